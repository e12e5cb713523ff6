"""Reading and changing the route files of a repository."""
