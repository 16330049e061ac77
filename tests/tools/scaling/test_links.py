"""Links in the folder of a study: no trial is removed or written where one leads."""

from __future__ import annotations

import pytest
import studies
from studies import SUBJECT, Times, study

from hpctrain.core.errors import UsageError
from hpctrain.tools.scaling.output.live_table import LiveView
from hpctrain.tools.scaling.study import StudyFolder
from hpctrain.tools.scaling.trials import local_runner, runner, slurm_runner

JOB = {"site": None, "time": "10", "gpus_per_node": 0, "cpus_per_task": None, "options": {}}
SIZE = "00001-ranks-00001-nodes"


def trials(folder, of, view):
    return list(runner.trials(folder, of, SUBJECT, view))


def slurm_trials(folder, of, view):
    missing = runner.missing_trials(folder, of)
    return list(slurm_runner.trials(folder, of, SUBJECT, missing, view))


ROWS = (
    (trials, "trials", f"{SIZE}/repeat-0"),
    (trials, f"trials/{SIZE}", "repeat-0"),
    (trials, f"trials/{SIZE}/repeat-0", "."),
    (trials, "recipes", "."),
    (slurm_trials, "trials", f"{SIZE}/repeat-0"),
    (slurm_trials, f"trials/{SIZE}/repeat-0.job", "."),
    (lambda folder, of, view: runner.run_pilots(folder, of, SUBJECT, view), "pilots", SIZE),
)


@pytest.mark.parametrize(("run", "link", "below"), ROWS)
def test_a_link_is_refused_and_nothing_behind_it_is_touched(
    run, link, below, tmp_path, monkeypatch
):
    outside, folder = tmp_path / "outside", StudyFolder(tmp_path / "study")
    (outside / below).mkdir(parents=True, exist_ok=True)
    (outside / below / "kept").touch()
    (folder.path / link).parent.mkdir(parents=True)
    (folder.path / link).symlink_to(outside)
    monkeypatch.setattr(slurm_runner.submit, "submit_script", lambda *_: pytest.fail("submitted"))
    monkeypatch.setattr(slurm_runner.submit, "find_jobs_by_name", lambda _: [])
    monkeypatch.setattr(local_runner, "run", studies.runner(lambda *_: Times(1e-2, 9e-3), []))
    of = study((1,), job=JOB)
    before = sorted(outside.rglob("*"))
    with LiveView(of) as view, pytest.raises(UsageError, match=f"{folder.path}.*a link to"):
        run(folder, of, view)
    assert sorted(outside.rglob("*")) == before


def test_a_link_within_a_trial_is_removed_and_not_what_it_leads_to(tmp_path):
    outside, folder = tmp_path / "outside", StudyFolder(tmp_path / "study")
    outside.mkdir()
    (outside / "kept").touch()
    out = folder.path / "trials" / SIZE / "repeat-0"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints/step-1").symlink_to(outside)
    (out / "log").symlink_to(outside / "kept")
    folder.make_room(out)
    assert not out.exists()
    assert out.parent.is_dir()
    assert (outside / "kept").exists()
