"""Sentences name their nouns: few genitives of pronouns, such as "the sum of those of all ranks".

Counted are the docstrings, comments and messages of the package's Python, each word of its other
files (templates, C, TOML), of the shell in slurm/, and of the pages of docs/. Torchft, submitit
and Optax have 0.7 to 1.4 of them in 1,000 words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUN_GENITIVE = re.compile(
    r"\b(?:(?:those|that) of"
    r"|of (?:which|whom|them|these|those|all|none|one|others|theirs|before))\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z][\w'-]*")
MOST = 3.0  #: per 1,000 words of a room


def words_of_python(source: str) -> Iterator[str]:
    """Yield comments, docstrings and other strings of more than one word."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def rooms() -> dict[str, list[Path]]:
    """Return the files with sentences of each room: a folder of the package, shell, or docs."""
    files: dict[str, list[Path]] = {}
    for path in (ROOT / "hpctrain").rglob("*"):
        if path.suffix in (".py", ".c", ".html", ".sbatch", ".sh", ".toml"):
            inner = path.relative_to(ROOT / "hpctrain").parts
            files.setdefault(inner[0] if inner[1:] else ".", []).append(path)
    files["docs"] = [p for p in (ROOT / "docs").rglob("*.md") if p.name != "files.md"]
    files["docs"] += ROOT.glob("*.md")
    files["slurm/"] = [p for p in (ROOT / "slurm").rglob("*") if p.is_file()]
    return files


def count(paths: list[Path]) -> tuple[list[str], int]:
    """Return the genitives of pronouns in files, each with its surroundings, and the words."""
    places, total = [], 0
    for path in paths:
        source = path.read_text()
        parts = words_of_python(source) if path.suffix == ".py" else [source]
        for part in parts:
            text = " ".join(part.split())
            total += len(WORD.findall(text))
            places += [
                f"{path.relative_to(ROOT)}: {text[max(0, m.start() - 30) : m.end() + 20]}"
                for m in PRONOUN_GENITIVE.finditer(text)
            ]
    return places, total


@pytest.mark.parametrize("room", sorted(rooms()))
def test_genitives_of_pronouns_are_few(room):
    places, words = count(rooms()[room])
    assert words > 50
    share = 1000 * len(places) / words
    assert share <= MOST, f"{share:.1f} per 1,000 words\n" + "\n".join(places)


def test_what_is_counted():
    source = '"""Add those\nof ranks."""\nx = f"{y} of which two"  # of all\nz = "of"\nof_all = 1\n'
    parts = [*words_of_python(source)]
    assert [len(PRONOUN_GENITIVE.findall(" ".join(part.split()))) for part in parts] == [1, 1, 1]


if __name__ == "__main__":
    for name, paths in sorted(rooms().items()):
        genitives, words = count(paths)
        print(f"{name:16} {1000 * len(genitives) / words:5.2f}  {len(genitives)} of {words} words")
