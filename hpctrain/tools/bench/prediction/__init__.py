"""`hpctrain bench predict`."""
