"""Benchmarks that anyone can rerun: ours beside the MPI library's own and other libraries."""
