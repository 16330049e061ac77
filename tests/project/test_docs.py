"""README and docs: Python blocks, marked commands and docs/examples run.

A ```python block runs unless its fence says ```python no-run: REASON. The blocks of a file run in
one process, in order, as a reader would. Lines after `$` run in blocks fenced ```console run; in
those fenced ```console train they train for a few steps only, with ranks as threads. A block
whose fence ends in `as NAME` is a file that the commands of the page find under this name.

After ```text printed by: stand the first words of a command of the page, and it must print each
line of the block, but for numbers, units of time, paths and the width of tables; after
```text printed exactly by: with them. What looks like output and is not compared says why.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import click
import pytest
from processes import BIN, LAUNCHER
from ranks import run_on
from tables import rows_of

from hpctrain import data, engines, nn, optim
from hpctrain import world as worlds
from hpctrain.collectives import ALLREDUCE
from hpctrain.commands import COMMANDS
from hpctrain.commands.train import train
from hpctrain.core.config import toml
from hpctrain.gradients.reducer import WireOptions
from hpctrain.parallel import schedules
from hpctrain.training import run_options
from hpctrain.training.callbacks import EarlyStop
from hpctrain.training.faults import FaultsOptions
from hpctrain.training.loggers.options import LogOptions
from hpctrain.training.run_options import TraceOptions
from hpctrain.world import World

ROOT = Path(__file__).parents[2]
FILES = sorted(f for f in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if f.exists())
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
EXAMPLES = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "docs" / "examples").glob("*.py"))


def blocks(text: str) -> list[tuple[str, int, list[str]]]:
    """Return (info string, index of the first line, lines) of each fenced block."""
    result, lines = [], text.splitlines()
    fences = [n for n, line in enumerate(lines) if line.lstrip().startswith("```")]
    for first, last in zip(fences[::2], fences[1::2], strict=True):
        info = lines[first].strip().removeprefix("```")
        result.append((info, first + 1, lines[first + 1 : last]))
    return result


def script(text: str) -> str:
    """Return the Python blocks of a page, each on the line it has in the page."""
    lines = [""] * len(text.splitlines())
    for info, first, code in blocks(text):
        if info == "python":
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def commands(text: str, fence: str = "console run") -> list[str]:
    """Return the commands of blocks with this `fence`."""
    run = [code for info, _, code in blocks(text) if info == fence]
    return [line.removeprefix("$ ") for code in run for line in code if line.startswith("$ ")]


def files(text: str) -> dict[str, str]:
    """Return the contents of blocks fenced ```LANGUAGE as NAME, by name."""
    named = [(re.fullmatch(r"\w+ as ([\w.-]+)", i), code) for i, _, code in blocks(text)]
    return {match[1]: "\n".join([*code, ""]) for match, code in named if match}


def normal(line: str) -> str:
    """Return a line without what differs from run to run: numbers, units, paths, widths."""
    line = re.sub(r"(?<![\w.])/\S+", "PATH", line)
    line = re.sub(r"auto \([\w-]+\)", "auto", line)  # what it takes depends on the cores
    line = re.sub(r"\d[\d,.]*(e[-+]?\d+)?( (us|ms|s)\b)?", "N", line)
    return " ".join(re.sub(r"[━─]+", "━", line).split())


#: fence of output: what of a line is compared
PRINTED = {"text printed by: ": normal, "text printed exactly by: ": str.rstrip}


@pytest.mark.parametrize("page", PAGES)
def test_fences_are_known(page):
    for info, first, _ in blocks(PAGES[page]):
        reference = info.split(" ")[0] in ("python", "console", "toml", "text", "bash", "json")
        reason = "no-run" not in info or info.startswith("python no-run: ")
        assert reference and reason, f"{page}:{first}: fence {info!r}"


OUTPUT = re.compile(r"[┃│┏┌]  ?\w|━━|^(\[0\]|hpctrain:) ", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_output_is_compared_or_says_why_not(page):
    for info, first, code in blocks(PAGES[page]):
        if info.startswith("text") and OUTPUT.search("\n".join(code)):
            marked = info.startswith((*PRINTED, "text not compared: "))
            assert marked, f"{page}:{first}: is this output compared with what is printed?"


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if script(text).strip()])
def test_python_blocks(page, start, tmp_path):
    file = tmp_path / f"{Path(page).name}.py"
    file.write_text(script(PAGES[page]))
    completed = start(file).finish()
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "page",
    sorted(filter(lambda p: commands(PAGES[p]), PAGES), key=lambda p: len(commands(PAGES[p]))),
)
def test_commands(page, tmp_path):
    env = {**os.environ, **LAUNCHER, "PATH": f"{BIN}:{os.environ['PATH']}"}
    message: dict[str, str] = {}
    for name, content in files(PAGES[page]).items():
        (tmp_path / name).write_text(content)
    for command in commands(PAGES[page]):
        completed = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
        message[command] = completed.stdout + completed.stderr
    for info, first, code in blocks(PAGES[page]):
        for fence, form in PRINTED.items():
            if info.startswith(fence):
                (answer,) = (
                    a for c, a in message.items() if c.startswith(info.removeprefix(fence))
                )
                printed = {form(line) for line in answer.splitlines()}
                missing = [line for line in code if form(line) not in printed]
                assert not missing, f"{page}:{first}: not printed:\n" + "\n".join(missing) + answer


def test_lines_are_compared_but_for_numbers_paths_and_widths():
    alike = {
        "│ wall        │ 1.82 s for 360 steps │": "│ wall  │ 912.0 ms for 24 steps     │",
        "[0] results: /home/ada/runs/first": "[0] results: /tmp/pytest-0/runs/ring",
        "┏━━━━━┳━━━━┓": "┏━━━━━━━━━━━━━━┳━┓",
        "rate 1e-05": "rate 0.1",
    }
    assert all(normal(doc) == normal(line) for doc, line in alike.items())
    assert normal("│ wall │ 1 s for 2 steps │") != normal("│ wall │ 1 s for 2 epochs │")
    assert normal("│ wire (overlaps compute) │ 1 s │") != normal("│ wire │ 1 s │")


TRAIN, STEPS = "console train", 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if commands(text, TRAIN)])
def test_commands_that_train(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a command may name the run of one before it
    for command in commands(PAGES[page], TRAIN):
        train_briefly(command, monkeypatch)


def train_briefly(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what `hpctrain [launch -n N] train ...` does, cut short and with ranks as threads."""
    program, *words = command.split()
    ranks = int(words[2]) if words[0] == "launch" else 1
    verb, *arguments = words[3:] if words[0] == "launch" else words
    assert (program, verb) == ("hpctrain", "train")
    steps = 2 * STEPS if "--resume" in arguments else STEPS
    for change in ("run.epochs=", f"run.steps={steps}", f"run.interval_steps={STEPS}"):
        arguments += ["--set", change]
    local = threading.local()
    monkeypatch.setattr(worlds, "init", lambda *_: local.world)

    def rank(world: World) -> None:
        local.world = world
        train.main(arguments, standalone_mode=False)

    run_on("threads", ranks, rank)


@pytest.mark.sample(2)
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("ranks", rows_of([None, 2], 2))
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, ranks, start):
    completed = start(ROOT / example, ranks=ranks).finish()
    assert completed.returncode == 0, completed.stdout + completed.stderr


PAGE = """\
text
```python
a = 1
```
```python no-run: needs a GPU
b
```
```console run
$ ls
out
```
```toml as my.toml
b = 2
```
"""


def test_page_is_taken_apart():
    assert script(PAGE).splitlines()[2] == "a = 1"
    assert script(PAGE).split() == ["a", "=", "1"]
    assert commands(PAGE) == ["ls"]
    assert files(PAGE) == {"my.toml": "b = 2\n"}


RECIPES = PAGES["docs/recipes.md"]
#: table of a recipe: options whose keys the page shows there, or names in a comment
SHOWN = {
    "run": run_options.RunOptions, "model": nn.MlpOptions, "data": data.DigitsOptions,
    "optimizer": optim.SgdOptions, "schedule": optim.CosineOptions, "engine": engines.AllReduce,
    "wire": WireOptions, "checkpoint": run_options.CheckpointOptions, "early_stop": EarlyStop,
    "trace": TraceOptions, "log": LogOptions, "faults": FaultsOptions,
}  # fmt: skip


@pytest.mark.parametrize("table", SHOWN)
def test_the_recipe_of_the_page_has_every_key(table):
    (text,) = ("\n".join(c) for i, _, c in blocks(RECIPES) if "[faults]" in "\n".join(c))
    part = text.partition(f"[{table}]")[2].partition("\n[")[0]
    names = [field.name for field in fields(SHOWN[table])]
    if table == "engine":  # which takes the keys of [wire] along
        names = [name for name in names if name not in {f.name for f in fields(WireOptions)}]
    names += (
        [field.name for field in fields(run_options.BatchOptions)] if table == "optimizer" else []
    )
    assert [name for name in names if not re.search(rf"\b{name}\b", part)] == []


@pytest.mark.parametrize("kind", nn.MODELS)
def test_the_page_lists_the_keys_of_every_model(kind):
    (line,) = (line for line in RECIPES.splitlines() if line.startswith(f"| `{kind}` |"))
    keys = line.split("|")[2]
    assert [f.name for f in fields(nn.MODELS[kind]) if not re.search(rf"`{f.name}\b", keys)] == []


