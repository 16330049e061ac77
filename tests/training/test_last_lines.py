"""The last lines of a run: its results folder, and the command that resumes it."""

from __future__ import annotations

import os
import shlex
import sys

import numpy as np
import pytest
from ranks import run_on

import hpctrain as ht
from hpctrain.core.errors import StoppedError, TrainingError, UnsavedError, notes
from hpctrain.core.run_files import last_lines
from hpctrain.core.signals import StopRequest
from hpctrain.world import World

# what was typed, what resumes it in folder "runs/a b"
TYPED = {
    "hpctrain train digits": "hpctrain train digits",
    "hpctrain train digits --out here --epochs 3": "hpctrain train digits --epochs 3",
    "hpctrain train digits --out=here --resume": "hpctrain train digits",
    "hpctrain train digits --resume=here --epochs 3": "hpctrain train digits --epochs 3",
    "hpctrain launch -n 4 train 'my own.toml' --set 'model.widths=[1, 2]'": "",
    "hpctrain netlab --hosts 2 -- hpctrain train digits": "",
}
# variables of the launcher of rank 0: what `hpctrain train digits` was called as
OPENMPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in
           {"RANK": "0", "SIZE": "4", "LOCAL_RANK": "0"}.items()}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0"}
STARTED = [
    ({}, "hpctrain train digits"),
    (OPENMPI, "mpirun -n 4 hpctrain train digits"),
    (HYDRA, "mpiexec -n 3 hpctrain train digits"),
    ({**OPENMPI, last_lines.COMMAND: "hpctrain launch -n 4 train 'a b.toml'"},
     "hpctrain launch -n 4 train 'a b.toml'"),
]  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_what_resumes_a_command(tmp_path, typed):
    words = last_lines.resuming(shlex.split(typed), tmp_path / "a b")
    expected = f"{TYPED[typed] or typed} --out '{tmp_path}/a b' --resume"
    assert words == shlex.split(expected)


@pytest.mark.parametrize(("variables", "expected"), STARTED)
def test_the_command_that_started_a_job(monkeypatch, variables, expected):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **variables})
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/hpctrain", "train", "digits"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(last_lines.shutil, "which", lambda name: f"/somewhere/bin/{name}")
    assert shlex.join(last_lines.command_line()) == expected


def test_a_program_that_is_not_on_the_path_is_called_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "argv", [".venv/bin/hpctrain", "train", "digits"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert last_lines.command_line() == [".venv/bin/hpctrain", "train", "digits"]


def fit(world: World, method: str, **arguments: object) -> None:
    """Train for long, at a rate that makes the parameters infinite where it is to diverge."""
    model = ht.nn.Model({"out": ht.nn.Linear(2)}, (4,))
    rate = 1e38 if method == "diverge" else 0.1
    trainer = ht.Trainer(model, ht.optim.sgd(rate=rate), world=world)
    samples = ht.data.Dataset(np.full((8, 4), 1e3, np.float32), np.arange(8) % 2)
    trainer.fit(samples, epochs=1000, batch=8, **arguments)


# what happens, whether there is a folder; the error, its exit code, what it says, what follows
ENDINGS = {
    "stopped": ("stop", True, StoppedError, 75, "resume me",
                "resume: fit(..., out={!r}, resume=True)"),
    "stopped, nothing saved": ("stop", False, UnsavedError, 130, "nothing was saved", None),
    "failed": ("diverge", True, TrainingError, 3, "not finite",
        "no checkpoint was written; start again: fit(..., out={!r}, resume=True)"),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_does_not_come_to_its_end(tmp_path, monkeypatch, ending):
    method, saved, kind, code, message, follows = ENDINGS[ending]
    out = str(tmp_path / "run")
    requested = property(lambda request: method == "stop", lambda request, value: None)
    monkeypatch.setattr(StopRequest, "requested", requested, raising=False)
    with pytest.raises(kind, match=message) as raised:
        run_on("threads", 1, lambda world: fit(world, method, **({"out": out} if saved else {})))
    assert raised.value.exit_code == code
    assert ("resume me" in str(raised.value)) == (ending == "stopped")
    expected = [f"results: {out}", follows.format(out)] if follows else []
    assert notes(raised.value) == expected
