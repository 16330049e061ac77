"""Figures of README and docs/measurements.md are those of the committed results.

A row holds a sentence of a page, or a part of one, with {} for each figure, and the figures as
computed from benchmarks/results. The page must contain it, rounded as the row says. No other figure
with a unit may stand in docs/measurements.md. README's table has a test in test_docs.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
read_text = run_path(str(ROOT / "benchmarks" / "lib" / "results.py"))["read_text"]
KIB, MIB = 1 << 10, 1 << 20
Statements = list[tuple[str, list[float]]]  #: (part of a page with {}, its figures)
MPIS = {"openmpi": "Open MPI", "mpich": "MPICH"}


@cache
def result(file: str) -> dict[str, Any]:
    return json.loads(read_text(RESULTS / f"{file}.json"))


def rows(file: str, **keys: Any) -> list[dict[str, Any]]:
    """Return the rows of a result that have the values of `keys`."""
    table = result(file).get("merged") or result(file)["rows"]
    return [row for row in table if keys.items() <= row.items()]


def value(file: str, key: str = "median_s", **keys: Any) -> float:
    (row,) = rows(file, **keys)
    return row[key]


def ratio(file: str, key: str, ours: str, rival: str, **keys: Any) -> float:
    """Return the median of the row whose `key` is `ours`, divided by that of `rival`."""
    return value(file, **{key: ours}, **keys) / value(file, **{key: rival}, **keys)


def of_both(file: str, key: str, **keys: Any) -> list[float]:
    """Return the figures of the rows of both MPIs."""
    return [row[key] for mpi in MPIS for row in rows(f"{file}-{mpi}", **keys)]


def ends(values: Sequence[float], factor: float = 1) -> list[float]:
    return [min(values) * factor, max(values) * factor]


def times(file: str, algorithm: str, mpi: str, rival: str, first: int, last: int) -> list[float]:
    """Return how many times as fast as `rival` an algorithm is, at each size of a comparison."""
    table = rows(f"compare-{file}", algorithm=algorithm, mpi=mpi)
    return [row["times"][rival] for row in table if first <= row["bytes"] <= last]


def geometric_means(algorithm: str) -> list[float]:
    return [
        float(np.exp(np.mean(np.log(
            times(f"allreduce-{ranks}-ranks", algorithm, mpi, "native", 256 * KIB, 128 * MIB)))))
        for ranks in (2, 4) for mpi in MPIS.values()
    ]  # fmt: skip


def ring_line(size: int) -> tuple[str, list[float]]:
    """Return the row of a size in the table of ring_vs_native.py: medians and percentiles in ms."""
    figures: list[float] = []
    for mpi in MPIS:
        for algorithm in "ring", "native":
            (row,) = rows(f"ring_vs_native-{mpi}", algorithm=algorithm, bytes=size * MIB)
            figures += [row[key] * 1e3 for key in ("median_s", "p5_s", "p95_s")]
        figures.append(row["speed_up_of_ring"])
    time = "{:.2f} ({:.2f}–{:.2f}) ms"
    return f"| {size} MiB | {time} | {time} | {{:.2f}}x | {time} | {time} | {{:.2f}}x |", figures


def exposed_ms(algorithm: str) -> list[float]:
    table = rows("compare-step-2-ranks", algorithm=algorithm, batch_per_rank=32)
    return ends([row["exposed_s"] * 1e3 for row in table])


def step_times(algorithm: str) -> list[float]:
    """Return how many times as fast as DDP on gloo a step is: for 32 and for 128 samples."""
    table = rows("compare-step-2-ranks", algorithm=algorithm)
    return [
        min(row["times"]["gloo"] for row in table if row["batch_per_rank"] == batch)
        for batch in (32, 128)
    ]


def seconds_to_target(method: str, *slow_factors: float) -> list[float]:
    """Return the medians over the seeds, for each factor by which a worker is slow."""
    return [
        float(np.median([row["time_to_target_s"] for row in
                         rows("engines-straggler", role="result", method=method, slow_factor=x)]))
        for x in slow_factors
    ]  # fmt: skip


def to_clock(*files: str, **keys: Any) -> list[float]:
    """Return the ends of the ratios of measured steps of pipelines to those of the clock."""
    return ends([row["to_clock"] for file in files for row in rows(f"pipeline-{file}", **keys)])


def grid_line(label: str, name: str) -> tuple[str, list[float]]:
    """Return the row of a grid: its step, divided by that of the data axis alone."""
    figures = [
        value(f"pipeline-grids-{place}", "to_data_axis_alone", grid=name, texts=batch)
        for place in ("here-openmpi", "hosts-1gbit-mpich")
        for batch in (16, 64)
    ]
    return f"| {label} |" + " {:.2f} |" * 4, figures


def of_both_us(schedule: str) -> list[float]:
    return of_both("pipeline-actions", "us_per_action", schedule=schedule)


def read_rate(name: str, reader: str) -> float:
    """Return the samples per second of a reader; of a node's with the order by chunks."""
    table = rows("node-reader-2-ranks-openmpi", reader=reader)
    chosen = [row for row in table if row["file"] == name and row.get("shuffle") != "samples"]
    return chosen[0]["samples_per_s"]