PACKAGE = ROOT / "hpctrain"


def test_the_map_of_rooms_is_the_import_contract():
    settings = toml.parse((ROOT / "pyproject.toml").read_text(), "pyproject.toml")
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    expected = [
        (str(level), f"`{room.strip(' ()')}`")
        for level, layer in enumerate(layers, 1)
        for room in layer.split("|")
    ]
    table = re.findall(r"^\| (\d+) \| (`\w+`) \|", PAGES["docs/architecture.md"], re.MULTILINE)
    assert table == expected


#: files that a page tells its reader to write
WRITTEN_BY_READERS = {"hpctrain/collectives/star.py"}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_paths_of_the_pages_exist(page):
    paths = re.findall(r"(?<![\w/.~-])(?:\w+/)+\w+\.py\b", (ROOT / page).read_text())
    folders = (ROOT, PACKAGE, (ROOT / page).parent)
    missing = {x for x in paths if not any((folder / x).exists() for folder in folders)}
    missing -= WRITTEN_BY_READERS
    assert not missing, f"{page} names files that are not there"


def test_functions_of_the_ways_exist():
    """A line `folder/file.py  name(...)` of architecture.md names a function of that file."""
    text = PAGES["docs/architecture.md"]
    named = re.findall(r"^(\w+(?:/\w+)*\.py) +(\w+)\(", text, re.MULTILINE)
    assert len(named) > 15
    missing = [
        (file, name)
        for file, name in named
        if not re.search(rf"\b(def|class) {name}\b", (PACKAGE / file).read_text())
    ]
    assert missing == []


