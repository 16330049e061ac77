"""The stages of the preflight, in order; collective, rank 0 gathers and prints the results."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain import world as worlds
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.doctor import mpi
from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.job import (
    binding,
    clocks,
    consistency,
    cores,
    known_sums,
    output_folder,
    ping_pong,
    rank_facts,
    show,
)
from hpctrain.doctor.job.gather import to_first, watched
from hpctrain.doctor.job.result import JobResult
from hpctrain.doctor.node import room
from hpctrain.hardware import shm
from hpctrain.hardware.nics import Nic
from hpctrain.training.timeline import kernel
from hpctrain.transport.device import gpus
from hpctrain.transport.placement.check import RankBinding
from hpctrain.watch.trace import Reading
from hpctrain.world import World

#: How long a rank may keep others waiting before the report names it.
LIMIT_S = 30.0
SPEAK_FIRST_S = 3.0  # for rank 0 to print an error that all ranks have raised
OUT = Path()


@dataclass(frozen=True)
class Asked:
    """Options of the command line."""

    json: Path | None = None
    out: Path = OUT
    recipe: str | None = None
    device: gpus.Device = "auto"


def run(options: Asked) -> int:
    """Check the whole job; return the exit code, the same on all ranks; collective."""
    launched = launchers.launched(os.environ)
    stages = show.Stages(launched.rank == 0)
    _before_mpi(launched, options)
    stages.say(f"starting MPI on {launched.size} ranks")
    try:
        world = worlds.init(options.device, 2 * LIMIT_S)
    except UsageError as error:
        return _report_no_job(launched, str(error), options)
    result = JobResult(world.hosts, world.bindings)
    place, marked = output_folder.nearest_existing(options.out), ""

    def hung(text: str) -> None:
        result.checks.append(_hang_check(text))
        _publish(result, options)
        output_folder.remove(marked)

    with watched(world, None, LIMIT_S, hung):
        stages.say(f"output folder {place}")
        marked = _folder(world, result, place)
    with watched(world, Path(marked) if marked else None, LIMIT_S, hung):
        _stages(world, result, options, stages)
        world.link.barrier()
    if world.rank == 0:
        output_folder.remove(marked)
        stages.end()
        _publish(result, options)
    return int(world.gather(str(exit_code(result.checks)))[0])


def _folder(world: World, result: JobResult, place: Path) -> str:
    """Check the output folder; return a folder in it shared by all nodes, "" if there is none."""
    marked, word = output_folder.mark(place) if world.rank == 0 else ("", "")
    marked, word = json.loads(world.gather(json.dumps([marked, word]))[0])
    speaks = rank_facts.first_of_node(world)
    state = output_folder.look(place, marked, word) if speaks else output_folder.FolderState()
    of_nodes = _by_node(world, to_first(world.link, asdict(state)))
    if of_nodes:
        nodes = {host: output_folder.FolderState(**table) for host, table in of_nodes.items()}
        result.checks += output_folder.checks(place, nodes)
    shared = all(flag == "True" for flag in world.gather(str(state.shared)))
    if not shared and world.rank == 0:
        output_folder.remove(marked)
    return marked if shared else ""


def _stages(world: World, result: JobResult, options: Asked, stages: show.Stages) -> None:
    """Run the stages after the output folder; rank 0 makes the checks."""
    link, on_first = world.link, world.rank == 0
    stages.say("versions, bindings, hardware")
    answers = to_first(link, asdict(rank_facts.local_facts(world, options.recipe)))
    result.told = [rank_facts.from_table(table) for table in answers]
    if on_first:
        result.checks[:0] = _fact_checks(result)
    stages.say("clocks")
    machines = world.gather(kernel())
    answers = to_first(link, clocks.reading(world, machines))
    if on_first:
        readings = {host: Reading(*fields) for host, fields in _by_node(world, answers).items()}
        result.checks.append(clocks.check(readings))
    stages.say("speed of cores")
    answers = to_first(link, _cores(world, machines))
    result.cores = [cores.Core(**row) for rows in answers for row in rows]
    if on_first:
        result.checks.append(cores.check(result.cores))
    stages.say("messages between all pairs")
    answers = to_first(link, [asdict(ping) for ping in ping_pong.all_pairs(world)])
    result.pings = [ping_pong.Ping(**row) for rows in answers for row in rows]
    if on_first:
        result.checks += ping_pong.checks(
            result.pings, world.hosts, binding.crowded(world.bindings)
        )
        ports = [[Nic(**nic) for nic in facts.hardware["nics"]] for facts in result.nodes.values()]
        result.checks += ping_pong.of_adapters(result.pings, ports)
    stages.say("sums")
    answers = to_first(link, known_sums.wrong(world))
    if on_first:
        result.checks.append(known_sums.check(answers, known_sums.names(world)))


def _cores(world: World, machines: list[str]) -> list[dict[str, Any]]:
    assigned = cores.assign(world.bindings, machines)[world.rank]
    world.link.barrier()  # all at once, as in training
    timings = cores.measure(world.rank, world.host, assigned)
    ping_pong.wait_quietly(world.link)  # idle ranks would spin and disturb those that still measure
    return [asdict(timing) for timing in timings]


def _by_node(world: World, answers: list[Any]) -> dict[str, Any]:
    """Return the answer of each node's first rank; empty on ranks other than 0."""
    return {host: answers[world.hosts.index(host)] for host in world.hosts} if answers else {}


