"""Fault campaigns, `hpctrain chaos`: training jobs under planted faults, and promises checked.

A *case* is one training job and its faults: a function of (campaign, index), and a line of JSON:

    {"seed": 15, "index": 3, "ranks": 3, "engine": "ps-sync", "recipe": {...}, "launcher": "launch",
     "faults": [{"kind": "signal", "signal": "SIGKILL", "target": 1, "step": 37, "delay_ms": 4}]}

Without `--elastic` attempt i of the job suffers fault i; the attempt after the last fault resumes
undisturbed and must complete the run. An elastic job suffers all faults in one attempt. Then the
*oracle* compares files, shared memory and the process table with what is promised: the parameters
of a run without faults, every step in one row of metrics, exit codes and summaries that agree, no
processes, files or shared memory left.

    campaign.py    the TOML file of a campaign; regimes.py: the engines it may name
    case.py        the format of cases and faults; draw.py: cases from a seed
    attempt.py     one attempt: start, signals at their moments, the end with a limit
    jobs.py        command lines; threads.py: ranks as threads
    hosts.py       faults of a netlab; disks that are full or fail, by failing.c, which is
                   preloaded into the ranks
    scope.py       the processes and shared memory of a case: namespaces, or an environment mark
    oracle.py      the promises, and the exit codes that a fault allows
    runner.py      a case from its first attempt to its verdict; runs without faults
    command.py     the command line; results.py: lines of JSON, tables, the bar
"""
