"""Transport: bytes between ranks, over MPI, threads, and the memory of a node."""
