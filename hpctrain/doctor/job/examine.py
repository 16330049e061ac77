"""The stages of the preflight, in their order; every rank takes part, rank 0 gathers and speaks."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain import launchers
from hpctrain import world as worlds
from hpctrain.doctor import mpi
from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.job import clocks, cores, folder, pings, same, seats, show, sums, told
from hpctrain.doctor.job.answers import to_first, watched
from hpctrain.doctor.job.found import Found
from hpctrain.doctor.node import room
from hpctrain.errors import UsageError
from hpctrain.hardware import shm
from hpctrain.hardware.nics import Nic
from hpctrain.timeline import kernel
from hpctrain.trace import Reading
from hpctrain.transport import gpus
from hpctrain.transport.seats import Seated
from hpctrain.world import World

#: How long a rank may keep others waiting before it is named.
LIMIT_S = 30.0
SPEAK_FIRST_S = 3.0  # for rank 0, to say what all ranks have seen
OUT = Path()


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    json: Path | None = None
    out: Path = OUT
    recipe: str | None = None
    device: gpus.Device = "auto"


def run(asked: Asked) -> int:
    """Look at the whole job; return the exit code, the same on all ranks; collective."""
    here = launchers.launched(os.environ)
    stages = show.Stages(here.rank == 0)
    _before_mpi(here, asked)
    stages.say(f"starting MPI on {here.size} ranks")
    try:
        world = worlds.init(asked.device, 2 * LIMIT_S)
    except UsageError as error:
        return _no_job(here, str(error), asked)
    found = Found(world.hosts, world.seats)
    place, marked = folder.there(asked.out), ""

    def hung(report: str) -> None:
        found.checks.append(_silent(report))
        _tell(found, asked)
        folder.remove(marked)

    with watched(world, None, LIMIT_S, hung):
        stages.say(f"output folder {place}")
        marked = _folder(world, found, place)
    with watched(world, Path(marked) if marked else None, LIMIT_S, hung):
        _stages(world, found, asked, stages)
        world.link.barrier()
    if world.rank == 0:
        folder.remove(marked)
        stages.end()
        _tell(found, asked)
    return int(world.gather(str(exit_code(found.checks)))[0])


def _folder(world: World, found: Found, place: Path) -> str:
    """Look at the output folder; return one in it that all nodes see, "" where there is none."""
    marked, word = folder.mark(place) if world.rank == 0 else ("", "")
    marked, word = json.loads(world.gather(json.dumps([marked, word]))[0])
    speaks = told.first_of_node(world)
    seen = folder.look(place, marked, word) if speaks else folder.Seen()
    of_nodes = _by_node(world, to_first(world.link, asdict(seen)))
    if of_nodes:
        nodes = {host: folder.Seen(**one) for host, one in of_nodes.items()}
        found.checks += folder.checks(place, nodes)
    shared = all(one == "True" for one in world.gather(str(seen.shared)))
    if not shared and world.rank == 0:
        folder.remove(marked)
    return marked if shared else ""


def _stages(world: World, found: Found, asked: Asked, stages: show.Stages) -> None:
    """Go through all that follows the output folder; rank 0 makes the checks."""
    link, on_first = world.link, world.rank == 0
    stages.say("versions, bindings, hardware")
    said = to_first(link, asdict(told.mine(world, asked.recipe)))
    found.told = [told.from_table(one) for one in said]
    if on_first:
        found.checks[:0] = _of_told(found)
    stages.say("clocks")
    machines = world.gather(kernel())
    said = to_first(link, clocks.reading(world, machines))
    if on_first:
        readings = {host: Reading(*one) for host, one in _by_node(world, said).items()}
        found.checks.append(clocks.check(readings))
    stages.say("speed of cores")
    said = to_first(link, _cores(world, machines))
    found.cores = [cores.Core(**one) for some in said for one in some]
    if on_first:
        found.checks.append(cores.check(found.cores))
    stages.say("messages between all pairs")
    said = to_first(link, [asdict(one) for one in pings.all_pairs(world)])
    found.pings = [pings.Ping(**one) for some in said for one in some]
    if on_first:
        found.checks += pings.checks(found.pings, world.hosts, seats.crowded(world.seats))
        ports = [[Nic(**nic) for nic in one.hardware["nics"]] for one in found.nodes.values()]
        found.checks += pings.of_adapters(found.pings, ports)
    stages.say("sums")
    said = to_first(link, sums.wrong(world))
    if on_first:
        found.checks.append(sums.check(said, sums.names(world)))


def _cores(world: World, machines: list[str]) -> list[dict[str, Any]]:
    mine = cores.dealt(world.seats, machines)[world.rank]
    world.link.barrier()  # all at once, as in training
    found = cores.tried(world.rank, world.host, mine)
    pings.wait_quietly(world.link)  # ranks without a core to try would take the time of others
    return [asdict(one) for one in found]


def _by_node(world: World, said: list[Any]) -> dict[str, Any]:
    """Return what the first rank of each node said; nothing where nothing was heard."""
    return {host: said[world.hosts.index(host)] for host in world.hosts} if said else {}


def _of_told(found: Found) -> list[Check]:
    level = next((one.threads for one in found.told if one.threads != "MULTIPLE"), "MULTIPLE")
    ulfm = all(one.ulfm for one in found.told)
    return [
        Check("MPI", "ok", found.told[0].versions["MPI"]),
        mpi.threads(level),
        Check("ULFM", "note", "on: ranks can outlive a lost one") if ulfm else
        Check("ULFM", "note", "off: a lost rank ends the job", "Open MPI: mpirun --with-ft ulfm"),
        same.versions(found.told, found.hosts),
        *same.recipe(found.told, found.hosts),
        *same.machines(found.told, found.hosts),
        *seats.checks(_seats(found)),
        *cores.quotas(found.seats, {host: one.hardware["cpu_quota"]
                                    for host, one in found.nodes.items()}),
        *same.merged({host: one.checks for host, one in found.nodes.items()}),
    ]  # fmt: skip


def _seats(found: Found) -> tuple[Seated, ...]:
    """Return the seats, with the GPUs of a node that a list hides from all of its ranks.

    Slurm tells a job how many it has. Elsewhere those that NVML shows are not hidden by a control
    group, and CUDA_VISIBLE_DEVICES alone keeps ranks from them.
    """
    if "SLURM_GPUS_ON_NODE" in os.environ:
        return found.seats
    count = {host: len(one.hardware["gpus"]) for host, one in found.nodes.items()}
    return tuple(replace(seat, gpus=max(seat.gpus, count[seat.host])) for seat in found.seats)


def _before_mpi(here: launchers.Launched, asked: Asked) -> None:
    """Keep what may end MPI when it starts, which `world` says by then: it may be all there is."""
    with suppress(OSError):
        check = room(shm.SHM, shm.free())
        if here.rank == 0 and asked.json and check.verdict == "bad":
            _keep(Found(checks=[check]), asked.json)


def _no_job(here: launchers.Launched, why: str, asked: Asked) -> int:
    """Tell why the ranks are no job, from the launcher's rank 0; return the exit code."""
    if here.rank == 0:
        remedy = f"hpctrain launch -n {here.size} doctor --job, or the srun or mpiexec of that MPI"
        _tell(Found(checks=[Check("launcher", "bad", why, remedy)]), asked)
    else:
        time.sleep(SPEAK_FIRST_S)  # some launchers kill all when one ends with an error
    return 1


def _silent(report: str) -> Check:
    remedy = (
        "look at the ranks that the others wait for, on their nodes: is a device or a disk hung?"
    )
    return Check("answers", "bad", report, remedy)


def _tell(found: Found, asked: Asked) -> None:
    show.show(found)
    if asked.json is not None:
        _keep(found, asked.json)


def _keep(found: Found, file: Path) -> None:
    file.write_text(json.dumps(found.table(), indent=1) + "\n")