def drawn_steps_ms(run: str) -> tuple[float, float]:
    """Return begin and end of the steps that README's picture shows."""
    starts = result("step-timeline-openmpi")["pictures"][run]["starts_ms"][5:]
    median_ms = 1e3 * value("step-timeline-openmpi", what=run)
    windows = [(starts[i], starts[i + DRAWN_STEPS]) for i in range(len(starts) - DRAWN_STEPS)]
    return min(windows, key=lambda ends: abs((ends[1] - ends[0]) / DRAWN_STEPS - median_ms))


@pytest.mark.parametrize("run", range(3))
def test_the_steps_of_the_picture_are_as_long_as_its_titles_say(run):
    first_ms, end_ms = drawn_steps_ms(RUNS[run])
    median_ms = 1e3 * value("step-timeline-openmpi", what=RUNS[run])
    assert (end_ms - first_ms) / DRAWN_STEPS == pytest.approx(median_ms, rel=0.03)


RUNS = ("after backward", "during backward", "in the order of the next forward")
DRAWN_STEPS = 3
STEP, GLOO = "step-torch-2-ranks-openmpi", "torch-backend-cpu-4-hosts-1gbit-openmpi"
LOGGERS, TRACKERS = "loggers-2-ranks-openmpi", ("csv", "tensorboard", "wandb", "mlflow")
FEW, CHECKED = "few-bytes-2-ranks-openmpi", "checked-2-ranks-openmpi"
ACCURACIES = [row["test_accuracy"] * 100 for row in rows("mnist_engines-resnet8-openmpi")]
WIRE = {"operation": "allreduce", "algorithm": "ring"}
#: name in the tables of the pages: method in the results
STRAGGLERS = {
    "`ps-sync`": "sync (server)", "`allreduce`": "sync (all-reduce)",
    "`ps-sync`, 1 backup worker": "1 backup worker", "`ps-async`, `staleness = 3`": "SSP s = 3",
    "`ps-async`": "async", "`local-sgd`, H = 8": "local SGD H = 8", "`easgd`, H = 4": "EASGD H = 4",
    "`gossip`": "gossip",
}  # fmt: skip
README: Statements = [
    ("the next step is complete in {:.0f} ms (median, a core each)",
     [1e3 * value("survival-kills-openmpi", "p50_s", part="fast on free cores")]),
    ("a step takes {:.2f} s, with gradients sent during backward {:.2f} s, in the order of the "
     "next forward {:.2f} s.",
     [value("step-timeline-openmpi", what=run) for run in RUNS]),
    ("With 128 samples per rank a DDP step takes {:.2f} of that on gloo, not {:.2f}.",
     [ratio(STEP, "algorithm", "ddp", "gloo", batch_per_rank=batch) for batch in (128, 32)]),
    ("An MLP on four hosts at 1 Gbit/s takes {:.2f} of its time on gloo.",
     [ratio(GLOO, "backend", "hpctrain", "gloo", operation="DDP MLP, batch 32")]),
    ("A call with 4 bytes costs {:.1f} times one of mpi4py, {:.1f} times with the check of "
     "arguments.",
     [ratio(FEW, "call", call, "native-plain", bytes=4) for call in ("plain", "checked")]),
]  # fmt: skip
MEASUREMENTS: Statements = [
    *map(ring_line, (1, 64, 128)),
    ("| one array that all ranks of the node share | {:.1f}x | {:.1f}x | {:.1f}x | {:.1f}x |",
     geometric_means("direct-shared")),
    ("| in place, in the array of each rank | {:.1f}x | {:.1f}x | {:.1f}x | {:.1f}x |",
     geometric_means("direct")),
    ("| 8 KiB, a bound call of `direct` | {:.1f}x |",
     [min(times("allreduce-2-ranks", "direct-bound", mpi, "native", 8 * KIB, 8 * KIB)[0]
          for mpi in MPIS.values())]),
    ("| a bound call of `auto`, any size | at least {:.2f}x its own library |",
     [min(min(times("allreduce-2-ranks", "auto-bound", mpi, "own native", 4, 128 * MIB))
          for mpi in MPIS.values())]),
    ("up to 2 KiB | {:.2f}x mpi4py on Open MPI, {:.2f}x on MPICH |",
     [min(times("allreduce-2-ranks", "auto", mpi, "own native-plain", 4, 2 * KIB))
      for mpi in MPIS.values()]),
    ("private arrays of the ranks | at worst {:.2f}x Open MPI, {:.2f}x MPICH |",
     [min(times("private-2-ranks", "auto-bound", mpi, "own native", 4, 128 * MIB))
      for mpi in MPIS.values()]),
    ("(`benchmarks/few_bytes.py`) | {:.1f} times a call of mpi4py, {:.1f} times with",
     [ratio(FEW, "call", call, "native-plain", bytes=4) for call in ("plain", "checked")]),
    ("cold caches, 16 to 128 KiB, Open MPI | {:.1f} to {:.1f} times the time of hot caches",
     ends([ratio(CHECKED, "caches", "cold", "hot", bytes=size * KIB, call="checked")
           for size in (16, 128)])),
    ("| hpctrain, compared with PyTorch DDP on Gloo | {:.1f}x as fast | {:.1f}x as fast |",
     step_times("auto")),
    ("with shared parameters, compared with the same | {:.1f}x as fast | {:.1f}x as fast |",
     step_times("share-parameters")),
    ("hpctrain / Horovod / DDP on Gloo | {:.1f} to {:.1f} / {:.0f} / {:.0f} ms |",
     [*exposed_ms("auto"), exposed_ms("horovod")[0], exposed_ms("gloo")[0]]),
    ("| 4 hosts, 1 Gbit/s | `ring` | {:.0f} to {:.0f} % | {:.1f} to {:.1f}x the MPI library |",
     [*ends(of_both("netlab-1gbit", "share_of_link", **WIRE), 100),
      *ends(of_both("netlab-1gbit", "speed_up", algorithm="native"))]),
    ("`hierarchical` | {:.0f} to {:.0f} % | {:.2f} to {:.2f}x a flat ring |",
     [*ends(of_both("netlab-2x2", "share_of_link", algorithm="hierarchical"), 100),
      *ends(of_both("netlab-2x2", "speed_up", algorithm="ring"))]),
    ("| 2 hosts, 10 Gbit/s | `ring` | {:.0f} to {:.0f} % |",
     ends(of_both("netlab-10gbit", "share_of_link", **WIRE), 100)),
    ("| 4 hosts, 10 Gbit/s | `ring` | {:.0f} to {:.0f} %, limited by",
     ends(of_both("netlab-10gbit-4-hosts", "share_of_link", **WIRE), 100)),
    ("| {:.2f} to {:.2f} | {:.2f} to {:.2f} | {:.1f} to {:.1f} |",
     [end for what in ("priority", "always", "never")
      for end in ends(of_both("overlap-hosts", "to_longer", what=what))]),
    ("128 samples per rank: {:.3f} (Open MPI), {:.3f} (MPICH); 32 samples: {:.3f}, {:.3f} |",
     [result(f"overhead-{mpi}")["ratio_null_to_single_at_batch"][batch]
      for batch in ("128", "32") for mpi in MPIS]),
    ("| one more bucket | `overhead.py` | {:.0f} us |",
     [result("overhead-openmpi")["us_per_bucket"]]),
    ("{:.0f} to {:.0f} us back to back; after 10 ms of compute {:.0f} us (MPICH), {:.0f} us",
     [*ends(of_both("vote-4-ranks", "median_s", study="back to back", vote="flags"), 1e6),
      *ends(of_both("vote-4-ranks", "median_s", study="after compute", vote="flags"), 1e6)]),
    ("| MLP {:.2f}, transformer {:.2f}, ResNet-20 {:.2f}; the ratios depend",
     [value("compute-openmpi", "ratio", what=what, who="ours")
      for what in ("mlp", "transformer", "resnet20")]),
    ("a node's reader {:.1f} times (contiguous) and {:.0f} times (gzip) as fast as DataLoaders",
     [read_rate(file, "node") / read_rate(file, "DataLoader") for file in ("contiguous", "gzip")]),
    ("| {:.0f} us for one that blocks for ever; {:.0f} to {:.0f} us for CSV, TensorBoard, W&B",
     [1e6 * value(LOGGERS, "cost_s", logger="blocked"),
      *ends([value(LOGGERS, "cost_s", logger=x) for x in TRACKERS], 1e6)]),
    ("`ring` {:.1f} MiB (Open MPI), {:.1f} MiB (MPICH); `MPI_Allreduce` {:.0f} MiB |",
     [*(x / MIB for x in of_both("memory-4-ranks", "grown_bytes", algorithm="ring")),
      value("memory-4-ranks-openmpi", "grown_bytes", algorithm="native") / MIB]),
    ("2, 4 and 8 threads | all seven | {:.3f} to {:.3f} |", to_clock("sleep-threads")),
    ("P = 2 MPI ranks | all seven | {:.3f} to {:.3f} (Open MPI), {:.3f} to {:.3f} (MPICH) |",
     [end for mpi in MPIS for end in to_clock(f"sleep-2-ranks-{mpi}")]),
    ("`interleaved` | {:.2f} to {:.2f} (Open MPI), {:.2f} to {:.2f} (MPICH) |",
     [end for mpi in MPIS for end in to_clock(f"compute-2-ranks-{mpi}")]),
    ("1 Gbit/s, MPICH | all seven | {:.2f} to {:.2f} |", to_clock("hosts-4-mpich", what="sleep")),
    ("MPICH | `gpipe`, `1f1b`, `zb-h1` | {:.2f} to {:.2f} |",
     to_clock("hosts-4-mpich", what="transformer")),
    ("messages of 32 KiB costs {:.0f} us (Open MPI), {:.0f} us (MPICH)",
     of_both_us("1f1b")),
    grid_line("2 x 2, `1f1b`", "2 x 2"),
    grid_line("2 x 2, `zb-h1`", "2 x 2, zb-h1"),
    grid_line("1 x 4, `1f1b`", "1 x 4"),
    grid_line("1 x 4, `zb-h1`", "1 x 4, zb-h1"),
    ("two ranks at {:.0f} to {:.0f} GB/s)",
     ends([x for n in (1, 2, 3)
           for x in of_both(f"server-{n}-workers", "GB_per_s", what="one way")])),
    ("{:.1f} GB/s (Open MPI), {:.1f} GB/s (MPICH): {:.2f} and {:.2f} of",
     [*of_both("server-2-workers", "GB_per_s", what="push"),
      *(result(f"server-2-workers-{mpi}")["ratio"] for mpi in MPIS)]),
    ("which sums before it applies | 2 | {:.1f} to {:.1f} GB/s |",
     ends(of_both("server-2-workers", "GB_per_s", what="sum"))),
    ("a test accuracy of {:.1f} % with `single`,", ACCURACIES[:1]),
    ("and {:.1f} to {:.1f} % with the others.", ends(ACCURACIES[1:])),
]  # fmt: skip
ENGINES: Statements = [
    (f"| {name} | {{:.1f}} | {{:.1f}} |", seconds_to_target(method, 1, 10))
    for name, method in STRAGGLERS.items()
]
#: engine in docs/reliability.md: part of the results
KILLS = {
    "MPI alone: revoke, shrink, all-reduce": "bare", "`allreduce`": "fast",
    "`allreduce`, a core each": "fast on free cores", "`allreduce`, `shard_optimizer`": "shards",
}  # fmt: skip


