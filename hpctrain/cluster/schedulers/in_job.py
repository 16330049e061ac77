"""A job of PBS or Flux that trains, from its batch host: `hpctrain launch --in-pbs | --in-flux`.

It goes through the parts of a job as cluster/slurm/batch_job.py has them, with three differences:

- No signal announces the end: this process asks for the time that is left, and stops the ranks
  --warn-s before it is over.
- The job does not go back into the queue: `qrerun` is for operators of PBS, and Flux has no such
  command. It submits its script again, as a job that waits for its own end.
- SIGTERM means that the scheduler ends the job (cancelled, preempted): ranks save, nothing follows.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hpctrain.cluster.program import rank_command
from hpctrain.cluster.schedulers import flux, pbs
from hpctrain.cluster.schedulers.dialect import Dialect
from hpctrain.cluster.schedulers.submission import record_job
from hpctrain.cluster.slurm import batch_job
from hpctrain.cluster.slurm.queries import NoAnswerError
from hpctrain.core import atomic, files, launchers
from hpctrain.core.errors import HpctrainError

_OPTIONS: dict[str, int | str] = {
            "max-restarts": 20, "relaunches": 3, "warn-s": 120, "asked": 0, "time-s": 0,
            "ranks-per-node": 1, "cores": 1, "gpus": 0, "nodes": 1, "script": "",
            "program": 0}  # fmt: skip
_SUBMIT_LIMIT_S = 60
_ENDED = 2  #: the value of --asked after SIGTERM, 1 after SIGUSR1
#: The id of a job that another one submitted, and the number of the restart that it is.
_RESTARTS_FILE = ".restarts"
_TIME_FORMAT = "%a %b %d %H:%M:%S %Y"  #: of PBS
#: Variables that mpirun of Open MPI passes on to other nodes; other launchers pass on all.
_PASSED_VARIABLES = (
    "HPCTRAIN_", "PYTHON", "OMP_", "CUDA_", "NCCL_", "UCX_", "FI_", "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip


class _SuccessiveJob(batch_job.BatchJob):
    """A job that submits its successor."""

    defaults = _OPTIONS
    dialect: Dialect

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        self._begin_s, self._is_ended = time.time(), options.asked == _ENDED
        self._end_s: float | None = None  #: of the job, as the scheduler last said
        super().__init__(options, command)
        if "HPCTRAIN_LAUNCHER" not in os.environ:  # of a container the path is another
            self._command[0] = shutil.which(self._command[0]) or self._command[0]

    def _prepare(self) -> list[str]:
        path = self.folder / _RESTARTS_FILE
        words = files.read_text(path, files.MIB).split() if path.exists() else []
        self._restarts = int(words[1]) if words[:1] == [self.id] else 0
        self._keep_script()
        return [] if self._is_ended else self._rank_words(self.options.ranks_per_node)

    def _keep_script(self) -> None:
        """Keep the script of this job, perhaps submitted by hand, for its successor."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record_job(self.dialect, self.folder, self.id)
        kept, script = self.folder / self.dialect.script_file, Path(self.options.script)
        if script.is_absolute() and script.is_file():  # else it came to a shell by stdin
            run, text = f"run={shlex.quote(str(self.folder))}", files.read_text(script, files.MIB)
            atomic.replace(kept, re.sub(r"^run=.*$", lambda _: run, text, flags=re.M))

    def run(self) -> int:
        """Start the ranks, again after a loss, until the job ends; return its exit code."""
        if self._is_ended:
            return self._print_line(f"{self.title} ended it before its ranks began: {self._later}")
        return super().run()

    def _run_ranks(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        os.environ[launchers.RESTARTS] = str(self._restarts + self._relaunches)
        return super()._run_ranks()

    def _end(self) -> None:
        self._is_ended = True
        self._stop_ranks((False, None))

    def _query(self) -> dict[str, str]:
        return {"JobState": "ENDED" if self._is_ended else "RUNNING"}

    def _query_end(self) -> tuple[bool, float | None]:
        if (remaining_s := self._remaining_s()) is not None:
            self._end_s = time.time() + remaining_s
        end_s = self._end_s
        return False, None if end_s is None else end_s - time.time() - self.options.warn_s

    def _remaining_s(self) -> float | None:
        """Return the seconds until the job's time is over; None without an answer."""
        raise NotImplementedError

    def _rank_words(self, ranks_per_node: int) -> list[str]:
        """Return the words that start `ranks_per_node` processes on each node."""
        raise NotImplementedError

    def _request_requeue(self) -> str:
        """Submit the script again, to start after this job; return what was done.

        Raises NoAnswerError if the next job may be in the queue without a known id.
        """
        script = self.folder / self.dialect.script_file
        if not script.is_file():
            self._print_line(f"{script} is missing: the script of this job could not be read")
            return ""
        words = [*self._submit_words(), *self.dialect.output_options(self.folder), str(script)]
        job = ""
        with suppress(subprocess.TimeoutExpired):  # refusals are in the output of this job
            reply = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_SUBMIT_LIMIT_S
            )
            if reply.returncode:
                return ""
            job = self.dialect.parse_id(reply.stdout.decode(errors="replace"))
        if not job:
            raise NoAnswerError(
                f"{' '.join(self.dialect.submit)} returned no id within {_SUBMIT_LIMIT_S} s: the "
                "next job may be in the queue; see there before you submit again"
            )
        atomic.replace(self.folder / _RESTARTS_FILE, f"{job} {self._restarts + 1}\n")
        record_job(self.dialect, self.folder, job)
        return f"submitted again as {job}"

    def _requeue(self, cause: str) -> int:
        try:
            return super()._requeue(cause)
        except NoAnswerError as error:  # another call may let two jobs follow
            return self._print_line(f"{cause}; {error}")

    def _submit_words(self) -> list[str]:
        raise NotImplementedError

    def _collect_records(self) -> None:
        with suppress(HpctrainError, KeyError, TypeError):  # no ranks began, say
            table = files.read_json(self.folder / "watch/nodes.json", files.MIB)
            name = f"hpctrain-watch-{table['token']}"
            words = ["bash", "-c", batch_job.MOVE_RECORDS, name, str(self.folder)]
            batch_job.output(*self._rank_words(1), *words, limit_s=batch_job.MOVE_LIMIT_S)


