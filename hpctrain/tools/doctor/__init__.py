"""The preflight: finds faults and slow settings of this node before a run.

Each file checks one aspect with functions of facts that are passed in, so that tests can plant
faults. `examine.py` gathers the facts of the real machine, `show.py` prints the result.
"""
