"""The Link between threads of one process."""
