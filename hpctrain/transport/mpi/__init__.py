"""The Link over MPI: messages, windows, start-up and fault tolerance."""
