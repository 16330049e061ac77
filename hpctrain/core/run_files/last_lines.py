"""The last lines of a run: the folder of its results, and the command that resumes it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.core import launchers
from hpctrain.core.run_files import run_folder

#: The variable in which `hpctrain launch` and `netlab` hand their command line to the ranks.
COMMAND = "HPCTRAIN_COMMAND"
_STARTERS = {"openmpi": "mpirun", "srun": "srun", "flux": "flux run", "jsm": "jsrun"}


def last_lines(run: Path) -> list[str]:
    """Return the lines that end a run in folder `run` before its last step."""
    command = f"fit(..., out={str(run)!r}, resume=True)"
    if (run / run_folder.RECIPE).is_file():  # a run of `hpctrain train`, not of a script
        command = shlex.join(resuming(command_line(), run))
    has_checkpoint = any((run / "checkpoints").glob("step-*/manifest.json"))
    verb = "resume" if has_checkpoint else "no checkpoint was written; start again"
    return [f"results: {run.absolute()}", f"{verb}: {command}"]


def command_line() -> list[str]:
    """Return the command line that started this job, as far as its ranks know it."""
    if COMMAND in os.environ:
        return shlex.split(os.environ[COMMAND])
    job = launchers.launched(os.environ)
    starter = f"{_STARTERS.get(job.name, 'mpiexec')} -n {job.size}" * (job.name != "none")
    return [*starter.split(), *_program_words(), *sys.argv[1:]]


def resuming(words: Sequence[str], run: Path) -> list[str]:
    """Return the command line `words` of a training, changed to resume `run`."""
    arguments: list[str] = []
    for previous_word, word in zip(["", *words], words, strict=False):
        if previous_word != "--out" and word.partition("=")[0] not in ("--out", "--resume"):
            arguments.append(word)
    return [*arguments, "--out", str(run), "--resume"]


def _program_words() -> list[str]:
    """Return the first words of this program's call: a name on the PATH, a file, or `python -m`."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        return [sys.executable, "-m", module.name.removesuffix(".__main__")]
    name = Path(sys.argv[0]).name
    return [name if shutil.which(name) == sys.argv[0] else sys.argv[0]]
