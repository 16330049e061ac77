"""Man pages: one for each command, with all words of its --help, and no complaint of groff."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from checkout import ROOT
from click.testing import CliRunner

from hpctrain.cli import hpctrain
from hpctrain.commands import COMMANDS

sys.path.insert(0, str(ROOT / "docs"))
from write_man_pages import ESCAPES, Roff, commands, main, man_pages

PLAIN = {text: chr(code) for code, text in ESCAPES.items()} | {r"\&": ""}
HEADINGS = {"Usage:", "Options:", "Commands:", "Examples:"}


@pytest.fixture(scope="module")
def pages():
    return man_pages()


def words_of(page: str) -> set[str]:
    text = re.sub("|".join(map(re.escape, PLAIN)), lambda match: PLAIN[match[0]], page)
    return {*text.split()}


def test_every_command_has_a_page(pages):
    listed = {"hpctrain", *(f"hpctrain-{name}" for name in COMMANDS)}
    assert listed <= {*pages}
    assert {"hpctrain-slurm-submit", "hpctrain-bench-allreduce"} <= {*pages}
    named = {
        name for page in pages.values() for name in re.findall(r"^\.BR (\S+) \(1\)", page, re.M)
    }
    assert {name.replace(r"\-", "-") for name in named} == {*pages}


def test_pages_have_the_words_of_the_help(pages):
    for context in commands(hpctrain, "hpctrain"):
        words = [*context.command_path.split()[1:], "--help"]
        answer = CliRunner().invoke(hpctrain, words, terminal_width=1000, catch_exceptions=False)
        page = pages[context.command_path.replace(" ", "-")]
        assert {*answer.output.split()} - HEADINGS - words_of(page) == set(), words


@pytest.mark.parametrize("line", [".SH no request", "'ft no request", r"a \fB word", "-x `y` ^"])
def test_no_line_of_help_is_a_request(line):
    formatter = Roff()
    formatter.write_text(f"\b\n{line}")
    written = formatter.getvalue().splitlines()
    assert [x for x in written if x.startswith((".", "'"))] == [".PP", ".nf", ".fi"]
    assert words_of(written[2]) == {*line.split()}


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff: apt-get install groff")
def test_groff_has_no_complaint(tmp_path):
    main(tmp_path)
    files = sorted(tmp_path.iterdir())
    command = ["groff", "-man", "-ww", "-z", "-Kutf8", *files]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stdout + completed.stderr) == (0, "")
