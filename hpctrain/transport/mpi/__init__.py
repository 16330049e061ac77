"""The Link over MPI."""
