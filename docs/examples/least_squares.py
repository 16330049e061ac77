"""All-reduce without a trainer: a least-squares fit over rows that no single rank holds.

Each rank makes A'A and A'b of its own rows; their sums over all ranks give the fit of all rows.
Run it alone, or on four ranks with `mpirun -n 4 python least_squares.py`
(Open MPI on fewer cores: `mpirun --oversubscribe -n 4 ...`).
"""

import numpy as np

import hpctrain as ht

ROWS, COLUMNS = 10_000, 20  # rows per rank

world = ht.init()
truth = np.random.default_rng(0).normal(size=COLUMNS)  # the same on every rank
random = np.random.default_rng([1, world.rank])  # another stream on each
a = random.normal(size=(ROWS, COLUMNS))
b = a @ truth + random.normal(scale=0.1, size=ROWS)

sums = np.column_stack([a.T @ a, a.T @ b])  # contiguous float64: what ht.allreduce takes
ht.allreduce(sums)  # in place, on every rank; all ranks must call
fit = np.linalg.solve(sums[:, :-1], sums[:, -1])

worst = np.abs(fit - truth)
ht.allreduce(worst, op="max", algorithm="recursive-doubling")  # short vectors: the fewest steps
if world.rank == 0:
    print(f"{world.size * ROWS} rows on {world.size} ranks: largest error {worst.max():.1e}")
assert worst.max() < 0.01
