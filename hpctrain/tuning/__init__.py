"""Tuning: measurements of all-reduces, and the choice among them by size."""
