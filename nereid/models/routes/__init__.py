"""Routes of a repository: reading, explanation, and changes."""
