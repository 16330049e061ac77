"""`hpctrain bench step`."""
