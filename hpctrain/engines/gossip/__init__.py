"""Gossip: workers average with each other, without a centre."""
