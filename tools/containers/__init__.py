"""A container engine for development, and what runs in it."""
