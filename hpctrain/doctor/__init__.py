"""The preflight: what is wrong, or would be slow, on this node, found before a run.

Each file looks at one side and returns checks: functions of facts that are passed in, so that tests
plant faults. `examine.py` gathers the facts of the real machine, `show.py` draws what was found.
"""
