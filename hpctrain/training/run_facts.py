"""Facts of a run for its summary that training does not change: ranks, hosts, software."""

from __future__ import annotations

import json
import os
from typing import Any

from hpctrain.collectives.tree import broadcast_first
from hpctrain.core import launchers
from hpctrain.core.names import counted
from hpctrain.engines import Engine
from hpctrain.gradients.arena import combine_slot_hashes, params_sha256, slot_hashes
from hpctrain.parallel.mesh import Mesh
from hpctrain.transport import paths
from hpctrain.transport.machine import blas_threads, versions
from hpctrain.world import World


def of_run(world: World, engine: Engine) -> dict[str, Any]:
    """Return the ranks, the hosts and the software of a run, by the keys of summary.json."""
    hosts = sorted(set(world.hosts))
    return {
        "engine": engine.name,
        "algorithm": engine.algorithm,
        "transport": world.transport,
        "world_size": world.size,
        "workers": engine.workers,
        "servers": engine.servers,
        "hosts": hosts,
        "rank_hosts": [hosts.index(host) for host in world.hosts],
        "gpus": sorted({place.gpu for place in world.places} - {""}),
        "gpu_paths": _gpu_paths(world),
        "restarts": launchers.restarts(os.environ),
        "threads": blas_threads(),
        "versions": versions(),
    }


def of_mesh(mesh: Mesh, engine: Engine) -> dict[str, Any] | None:
    """Return the facts of a pipeline; None if each rank holds a whole replica; collective."""
    if mesh.pipe is mesh.everyone:
        return None
    from hpctrain.training.pipeline_facts import summarize_pipeline  # most runs have no pipeline

    return summarize_pipeline(mesh, engine)


def describe_mesh(mesh: Mesh, batch: int) -> str:
    """Return grid, schedule, stages and bubble in a line; empty without a pipeline."""
    if mesh.pipe is mesh.everyone:
        return ""
    from hpctrain.training.pipeline_facts import describe_pipeline

    return describe_pipeline(mesh, batch)


def describe_start(mesh: Mesh, engine: Engine, batch: int) -> str:
    """Describe the engine, the ranks, the devices, and the sizes of model and batch."""
    world = mesh.everyone
    hosts = len(set(world.hosts))
    gpus = sum(bool(place.gpu) for place in world.places)
    phrases = [f"{counted(world.size, 'rank')} of {counted(hosts, 'host')}"]
    phrases += [f"{gpus} of them with GPUs" if gpus else "on CPU cores"]
    if engine.servers:
        roles = f"{counted(engine.workers, 'worker')} and {counted(engine.servers, 'server')}"
        is_alone = engine.asynchronous and engine.workers == 1
        phrases.append(roles + " (a single worker is never asynchronous)" * is_alone)
    if mesh.pipe is not world:
        phrases += [f"{counted(mesh.data.size, 'replica')} of {mesh.pipe.size} ranks each"]
    parameters = sum(slot.size for slot in engine.replica.arena.model_slots)
    return (
        f"{engine.name}, {', '.join(phrases)}, {parameters:,} parameters, {batch} samples per step"
    )


def trained_sha256(world: World, engine: Engine) -> str:
    """Return the hash of the trained parameters of worker 0: a server's replica is not trained."""
    arena, sha256_by_name, own_json = engine.replica.arena, dict[str, str](), ""
    if engine.worker == 0:
        own_json = json.dumps(slot_hashes(arena) if arena.share else params_sha256(arena))
    for text in broadcast_first(world.link, own_json.encode() or None, world.size).values():
        hashes = json.loads(text)
        if isinstance(hashes, str):  # of the whole model
            return hashes
        sha256_by_name |= hashes
    return combine_slot_hashes(arena, sha256_by_name)


def _gpu_paths(world: World) -> dict[str, str] | None:
    """Return the path of GPU memory between ranks, and the reason for it; None on CPUs."""
    if not any(place.gpu for place in world.places):
        return None
    gpu_memory = world.memory.gpu
    return paths.summarize_paths(world.verdict, gpu_memory is not None and gpu_memory.refused)