def lines(campaign: str) -> list[dict[str, Any]]:
    text = read_text(RESULTS / f"chaos-{campaign}.jsonl")
    return [line for line in map(json.loads, text.splitlines()) if "case" in line]


def campaign(name: str) -> list[int]:
    """Return the number of cases, of faults, and of cases that passed."""
    cases = lines(name)
    passed = [line for line in cases if line["verdict"] == "passed"]
    return [len(cases), sum(len(line["case"]["faults"]) for line in cases), len(passed)]


def compared(name: str) -> int:
    """Return the number of cases with the parameters of a run without faults."""
    equal = [line for line in lines(name) if line["reference_sha256"]]
    assert all(line["params_sha256"] == line["reference_sha256"] for line in equal)
    return len(equal)


ETTR = {
    "30 s, a spare for each": "30 s, spares", "5 s, a spare for each": "5 s, spares",
    "5 s, one spare, then a restart from the newest checkpoint": "5 s, one spare",
    "5 s, restarts alone": "5 s, restart",
}  # fmt: skip
RELIABILITY: Statements = [
    *((f"| {label} | {{}} | {{:.0f}} ms | {{:.0f}} ms |",
       [row["kills"], row["p50_s"] * 1e3, row["p99_s"] * 1e3])
      for label, part in KILLS.items() for row in rows("survival-kills-openmpi", part=part)),
    *((f"| `chaos-{name}.jsonl.gz` | {launcher} | {{:,}} | {{:,}} | {{:,}} |", campaign(name))
      for name, launcher in (("elastic", "`elastic`, Open MPI"), ("threads", "`threads`"))),
    ("In all {:,} elastic and {:,} threaded cases that could be compared the parameters equal",
     [compared(name) for name in ("elastic", "threads")]),
    *(("takes {:.3f} times as long with ULFM as without ({:.3f} to {:.3f}, {} rounds)",
       [row["ratio"], row["least"], row["most"], row["rounds"]])
      for row in rows("survival-cost-openmpi", part="elastic on free cores")),
    *((f"| {label} | {{}} | {{}} | {{:.1f}} % | {{:.1f}} % |",
       [row["faults"], row["spares"], 100 * row["ettr"], 100 * row["goodput"]])
      for label, part in ETTR.items() for row in rows("survival-ettr-openmpi", part=part)),
]  # fmt: skip
GPU_STEPS, GPU_TENSORS = "gpu/steps", "gpu/tensors"
COPIED = {what: value("gpu/optimizer", "gb_per_s", what=what)
          for what in ("copy", "sgd", "momentum", "adamw")}  # fmt: skip