README, COMMAND_LINE = PAGES["README.md"], PAGES["docs/command-line.md"]
PROJECT = toml.parse((ROOT / "pyproject.toml").read_text(), "pyproject.toml")["project"]
#: those of `make test-guests`, which CONTRIBUTING.md names
EXTRAS_OF_MAKE = {"test-clients", "test-data", "test-guests", "test-loggers"}
#: pages, the form of a name in them, the names that each must have
LISTED = {
    "all-reduce": ([README, PAGES["docs/algorithms.md"]], "`{}`", [*ALLREDUCE, "nccl", "auto"]),
    "engine": ([README, PAGES["docs/engines.md"]], "`{}`", engines.ENGINES),
    "optimizer": ([README.lower()], "{}", optim.OPTIMIZERS),
    "model": ([README.lower()], "{}", {kind.removesuffix("20") for kind in nn.MODELS}),
    "extra": ([README], "`{}`", {*PROJECT["optional-dependencies"]} - EXTRAS_OF_MAKE),
    "command": ([COMMAND_LINE], "`hpctrain {}", COMMANDS),
}


@pytest.mark.parametrize("kind", LISTED)
def test_the_pages_list_every(kind):
    pages, form, names = LISTED[kind]
    assert names
    assert [name for name in names if any(form.format(name) not in page for page in pages)] == []


