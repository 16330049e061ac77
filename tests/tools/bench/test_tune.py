"""The command `hpctrain tune`: tables, plots, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import on_fakes
from ranks import run_on

from hpctrain import world as worlds
from hpctrain.commands.bench_measured import tune as command
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import tune as tune_command
from hpctrain.tuning import choose, table

AUTO = """
import sys, numpy as np, hpctrain as ht
world = ht.init()
assert world.main.choices.measured == (sys.argv[1] == "measured"), sys.argv
x = world.memory.zeros(1000, np.float32)
x[:] = world.rank + 1
ht.allreduce(x, world=world)
assert (x == 3).all()
"""


@pytest.mark.processes
@pytest.mark.either
def test_a_table_is_made_shown_drawn_and_used(hpctrain, start, tmp_path):
    out, plot = tmp_path / "tables" / "mine.json", tmp_path / "mine.png"
    flags = ("--sizes", "4B:64KiB*64", "--rounds", "3", "--out", out, "--plot", plot)
    completed = hpctrain("tune", *flags, ranks=2)
    assert completed.returncode == 0, completed.stderr
    assert "in node memory: takes" in completed.stdout and "alpha" in completed.stdout
    result = {row["bytes"] for row in json.loads(out.read_text())["rows"]}
    assert {4, 256, 16384} <= result <= {4, 128, 256, 8320, 16384}  # middles where the pick changes
    assert plot.stat().st_size > 10_000

    output = hpctrain("tune", "--show", out)
    assert output.returncode == 0 and output.stdout == completed.stdout

    for env, reported in (({table.FILE_VARIABLE: str(out)}, "measured"), ({}, "guessed")):
        used = start("-c", AUTO, reported, ranks=2, env=env).finish()
        assert used.returncode == 0, used.stderr


@pytest.mark.processes
@pytest.mark.either
def test_ranks_that_are_processes_tune_on_gpus_and_train_by_it(start, tmp_path):
    """All of MPI's memory is the host's there: a pointer of the stand-in's would crash it."""
    env = {**on_fakes(hidden=True), table.FILE_VARIABLE: str(tmp_path)}
    flags = ("--device", "gpu", "--sizes", "4KiB:64KiB*16", "--rounds", "3", "--keep-noisy")
    completed = start("-m", "fakes", "tune", *flags, ranks=2, env=env).finish()
    assert completed.returncode == 0, completed.stderr
    (path,) = tmp_path.glob("*-gpu-*.json")
    local = table.read_table(path).fingerprint
    assert local.device.endswith("2 ranks on 1 GPU: 0 1") and local.paths in completed.stdout
    code = "import hpctrain as ht; print(ht.init('gpu').main.choices.gpus.measured)"
    used = start("-c", f"import fakes\nwith fakes.installed(hidden=True): {code}", ranks=2, env=env)
    assert used.finish().stdout.count("True") == 2, used.output()
    env[table.FILE_VARIABLE] = str(path)
    output = start("-m", "fakes", "tune", "--show", "--device", "gpu", env=env).finish()
    assert output.stdout == completed.stdout


# What is typed -> what is said, with exit code 2 and before MPI is started.
REFUSED = [
    (["--sizes", "large"], "--sizes: expected sizes such as 4B:128MiB"),
    (["--sizes", "0"], "--sizes: expected sizes"),
    (["--sizes", "8:4"], "from small to large"),
    (["--rounds", "2"], "--rounds: expected at least 3, seen 2"),
    (["--plot", "x.pdf"], "ends in .png or .svg"),
    (["--show", "none.json"], "none.json: expected a file, seen nothing"),
    (["--show", "--rounds", "3"], "--show measures nothing"),
    (["--device", "tpu"], "--device"),
    (["--show", "--device", "gpu"], "no tuning table on GPUs of this machine in"),
    (["--show", "here"], "here: expected a regular file, seen a directory"),
    ([], "one rank has nothing to tune"),
]


@pytest.mark.parametrize(("typed", "message"), REFUSED)
def test_bad_input(typed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    monkeypatch.setenv(table.FILE_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        run(typed)


def run(typed):
    """Run the command as a rank that is a thread would."""

    def body(world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worlds, "init", lambda *_: world)
            command.main(typed, standalone_mode=False)

    run_on("threads", 1, body)


def test_show_where_there_is_no_table_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setenv(table.FILE_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=r"no tuning table of this machine in .*launch -n"):
        run(["--show"])


@pytest.mark.parametrize(
    "out, plot, seen",
    [("file/x.json", None, "file/x.json cannot be written: File exists"),
     ("folder", None, "folder cannot be written: Is a directory"),
     ("x.json", "file/x.png", "file/x.png cannot be written: File exists")],
)  # fmt: skip
def test_what_cannot_be_written_is_said_before_anything_is_measured(
    out, plot, seen, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(tune_command, "measure_constants", None)  # the first that would be measured

    def body(world):
        requested = tune_command.parse_options("4B", 3, tmp_path / out, plot and tmp_path / plot)
        with pytest.raises(UsageError, match=f"rank 0 on .*: {tmp_path}/{seen}$"):
            tune_command.run(world, requested)

    run_on("threads", 2, body)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_the_newest_of_so_many_ranks_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(table.FILE_VARIABLE, str(tmp_path))
    options = tune_command.parse_options("8B", 3, None, None, keep_noisy=True)
    for ranks in (2, 3):
        run_on("threads", ranks, lambda world: tune_command.run(world, options))
    capsys.readouterr()
    for ranks, output in ((1, 3), (2, 2), (3, 3)):
        tune_command.show_table(None, ranks, None)
        assert f"{output} ranks on 1 node" in capsys.readouterr().out
    with pytest.raises(UsageError, match="of 9 ranks"):
        tune_command.show_table(None, 9, None)


@pytest.mark.parametrize("noisy", [0.414, None])
def test_a_table_made_on_a_busy_machine_says_so(noisy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(choose, "find_noise", lambda rows: noisy)
    out = tmp_path / "table.json"
    run_on(
        "threads",
        2,
        lambda world: tune_command.run(world, tune_command.parse_options("8B", 3, out, None)),
    )
    reported = "noisy: the quartiles of repeats differ by 41% of the median, expected at most 25%"
    assert (reported in capsys.readouterr().out) == (noisy is not None)
    assert json.loads(out.read_text())["noisy"] == noisy
    tune_command.show_table(out, 2, None)
    assert (reported in capsys.readouterr().out) == (noisy is not None)


# is the machine busy, the file that the user names, --keep-noisy -> is the table written
KEPT = {
    "quiet": (None, None, False, True),
    "busy": (0.414, None, False, False),
    "busy, a file": (0.414, "mine.json", False, True),
    "busy, asked for": (0.414, None, True, True),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", KEPT)
def test_a_table_of_a_busy_machine_is_kept_only_if_asked_for(case, tmp_path, monkeypatch, capsys):
    noisy, file, keep_noisy, is_kept = KEPT[case]
    monkeypatch.setattr(choose, "find_noise", lambda rows: noisy)
    monkeypatch.setenv(table.FILE_VARIABLE, str(tmp_path))
    out = file and tmp_path / file
    options = tune_command.parse_options("8B", 3, out, None, keep_noisy=keep_noisy)
    assert run_on("threads", 2, lambda world: tune_command.run(world, options)) == [is_kept] * 2
    assert len(list(tmp_path.glob("*.json"))) == is_kept
    output, error = capsys.readouterr()
    assert ("table: not written" in output) == (not is_kept)
    assert ("--keep-noisy writes it" in error) == (not is_kept)
