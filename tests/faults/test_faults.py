"""Faults of one rank during training: the job ends, reports the place, and keeps its results."""

from __future__ import annotations

import re
import shutil

import pytest
from jobs import EVERY, MARK, command_that_resumes, sets, trap
from ranks import run_on
from tables import rows_of

from hpctrain import checkpoint
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs

pytestmark = pytest.mark.processes

BUILD = -1  # the step before the first: the model is being made
SAVES = sets(checkpoint_every_steps=5)

# A trap, where it springs; the job's exit code, and what its output says
LOST = {
    "error while the model is built": (("raise", 1, BUILD), 1,
        r"\[rank 1 on [^\]]+\] RuntimeError: the model broke"),
    "error in a step": (("raise", 1), 1, r"\[rank 1 on [^\]]+\] RuntimeError: the model broke"),
    "our own error in a step": (("refuse", 1), 1, r"\[rank 1 on .*UsageError: seen on one rank"),
    "error on rank 0": (("raise", 0), 1, r"\[rank 0 on [^\]]+\] RuntimeError: the model broke"),
    "sys.exit(0)": (("leave", 1), 1, r"\[rank 1 on [^\]]+\] SystemExit: 0"),
    "error in a callback": (("none", 1), 1,
        r"\[rank 1 on [^\]]+\] \S+: callback broken: RuntimeError: the callback broke"),
    "gradient not finite": (("spoil", 1), 3,
        r"hpctrain: the gradient of 'linear0\.\w+' is not finite at step 7 on rank 1 \(\S+\);"),
    "loss not finite": (("diverge", 1), 3,
        r"hpctrain: the loss is not finite at step 7 on rank 1 \(\S+\); no rank has taken"),
}  # fmt: skip
CALLBACK = sets(run_callbacks="[{kind='traps:broken', ranks='all'}]", run_interval_steps=7)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", rows_of(LOST, "error in a step", "loss not finite"))
def test_a_fault_on_one_rank(digits, fault):
    (kind, rank, *step), code, message = LOST[fault]
    keys = [*SAVES, *(CALLBACK if fault == "error in a callback" else [])]
    job = digits(*keys, *trap(kind, rank, *step), launch=rank == 0 or code == 3)
    ended = job.finish()
    assert ended.returncode == code, ended.stderr
    assert len(re.findall(message, ended.stderr)) == 1, ended.stderr
    if step:
        assert not job.out.exists()  # nothing had begun
    else:
        assert (job.summary["status"], job.summary["exit_code"]) == ("failed", code)
        assert f"rank {rank}" in job.summary["reason"]
        assert job.steps == [5]
        assert f"results: {job.out}\n" in ended.stderr
        assert command_that_resumes(ended.stderr)[-3:] == ["--out", str(job.out), "--resume"]


def test_a_killed_rank(digits, undisturbed):
    keys = [*SAVES, *sets(run_epochs=1)]
    job = digits(*keys, *trap("kill", 1), launch=True)
    ended = job.finish()
    assert ended.returncode == 1
    assert "a rank was lost: mpiexec ended with" in ended.stderr
    assert command_that_resumes(ended.stderr)[-3:] == ["--out", str(job.out), "--resume"]
    summary = job.summary
    assert (summary["status"], summary["exit_code"], job.steps) == ("failed", 1, [5])
    resumed = digits(*keys, *trap("none", 1), "--resume")
    assert resumed.finish().returncode == 0
    assert resumed.summary["params_sha256"] == undisturbed(*keys)["params_sha256"]


def test_a_killed_rank_under_mpiexec(digits):
    job = digits(*SAVES, *trap("kill", 1))
    ended = job.finish()
    assert ended.returncode != 0
    assert job.summary is None  # nobody was left to tell
    assert job.steps == [5]


@pytest.mark.sample(1)
@pytest.mark.parametrize("launched", [False, True], ids=["mpiexec", "launch"])
def test_a_stopped_rank(digits, launched):
    job = digits(*SAVES, *sets(run_timeout_s=1), *trap("stop", 1), ranks=3, launch=launched)
    ended = job.finish()
    assert ended.returncode == 86, ended.stderr
    assert ended.stderr.count("hung: a call has waited for longer than 1 s") == 1
    waits_for, rest = ended.stderr.split("the job waits for:")[1].split("these wait:")
    silent = (
        r"rank 1 on \S+ \(pid \d+\), step 7, at \S+:\d+ \w+: no heartbeat .*: stopped or dead; "
    )
    silent += r"last operation [\w ]+ with (rank \d|all ranks)"
    assert re.search(silent, waits_for), waits_for
    assert len(re.findall(r"rank [02] on .* step 7, at \S+:\d+ .*: waiting; in \w+", rest)) == 2
    assert (job.summary["status"], job.summary["exit_code"]) == ("hung", 86)
    assert "rank 1 on" in job.summary["reason"]
    assert f"results: {job.out}\n" in ended.stderr
    assert command_that_resumes(ended.stderr)[-3:] == ["--out", str(job.out), "--resume"]


def truncated(data: bytes) -> bytes:
    return data[:-7]


