"""Studies of a user's script: its trials, what their pilots show, and what is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from studies import study

from hpctrain.cli import hpctrain
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.tools.scaling.study import StudyFolder
from hpctrain.tools.scaling.subject import ScriptSubject
from hpctrain.tools.scaling.trial_recipe import Size, Timing
from hpctrain.tools.scaling.trials import local_runner

PROGRAM = ("python", "my ddp.py", "--batch={batch}")
# mode, --samples-per-step -> the batch of each of four ranks, the samples of a step
TRIALS = [("strong", 64, "16", 64), ("weak", 64, "64", 256), ("strong", None, "None", None)]


@pytest.mark.parametrize(("mode", "samples", "batch", "total"), TRIALS)
def test_a_trial(tmp_path, mode, samples, batch, total):
    out, of = tmp_path / "trials/4/repeat-0", study(mode=mode)
    words, variables = ScriptSubject(PROGRAM, samples).command(
        StudyFolder(tmp_path), of, Size(4), out, Timing(5)
    )
    assert words == ["--", "python", "my ddp.py", f"--batch={batch}"]
    trial = {"out": str(out), "interval": 5, "total": 61, "samples": total}
    assert json.loads(variables["HPCTRAIN_TRIAL"]) == trial
    assert out.is_dir()
    line = local_runner.line(of, Size(4), words)
    assert line[-7:] == ["launch", "-n", "4", *words]


# mode, samples of a step on 1 and 4 ranks -> the batch of the study; None: refused
PILOTS = [
    ("strong", (64, 64), 64),
    ("strong", (16, 64), None),
    ("weak", (16, 64), 16),
    ("weak", (64, 64), None),
    ("weak", (), 1),
]


@pytest.mark.parametrize(("mode", "samples", "batch"), PILOTS)
def test_pilots_show_the_batch(tmp_path, mode, samples, batch):
    pilots = {Size(1): tmp_path / "1", Size(4): tmp_path / "4"}
    for out, count in zip(pilots.values(), samples, strict=False):
        out.mkdir()
        facts = {"status": "done", "samples_per_step": count, "gradient_bytes": 40}
        run_folder.write_summary(out, facts)
    subject = ScriptSubject(("ddp.py",), None)
    if batch is None:
        with pytest.raises(UsageError, match=r"expected the same samples .*write \{batch\}"):
            subject.pilot_facts(study(mode=mode), pilots)
        return
    assert subject.pilot_facts(study(mode=mode), pilots).get("batch", 1) == batch


REFUSALS = {
    "-- python x.py {batch}": "{batch} in the arguments of a script: add --samples-per-step",
    "--samples-per-step 63 -- x.py {batch}": "2 ranks: cannot share --samples-per-step 63 evenly",
    "--samples-per-step 0 -- x.py": "expected 1 or more, seen 0",
    "--set run.epochs=1 -- python x.py": "--set changes a recipe",
    "--on slurm -- python x.py": "--on slurm: expected a recipe",
    "digits -- python x.py": "expected a recipe, or a program after `--`, seen the recipe digits",
    "digits --samples-per-step 64": "--samples-per-step is of a script",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(words):
    result = CliRunner().invoke(
        hpctrain, ["scale", "--ranks", "1,2", *words.split()], standalone_mode=False
    )
    assert isinstance(result.exception, UsageError) and REFUSALS[words] in str(result.exception)
