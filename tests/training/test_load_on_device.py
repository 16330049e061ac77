"""Loaded models: they compute on the requested device, in the precision of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import fakes
import numpy as np
import pytest
from click.testing import CliRunner
from ranks import run_on_gpus

from hpctrain import data, nn
from hpctrain.commands.checkpoint import evaluate
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.training import recipe, runs
from hpctrain.transport.device import gpus

PRECISIONS = ("float32", "float64", "bf16", "fp16")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of one epoch on a stand-in, by precision: the folder, and its summary."""
    folder, reported = tmp_path_factory.mktemp("made"), {}

    def make(precision):
        if precision not in reported:
            keys = ["model.widths=[64,16,10]", "run.epochs=1", f"run.precision={precision}"]
            spec, out = recipe.load("digits", keys), folder / precision
            reported[precision] = out, run_on_gpus(1, lambda w: runs.train(spec, w, out, False))[0]
        return reported[precision]

    with fakes.installed():
        yield make


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    monkeypatch.setattr("hpctrain.world.process._world", None)  # which another test may have made


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gpu_finds_what_it_found_in_training(made, precision):
    run, summary = made(precision)
    reported = runs.evaluate(run, device="gpu")
    assert reported["device"] == "gpu" and reported["samples"] == 360
    assert (reported["test_loss"], reported["test_accuracy"]) == (
        summary["test_loss"],
        summary["test_accuracy"],
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_cores_compute_in_32_bits_what_was_trained_in_16(made, precision):
    run, summary = made(precision)
    reported = runs.evaluate(run, device="cpu")
    assert reported["device"] == "cpu" and reported["test_loss"] == pytest.approx(
        summary["test_loss"], rel=3e-2
    )
    assert (reported["test_loss"] != summary["test_loss"]) == (precision in ("bf16", "fp16"))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("own", [False, True])
def test_a_loaded_model_gives_outputs_of_the_host(made, precision, own):
    x = data.DigitsOptions().load(0).test.x[:5]
    model = nn.MlpOptions(widths=[64, 16, 10]).build((8, 8), 10) if own else None
    on_gpu, on_host = (runs.load(made(precision)[0], False, model, d) for d in ("gpu", "cpu"))
    assert xp.on_device(on_gpu.replica.arena.param)
    assert not xp.on_device(on_host.replica.arena.param)
    assert type(on_gpu.predict(x)) is np.ndarray and on_gpu.predict(x).dtype == np.float32
    np.testing.assert_allclose(on_gpu.predict(x), on_host.predict(x), rtol=0.05, atol=0.05)


#: the world of the process, whether CUDA is there -> where "auto" computes
AUTO = [(None, True, "gpu"), (None, False, "cpu"), ("cpu", True, "cpu"), ("gpu", True, "gpu")]


@pytest.mark.parametrize(("world", "cuda", "location"), AUTO)
def test_auto_takes_what_there_is(made, monkeypatch, world, cuda, location):
    run, _ = made("float32")
    monkeypatch.setattr(gpus, "driver_cuda_version", lambda: 13000 if cuda else None)
    if world is not None:
        local = run_on_gpus(1, lambda w: w)[0]
        local = replace(local, gpu=local.gpu if world == "gpu" else None)
        monkeypatch.setattr("hpctrain.world.process._world", local)
    result = CliRunner().invoke(evaluate, [str(run)])
    assert json.loads(result.output)["device"] == location


def test_ranks_of_a_node_take_their_gpus_in_turn(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    for name, value in {"SIZE": 4, "LOCAL_RANK": 3, "LOCAL_SIZE": 4}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with fakes.installed(devices=2) as machine:
        assert runs._on_gpu("gpu") and machine.device == 1
        machine.here.device = 0


def test_wrong_devices_are_refused(made):
    with pytest.raises(UsageError, match="unknown device 'gpuu'; did you mean 'gpu'"):
        runs.load(made("float32")[0], device="gpuu")
    with fakes.installed(devices=0), pytest.raises(UsageError, match="no GPU"):
        runs.load(made("float32")[0], device="gpu")


@pytest.mark.processes
@pytest.mark.either
def test_the_command_on_a_stand_in(made):
    run, summary = made("bf16")
    command = [sys.executable, "-m", "fakes", "evaluate", str(run), "--device", "gpu"]
    reported = subprocess.run(command, cwd="tests", capture_output=True, text=True, timeout=60)
    assert json.loads(reported.stdout)["test_loss"] == summary["test_loss"], reported.stderr
