"""The arithmetic of reductions: operations by name, on two arrays or more."""
