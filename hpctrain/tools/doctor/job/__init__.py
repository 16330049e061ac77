"""The preflight of a whole job: all ranks are checked together, in less than a minute.

    examine.py        the stages in their order
    result.py         answers gathered on rank 0; doctor/show.py prints them
    consistency.py    facts of each rank, and ranks and clocks that differ; a node's checks, of its
                      first rank, as one row
    binding.py        the binding map, and its faults
    output_folder.py  the output folder: space, write and fsync, on all nodes
    cores.py          a short computation on every core
    ping_pong.py      all pairs, as a tournament; outliers by median and MAD: see check.py
    known_sums.py     each all-reduce, on integers

If a rank does not answer, the job ends after 30 s with the name of the rank and the result so far.
"""
