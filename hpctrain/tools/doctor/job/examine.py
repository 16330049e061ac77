"""Run the stages of a job's preflight on all ranks; rank 0 gathers and prints the results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.collectives.small_messages import is_any
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.strict_json import to_json
from hpctrain.hardware.nics import Nic
from hpctrain.tools.doctor import mpi, show
from hpctrain.tools.doctor.check import Check, exit_code
from hpctrain.tools.doctor.examine import check_script
from hpctrain.tools.doctor.job import (
    binding,
    consistency,
    cores,
    known_sums,
    output_folder,
    ping_pong,
)
from hpctrain.tools.doctor.job.result import (
    RANK_0_HEAD_START_S,
    JobResult,
    gather_json,
    watch_job,
)
from hpctrain.tools.doctor.node import check_free_memory
from hpctrain.training.timeline import kernel
from hpctrain.transport.device import gpus
from hpctrain.transport.placement.check import RankBinding
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.watch.trace import Reading
from hpctrain.world import World, init

#: How long a rank may keep others waiting before the job is ended.
HANG_TIMEOUT_S = 30.0
DEFAULT_OUT = Path()
Answers = list[Any]  #: every rank's answer, by rank


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    json: Path | None = None
    out: Path = DEFAULT_OUT
    recipe: str | None = None
    script: str | None = None
    device: gpus.Device = "auto"


def examine_job(options: Options) -> int:
    """Check the whole job; return the exit code, which is equal on all ranks; collective."""
    launched = launchers.launched(os.environ)
    stage_line = show.StageLine(launched.rank == 0)
    script_checks = check_script(options.script)  # refused before MPI starts
    _save_shm_check(launched, options)
    stage_line.show_stage(f"starting MPI on {launched.size} ranks")
    try:
        world = init(options.device, 2 * HANG_TIMEOUT_S)
    except UsageError as error:
        return _report_no_job(launched, str(error), options)
    result = JobResult(world.hosts, world.bindings, checks=script_checks)
    out_folder, probe = output_folder.nearest_existing_folder(options.out), ""

    def on_hang(report: str) -> None:
        remedy = "check the nodes of the ranks for which others wait: does a device or a disk hang?"
        result.checks.append(Check("answers", "bad", report, remedy))
        _publish_result(result, options)
        output_folder.remove_probe(probe)

    with watch_job(world, None, HANG_TIMEOUT_S, on_hang):
        stage_line.show_stage(f"output folder {out_folder}")
        probe = _inspect_out_folder(world, result, out_folder)
    with watch_job(world, Path(probe) if probe else None, HANG_TIMEOUT_S, on_hang):
        _run_stages(world, result, options, stage_line)
        world.link.barrier()
    if world.rank == 0:
        output_folder.remove_probe(probe)
        stage_line.erase()
        _publish_result(result, options)
    return world.from_first(lambda: exit_code(result.checks))


def _inspect_out_folder(world: World, result: JobResult, out_folder: Path) -> str:
    """Check the output folder; return a probe folder in it, "" if nodes do not share it."""
    probe, word = world.from_first(lambda: output_folder.make_probe(out_folder))
    is_first_of_node = consistency.is_first_of_node(world)
    state = (
        output_folder.inspect_folder(out_folder, probe, word)
        if is_first_of_node
        else output_folder.FolderState()
    )
    tables_by_host = _answers_by_host(world, gather_json(world.link, asdict(state)))
    if tables_by_host:
        nodes = {host: output_folder.FolderState(**table) for host, table in tables_by_host.items()}
        result.checks += output_folder.check_folder(out_folder, nodes)
    is_shared = not is_any(world.link, not state.shared)
    if not is_shared and world.rank == 0:
        output_folder.remove_probe(probe)
    return probe if is_shared else ""


def _run_stages(
    world: World, result: JobResult, options: Options, stage_line: show.StageLine
) -> None:
    """Run all further stages: every rank measures, rank 0 adds the answers to the result."""
    machines = world.gather(kernel())
    stages: tuple[tuple[str, Callable[[], Any], Callable[[World, JobResult, Answers], None]], ...]
    stages = (
        (
            "versions, bindings, hardware",
            lambda: asdict(consistency.collect_local_facts(world, options.recipe)),
            _add_facts,
        ),
        ("clocks", lambda: consistency.measure_clock_offset(world, machines), _add_clocks),
        ("speed of cores", lambda: _measure_cores(world, machines), _add_cores),
        (
            "messages between all pairs",
            lambda: [asdict(ping) for ping in ping_pong.measure_all_pairs(world)],
            _add_pings,
        ),
        ("sums", lambda: known_sums.find_failed_algorithms(world), _add_sums),
    )
    for title, measure, add_answers in stages:
        stage_line.show_stage(title)
        answers = gather_json(world.link, measure())
        if world.rank == 0:
            add_answers(world, result, answers)


def _add_facts(world: World, result: JobResult, answers: Answers) -> None:
    result.facts = [consistency.facts_from_table(table) for table in answers]
    result.checks[:0] = _check_facts(result)  # printed before the checks of the output folder


def _add_clocks(world: World, result: JobResult, answers: Answers) -> None:
    readings = {host: Reading(*fields) for host, fields in _answers_by_host(world, answers).items()}
    result.checks.append(consistency.check_clocks(readings))


def _measure_cores(world: World, machines: list[str]) -> list[dict[str, Any]]:
    assigned_cores = cores.assign_cores(world.bindings, machines)[world.rank]
    world.link.barrier()  # all ranks measure at once, as in training
    timings = cores.measure_cores(world.rank, world.host, assigned_cores)
    ping_pong.sleeping_barrier(world.link)  # spinning ranks would disturb ranks that still measure
    return [asdict(timing) for timing in timings]


def _add_cores(world: World, result: JobResult, answers: Answers) -> None:
    result.cores = [cores.CoreTiming(**row) for rows in answers for row in rows]
    result.checks.append(cores.check_cores(result.cores))


def _add_pings(world: World, result: JobResult, answers: Answers) -> None:
    result.pings = [ping_pong.Ping(**row) for rows in answers for row in rows]
    oversubscribed = binding.is_oversubscribed(world.bindings)
    result.checks += ping_pong.check_links(result.pings, world.hosts, oversubscribed)
    ports = [[Nic(**nic) for nic in facts.hardware["nics"]] for facts in result.nodes.values()]
    result.checks += ping_pong.check_rdma(result.pings, ports)


def _add_sums(world: World, result: JobResult, answers: Answers) -> None:
    result.checks.append(known_sums.check_sums(answers, known_sums.algorithm_names(world)))


def _answers_by_host(world: World, answers: list[Any]) -> dict[str, Any]:
    """Return the answer of each host's first rank; empty on ranks other than 0."""
    return {host: answers[world.hosts.index(host)] for host in world.hosts} if answers else {}


