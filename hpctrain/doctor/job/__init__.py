"""The preflight of a whole job: all ranks together, in less than a minute, before they train.

    told.py      what each rank tells of itself; a node's checks come from its first rank
    same.py      whoever differs; the checks of all nodes as one row
    seats.py     the binding map, and what is wrong with it
    folder.py    the output folder: room, write and fsync, seen by all nodes
    cores.py     a short computation on every core          outliers.py   which figures stick out,
    pings.py     all pairs, as a tournament                               by median and MAD
    sums.py      each all-reduce, on whole numbers
    examine.py   the stages in their order; rank 0 gathers, show.py speaks

A rank that does not answer ends the job after a while, with its name and what was found so far.
"""
