"""A rank's replica: the whole model, or a pipeline's part; and the checks of a split model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from hpctrain import nn
from hpctrain.core.errors import RecoveryError, UsageError
from hpctrain.engines.engine import Times
from hpctrain.gradients.precision import Precision
from hpctrain.gradients.precision import make_replica as make_whole_replica
from hpctrain.parallel.mesh import Mesh, make_mesh
from hpctrain.parallel.options import MeshOptions, PipelineOptions
from hpctrain.training import weights
from hpctrain.training.faults import FaultsOptions
from hpctrain.watch.trace import Trace
from hpctrain.world import World

log = logging.getLogger(__name__)
#: The options of engines that train replicas which are split over ranks
ENGINES = ("AllReduce", "LocalSgd", "PsSync", "PsAsync", "Easgd", "Gossip")


def check(
    mesh: MeshOptions,
    pipeline: PipelineOptions,
    engine: Any,
    precision: Precision,
    faults: FaultsOptions,
    *,
    model: Any = None,
) -> None:
    """Raise UsageError for options, or for a `model` if it is known, that do not go with `mesh`."""
    if mesh.pipe > 1 and model is not None and not isinstance(model, nn.Model):
        raise UsageError(
            f"[mesh] pipe: expected an ht.nn.Model, seen {type(model).__name__}; for modules of "
            'PyTorch use torch.distributed.pipelining on init_process_group("hpctrain")'
        )
    if mesh.pipe == 1:
        if pipeline != PipelineOptions():
            raise UsageError("[pipeline]: expected [mesh] pipe of 2 or more beside it, seen 1")
        return
    for has_conflict, message in _conflicts(engine, precision, faults):
        if has_conflict:
            raise UsageError(f"[mesh] pipe: {message}")


def _conflicts(
    engine: Any, precision: Precision, faults: FaultsOptions
) -> Iterator[tuple[bool, str]]:
    """Yield each conflict with a pipeline: whether it is there, and a message."""
    engine_name = type(engine).__name__
    yield (
        engine_name not in ENGINES,
        f"expected an engine of several ranks, such as allreduce, seen {engine_name}",
    )
    for key, usual in {
        "priority": False, "share_parameters": False, "compression": "none", "apart": "ranks"
    }.items():  # fmt: skip
        actual = getattr(engine, key, usual)
        yield (
            actual != usual,
            f"expected {key} = {usual!r}, seen {actual!r}; not yet available for replicas that are "
            "split over ranks",
        )
    yield (
        precision in ("bf16", "fp16"),
        f"expected precision float32, float64 or tf32, seen {precision}; not yet available for "
        "replicas that are split over ranks",
    )
    yield faults.any, "expected no [faults]: a planted delay would also stretch waits for stages"


def make_replica(
    model: Any,
    seed: int,
    precision: Precision,
    world: World,
    *,
    mesh: MeshOptions,
    pipeline: PipelineOptions,
    init: str | Path | None,
) -> tuple[Mesh, Any]:
    """Return the mesh of all ranks, and this rank's replica of `model` or its part; collective.

    It has the weights at `init`, if that is given.
    """
    on_gpu = world.gpu is not None
    if mesh.pipe > 1:
        from hpctrain.parallel.pipeline.build import make_pipeline  # most runs have no pipeline

        rank_mesh = make_mesh(world, mesh)
        part = make_pipeline(model, seed, precision, on_gpu, rank_mesh, pipeline)
        ranks, replica = replace(rank_mesh, pipeline=part), part
    else:
        ranks = Mesh(everyone=world, data=world, pipe=world)
        replica = world.on_all_ranks(lambda: make_whole_replica(model, seed, precision, on_gpu))
        announce = getattr(replica, "announcements", None)  # of models of other frameworks
        is_first = world.rank == 0 and not world.is_spare
        for text in announce(world.size) if announce is not None and is_first else ():
            log.warning("%s", text)
    if init is not None:
        weights.warm_start(world, replica.arena, Path(init))
    return ranks, replica


def announce_reset(world: World, unit: int) -> None:
    """Announce what a rebuilt engine lacks of an earlier training, after which ranks were lost.

    Raises RecoveryError where `unit` ranks hold a replica together: they lack its parameters.
    """
    if unit > 1:
        raise RecoveryError(
            "lost a rank before this call took over the layers that an earlier fit had trained; "
            "start the job again, with fit(out=..., resume=True) to go on from a checkpoint"
        )
    if world.rank == 0:
        log.warning(
            "the state of the optimizer after an earlier fit is lost with a rank: it begins anew, "
            "unless fit resumes from a checkpoint; the parameters are kept"
        )


class StageWait:
    """Encloses waits for other stages; they count as waits of the engine, too."""

    def __init__(self, times: Times, trace: Trace):
        self._times, self._trace = times, trace
        self.seconds = 0.0

    def __enter__(self) -> None:
        """Read the clock."""
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        """Read the clock again, and add the seconds."""
        seconds = self._trace.add("wait for a stage", "wait", self._start, perf_counter())
        self.seconds += seconds
        self._times.wait_s += seconds
