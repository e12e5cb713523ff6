"""Commands that show or change a route, and the adapter through which a gateway does."""
