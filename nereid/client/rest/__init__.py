"""KServe v2 clients over HTTP: the same methods, blocking and for asyncio."""
