"""Python clients of a Nereid server: synchronous and asynchronous, over HTTP, gRPC and shared memory."""
