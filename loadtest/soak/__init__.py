"""The soak: mixed traffic for minutes, versions and routes that change under it, and what is left of it."""
