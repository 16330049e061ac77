"""Printed text: files keep their tabs and line ends, and JSON stays JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hpctrain.cli import hpctrain
from hpctrain.core.config import toml
from hpctrain.core.printing import printable, say
from hpctrain.core.strict_json import to_json


@pytest.mark.parametrize("tabs, shown", [(False, r"a\tb\x1b[1m"), (True, "a\tb\\x1b[1m")])
def test_tabs_of_files_are_kept(capsys, tabs, shown):
    say("a\tb\x1b[1m", tabs=tabs)
    assert capsys.readouterr().out == shown + "\n"


def test_json_is_printed_unchanged():
    text = to_json({"\x7f \x1b \x85 é\t": "\x7f"})
    assert printable(text) == text
    assert json.loads(text) == {"\x7f \x1b \x85 é\t": "\x7f"}


def test_a_recipe_is_shown_as_it_is(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b'schema = 1\r\n[run]\t# of mine\r\n\tname = "a\tb"\r\n')
    output = CliRunner().invoke(hpctrain, ["recipe", "show", str(file)]).output
    assert toml.parse(output, "seen") == toml.parse(file.read_text(), "mine")
