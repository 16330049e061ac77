"""A run's folder: its files, their types, and the rows that one rank writes."""
