"""Commands that send images to a running server, one for each task."""
