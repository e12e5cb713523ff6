"""Everything that talks to a server."""
