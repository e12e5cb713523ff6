"""Commands that show or change a route."""
