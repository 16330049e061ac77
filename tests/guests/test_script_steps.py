"""The steps of scripts: rows of a trial from any loop, and the timeline of real ranks."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

from hpctrain.core.run_files import run_folder
from hpctrain.tools.scaling.collect import TrialResult, read_trial
from hpctrain.tools.scaling.trial_recipe import Timing
from hpctrain.torch import script_steps
from hpctrain.torch.script_steps import Trial, TrialRecorder, batch_length, gaps
from hpctrain.watch.trace import Span

TIMING = Timing(2)


def loop(steps: int, batch: int = 0, evaluates: bool = False, parts: int = 1) -> None:
    """Train a line for `steps` steps of `parts` batches from a DataLoader, if `batch` is not 0."""
    w = torch.zeros(3, requires_grad=True)
    optimizer, other = torch.optim.SGD([w], 0.1), torch.optim.SGD([w], 0.0)
    data = TensorDataset(torch.ones(batch * parts * steps or 1, 3))
    batches = iter(DataLoader(data, batch or 1))
    for _ in range(steps):
        for _ in range(parts if batch else 0):
            (w * next(batches)[0]).sum().backward()
        (w**2).sum().backward()
        optimizer.step()
        other.step()  # no step of the first optimizer
        if evaluates:
            with torch.no_grad():
                next(iter(DataLoader(data, 64)))


# arguments of the loop, --samples-per-step -> samples of a step, or the reason of a gap
LOOPS = {
    "counted from the DataLoader": ((99, 8), None, 8),
    "an evaluation between steps": ((99, 8, True), None, 8),
    "two batches a step": ((99, 8, False, 2), None, 16),
    "given": ((99,), 32, 32),
    "no DataLoader": ((99,), None, "give their number by --samples-per-step"),
    "too few steps": ((7, 8), None, "the script ended after 7 of 25 steps"),
}


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """Return a function that lets a trial record this process until the end of the test."""
    hooks: list = []
    register = script_steps.register_optimizer_step_post_hook
    monkeypatch.setattr(script_steps, "register_optimizer_step_post_hook", hooks.append)
    monkeypatch.setattr(script_steps.atexit, "register", lambda _: None)
    iterator = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(iterator, "__next__", iterator.__next__)

    def begin(samples: int | None) -> TrialRecorder:
        recorder = TrialRecorder(Trial(str(tmp_path), TIMING.interval, TIMING.total, samples))
        recorder.watch()
        handles.append(register(hooks[0]))
        return recorder

    handles: list = []
    yield begin
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", LOOPS)
def test_a_trial_has_the_rows_of_a_recipe(watched, tmp_path, name):
    arguments, samples, expected = LOOPS[name]
    recorder = watched(samples)
    try:
        loop(*arguments)
        recorder._exit()
    except SystemExit:
        assert recorder.step == TIMING.total
    outcome, summary = read_trial(tmp_path, TIMING), run_folder.read_summary(tmp_path)
    if isinstance(expected, str):
        assert expected in outcome.reason
        return
    assert isinstance(outcome, TrialResult), outcome
    assert summary["samples_per_step"] == expected and summary["gradient_bytes"] == 12
    assert outcome.samples_per_s > 0 and outcome.compute_s > 0
    assert (outcome.wire_s, outcome.wait_s) == pytest.approx((0, 0), abs=1e-9)  # no other rank


def test_gaps():
    spans = [Span("", "wait", 1, *times, 0, None) for times in ((2, 4), (3, 5), (8, 9))]
    assert [*gaps(spans, 1, 10)] == [(1, 2), (5, 8), (9, 10)]
    assert [*gaps(spans[:2], 2, 5)] == []
    assert [*gaps([], 1, 1)] == []


LENGTHS = [
    (torch.zeros(4, 2), 4),
    ([torch.zeros(3), torch.zeros(5)], 3),
    ({"ids": {"x": torch.zeros(6, 1)}}, 6),
    (["text", torch.zeros(2)], 2),
    ("text", 0),
]


@pytest.mark.parametrize(("batch", "length"), LENGTHS)
def test_the_length_of_a_batch(batch, length):
    assert batch_length(batch) == length


SCRIPT = """
import sys
import torch
import torch.distributed as dist

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if sys.argv[1] == "ddp":
    dist.init_process_group("hpctrain")
    model = torch.nn.parallel.DistributedDataParallel(model)
elif sys.argv[1] == "sync":
    import hpctrain as ht
    ht.torch.sync(model, optimizer)
elif sys.argv[1] == "hvd":
    import hpctrain.horovod.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("sync", "hvd", "no"))]
)
def test_the_timeline_of_a_script(hpctrain, tmp_path, kind):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["launch", "-n", "2", "--trace", tmp_path / "out", "--", "python"]
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    done = hpctrain(*words, tmp_path / "script.py", kind, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    file = tmp_path / "out/trace.json"
    if kind == "no":
        assert not file.exists() and "no trace of this script: its ranks do not" in done.stderr
        return
    counts: dict = defaultdict(int)
    for event in json.loads(file.read_text())["traceEvents"]:
        if event["ph"] == "X":
            counts[event["pid"], event["cat"]] += 1
    for rank in (0, 1):
        assert counts[rank, "wait"] >= 4 and counts[rank, "wire"] >= 4, counts
        assert counts[rank, "compute"] >= 8, counts
