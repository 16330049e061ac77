"""A program in Python on ranks: torchrun's variables are set before it; its timeline."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.cluster.slurm.job_end import print_message
from hpctrain.core import torchrun
from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_SHEBANG_BYTES = 256
#: Ranks with this variable write a timeline: see hpctrain/torch/script_steps.py.
TRACE_VARIABLE = "HPCTRAIN_TRACE"


@contextmanager
def rank_command(argv: Sequence[str], hosts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the command line of each rank that runs `argv`; changed for a program in Python alone.

    `hosts`: of the job, in order; empty if all ranks are on this host. MASTER_PORT is free on this
    host, and kept so until the end of the context.
    """
    if not is_python(argv[0]):
        yield list(argv)
        return
    with torchrun.reserve_port() as reserved:
        address = [hosts[0] if hosts else socket.gethostname(), str(reserved.getsockname()[1])]
        yield [*module_command("hpctrain.core.torchrun"), *address, *argv]


def is_python(program: str) -> bool:
    """Return whether `program` is Python, or a script for it by its first line."""
    path = Path(shutil.which(program) or program)
    if _INTERPRETER.fullmatch(path.name):
        return True
    try:
        with path.open("rb") as file:
            line = file.readline(_SHEBANG_BYTES).decode(errors="replace")
    except OSError:
        return False
    words = line.removeprefix("#!").split()
    return line.startswith("#!") and any(
        _INTERPRETER.fullmatch(Path(word).name) for word in words[:3]
    )


@contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """Let the ranks write a timeline into `folder`, unless it is None; say if there is none."""
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trace.json").unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"--trace {folder} cannot be written: {error.strerror}") from None
    os.environ[TRACE_VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        del os.environ[TRACE_VARIABLE]
    if not (folder / "trace.json").exists():
        print_message(f"no trace.json in {folder}: no rank ended its training by PyTorch")
