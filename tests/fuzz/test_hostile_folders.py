"""Hostile folders of runs and hostile nodes: nothing outside is read or written, nothing waits.

A folder is a good run with one to four changes; each command that reads runs is called on it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import socket
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fuzz import campaign, in_memory, mutated, mutated_json
from fuzz.test_run_files import DAMAGES
from hpctrain.commands.checkpoint import checkpoint as checkpoint_command
from hpctrain.commands.checkpoint import evaluate
from hpctrain.commands.recipe import recipe as recipe_command
from hpctrain.commands.runs import compare, follow, hang, report
from hpctrain.commands.runs import runs as runs_command
from hpctrain.core.errors import HpctrainError
from hpctrain.tools.report import history as follow_report
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.watch import WatchRecord, node_file
from hpctrain.watch.node_file import Node, NodeFile
from hpctrain.world import over_threads

pytestmark = pytest.mark.timeout(3600)
SECRET = "only-outside-of-the-run"
MODULE = f"mine_{random.Random(1).getrandbits(64):x}"
CODE = """
import hpctrain as ht

def model(input_shape, classes):
    return ht.nn.Model({"flat": ht.nn.Flatten(), "out": ht.nn.Linear(classes)}, input_shape)
"""
RECIPE = """
schema = 1
run = { name = "mine", steps = 2, interval_steps = 1, epoch_samples = 64, device = "cpu" }
data = { kind = "digits" }
model = { kind = "MODULE:model" }
optimizer = { kind = "sgd", rate = 0.1, batch = 8 }
engine = { kind = "ps-async" }
trace = { enabled = true }
""".replace("MODULE", MODULE)
#: text that a terminal, a table, a plot, a page or a log must not obey
FOREIGN = (
    "\x1b[2J\x1b]0;title\x07", "\x9b31m", "[red]x[/green]", "[link=file:///etc]x", ":smile:",
    r"$\frac$", "<script>x</script>", "{task.id}", "\r\nfake: done", "%s%n", "x" * 5000,
)  # fmt: skip
FILES = ("metrics.jsonl", "summary.json", "recipe.toml", ".lock", ".redone", ".why", "trace.json",
         "report.html", "losses.png", "watch/nodes.json", "watch/node-00000", "watch/wanted",
         "replay/rank-00000.jsonl", "trace/rank-00000.json", "watch/hung-report.txt")  # fmt: skip
FOLDERS = ("watch", "replay", "trace", "checkpoints")


def make_run(folder):
    """Train two steps with a module of its own; leave the records of two ranks in its folder."""
    (folder / "project").mkdir()
    (folder / "project" / f"{MODULE}.py").write_text(CODE)
    (folder / "project/my.toml").write_text(RECIPE)
    spec = recipe.load(str(folder / "project/my.toml"))
    train(spec, folder / "good", resume=False)
    token = uuid.uuid4().hex
    node = Node("n0", node_file.create(token, 0, 2), (0, 1))
    node_file.publish(folder / "good/watch", token, [node])
    file = NodeFile(node.file, 2)
    for rank in range(2):
        WatchRecord(rank, 2, file.pages(rank)).write_heartbeat()
    node_file.collect(folder / "good/watch")
    return recipe.load(str(folder / "project/my.toml"), ["run.steps=3"])


def train(spec, run, resume=True):
    return run_ranks(2, lambda link: runs.train(spec, over_threads(link), run, resume))


# --- what is changed -----------------------------------------------------------------------------


def plain(path):
    """Return the path of a small file; raise OSError where another change has put something."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 20:
        raise OSError
    return path


def odd_file(run, outside, rng):
    """Put a link, a FIFO, a socket, a hole or a folder in the place of a file."""
    path = run / rng.choice(FILES)
    path.parent.mkdir(exist_ok=True)
    with suppress(OSError):
        path.unlink()
    rng.choice((
        lambda: path.symlink_to(outside / rng.choice(("file", "file.json", "log.jsonl", "gone"))),
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.link(outside / "file", path),
        lambda: os.mkfifo(path),
        lambda: bind(path),
        lambda: (path.touch(), os.truncate(path, 1 << 40)),
        path.mkdir,
    ))()  # fmt: skip


def odd_folder(run, outside, rng):
    """Put a link to a folder outside, or something else, in the place of a folder."""
    path = run / rng.choice(FOLDERS)
    shutil.rmtree(path, ignore_errors=True)
    rng.choice((
        lambda: path.symlink_to(outside),
        lambda: path.symlink_to(outside / path.name),
        lambda: os.mkfifo(path),
        path.touch,
    ))()  # fmt: skip