def subcommands() -> list[str]:
    """Return `group subcommand` of all groups of the command line."""
    loaded = {name: load() for name, load in COMMANDS.items()}
    groups = {name: command for name, command in loaded.items() if isinstance(command, click.Group)}
    return [
        f"{name} {child}"
        for name, group in groups.items()
        for child in group.list_commands(click.Context(group))
    ]


def test_the_page_of_commands_lists_every_subcommand():
    lines = [line for line in COMMAND_LINE.splitlines() if line.startswith("| `hpctrain")]
    names = subcommands()
    missing = [
        name
        for name in names
        if not any(all(re.search(rf"\b{w}\b", line.split("|")[1]) for w in name.split())
                   for line in lines)
    ]  # fmt: skip
    assert len(names) > 15 and missing == []


INLINE = ("hpctrain launch -n 4 train digits", "hpctrain train my.toml --out runs/first")
TYPED = [
    line.partition(" #")[0].strip()
    for info, _, code in blocks(README)
    for line in code
    if info == "bash" and line.startswith("hpctrain ")
]


@pytest.mark.parametrize("command", [*TYPED, *INLINE])
def test_commands_of_the_readme_are_understood(command):
    assert command in README
    name, *arguments = command.split()[1:]
    group = COMMANDS[name]()
    context = group.make_context(name, [*arguments])
    if isinstance(group, click.Group):
        _, child, rest = group.resolve_command(context, arguments)
        assert child is not None
        child.make_context(child.name, rest, parent=context)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_targets_of_make_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"`make ([\w-]+)|^make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE)
    )
    assert named and {a or b for a, b in named} - targets == set()


def test_the_example_of_pytorch_in_the_readme_is_the_one_that_is_run():
    """But for the names of tensors and of the module."""
    code = "\n".join(c for i, _, lines in blocks(README) if "ddp.py" in i for c in lines)
    example = (ROOT / "docs/examples/pytorch/ddp.py").read_text()
    calls = set(re.findall(r"[\w.]+(?=\()", code))
    assert len(calls) > 6 and calls - set(re.findall(r"[\w.]+(?=\()", example)) == set()


def test_numbers_of_the_readme_that_are_no_times():
    train, test, _ = data.DigitsOptions().load(0)
    assert f"{len(train) + len(test):,} images" in README
    assert PROJECT["requires-python"].removeprefix(">=") in README
    for file in set(re.findall(r"benchmarks/results/([\w.-]+\.json)", README)):
        result = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
        runs = [result] if "machine" in result else result["runs"]
        machines = [run["machine"] for run in runs if "Open" in run["machine"]["mpi"]]
        assert {(m["cpu"], m["cores"], m["mpi"]) for m in machines} == {
            ("AMD EPYC", 2, "Open MPI 5.0.11")
        }, file
        assert all(
            {"p5_s", "p95_s"} <= row.keys() or {"low", "high"} <= row.keys()
            for row in result.get("merged") or result["rows"]
        )


