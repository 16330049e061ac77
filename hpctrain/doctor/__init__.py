"""The preflight: finds faults of this node, and causes of slowness, before a run.

Each file looks at one side and returns checks: functions of facts that are passed in, so that tests
plant faults. `examine.py` gathers the facts of the real machine, `show.py` prints the result.
"""
