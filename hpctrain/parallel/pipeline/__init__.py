"""A model split over ranks: its stages, their messages, and the replica of a rank."""
