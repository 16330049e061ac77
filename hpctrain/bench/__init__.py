"""Benchmarks: our collectives and steps beside those of the MPI library and other libraries."""
