"""Tab completion: the candidates that the shell's own completion script receives."""

from __future__ import annotations

import os
import subprocess

import pytest
from conftest import BIN

from hpctrain import cli

SHELLS = {"bash": "bash_complete", "zsh": "zsh_complete", "fish": "fish_complete"}

#: command line up to the cursor: (what is offered, what is not)
LINES = {
    "tr": ({"train"}, {"tune"}),
    "": ({"train", "launch", "doctor"}, set()),
    "train --re": ({"--resume", "--replay"}, {"--engine"}),
    "train di": ({"digits"}, {"mnist"}),
    "train digits --engine ps": ({"ps-sync", "ps-async"}, {"allreduce"}),
    "train digits --device ": ({"cpu", "gpu", "auto"}, set()),
    "launch -n 4 ": ({"train", "evaluate"}, set()),
    "launch -n 4 train di": ({"digits"}, {"mnist"}),
    "launch -n 4 train digits --ep": ({"--epochs"}, {"--ranks"}),
    "launch --ra": ({"--ranks"}, {"--epochs"}),
    "scale mn": ({"mnist"}, {"digits"}),
    "slurm submit digits --engine al": ({"allreduce"}, {"single"}),
    "slurm sub": ({"submit"}, {"status"}),
    "bench all": ({"allreduce", "all-gather"}, {"p2p"}),
    "train ": ({"digits", "mnist", "mine.toml"}, {"notes.txt"}),
    "train folder/": ({"folder/"}, {"digits"}),
    "trian ": ({"train"}, {"digits"}),
}


def asked(shell: str, line: str) -> dict[str, str]:
    """Return the variables with which the script of `shell` asks for words that follow `line`."""
    words = ["hpctrain", *line.split(" ")]
    last = words[-1] if shell == "fish" else str(len(words) - 1)
    arguments = {"COMP_WORDS": " ".join(words).rstrip(), "COMP_CWORD": last}
    return arguments | {cli.COMPLETION: SHELLS[shell]}


def offered(shell: str, answer: str) -> set[str]:
    """Return the words in an answer, which has a form for each shell."""
    lines = answer.splitlines()
    if shell == "zsh":  # kind, word, help
        return set(lines[1::3])
    return {line.partition(",")[2].partition("\t")[0] for line in lines}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("shell", SHELLS)
def test_words_that_may_follow(shell, line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for file in "mine.toml", "notes.txt":
        (tmp_path / file).touch()
    for name, value in asked(shell, line).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as remaining:
        cli.main()
    answer, complaint = capsys.readouterr()
    target, absent = LINES[line]
    words = offered(shell, answer)
    assert (remaining.value.code, complaint) == (0, "")
    assert target <= words and not absent & words


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_for_a_shell(shell, monkeypatch, capsys):
    monkeypatch.setenv(cli.COMPLETION, f"{shell}_source")
    with pytest.raises(SystemExit) as remaining:
        cli.main()
    assert (remaining.value.code, capsys.readouterr().err) == (0, "")


@pytest.mark.processes
@pytest.mark.either
def test_a_bash_completes(tmp_path):
    asks = f"""
        eval "$({cli.COMPLETION}=bash_source hpctrain)"
        COMP_WORDS=(hpctrain launch -n 2 train di) COMP_CWORD=5
        $(complete -p hpctrain | sed 's/.*-F \\([^ ]*\\) .*/\\1/') hpctrain di train 2>&1
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    observed = subprocess.run(
        ["bash", "-c", asks], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "digits" in observed.stdout.split()
    assert "Traceback" not in observed.stdout + observed.stderr