def forged_json(run, outside, rng):
    """Put foreign text, odd values or other types into the summary, a row or the nodes."""
    path = plain(run / rng.choice(("summary.json", "metrics.jsonl", "watch/nodes.json")))
    head, *rest = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    entry = json.loads(head)
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(FOREIGN)
        if path.suffix == ".json" and rng.random() < 0.7:
            key = rng.choice(("status", "engine", "reason", "recipe", "algorithm", "transport"))
            entry[key] = text
        else:
            entry[f"test_{text}"] = 0.5
        entry["hosts"] = [text]
    if rng.random() < 0.3:
        entry = mutated_json(entry, rng)
    path.write_text("\n".join([json.dumps(entry), *rest]) + "\n")


def forged_recipe(run, outside, rng):
    """Put foreign text into the recipe, or damage it."""
    path = plain(run / "recipe.toml")
    text = path.read_text().replace('"mine"', json.dumps(rng.choice(FOREIGN)))
    path.write_bytes(mutated(text.encode(), rng) if rng.random() < 0.4 else text.encode())


def forged_record(run, outside, rng):
    """Put an escape sequence into the host of a record, or damage it."""
    path = plain(run / "watch/node-00000")
    name = os.uname().nodename.encode()
    data = path.read_bytes().replace(
        name, b"\x1b[2J\x1b[31m"[: len(name)].ljust(len(name), b"\x07")
    )
    path.write_bytes(mutated(data, rng) if rng.random() < 0.3 else data)


def damaged_checkpoint(run, outside, rng):
    path = rng.choice(sorted((run / "checkpoints").glob("step-*")))
    rng.choice(DAMAGES)(path, rng)


def stale_bytecode(run, outside, rng):
    """Put bytecode of other code beside the module that the recipe names."""
    module = run.parent / "project" / f"{MODULE}.py"
    code = compile(f"open({str(outside / 'ran')!r}, 'w')\n" + CODE, str(module), "exec")
    path = Path(importlib.util.cache_from_source(str(module)))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(importlib._bootstrap_external._code_to_hash_pyc(code, bytes(8), False))


def of_another_user(run, outside, rng):
    path = run / rng.choice((*FILES, *FOLDERS, "."))
    if os.geteuid() == 0 and path.exists():
        os.chown(path, 12345, 12345, follow_symlinks=False)


def bind(path):
    with socket.socket(socket.AF_UNIX) as local:
        here = os.open(path.parent, os.O_RDONLY)
        local.bind(f"/proc/self/fd/{here}/{path.name}")  # a path may have 107 bytes
        os.close(here)


CHANGES = (odd_file, odd_file, odd_folder, forged_json, forged_json, forged_recipe, forged_record,
           damaged_checkpoint, stale_bytecode, of_another_user)  # fmt: skip


# --- the commands --------------------------------------------------------------------------------

COMMANDS = (
    (report, "RUN"), (runs_command, "."), (runs_command, "RUN", "--json"),
    (compare, "RUN", "GOOD"), (compare, "RUN", "GOOD", "--json"),
    (compare, "RUN", "GOOD", "--plot", "plot.png"), (follow, "RUN"), (hang, "RUN", "-n", "9"),
    (hang, "RUN", "--json"), (hang, "RUN", "--collect"), (checkpoint_command, "list", "RUN"),
    (checkpoint_command, "verify", "RUN"), (checkpoint_command, "export", "RUN", "--force"),
    (evaluate, "RUN"), (recipe_command, "diff", "RUN/recipe.toml", "digits"),
    (recipe_command, "check", "RUN/recipe.toml"),
)  # fmt: skip


def invoke(command, words, run):
    """Return what a command prints; it may refuse the folder, but not fail otherwise."""
    sys.modules.pop(MODULE, None)
    places = {"RUN": str(run), "GOOD": str(run.parent / "good"), "plot.png": str(run / "plot.png")}
    words = [places.get(word, word.replace("RUN", str(run))) for word in words]
    ended = CliRunner().invoke(command, words, standalone_mode=False)
    error = ended.exception
    if error is not None and not isinstance(
        error, HpctrainError | click.ClickException | SystemExit | click.exceptions.Exit
    ):
        raise error
    return ended.output + (str(error) if isinstance(error, HpctrainError) else "")


