"""`hpctrain tune`."""
