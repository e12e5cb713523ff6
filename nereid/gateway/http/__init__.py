"""The gateway's HTTP layer: routing, uploads, security headers and responses."""