def _fact_checks(result: JobResult) -> list[Check]:
    levels = (facts.threads for facts in result.told)
    level = next((level for level in levels if level != "MULTIPLE"), "MULTIPLE")
    ulfm = all(facts.ulfm for facts in result.told)
    return [
        Check("MPI", "ok", result.told[0].versions["MPI"]),
        mpi.threads(level),
        Check("ULFM", "note", "on: ranks can outlive a lost one") if ulfm else
        Check("ULFM", "note", "off: a lost rank ends the job", "Open MPI: mpirun --with-ft ulfm"),
        consistency.versions(result.told, result.hosts),
        *consistency.recipe(result.told, result.hosts),
        *consistency.machines(result.told, result.hosts),
        *binding.checks(_seats(result)),
        *cores.quotas(result.seats, {host: facts.hardware["cpu_quota"]
                                     for host, facts in result.nodes.items()}),
        *consistency.merged({host: facts.checks for host, facts in result.nodes.items()}),
    ]  # fmt: skip


def _seats(result: JobResult) -> tuple[RankBinding, ...]:
    """Return the seats, counting GPUs that CUDA_VISIBLE_DEVICES hides from all ranks of a node.

    Slurm sets the number of GPUs of a job. Elsewhere a GPU that NVML shows is not hidden by a
    control group: CUDA_VISIBLE_DEVICES alone keeps ranks from it.
    """
    if "SLURM_GPUS_ON_NODE" in os.environ:
        return result.seats
    count = {host: len(facts.hardware["gpus"]) for host, facts in result.nodes.items()}
    return tuple(replace(seat, gpus=max(seat.gpus, count[seat.host])) for seat in result.seats)


def _before_mpi(launched: launchers.Launched, options: Asked) -> None:
    """Save the check of /dev/shm before MPI_Init, which may crash; `world` prints the warning."""
    with suppress(OSError):
        check = room(shm.SHM, shm.free())
        if launched.rank == 0 and options.json and check.verdict == "bad":
            _save(JobResult(checks=[check]), options.json)


def _report_no_job(launched: launchers.Launched, reason: str, options: Asked) -> int:
    """Report from the launcher's rank 0 why the ranks form no job; return the exit code."""
    if launched.rank == 0:
        start = f"hpctrain launch -n {launched.size} doctor --job"
        remedy = f"{start}, or the srun or mpiexec of that MPI"
        _publish(JobResult(checks=[Check("launcher", "bad", reason, remedy)]), options)
    else:
        time.sleep(SPEAK_FIRST_S)  # some launchers kill all when one ends with an error
    return 1


def _hang_check(text: str) -> Check:
    remedy = (
        "look at the ranks that the others wait for, on their nodes: is a device or a disk hung?"
    )
    return Check("answers", "bad", text, remedy)


def _publish(result: JobResult, options: Asked) -> None:
    show.show(result)
    if options.json is not None:
        _save(result, options.json)


def _save(result: JobResult, file: Path) -> None:
    file.write_text(json.dumps(result.table(), indent=1) + "\n")
