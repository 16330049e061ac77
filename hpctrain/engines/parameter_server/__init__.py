"""Parameter servers: synchronous, asynchronous, elastic averaging."""