def altered(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]


OLD, NEW = "step-00000005", "step-00000010"
PART, MANIFEST = "part-00001.safetensors", "manifest.json"
# What is done to which files -> whether the checkpoint before can be used
# Other kinds of damage: tests/checkpoint/test_checkpoint.py.
DAMAGE = {
    "altered": ({f"{NEW}/{PART}": altered}, True),
    "none is left": ({f"{NEW}/{MANIFEST}": truncated, f"{OLD}/{PART}": altered}, False),
}
TEN_STEPS = sets(run_epochs="", run_steps=10, checkpoint_every_steps=5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small):
    """A run with checkpoints of steps 5 and 10, made by ranks that are threads."""
    spec = recipe.load("digits", [*small, *TEN_STEPS][1::2])
    out = tmp_path_factory.mktemp("trained") / "run"
    run_on("threads", 2, lambda world: runs.train(spec, world, out, False))
    return out


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.either
def test_a_damaged_checkpoint(digits, trained, tmp_path, damage):
    files, usable = DAMAGE[damage]
    shutil.copytree(trained, tmp_path / "run")
    for name, change in files.items():
        file = tmp_path / "run" / "checkpoints" / name
        file.write_bytes(change(file.read_bytes()))
    job = digits(*TEN_STEPS, "--resume")
    ended = job.finish()
    assert ended.stderr.count(f"{NEW} is damaged, set aside") == 1, ended.stderr
    assert len(list((job.out / "checkpoints").glob("bad-*"))) == len(files)
    if usable:
        assert ended.returncode == 0
        assert f"going back to {job.out}/checkpoints/{OLD}" in ended.stderr
        assert "resumed at step 5 of 10" in ended.stderr
        reported = run_folder.read_summary(trained)
        assert job.summary["params_sha256"] == reported["params_sha256"]
    else:
        assert ended.returncode == 2
        assert "no checkpoint in" in ended.stderr and "can be used" in ended.stderr
        assert job.summary == run_folder.read_summary(trained)  # nothing was trained since


@pytest.mark.either
def test_a_checkpoint_of_another_model(digits, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    job = digits(*TEN_STEPS, *sets(model_widths="[64,20,10]"), "--resume")
    ended = job.finish()
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    assert ended.stderr.count("does not fit the recipe") == 1


# The step from which on no file can grow -> the checkpoints made before, those that then fail
FULL = {"while it trains": (7, [5], [10, 15, 18]), "at the end": (17, [5, 10, 15], [18])}


@pytest.mark.sample(1)
@pytest.mark.parametrize("moment", FULL)
@pytest.mark.either
def test_a_full_disk(digits, moment):
    step, saved, failed = FULL[moment]
    keys = sets(run_epochs="", run_steps=18, checkpoint_every_steps=5)
    job = digits(*keys, *trap("full", EVERY, step))
    ended = job.finish()
    assert ended.returncode == 1
    tried = re.findall(
        r"could not save \S*step-(\d+)\S*: rank 1 on .* File too large: .*; "
        r"still good: \S*step-(\d+)(; training goes on)?",
        ended.stderr,
    )
    assert [(int(now), int(before)) for now, before, _ in tried] == [(s, saved[-1]) for s in failed]
    assert [goes_on for *_, goes_on in tried[:-1]] == ["; training goes on"] * (len(failed) - 1)
    assert (job.summary["status"], job.summary["exit_code"]) == ("failed", 1)
    assert "File too large" in job.summary["reason"]
    assert job.steps == saved
    assert checkpoint.verify(job.out / "checkpoints" / f"step-{saved[-1]:08d}") is None


@pytest.mark.either
def test_a_disk_full_of_checkpoints_has_no_room_for_the_trace(digits):
    keys = sets(run_epochs="", run_steps=40, model_widths="[64,2,10]", trace_enabled="true")
    job = digits(*trap("full", EVERY), *keys)
    ended = job.finish()
    assert ended.returncode == 0, ended.stderr
    message = re.findall(r"could not be written: rank 0 on \S+: File too large", ended.stderr)
    assert len(message) == 1
    assert (job.summary["status"], job.steps) == ("done", [40])
    assert not [
        *job.out.glob("trace.json"),
        *job.out.glob("trace/*"),
        *job.out.glob(".trace*"),
    ]


NEVER_COMES = """
import os, sys, time
from hpctrain.world.start import over_mpi
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    time.sleep(600)
over_mpi("cpu", timeout_s=2)
"""


def test_a_rank_that_never_starts_mpi(start, mark):
    ended = start("-c", NEVER_COMES, ranks=2, env={MARK: mark}).finish()
    # MPICH's mpiexec adds up the codes of all ranks, also of those that it has killed.
    assert ended.returncode == 86 or (ended.returncode and "BAD TERMINATION" in ended.stdout)
    assert "hpctrain: rank 0 of 2 on " in ended.stderr
    assert "has waited 2 s in the start of MPI: expected all ranks there" in ended.stderr
    assert re.search(r"Timeout \(.*\)!(.|\n)*startup.py\", line \d+ in start", ended.stderr)
