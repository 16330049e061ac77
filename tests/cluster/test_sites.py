"""Profiles of sites: refusals, and their effect on a job and on site.env."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import directives, fake, fake_hpctrain, run_script

from hpctrain import cli
from hpctrain.cluster.slurm import site
from hpctrain.cluster.slurm.job import Job
from hpctrain.cluster.slurm.render import render
from hpctrain.core.errors import UsageError

HEAD = 'title = "x"\n[cpu]\n'
SITES = {
    'gpus_pernode = 4\ntitle = "x"': "unknown key in [site s.toml]: 'gpus_pernode'",
    f"{HEAD}task_per_node = 4": "in [site s.toml.cpu]: 'task_per_node'; did you mean 'tasks_per_n",
    f'{HEAD}options.partion = "a"': "did you mean 'partition'?",
    f'{HEAD}options.partition = "a b"': "[site s.toml] partition: expected only ASCII letters",
    f'{HEAD}options.time = "1"': "[site s.toml] time cannot be set: use --time",
    f'{HEAD}options.clusters = "b"': "[site s.toml] clusters cannot be set: export SLURM_CLUSTERS",
    f'{HEAD}options.gpus-per-node = "2"': "cannot be set: use --gpus-per-node",
    f'{HEAD}options.gres = "gpu:4"': "cannot ask for GPUs",
    f'{HEAD}options.gpu-bind = "closest"': "use 'none', otherwise",
    f'{HEAD}environment."A B" = "1"': "'A B' is not a variable name",
    f'{HEAD}environment.A = "1\\n2"': "without control characters",
    f'{HEAD}modules = ["a\\nb"]': "without control characters",
    'title = "x"': "expected a table [cpu] or [gpu]",
    "title = ": "is not TOML",
    'title = "x"\ncpu = 1': "[site s.toml.cpu] expected a table, seen 1",
    'title = "x"\n[[cpu]]': "[site s.toml.cpu] expected a table, seen [{}]",
    f"{HEAD}cpus_per_task = {'9' * 5000}": "site s.toml, line 3: expected integers of at most 64",
    f"{HEAD}modules = {'[' * 5000}": "site s.toml: expected at most 32 levels of tables",
    'title = "a\\u0000"\n[cpu]': "site s.toml: title: expected text without NUL",
    "[cpu]": "title is missing",
}


@pytest.mark.parametrize("text", SITES)
def test_bad_profiles_of_sites(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        site.load_site("s.toml")
    assert SITES[text] in str(error.value)


def test_each_line_of_a_refusal_says_who_speaks(tmp_path, monkeypatch, capsys):
    (tmp_path / "s.toml").write_text("titel = 'x'\n[cpu]")
    words = ["slurm", "render", "digits", "--site", str(tmp_path / "s.toml")]
    monkeypatch.setattr(cli.sys, "argv", ["hpctrain", *words])
    assert cli._guarded() == 2
    unknown, missing = capsys.readouterr().err.splitlines()
    assert unknown.startswith("hpctrain: unknown key in [site ")
    assert missing.startswith("hpctrain: [site ")
    assert missing.endswith("title is missing")


SLURM_SITES = [name for name in site.profile_names() if site.load_site(name).scheduler == "slurm"]


@pytest.mark.parametrize("name", SLURM_SITES)
def test_each_site_renders(name):
    result = site.load_site(name)
    for nodes in filter(None, (result.gpu, result.cpu)):
        text = render(Job(nodes=2, gpus_per_node=nodes.gpus), result)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        item = nodes.gpus or nodes.tasks_per_node
        assert f"#SBATCH --ntasks-per-node={item}" in directives(text)
        assert f"#SBATCH --cpus-per-task={nodes.cpus_per_task}" in directives(text)
        assert f"# {result.title}\n" in text


def asked_cores(text: str) -> list[int]:
    """Return how many cores of a node each part of a job asks for."""
    tasks, cores = (
        [int(n) for n in re.findall(f"^#SBATCH --{option}=(\\d+)$", text, re.M)]
        for option in ("ntasks-per-node", "cpus-per-task")
    )
    return [n * item for n, item in zip(tasks, cores, strict=True)]


@pytest.mark.parametrize("name", [name for name in SLURM_SITES if name != "cpu"])
@pytest.mark.parametrize("extra", [{}, {"servers": 1}, {"servers": 4}, {"tasks_per_node": 20}])
def test_no_job_asks_a_node_for_more_cores_than_it_has(name, extra):
    result = site.load_site(name)
    for nodes in filter(None, (result.gpu, result.cpu)):
        gpus = 0 if "tasks_per_node" in extra else nodes.gpus
        if gpus or result.cpu:
            text = render(Job(nodes=2, gpus_per_node=gpus, **extra), result)
            kind = result.node_kind(gpus)
            assert (
                0 < asked_cores(text)[0] <= kind.cpus_per_task * (kind.gpus or kind.tasks_per_node)
            )


def test_cores_of_servers():
    perlmutter = site.load_site("perlmutter")
    beside = Job(nodes=2, gpus_per_node=4, servers=2)
    assert asked_cores(render(beside, perlmutter)) == [5 * 25]
    assert asked_cores(render(replace(beside, cpus_per_task=7), perlmutter)) == [5 * 7]
    apart = Job(nodes=4, gpus_per_node=4, servers=16, server_nodes=1)
    assert asked_cores(render(apart, perlmutter)) == [4 * 16, 16 * 16]


def test_a_site_has_jobs_of_its_own_scheduler():
    with pytest.raises(UsageError, match=r"Aurora .* another scheduler: use `hpctrain pbs`"):
        render(Job(), site.load_site("aurora"))


def test_unknown_site():
    with pytest.raises(UsageError, match=r"unknown site 'cpus'; did you mean 'cpu'\?"):
        site.load_site("cpus")
    with pytest.raises(UsageError, match=r"no/such\.toml: expected a file, seen nothing"):
        site.load_site("no/such.toml")


def test_environment_of_a_site_is_quoted(tmp_path):
    nodes = site.Nodes(environment={"A": "it's $(touch broken)"}, options={"account": "m1"})
    activate = tmp_path / "my env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("A=before")
    result = site.Site(title="x", cpu=nodes, venv=str(tmp_path / "my env"))
    (tmp_path / "site.env").write_text(result.site_env(nodes))
    line = '. ./site.env; echo "$A|$SBATCH_ACCOUNT|$HPCTRAIN_LAUNCHER"'
    completed = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert completed.stdout == "it's $(touch broken)|m1|srun --kill-on-bad-exit=1\n"


def test_gpus_asked_for_by_gres_stay_beside_others():
    nodes = site.Nodes(gpus=4, gpus_as="gres", options={"gres": "nvme:1"})
    result = site.Site(title="x", gpu=nodes)
    assert "export SBATCH_GRES=gpu:4,nvme:1" in result.site_env(nodes).splitlines()
    assert "#SBATCH --gres=gpu:2,nvme:1" in directives(render(Job(gpus_per_node=2), result))
    for interactive in (False, True):
        job = Job(gpus_per_node=2, options={"gres": "craynetwork:0"}, interactive=interactive)
        assert "--gres=gpu:2,craynetwork:0\n" in render(job, result)


@pytest.mark.parametrize("place", ["site.env", "modules", "venv"])
def test_where_the_site_is_missing_no_rank_starts(place, tmp_path):
    """Else ranks would start with whatever MPI there is."""
    for name, script in (("srun", "touch started"), ("module", "exit 1"), ("scontrol", "")):
        fake(tmp_path, name, script)
    fake_hpctrain(tmp_path)
    missing = {"modules": ["openmpi"]} if place != "venv" else {"venv": str(tmp_path / "no")}
    result = site.Site(title="x", cpu=site.Nodes(), **missing)
    text = render(Job(), None if place == "site.env" else result)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/site.env").write_text(result.site_env(result.cpu))
    completed = run_script(tmp_path, text)
    assert completed.returncode == 1
    assert not (tmp_path / "started").exists()
    assert ("site.env: its last command failed" in completed.stderr) == (place == "site.env")
