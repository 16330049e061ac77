"""Simulated times of pipeline schedules, and their timelines as text and plots."""
