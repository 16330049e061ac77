"""The stages of the preflight, in order; collective, rank 0 gathers and prints the results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.doctor import mpi
from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.job import (
    binding,
    consistency,
    cores,
    known_sums,
    output_folder,
    ping_pong,
    rank_facts,
    show,
)
from hpctrain.doctor.job.result import JobResult, gather_json, watched
from hpctrain.doctor.node import free_memory
from hpctrain.hardware.nics import Nic
from hpctrain.training.timeline import kernel
from hpctrain.transport.device import gpus
from hpctrain.transport.placement.check import RankBinding
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.watch.trace import Reading
from hpctrain.world import World, init

#: How long a rank may keep others waiting before the report names it.
LIMIT_S = 30.0
RANK_0_HEAD_START_S = 3.0  # for rank 0 to print an error that all ranks have raised
DEFAULT_OUT = Path()
Answers = list[Any]  #: of all ranks, in their order


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    json: Path | None = None
    out: Path = DEFAULT_OUT
    recipe: str | None = None
    device: gpus.Device = "auto"


def run(options: Options) -> int:
    """Check the whole job; return the exit code, the same on all ranks; collective."""
    launched = launchers.launched(os.environ)
    line = show.StageLine(launched.rank == 0)
    _before_mpi(launched, options)
    line.say(f"starting MPI on {launched.size} ranks")
    try:
        world = init(options.device, 2 * LIMIT_S)
    except UsageError as error:
        return _report_no_job(launched, str(error), options)
    result = JobResult(world.hosts, world.bindings)
    place, probe = output_folder.nearest_existing(options.out), ""

    def on_hang(text: str) -> None:
        result.checks.append(_hang_check(text))
        _publish(result, options)
        output_folder.remove(probe)

    with watched(world, None, LIMIT_S, on_hang):
        line.say(f"output folder {place}")
        probe = _check_folder(world, result, place)
    with watched(world, Path(probe) if probe else None, LIMIT_S, on_hang):
        _run_stages(world, result, options, line)
        world.link.barrier()
    if world.rank == 0:
        output_folder.remove(probe)
        line.end()
        _publish(result, options)
    return int(world.gather(str(exit_code(result.checks)))[0])


def _check_folder(world: World, result: JobResult, place: Path) -> str:
    """Check the output folder; return a folder in it shared by all nodes, "" if there is none."""
    probe, word = output_folder.make_probe(place) if world.rank == 0 else ("", "")
    probe, word = json.loads(world.gather(json.dumps([probe, word]))[0])
    is_first = rank_facts.is_first_of_node(world)
    state = output_folder.inspect(place, probe, word) if is_first else output_folder.FolderState()
    of_nodes = _by_node(world, gather_json(world.link, asdict(state)))
    if of_nodes:
        nodes = {host: output_folder.FolderState(**table) for host, table in of_nodes.items()}
        result.checks += output_folder.checks(place, nodes)
    is_shared = all(flag == "True" for flag in world.gather(str(state.shared)))
    if not is_shared and world.rank == 0:
        output_folder.remove(probe)
    return probe if is_shared else ""


def _run_stages(world: World, result: JobResult, options: Options, line: show.StageLine) -> None:
    """Run the stages after the output folder: all ranks measure, rank 0 adds to the result."""
    machines = world.gather(kernel())
    stages: tuple[tuple[str, Callable[[], Any], Callable[[World, JobResult, Answers], None]], ...]
    stages = (
        ("versions, bindings, hardware", lambda: _facts(world, options), _add_facts),
        ("clocks", lambda: consistency.clock_reading(world, machines), _add_clocks),
        ("speed of cores", lambda: _measure_cores(world, machines), _add_cores),
        ("messages between all pairs", lambda: _measure_pings(world), _add_pings),
        ("sums", lambda: known_sums.failed_algorithms(world), _add_sums),
    )
    for title, measure, add in stages:
        line.say(title)
        answers = gather_json(world.link, measure())
        if world.rank == 0:
            add(world, result, answers)


def _facts(world: World, options: Options) -> dict[str, Any]:
    return asdict(rank_facts.local_facts(world, options.recipe))


def _add_facts(world: World, result: JobResult, answers: Answers) -> None:
    result.facts = [rank_facts.from_table(table) for table in answers]
    result.checks[:0] = _fact_checks(result)  # before those of the output folder


def _add_clocks(world: World, result: JobResult, answers: Answers) -> None:
    readings = {host: Reading(*fields) for host, fields in _by_node(world, answers).items()}
    result.checks.append(consistency.clocks(readings))


def _measure_cores(world: World, machines: list[str]) -> list[dict[str, Any]]:
    assigned = cores.assign(world.bindings, machines)[world.rank]
    world.link.barrier()  # all at once, as in training
    timings = cores.measure(world.rank, world.host, assigned)
    ping_pong.sleeping_barrier(world.link)  # spinning ranks would disturb those that still measure
    return [asdict(timing) for timing in timings]


def _add_cores(world: World, result: JobResult, answers: Answers) -> None:
    result.cores = [cores.CoreTiming(**row) for rows in answers for row in rows]
    result.checks.append(cores.check(result.cores))


def _measure_pings(world: World) -> list[dict[str, Any]]:
    return [asdict(ping) for ping in ping_pong.all_pairs(world)]


def _add_pings(world: World, result: JobResult, answers: Answers) -> None:
    result.pings = [ping_pong.Ping(**row) for rows in answers for row in rows]
    oversubscribed = binding.is_oversubscribed(world.bindings)
    result.checks += ping_pong.checks(result.pings, world.hosts, oversubscribed)
    ports = [[Nic(**nic) for nic in facts.hardware["nics"]] for facts in result.nodes.values()]
    result.checks += ping_pong.check_rdma(result.pings, ports)


def _add_sums(world: World, result: JobResult, answers: Answers) -> None:
    result.checks.append(known_sums.check(answers, known_sums.names(world)))


def _by_node(world: World, answers: list[Any]) -> dict[str, Any]:
    """Return the answer of each node's first rank; empty on ranks other than 0."""
    return {host: answers[world.hosts.index(host)] for host in world.hosts} if answers else {}