class PbsJob(_SuccessiveJob):
    """A job of PBS: mpiexec starts its ranks on the hosts in PBS_NODEFILE."""

    name, title, variable, dialect = "pbs", "PBS", pbs.PBS.id_variable, pbs.PBS

    def _remaining_s(self) -> float | None:
        attributes = pbs.parse_attributes(batch_job.output("qstat", "-x", "-f", self.id))
        if not attributes and self._end_s is not None:
            return None
        limit_s = _parse_s(attributes.get("Resource_List.walltime", "")) or self.options.time_s
        begin_s = self._begin_s
        with suppress(ValueError):
            start = datetime.strptime(attributes.get("stime", ""), _TIME_FORMAT)
            begin_s = min(begin_s, start.timestamp())
        return begin_s + limit_s - time.time() if limit_s else float("inf")

    def _rank_words(self, ranks_per_node: int) -> list[str]:
        node_file = Path(os.environ.get("PBS_NODEFILE", "PBS_NODEFILE"))
        hosts = set(files.read_text(node_file, files.MIB).split())
        count = len(hosts) * ranks_per_node
        command, *container = os.environ.get("HPCTRAIN_LAUNCHER", "mpiexec").split()
        version = batch_job.output(command, "--version")
        if "Open MPI" in version or "OpenRTE" in version:
            names = [name for name in os.environ if name.startswith(_PASSED_VARIABLES)]
            words = [
                "-n",
                str(count),
                "--map-by",
                f"ppr:{ranks_per_node}:node",
                "--bind-to",
                "none",
            ]
            words += [word for name in names for word in ("-x", name)]
        else:
            words = ["-n", str(count), "-ppn", str(ranks_per_node)]
            if "HYDRA" not in version and "Intel" not in version:  # that of PALS
                words += ["--cpu-bind", "depth", "--depth", str(self.options.cores)]
        return [command, *words, "--hostfile", str(node_file), *container]

    def _submit_words(self) -> list[str]:
        return ["qsub", "-W", f"depend=afterany:{self.id}"]


def _parse_s(walltime: str) -> int:
    """Return the seconds of H:M:S; 0 for another text."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", walltime)
    return int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3]) if match else 0


class FluxJob(_SuccessiveJob):
    """A job of Flux: an instance of its own, in which `flux run` starts the ranks."""

    name, title, variable, dialect = "flux", "Flux", flux.FLUX.id_variable, flux.FLUX

    def _prepare(self) -> list[str]:
        self.id = self.dialect.parse_id(self.id) or self.id
        return super()._prepare()

    def _remaining_s(self) -> float | None:
        text = batch_job.output("flux", "job", "timeleft").strip()
        return float(text) if text.isdigit() else None

    def _rank_words(self, ranks_per_node: int) -> list[str]:
        count = batch_job.output("flux", "resource", "list", "-no", "{nnodes}").strip()
        nodes = int(count) if count.isdigit() else self.options.nodes
        words = os.environ.get("HPCTRAIN_LAUNCHER", "flux run").split()
        size = ["-N", str(nodes), "-n", str(nodes * ranks_per_node), "-c", str(self.options.cores)]
        size += ["-g", "1"] * bool(self.options.gpus)
        return [*words[:2], *size, *words[2:]]

    def _submit_words(self) -> list[str]:
        return ["flux", "--parent", "batch", f"--dependency=afterany:{self.id}"]


#: The jobs of `hpctrain launch`, by the option that a script calls it with.
JOBS = {"--in-slurm": batch_job.BatchJob, "--in-pbs": PbsJob, "--in-flux": FluxJob}


def main(option: str, words: Sequence[str]) -> int:
    """Run a job of the scheduler that `option` names; return its exit code.

    A program in Python has torchrun's variables, unless a container starts it.
    """
    end = [*words, "--"].index("--") + 1
    options, command = [*words[:end]], [*words[end:]]
    if "--program=1" not in options or not command or "HPCTRAIN_LAUNCHER" in os.environ:
        return batch_job.main([*words], JOBS[option])
    with rank_command(command, [socket.gethostname()]) as rank_words:
        return batch_job.main([*options, *rank_words], JOBS[option])
