"""Prints the table of README from the committed results: times of hpctrain beside its rivals.

python benchmarks/readme_table.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lib.results import RESULTS, find_file, read_text

MIB64 = 64 << 20
TORCH, STEP = "torch-backend-cpu-2-ranks-openmpi.json", "step-torch-2-ranks-openmpi.json"
SCRIPTS = "horovod-scripts-2-ranks-openmpi.json"
UNITS = {"us": 1e-6, "ms": 1e-3}  # of a figure, such as "MLP ms"
Row = Mapping[str, Any]

#: what, file, keys that both rows have, those of ours, those of the rival, name of the rival
COMPARISONS: list[tuple[str, str, Row, Row, Row, str]] = [
    ("all-reduce of 64 MiB, 2 ranks on one node", "ring_vs_native-openmpi.json",
     {"bytes": MIB64}, {"algorithm": "ring"}, {"algorithm": "native"}, "`MPI_Allreduce`"),
    ("the same, 4 hosts joined by 1 Gbit/s", "netlab-1gbit-openmpi.json",
     {"bytes": MIB64}, {"algorithm": "ring"}, {"algorithm": "native"}, "`MPI_Allreduce`"),
    ("`torch.distributed.all_reduce` of 4 bytes", TORCH,
     {"operation": "all_reduce 4"}, {"backend": "hpctrain"}, {"backend": "gloo"}, "gloo"),
    ("the same of 64 MiB", TORCH,
     {"operation": f"all_reduce {MIB64}"}, {"backend": "hpctrain"}, {"backend": "gloo"}, "gloo"),
    ("step of DDP, MLP of 10 M parameters, 32 samples per rank", STEP,
     {"batch_per_rank": 32}, {"algorithm": "ddp"}, {"algorithm": "gloo"}, "DDP on gloo"),
    ("step of `ht.torch.sync`, the same module", STEP,
     {"batch_per_rank": 32}, {"algorithm": "sync"}, {"algorithm": "gloo"}, "DDP on gloo"),
    ("all-reduce of 4 bytes in a script of Horovod", SCRIPTS,
     {"figure": "all-reduce us"}, {"library": "hpctrain"}, {"library": "horovod"}, "Horovod"),
    ("step of that script, MLP of 10.5 M parameters", SCRIPTS,
     {"figure": "MLP ms"}, {"library": "hpctrain"}, {"library": "horovod"}, "Horovod"),
]  # fmt: skip


def make_table() -> list[str]:
    """Return the lines of the table, in Markdown."""
    lines = ["| | hpctrain | rival | |", "|---|---|---|---|"]
    for what, file, common, ours, theirs, rival in COMPARISONS:
        document = json.loads(read_text(RESULTS / file))
        rows = document.get("merged") or document["rows"]
        seconds, rival_seconds = (find_seconds(rows, {**common, **x}) for x in (ours, theirs))
        times = f"{rival_seconds / seconds:.2g}"
        link = f"[{what}](benchmarks/results/{find_file(RESULTS / file).name})"
        lines.append(f"| {link} | {write(seconds)} | {write(rival_seconds)}, {rival} | {times}x |")
    return lines


def find_seconds(rows: list[Row], keys: Row) -> float:
    """Return the median of the only row that has these keys."""
    (row,) = (row for row in rows if keys.items() <= row.items())
    if "median_s" in row:
        return row["median_s"]
    return row["median"] * UNITS[row["figure"].split()[-1]]


def write(seconds: float) -> str:
    """Return a time with its unit and two or three digits."""
    unit, factor = next(x for x in (("s", 1), ("ms", 1e3), ("us", 1e6)) if seconds * x[1] >= 1)
    return f"{seconds * factor:.{1 if seconds * factor < 10 else 0}f} {unit}"


if __name__ == "__main__":
    print("\n".join(make_table()))
