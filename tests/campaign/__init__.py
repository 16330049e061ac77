"""Fault campaigns: training jobs that are killed, stopped and starved of disk, then resumed.

A *case* is one training job and the faults of its first attempts: a function of (seed, index), and
a line of JSON:

    {"seed": 15, "index": 3, "ranks": 3, "engine": "ps-sync", "recipe": {...}, "launcher": "launch",
     "faults": [{"kind": "signal", "signal": "SIGKILL", "target": 1, "step": 37, "delay_ms": 4}]}

Attempt i suffers fault i; the attempt after the last fault is undisturbed and must complete the
run. Then an *oracle* compares what is left on disk, in memory and in the process table with what
is promised: parameters equal to those of a run that was never hurt, every step in one row of
metrics, exit codes and summaries that agree, no processes, files or shared memory left.

    case.py        the format, and cases from a seed
    failing.c      a disk that fails: preloaded into the ranks; disks.py builds it, mounts full ones
    isolation.py   each case in namespaces of its own, so that whatever is left there is the case's
    attempt.py     one attempt: start, hurt at the moment, wait for the end with a limit
    oracle.py      what must hold at the end
    runner.py      a case from its first attempt to its verdict
    __main__.py    the command line
"""
