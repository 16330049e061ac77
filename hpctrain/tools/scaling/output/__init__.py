"""The output of a study: files, tables, plots, a page, and a live table."""