ALL_REDUCED = {"bytes": 512 * MIB}
GPUS: Statements = [
    ("transformer {:.2f} ({:.1f} ms), MLP {:.2f} ({:.1f} ms),",
     [figure for what in ("transformer", "mlp")
      for figure in (ratio(GPU_STEPS, "who", "ours", "torch", what=what),
                     1e3 * value(GPU_STEPS, who="ours", what=what))]),
    ("ResNet-20 {:.2f} ({:.1f} ms, beside a profile) |",
     [result("gpu/profile")["resnet20 float32"]["wall_s"]
      / result("gpu/profile")["resnet20 torch"]["wall_s"],
      1e3 * result("gpu/profile")["resnet20 float32"]["wall_s"]]),
    ("| transformer in tf32, bf16 | {:.1f}, {:.1f} ms |",
     [1e3 * value(GPU_STEPS, who=who, what="transformer") for who in ("tf32", "bf16")]),
    ("{:.2f}, {:.2f}, {:.2f} of a copy's {:,.0f} GB/s |",
     [*(COPIED[what] / COPIED["copy"] for what in ("sgd", "momentum", "adamw")), COPIED["copy"]]),
    ("2 ranks | {:.1f} ms, {:.0f} times as fast as the ring through the host |",
     [1e3 * value("gpu/allreduce-2-ranks", what="direct", **ALL_REDUCED),
      ratio("gpu/allreduce-2-ranks", "what", "ring staged", "direct", **ALL_REDUCED)]),
    ("512 MiB | {:.1f} ms: **{:.1f} times as long as mapped arrays,",
     [1e3 * value(GPU_TENSORS, what="tensor", **ALL_REDUCED),
      ratio(GPU_TENSORS, "what", "tensor", "array", **ALL_REDUCED)]),
    ("| {:.0f} GB/s; {:.1f} GB/s |",
     [value("gpu/paths", "gb_per_s", what=what) for what in ("ipc", "staged")]),
]  # fmt: skip
PAGES = {
    "README.md": README,
    "docs/gpus.md": GPUS,
    "docs/measurements.md": MEASUREMENTS,
    "docs/engines.md": ENGINES,
    "docs/reliability.md": RELIABILITY,
}
ROWS = [(page, statement, figures) for page, table in PAGES.items() for statement, figures in table]


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("page, statement, figures", ROWS, ids=[row[1] for row in ROWS])
def test_a_statement_has_the_figures_of_the_results(page, statement, figures):
    assert statement.format(*figures) in text(page)


#: figures of what was measured, not results: speeds of links, times of compute
GIVEN = ("10 ms of compute", "sleep 50 ms", "sleep 40 ms", "claim of 10 %")
RESULT = re.compile(r"\d[\d.,]*(?: %|x\b| (?:ms|us|GB/s)(?!\w))")


def test_every_result_of_the_page_of_measurements_is_compared():
    page = text("docs/measurements.md")
    for part in (*(statement.format(*figures) for statement, figures in MEASUREMENTS), *GIVEN):
        page = page.replace(part, "")
    assert RESULT.findall(page) == []


def test_rivals_are_as_slow_where_the_wire_is_full():
    wire = [1e9 * value(GLOO, operation=f"all_reduce {64 * MIB}", backend=b) / 8
            for b in ("hpctrain", "gloo")]  # fmt: skip
    floor = 2 * 3 / 4 * 64 * MIB  # bytes that each of four ranks sends
    assert all(floor <= sent < 1.1 * floor for sent in wire)
