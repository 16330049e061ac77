"""Help texts on narrow terminals cut no name and no sentence; commands of hpctrain on a netlab."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from hpctrain import engines
from hpctrain.cli import hpctrain
from hpctrain.cluster.netlab import netlab
from hpctrain.core import fitted_table
from hpctrain.core.interpreter import module_command
from hpctrain.parallel.schedules import SCHEDULES

#: command: words that stand in its help whole
NAMES = {
    "train": [*engines.ENGINES],
    "pipeline check": [*SCHEDULES],
    "pipeline predict": [*SCHEDULES],
    "pipeline": ["data x pipe ranks", "every schedule"],
    "bench allreduce": ["recursive-doubling", "direct-shared"],
    "slurm submit": ["juwels-booster", "local-sgd"],
    "slurm": ["of DIR, a run or a study"],
    "checkpoint": ["oldest first; the best one is marked"],
}


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", NAMES)
def test_help_cuts_no_name_and_no_sentence(command, width):
    words = [*command.split(), "--help"]
    text = CliRunner().invoke(hpctrain, words, terminal_width=width, catch_exceptions=False).stdout
    listed = text.partition("Commands:")[2]
    assert not [line for line in listed.splitlines() if line.endswith("...")]
    assert not [line for line in text.splitlines() if line.endswith("-")]
    whole = " ".join(text.split())
    assert "\u2011" not in text
    assert [name for name in NAMES[command] if name not in whole] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "digits"], [*module_command("hpctrain"), "train", "digits"]),
        (["--", "train", "digits"], [*module_command("hpctrain"), "train", "digits"]),
        (["--", "python", "x.py"], ["python", "x.py"]),
    ],
)
def test_a_netlab_takes_commands_as_launch_does(monkeypatch, words, expected):
    started = []
    monkeypatch.setattr(netlab, "netlab", lambda lab, argv, policy: started.extend(argv) or 0)
    CliRunner().invoke(hpctrain, ["netlab", "--hosts", "2", *words], catch_exceptions=False)
    assert started == expected


@pytest.mark.parametrize("width", [50, 80, 200])
def test_names_of_schedules_are_whole_on_any_terminal(monkeypatch, width):
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=True)
    monkeypatch.setattr(fitted_table, "stdout_console", lambda _: terminal)
    words = ["pipeline", "check", "--ranks", "4", "--micro-batches", "8"]
    CliRunner().invoke(hpctrain, words, catch_exceptions=False)
    assert [name for name in SCHEDULES if name not in out.getvalue()] == []
    assert "…" not in out.getvalue()
