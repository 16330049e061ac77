"""A folder for sys.path or PYTHONPATH, with the package `horovod` alone."""
