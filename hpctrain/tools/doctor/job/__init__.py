"""The preflight of a whole job: all ranks are checked together, in less than a minute.

    examine.py        the stages in their order
    result.py         answers gathered on rank 0; show.py prints them
    rank_facts.py     facts of each rank; a node's checks come from its first rank
    consistency.py    ranks and clocks that differ; the nodes' checks as one row
    binding.py        the binding map, and its faults
    output_folder.py  the output folder: space, write and fsync, on all nodes
    cores.py          a short computation on every core          outliers.py   outliers by median
    ping_pong.py      all pairs, as a tournament                               and MAD
    known_sums.py     each all-reduce, on integers

If a rank does not answer, the job ends after 30 s with the name of the rank and the result so far.
"""
