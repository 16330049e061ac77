"""Benchmarks: our collectives and steps beside the MPI library and other libraries."""