def test_the_table_of_the_readme_is_that_of_the_results():
    make = [sys.executable, ROOT / "benchmarks" / "readme_table.py"]
    table = subprocess.run(make, capture_output=True, text=True, check=True).stdout
    assert len(table.splitlines()) > 5
    assert table in PAGES["README.md"]


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@pytest.mark.parametrize(
    "page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CHANGES.md", "docs/deploy/README.md"]
)
def test_links_lead_to_files_and_headings(page):
    """Anchors as GitHub makes them: lower case, without punctuation, dashes for spaces."""
    missing = []
    for target, anchor in LINK.findall((ROOT / page).read_text()):
        file = (ROOT / page).parent / target if target else ROOT / page
        headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}
        if not file.exists() or (anchor and anchor not in anchors):
            missing.append(f"{target}#{anchor}")
    assert not missing, f"{page} links to what is not there"


#: words of README.md and docs/ that a reader can be asked to search
WORDS = 45_000
#: pages that answer one question, and their words
SHORT_PAGES = {
    "README": 360, "log-to-wandb": 300, "my-job-was-preempted": 300, "my-own-data": 330,
    "my-script-under-srun": 300, "tutorial-first-run": 300, "tutorial-pytorch": 300,
    "why-is-it-slow": 300,
}  # fmt: skip


def count_words(file: Path) -> int:
    return len(file.read_text().split())


def test_the_docs_are_short():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {p.relative_to(ROOT).as_posix(): count_words(p) for p in pages if p.name != "files.md"}
    assert sum(words.values()) <= WORDS, sorted(words.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("page", SHORT_PAGES)
def test_a_page_of_one_question_is_short(page):
    assert count_words(ROOT / "docs" / f"{page}.md") <= SHORT_PAGES[page]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1250


#: what the first 40 lines of README show: a picture, the main table, and a command for each reader
FIRST_SCREEN = (
    "![",
    "| | hpctrain | rival | |",
    "hpctrain slurm submit",
    'dist.init_process_group("hpctrain")',
    "import hpctrain.horovod.torch as hvd",
)


@pytest.mark.parametrize("part", FIRST_SCREEN)
def test_the_first_screen_of_the_readme_has(part):
    assert part in "\n".join(README.splitlines()[:40])


NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*")


def sentences(text: str) -> list[str]:
    """Return the sentences of a page: no code, tables and pictures, no targets of links."""
    fenced = [range(first - 1, first + len(code) + 1) for _, first, code in blocks(text)]
    lines = [
        line
        for n, line in enumerate(text.splitlines())
        if not any(n in fence for fence in fenced) and not line.startswith(("|", "!["))
    ]
    prose = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    parts = re.split(r"\n\s*\n|\n(?=- )|(?<=[.?!])\s+(?=[A-Z`*\[])", prose)
    return [" ".join(part.split()) for part in parts]


def test_no_sentence_of_the_readme_has_five_numbers():
    assert len(sentences(README)) > 20
    assert [s for s in sentences(README) if len(NUMBER.findall(s)) > 4] == []
    assert sentences("A 1, 2.5, H100. B 3\n4.\n\n| 5 |\n- C [6](7)") == [
        "A 1, 2.5, H100.", "B 3 4.", "- C [6]"
    ]  # fmt: skip


def test_programs_and_commands_in_the_readme_exist():
    modules = set(re.findall(r"python -m hpctrain\.(\w+)", README))
    assert modules and all((PACKAGE / name / "__main__.py").exists() for name in modules)
    named = set(re.findall(r"`hpctrain ([a-z]+)", README))
    assert len(named) > 5 and named - set(COMMANDS) == set()


SPELLED = {5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}


def test_the_readme_counts_the_schedules_and_names_the_packages_of_extras():
    assert f"pipelines of {SPELLED[len(schedules.SCHEDULES)]} schedules" in README
    extras = PROJECT["optional-dependencies"]
    for extra in ("hdf5", "zarr", "parquet", "webdataset", "huggingface", "report"):
        assert re.match(r"[\w-]+", extras[extra][0])[0] in README
