"""Python clients for a Nereid server: synchronous and asynchronous, over HTTP, gRPC and shared memory."""
