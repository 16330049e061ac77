"""Survival of lost ranks in a call of fit: the state to go on from, and the record of losses."""