def _check_facts(result: JobResult) -> list[Check]:
    levels = (facts.threads for facts in result.facts)
    level = next((level for level in levels if level != "MULTIPLE"), "MULTIPLE")
    ulfm = all(facts.ulfm for facts in result.facts)
    return [
        Check("MPI", "ok", result.facts[0].versions["MPI"]),
        mpi.check_threads(level),
        Check("ULFM", "note", "on: ranks can survive a lost rank") if ulfm else
        Check("ULFM", "note", "off: a lost rank ends the job", "Open MPI: mpirun --with-ft ulfm"),
        consistency.check_versions(result.facts, result.hosts),
        *consistency.check_recipe(result.facts, result.hosts),
        *consistency.check_host_names(result.facts, result.hosts),
        *binding.check_bindings(_bindings_with_hidden_gpus(result)),
        *cores.check_quotas(result.bindings, {host: facts.hardware["cpu_quota"]
                                     for host, facts in result.nodes.items()}),
        *consistency.merge_checks({host: facts.checks for host, facts in result.nodes.items()}),
    ]  # fmt: skip


def _bindings_with_hidden_gpus(result: JobResult) -> tuple[RankBinding, ...]:
    """Return the bindings, counting GPUs that CUDA_VISIBLE_DEVICES hides from all ranks of a node.

    In Slurm the bindings are right, since Slurm sets the number of GPUs. Elsewhere no control group
    hides a GPU that NVML shows, so only CUDA_VISIBLE_DEVICES keeps ranks from using it.
    """
    if "SLURM_GPUS_ON_NODE" in os.environ:
        return result.bindings
    gpu_counts = {host: len(facts.hardware["gpus"]) for host, facts in result.nodes.items()}
    return tuple(
        replace(rank_binding, gpus=max(rank_binding.gpus, gpu_counts[rank_binding.host]))
        for rank_binding in result.bindings
    )


def _save_shm_check(launched: launchers.Launched, options: Options) -> None:
    """Save a bad check of /dev/shm before MPI_Init, which may crash; `world` prints the warning."""
    with suppress(OSError):
        check = check_free_memory(dev_shm.SHM_FOLDER, dev_shm.free_shm_bytes())
        if launched.rank == 0 and options.json and check.verdict == "bad":
            _save_result(JobResult(checks=[check]), options.json)


def _report_no_job(launched: launchers.Launched, reason: str, options: Options) -> int:
    """Print on the launcher's rank 0 the reason why the ranks form no job; return the exit code."""
    if launched.rank == 0:
        launch_command = f"hpctrain launch -n {launched.size} doctor --job"
        remedy = f"{launch_command}, or the srun or mpiexec of that MPI"
        _publish_result(JobResult(checks=[Check("launcher", "bad", reason, remedy)]), options)
    else:
        time.sleep(RANK_0_HEAD_START_S)  # some launchers kill all ranks when one ends with an error
    return 1


def _publish_result(result: JobResult, options: Options) -> None:
    show.print_job(result)
    if options.json is not None:
        _save_result(result, options.json)


def _save_result(result: JobResult, file: Path) -> None:
    file.write_text(to_json(result.table(), indent=1) + "\n")
