"""A dry run: the start of a training on all its ranks, which writes nothing and shows its costs."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpctrain import data
from hpctrain.core import progress
from hpctrain.core.run_files import run_folder
from hpctrain.hardware.memory import available_bytes
from hpctrain.training import loading, run_facts, runs
from hpctrain.training.arguments import check_sets
from hpctrain.training.loggers.options import LogOptions
from hpctrain.training.recipe import Recipe
from hpctrain.transport.device import gpus
from hpctrain.world import World

WARM_UP_STEPS = 2
MEASURE_S = 3.0  #: the time of the measured steps, at least one
MAX_STEPS = 50
MIB = 1 << 20


def dry_run(spec: Recipe, world: World, out: Path | None) -> dict[str, Any]:
    """Train a few steps of `spec` and return its sizes, memory and time per step; collective.

    Nothing is written, evaluated or saved, and no callback is called. Rank 0 prints a table. Raises
    the errors of `runs.train`.
    """
    quiet_spec = replace(
        spec, early_stop=None, log=LogOptions(), run=replace(spec.run, callbacks=[])
    )
    with _no_messages(), runs.prepare(quiet_spec, world) as job:
        own_step_s = job.fit(steps=WARM_UP_STEPS)["wall_s"] / WARM_UP_STEPS
        first_step_s = world.from_first(lambda: own_step_s)
        steps = min(max(1, round(MEASURE_S / first_step_s)), MAX_STEPS, job.total_steps)
        step_s = job.fit(steps=steps)["wall_s"] / steps
        engine = job.trainer.engine
        engine.settle()
        checkpoint_bytes = sum(piece.array.nbytes for piece in engine.state())
        start = run_facts.describe_start(job.trainer.mesh, engine, job.batch)
        mesh_text, memory, memory_texts = _describe_pipeline(job)
    costs = _costs_over_ranks(world, step_s, checkpoint_bytes)
    facts = {
        "recipe": spec.run.name,
        "start": start,
        "pipeline": mesh_text,
        "memory": memory,
        "memory_texts": memory_texts,
        "folder": str(out or run_folder.default_path(spec.run.name)),
        "training_samples": len(job.split.train),
        "test_samples": len(job.split.test) if job.split.test is not None else 0,
        "steps": job.total_steps,
        "epochs": job.total_steps / job.steps_per_epoch,
        "available_bytes": available_bytes(),
        "measured_steps": steps,
        "training_s": costs["step_s"] * job.total_steps,
        **costs,
    }
    if world.rank == 0:
        progress.console().print(_make_table(facts))
    return facts


def _costs_over_ranks(world: World, step_s: float, checkpoint_bytes: int) -> dict[str, Any]:
    """Return the time of the slowest rank, the largest memory and all bytes saved; collective."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free_bytes = gpus.free_gpu_bytes() if world.gpu is not None else None
    own_costs = (step_s, checkpoint_bytes, peak_bytes, free_bytes)
    costs_of_ranks = [json.loads(text) for text in world.gather(json.dumps(own_costs))]
    step_times, sizes, peaks, free_sizes = zip(*costs_of_ranks, strict=True)
    return {
        "step_s": max(step_times),
        "checkpoint_bytes": sum(sizes),
        "peak_bytes": max(peaks),
        "gpu_free_bytes": min((n for n in free_sizes if n is not None), default=None),
    }


def examine(spec: Recipe) -> tuple[str, str]:
    """Load the data of a recipe and build its model, on this process alone; describe them.

    Return the description, and what was not examined: functions of the user are not called, and
    of files only labels and a few samples are read. Raises UsageError for files, samples, labels or
    widths that a training would refuse.
    """
    parts = {"data": spec.data, "model": spec.model}
    functions = [name for name, part in parts.items() if hasattr(part, "target")]
    function_text = f"the functions of [{'] and ['.join(functions)}] were not called"
    if "data" in functions:
        return function_text, ""
    split = loading.load_raw(spec)
    named_sets = {"training": split.train, "test": split.test}
    sets = {name: samples for name, samples in named_sets.items() if samples is not None}
    rows = {name: loading.spread_rows(samples) for name, samples in sets.items()}
    counts = {name: loading.count_unread(samples) for name, samples in sets.items()}
    unread_text = " and ".join(f"{n:,} {name} samples" for name, n in counts.items() if n)
    if functions:
        return function_text, unread_text
    model = runs.build_model(spec, split)
    check_sets(model, model.loss, **sets)
    read_sets = {name: data.Dataset(*pair, finite=False) for name, pair in rows.items()}
    check_sets(model, model.loss, **read_sets)  # targets known so far may be the first few alone
    test_count = 0 if split.test is None else len(split.test)
    text = (
        f"{len(split.train):,} training and {test_count:,} test samples "
        f"{split.train.sample_shape}, {model.parameter_count:,} parameters"
    )
    return text, unread_text


def _describe_pipeline(job: runs.Job) -> tuple[str, Any, dict[str, str]]:
    """Return a text about the mesh, the bytes of each rank by kind, and a text about each kind."""
    mesh, engine = job.trainer.mesh, job.trainer.engine
    mesh_text = run_facts.describe_mesh(mesh, job.batch)
    if not mesh_text:
        return "", None, {}
    from hpctrain.training import pipeline_facts  # most runs have no pipeline

    memory = pipeline_facts.memory_of_ranks(mesh, engine)
    return mesh_text, memory, pipeline_facts.table_rows(memory)


@contextmanager
def _no_messages() -> Iterator[None]:
    """Disable the messages of a training below warnings."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _make_table(facts: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{facts['recipe']}: dry run, nothing was written", show_header=False)
    available_bytes = facts["available_bytes"]
    rows = {
        "training": facts["start"],
        "pipeline": facts["pipeline"],
        "folder": facts["folder"],
        "samples": f"{facts['training_samples']:,}, test: {facts['test_samples']:,}",
        "steps": f"{facts['steps']:,} ({facts['epochs']:,.4g} epochs)",
        "peak memory of a rank": f"{facts['peak_bytes'] / MIB:,.0f} MiB"
        + (f"; this node has {available_bytes / MIB:,.0f} MiB free" if available_bytes else ""),
        **facts["memory_texts"],
        "checkpoint": f"{facts['checkpoint_bytes'] / MIB:,.1f} MiB",
        "time per step": f"{1000 * facts['step_s']:.3g} ms, the mean of {facts['measured_steps']}",
        "time of training": f"about {_duration_text(facts['training_s'])}, without evaluations "
        "and checkpoints",
    }
    if facts["gpu_free_bytes"] is not None:
        rows["GPU memory"] = f"{facts['gpu_free_bytes'] / MIB:,.0f} MiB left on the fullest GPU"
    for name, value in rows.items():
        if value:  # a run without a mesh has no pipeline
            table.add_row(name, value)
    return table


def _duration_text(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
