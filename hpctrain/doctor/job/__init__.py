"""The preflight of a whole job: all ranks together, in less than a minute, before they train.

    told.py      facts of each rank; a node's checks come from its first rank
    same.py      ranks that differ; the checks of all nodes as one row
    seats.py     the binding map, and its faults
    folder.py    the output folder: space, write and fsync, on all nodes
    cores.py     a short computation on every core          outliers.py   outliers by median
    pings.py     all pairs, as a tournament                               and MAD
    sums.py      each all-reduce, on integers
    examine.py   the stages in their order; rank 0 gathers, show.py prints

A rank that does not answer ends the job after a while, with its name and the result so far.
"""
