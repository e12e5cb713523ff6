"""What runs inside the server: a library, and in its sub-folders the backends that Triton loads."""
