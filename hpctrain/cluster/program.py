"""The command line of a rank of a program in Python: torchrun's variables are set before it."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core import torchrun
from hpctrain.core.interpreter import module_command

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_SHEBANG_BYTES = 256


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
