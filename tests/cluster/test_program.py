"""program: which programs get torchrun's variables."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from hpctrain.cluster.program import TRACE_VARIABLE, is_python, rank_command, traced

PROGRAMS = {
    "python": ("", True),
    "python3.11": ("", True),
    "python3.13t": ("", True),
    "pythonista": ("", False),
    "accelerate": ("#!/opt/venv/bin/python3\nimport sys\n", True),
    "tool": ("#!/usr/bin/env -S python3 -u\n", True),
    "run.sh": ("#!/bin/sh\npython x.py\n", False),
    "words": ("import python\n", False),
    "binary": ("\x7fELF", False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_python(tmp_path, name):
    text, expected = PROGRAMS[name]
    path = tmp_path / name
    path.write_text(text)
    assert is_python(str(path)) == expected


def test_a_program_that_is_not_there():
    assert not is_python("/no/such/program")


@pytest.mark.parametrize(("hosts", "host"), [(["n1", "n2"], "n1"), ([], socket.gethostname())])
def test_the_port_is_kept_until_the_job_has_ended(hosts, host):
    with rank_command([sys.executable, "x.py"], hosts) as command:
        *_, address, port, program, script = command
        assert (address, program, script) == (host, sys.executable, "x.py")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", int(port)))
        with socket.create_server(("", int(port))):  # as PyTorch's store does
            pass


@pytest.mark.parametrize("writes", [True, False])
def test_a_trace_that_nobody_wrote_is_told(tmp_path, capsys, writes):
    file = tmp_path / "out/trace.json"
    file.parent.mkdir()
    file.touch()  # of an earlier job
    with traced(file.parent):
        assert os.environ[TRACE_VARIABLE] == str(file.parent) and not file.exists()
        if writes:
            file.touch()
    assert TRACE_VARIABLE not in os.environ
    assert ("no trace.json in" in capsys.readouterr().err) != writes


def test_other_programs_are_unchanged():
    with rank_command(["sh", "-c", "python x.py"], []) as command:
        assert command == ["sh", "-c", "python x.py"]
