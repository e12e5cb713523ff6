"""Requests to one model of one server, whatever its task: blocking, and for asyncio."""
