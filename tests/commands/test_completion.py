"""Tab completion: the candidates that the shell's own completion script receives."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios

import pytest
from conftest import BIN
from limits import clock

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


#: line as it is typed, before TAB twice: words on the screen afterwards
TYPED = {
    "hpctrain ": "checkpoint",
    "hpctrain train di": "train digits",
    "hpctrain launch -n 2 tr": "-n 2 train",
    "hpctrain train digits --engine ": "ps-sync",
}
INTERACTIVE = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i", "+o", "prompt_sp"],
}
PREPARE = {
    "bash": "PS1=; bind 'set enable-bracketed-paste off'",
    "zsh": "PS1=; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D",
}
KILL_LINE, TAB = "\x15", "\t"


class Keyboard:
    """An interactive shell on a terminal of 100 columns, which is typed at."""

    def __init__(self, shell: str, folder: str):
        self.terminal, own_end = pty.openpty()
        fcntl.ioctl(own_end, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
        environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "xterm"}
        self.process = subprocess.Popen(
            INTERACTIVE[shell], stdin=own_end, stdout=own_end, stderr=own_end, env=environ,
            cwd=folder, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY)
        )  # fmt: skip
        os.close(own_end)

    def type(self, keys: str, expected: str) -> str:
        """Send `keys`; return what the terminal shows, once that has `expected`, or after 60 s."""
        os.write(self.terminal, keys.encode())
        screen, end = "", clock() + 60
        while expected not in screen and clock() < end:
            if select.select([self.terminal], [], [], 1.0)[0]:
                part = os.read(self.terminal, 1 << 16).decode(errors="replace")
                screen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", part)
        return screen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


def installed(shell: str):
    missing = shutil.which(shell) is None
    reason = f"needs {shell}: apt-get install {shell}"
    return pytest.param(shell, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("shell", [*map(installed, INTERACTIVE)])
def test_tab_in_a_real_shell(shell, tmp_path):
    keyboard = Keyboard(shell, tmp_path)
    try:
        script = f'eval "$({cli.COMPLETION}={shell}_source hpctrain)"'
        keyboard.type(f"{PREPARE[shell]}; {script}; echo rea''dy\r", "ready\n")
        for line, expected in TYPED.items():
            screen = keyboard.type(f"{KILL_LINE}{line}{TAB}{TAB}", expected)
            assert expected in screen and "Traceback" not in screen
    finally:
        keyboard.close()


@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("shell", [installed("fish")])
def test_fish_completes(shell, tmp_path):
    """fish asks its terminal for its features before it reads a key: `complete` needs none."""
    asks = "; ".join(f"complete -C '{line}'" for line in TYPED)
    observed = subprocess.run(
        [shell, "--no-config", "-c", f"{cli.COMPLETION}=fish_source hpctrain | source; {asks}"],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    words = {line.partition("\t")[0] for line in observed.stdout.splitlines()}
    assert {"checkpoint", "digits", "train", "ps-sync"} <= words, observed.stderr
