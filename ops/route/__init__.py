"""`nereid route`: look at a route, change it, and go back."""