def _fact_checks(result: JobResult) -> list[Check]:
    levels = (facts.threads for facts in result.facts)
    level = next((level for level in levels if level != "MULTIPLE"), "MULTIPLE")
    ulfm = all(facts.ulfm for facts in result.facts)
    return [
        Check("MPI", "ok", result.facts[0].versions["MPI"]),
        mpi.threads(level),
        Check("ULFM", "note", "on: ranks can outlive a lost one") if ulfm else
        Check("ULFM", "note", "off: a lost rank ends the job", "Open MPI: mpirun --with-ft ulfm"),
        consistency.versions(result.facts, result.hosts),
        *consistency.recipe(result.facts, result.hosts),
        *consistency.machines(result.facts, result.hosts),
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


def _before_mpi(launched: launchers.Launched, options: Options) -> None:
    """Save the check of /dev/shm before MPI_Init, which may crash; `world` prints the warning."""
    with suppress(OSError):
        check = free_memory(dev_shm.SHM, dev_shm.free())
        if launched.rank == 0 and options.json and check.verdict == "bad":
            _save(JobResult(checks=[check]), options.json)


def _report_no_job(launched: launchers.Launched, reason: str, options: Options) -> int:
    """Report from the launcher's rank 0 why the ranks form no job; return the exit code."""
    if launched.rank == 0:
        start = f"hpctrain launch -n {launched.size} doctor --job"
        remedy = f"{start}, or the srun or mpiexec of that MPI"
        _publish(JobResult(checks=[Check("launcher", "bad", reason, remedy)]), options)
    else:
        time.sleep(RANK_0_HEAD_START_S)  # some launchers kill all when one ends with an error
    return 1


def _hang_check(text: str) -> Check:
    remedy = (
        "look at the ranks that the others wait for, on their nodes: is a device or a disk hung?"
    )
    return Check("answers", "bad", text, remedy)


def _publish(result: JobResult, options: Options) -> None:
    show.show(result)
    if options.json is not None:
        _save(result, options.json)


def _save(result: JobResult, file: Path) -> None:
    file.write_text(json.dumps(result.table(), indent=1) + "\n")
