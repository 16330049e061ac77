"""Local SGD: workers train apart and average their parameters."""