def state_of(folder):
    """Return names, owners, contents and times of change of all below `folder`."""
    return {
        path: (path.lstat().st_mtime_ns, path.lstat().st_uid, path.is_file() and path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def make_outside(folder):
    """Make what no command may touch: files, and folders like those of a run."""
    for inner in ("", "watch", "replay", "trace", "checkpoints/step-00000009"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
        for name in ("file", "rank-00000.json", "rank-00000.jsonl", "node-00000", "manifest.json"):
            (folder / inner / name).write_text(SECRET)
        left = folder / inner / ".rank-00000.jsonl.1-1.1"  # as of a writer that was killed
        left.write_text(SECRET)
        os.utime(left, (0, 0))
    (folder / "file.json").write_text(json.dumps({"status": "done", "reason": SECRET}))
    (folder / "log.jsonl").write_text(json.dumps({"step": 1, "train_loss": 0.5, SECRET: 1}) + "\n")


@pytest.mark.parametrize("count", [6, pytest.param(300, marks=pytest.mark.full)])
def test_hostile_folders(count, monkeypatch):
    def end(seconds):
        raise follow_report.record.UsageError("no summary came")

    _, *others = follow_report.follow.__defaults__
    monkeypatch.setattr(follow_report.follow, "__defaults__", (end, *others))
    with in_memory() as folder:
        longer = make_run(folder)
        make_outside(folder / "outside")
        before = state_of(folder / "outside")
        shutil.copytree(folder / "good", folder / "a warm-up")  # what imports take is no growth
        for command, *words in COMMANDS:
            invoke(command, words, folder / "a warm-up")

        def case(rng):
            run = folder / "run"
            shutil.copytree(folder / "good", run)
            try:
                look(run, rng)
            finally:
                shutil.rmtree(folder / "project/__pycache__", ignore_errors=True)
                shutil.rmtree(run)

        def look(run, rng):
            for change in rng.sample(CHANGES, rng.randint(1, 4)):
                with suppress(OSError, ValueError, IndexError, TypeError):  # changed before
                    change(run, folder / "outside", rng)
            for command, *words in COMMANDS:
                output = invoke(command, words, run)
                assert not re.search(r"[^\n -~\u00a1-\uffff]", output), (words, output)
                assert SECRET not in output, (words, output)
                assert state_of(folder / "outside") == before, words
            with suppress(HpctrainError):
                train(longer, run)
            assert state_of(folder / "outside") == before, "train --resume"

        campaign("hostile folders", count, case, seconds=120, mib=400)


# --- files of others in the memory of a node -----------------------------------------------------


def put(path, rng):
    """Make a file that another user may have left under a name of ours."""
    rng.choice((
        lambda: os.mkfifo(path),
        lambda: bind(path),
        lambda: (path.touch(), os.truncate(path, 1 << 40)),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.write_bytes(rng.randbytes(1 << 17)),
        lambda: path.write_bytes(b"hpcwtch1" + bytes(1 << 17)),
        path.mkdir,
    ))()  # fmt: skip
    os.utime(path, (0, 0), follow_symlinks=False)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
        path.is_symlink() or path.chmod(0o777)


def shape_of(path):
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.full)])
def test_hostile_nodes(count, tmp_path):
    """Files of others neither stop a job, nor are they read, changed or removed."""
    run = tmp_path / "run"

    def case(rng):
        folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
        names = [f"hpctrain-watch-{rng.getrandbits(128):032x}-{n:05d}" for n in range(2)]
        paths = [folder / name for folder in folders for name in names]
        paths = [path for path in paths if not os.path.lexists(path)]
        try:
            for path in paths:
                put(path, rng)
            before = [shape_of(path) for path in paths]
            look(paths)
            if os.geteuid() == 0:
                assert [shape_of(path) for path in paths] == before
        finally:
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def look(paths):
        token = uuid.uuid4().hex
        nodes = [Node(f"n{i}", str(path), (i,)) for i, path in enumerate(paths)]
        node_file.publish(run / "watch", token, nodes)
        assert node_file.collect(run / "watch") == [node.name for node in nodes]
        assert all(node_file.read_memory(node) is None for node in nodes)
        node_file.remove_earlier(run / "watch")
        for node in nodes:
            with pytest.raises(OSError, match=str(node.file)):
                NodeFile(node.file, 1)
        made = node_file.create(token, 0, 1)
        for folder in {path.parent for path in paths}:
            node_file._remove_abandoned.__wrapped__(folder)
        os.unlink(made)

    campaign("hostile nodes", count, case, seconds=20, mib=64)
