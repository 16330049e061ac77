"""slurm render: output compared with files; bad input as a table; quoting of values.

`PYTHONPATH=tests python tests/cluster/test_slurm.py` writes the files anew: slurm/ and
tests/golden/slurm/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
from scripts import SENT, directives, fake, fake_hpctrain, run_script

from hpctrain.cluster.slurm import sbatch, site
from hpctrain.cluster.slurm.job import Job, Task, job_name, parse_time_limit_s, total_ranks
from hpctrain.cluster.slurm.render import DEFAULT_JOBS, render
from hpctrain.core.errors import UsageError

ROOT = Path(__file__).parents[2]
CPU = site.Site(title="A cluster", cpu=site.Nodes())

# file of tests/golden/slurm: job, site
GOLDEN: dict[str, tuple[Job, str | None]] = {
    "two_nodes_of_gpus": (
        Job("my runs/it's.toml", nodes=2, gpus_per_node=4, arguments=("--set", "run.epochs=3")),
        None,
    ),
    "servers_on_cpu_nodes_of_perlmutter": (
        Job(nodes=4, gpus_per_node=4, servers=4, server_nodes=2, out="runs/ps"),
        "perlmutter",
    ),
    "sweep": (
        Job(
            nodes=2,
            tasks=tuple(
                Task(i, f"rate=0.{i}", ("--set", f"optimizer.rate=0.{i}", "--epochs", "3"))
                for i in (1, 2, 3, 5)
            ),
        ),
        None,
    ),
}


def files() -> dict[Path, str]:
    """Return the files that are kept, and what is to stand in them."""
    created = {ROOT / "slurm" / name: render(job) for name, job in DEFAULT_JOBS.items()}
    for name in site.profile_names():
        if site.load_site(name).scheduler != "slurm":
            continue
        created |= {ROOT / "slurm/sites" / file: text for file, text in envs(name).items()}
    created[ROOT / "slurm/site.env"] = envs("cpu")["cpu.env"]
    for name, (job, location) in GOLDEN.items():
        text = render(job, site.load_site(location) if location else None)
        created[ROOT / "tests/golden/slurm" / f"{name}.sbatch"] = text
    return created


def envs(name: str) -> dict[str, str]:
    """Return the files site.env of a profile: one for each kind of node."""
    result = site.load_site(name)
    kinds = [kind for kind in (result.gpu, result.cpu) if kind]
    names = [name, f"{name}-cpu"][: len(kinds)]
    return {f"{n}.env": result.site_env(kind) for n, kind in zip(names, kinds, strict=True)}


def test_kept_files_are_what_is_rendered():
    saved = {path: path.read_text() for path in files() if path.exists()}
    assert saved == files()
    assert max(len(text.splitlines()) for text in saved.values()) <= 50
    assert (ROOT / "slurm" / SENT.name).resolve() == SENT
    assert set((ROOT / "slurm").rglob("*.*")) == {
        *(path for path in files() if "golden" not in path.parts), ROOT / "slurm" / SENT.name
    }  # fmt: skip


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_shell_accepts_them(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck"):
        completed = subprocess.run(
            ["shellcheck", "--shell=bash", path], capture_output=True, text=True, timeout=100
        )
        assert completed.stdout == ""


# job -> what its error says
BAD = [
    (Job(nodes=0), "--nodes: expected 1 or more, seen 0"),
    (Job(tasks_per_node=-1), "--tasks-per-node: expected 1 or more, seen -1"),
    (Job(gpus_per_node=4, tasks_per_node=8), "8 ranks per node share 4 GPUs"),
    (Job(nodes=2, sizes=(1, 4)), "--sizes up to 4 do not fit on --nodes 2"),
    (Job(nodes=4, sizes=(4, 1)), "in ascending order"),
    (Job(nodes=4, sizes=(0, 1)), "--sizes: expected 1 or more, seen 0"),
    (Job(nodes=2, servers=3), "--servers 3 for 2 workers"),
    (Job(nodes=4, servers=3, server_nodes=2), "3 cannot be divided among --server-nodes 2"),
    (Job(nodes=4, server_nodes=2), "--server-nodes without --servers"),
    (Job(nodes=4, servers=1, sizes=(1,)), "exclude each other"),
    (Job(sizes=(1,), tasks=(Task(0, "a=1", ()),)), "a sweep's jobs have one size"),
    (Job(servers=1, server_nodes=1, tasks=(Task(0, "a=1", ()),)), "one size and one part"),
    (Job(interactive=True, tasks=(Task(0, "a=1", ("--set", "b.a=1")),)), "leave out --set"),
    (Job(nodes=4, servers=1, min_ranks=2), "with --servers or --sizes is fixed"),
    (Job(nodes=4, sizes=(1, 4), elastic=True), "srun, which cannot run ULFM"),
    (Job(nodes=4, spares=1), "--spares 1: only an elastic job has spares; add --elastic"),
    (Job(nodes=4, spares=2, elastic=True, min_ranks=3), "--min-ranks 3: expected at most 2"),
    (Job(spares=-1), "--spares: expected 0 or more, seen -1"),
    (Job(min_ranks=0), "--min-ranks: expected 1 or more, seen 0"),
    (Job(relaunches=-1), "--relaunches: expected 0 or more, seen -1"),
    (Job(time="2 hours"), "--time 2 hours: expected minutes, H:M:S, D-H or D-H:M:S, such as"),
    (Job(time="1"), "is 60 s, but the stop signal comes 120 s before"),
    (Job(program=("a\nb",)), "one line without control characters"),
    (Job(program=("x",), servers=1), "--servers: of a recipe; leave out for a program, seen x"),
    (Job(program=("x",), arguments=("--set", "a")), "--set: of a recipe; leave out"),
    (Job(program=("x",), interactive=True), "--interactive: of a recipe; leave out"),
    (Job(recipe=""), "expected the name or the file of a recipe"),
    (Job(recipe="--help"), "expected the name or the file of a recipe"),
    (Job(recipe="a\n#SBATCH --wrap=b"), "one line without control characters"),
    (Job(arguments=("\x1b[2J",)), "one line without control characters"),
    (Job(out="runs/\udcff"), "one line without control characters"),
    (Job(options={"constrain": "a100"}), "did you mean 'constraint'"),
    (Job(options={"gpus-per-task": "1"}), "hides the neighbours' GPUs"),
    (Job(options={"gpu-bind": "single:1"}), "if the site binds tasks to GPUs, use 'none'"),
    (Job(options={"tres-per-task": "gres/gpu:1"}), "hides neighbours'"),
    (Job(options={"tres-bind": "gres/gpu:single:1"}), "hides the neighbours' GPUs"),
    (Job(options={"gres": "nvme:1,gpu:a100:4"}), "cannot ask for GPUs: use --gpus-per-node"),
    (Job(options={"gres": "gres:gpu"}), "cannot ask for GPUs: use --gpus-per-node"),
    (Job(options={"clusters": "b"}), "--clusters cannot be set: export SLURM_CLUSTERS=NAME"),
    (Job(options={"chdir": "/tmp"}), "runs in the folder from which it was submitted"),
    (Job(options={"qos": "a b"}), "sbatch reads the value from a line of the script; seen 'a b'"),
    (
        Job(options={"comment": "a\n#SBATCH --uid=0"}),
        "--option comment: expected only ASCII letters",
    ),
    (Job(options={"comment": "$(touch broken)"}), "--option comment: expected only ASCII letters"),
]


@pytest.mark.parametrize("job, reported", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(job, reported):
    with pytest.raises(UsageError) as error:
        render(job)
    assert reported in str(error.value)


def test_refused_of_a_site():
    with pytest.raises(UsageError, match="has no GPUs for hpctrain; leave it out"):
        render(Job(gpus_per_node=4), CPU)
    with pytest.raises(UsageError, match=r"8: Alps .* has nodes with 4 GPUs; ask for 4 at most"):
        render(Job(gpus_per_node=8), site.load_site("alps"))
    for name in ("alps", "alps-openmpi", "juwels-booster"):
        with pytest.raises(UsageError, match="nodes with 4 GPUs; add --gpus-per-node 4"):
            render(Job(), site.load_site(name))
    with pytest.raises(UsageError, match=r"--server-nodes 2: Alps .* has no nodes without GPUs"):
        render(Job(nodes=2, gpus_per_node=4, servers=2, server_nodes=2), site.load_site("alps"))
    with pytest.raises(UsageError, match="did you mean 'uenv'"):
        render(Job(gpus_per_node=4, options={"uenf": "a"}), site.load_site("alps"))
    with pytest.raises(UsageError, match="A cluster starts ranks with `mpirun`"):
        render(
            Job(nodes=2, servers=1),
            site.Site(title="A cluster", cpu=site.Nodes(), launcher="mpirun"),
        )


def test_a_refusal_of_a_value_names_all_that_is_allowed():
    with pytest.raises(UsageError) as error:
        sbatch.must_be_plain_value("--option comment", "\n")
    named = re.search(r"digits and (\S+), since", str(error.value))[1]
    for mark in filter(str.isprintable, map(chr, range(256))):
        if mark in named or (mark.isascii() and mark.isalnum()):
            sbatch.must_be_plain_value("", mark)
        else:
            with pytest.raises(UsageError):
                sbatch.must_be_plain_value("", mark)


def test_gpu_bind_none_undoes_a_binding():
    text = render(Job(gpus_per_node=2, options={"gpu-bind": "none"}))
    assert "#SBATCH --gpu-bind=none" in directives(text)


def test_without_restarts_slurm_makes_none_either():
    assert "#SBATCH --requeue" in directives(render(Job(max_restarts=1)))
    lines = directives(render(Job(max_restarts=0)))
    assert "#SBATCH --no-requeue" in lines and "#SBATCH --requeue" not in lines


def test_an_elastic_job_is_started_by_launch():
    """Its spares are among the ranks of the allocation; `launch` starts it again."""
    text = render(Job(nodes=4, tasks_per_node=2, elastic=True, spares=2, min_ranks=4, relaunches=5))
    assert (
        'HPCTRAIN_LAUNCHER="hpctrain launch --elastic --spares 2 --min-ranks 4 --max-restarts 5 '
        '-n $((SLURM_NTASKS - 2))"\n'
    ) in text
    assert "\ntrain=(train digits)\n" in text
    assert "#SBATCH --no-kill" in directives(text) and " --relaunches=0 " in text
    assert "#SBATCH --no-kill" not in directives(render(Job(nodes=4)))


TIMES = {"90": 5400, "2:30": 150, "2:00:00": 7200, "1-12": 129600, "1-0:30": 88200, "0-0:0:9": 9}


@pytest.mark.parametrize("time", TIMES)
def test_time_limits_as_sbatch_reads_them(time):
    assert parse_time_limit_s(time) == TIMES[time]


def test_ranks():
    assert total_ranks(Job(nodes=4, gpus_per_node=4, servers=2)) == 18
    assert total_ranks(Job(nodes=4, gpus_per_node=4, elastic=True, spares=2)) == 14


HOSTILE = [
    "it's",
    '"; touch broken; "',
    "$(touch broken)",
    "`touch broken`",
    "a b; touch broken #",
    "*",
    "~",
    "#SBATCH --wrap=x",
    "{{ again }}",
    "\\",
    "!!",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_values_stay_values(text, tmp_path):
    """Run what was rendered with commands that only say what they were given."""
    fake(tmp_path, "srun", 'printf "%s\\0" "$0" "$@" >> said\nmkdir -p "$OUT"')
    fake(tmp_path, "scontrol", "")
    fake_hpctrain(tmp_path)
    job = Job(text, out=f"runs/{text}", arguments=("--set", f"run.name={text}"))
    completed = run_script(tmp_path, render(job), OUT="made")
    assert (completed.returncode, completed.stderr) == (1, "")  # no summary says that it is done
    message = (tmp_path / "said").read_text().split("\0")[1:-1]
    assert message == [
        "--kill-on-bad-exit=1", "hpctrain", "train", text, "--set", f"run.name={text}",
        "--out", f"runs/{text}", "--resume",
    ]  # fmt: skip
    created = sorted(path.name for path in tmp_path.iterdir())
    assert created == ["bin", "job.sh", "made", "runs", "said"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [text]
    harmless = re.compile(r"#SBATCH --[a-z-]+(=[\w.:@-]+)?")
    assert all(map(harmless.fullmatch, directives(render(job))))


def test_random_words_stay_words(tmp_path):
    """Hundreds of them on one command line, of all that means something to a shell."""
    random = Random(7)
    nasty = "'\"`$\\ #*?~!&|;<>(){}[]=%^-,:@a1é" + "\u202e\u00a0"
    words = ["".join(random.choices(nasty, k=random.randrange(12))) for _ in range(400)]
    words = [word for word in words if word.isprintable()]
    assert len(words) > 100
    fake(tmp_path, "srun", 'printf "%s\\0" "$@" > said')
    fake(tmp_path, "scontrol", "")
    fake_hpctrain(tmp_path)
    completed = run_script(tmp_path, render(Job(arguments=tuple(words), out="run")))
    assert (completed.returncode, completed.stderr) == (1, "")
    message = (tmp_path / "said").read_text().split("\0")
    assert message[4:-1] == [*words, "--out", "run", "--resume"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "job.sh", "run", "said"]
    for word in words:
        assert re.fullmatch(r"[\w.][\w.-]*", job_name(Job(word or "x")), re.ASCII)


def test_servers_beside_workers_see_no_gpu(tmp_path):
    total_ranks = "while [ $1 != bash ]; do shift; done; for SLURM_PROCID in 0 3 4; do "
    fake(tmp_path, "srun", f'echo $@ > srun\nexport SLURM_PROCID\n{total_ranks} "$@"; done')
    fake(tmp_path, "scontrol", "")
    fake_hpctrain(tmp_path, 'echo "$SLURM_PROCID $1 [$CUDA_VISIBLE_DEVICES]" >> said')
    text = render(Job(nodes=2, gpus_per_node=2, servers=1))
    run_script(tmp_path, text, SLURM_JOB_NUM_NODES="2", CUDA_VISIBLE_DEVICES="0,1")
    assert (tmp_path / "said").read_text() == "0 train [0,1]\n3 train [0,1]\n4 train []\n"
    assert "--distribution=cyclic -n 5 " in (tmp_path / "srun").read_text()


# jobs of which srun is told more than its site says, and what
EXTRA = {
    "-n 3 --nodes=1": Job(nodes=2, tasks_per_node=3, sizes=(1, 2)),
    "--distribution=cyclic -n 3": Job(nodes=2, servers=1),
    "--het-group=0,1": Job(nodes=2, servers=2, server_nodes=1),
}


@pytest.mark.parametrize("options", EXTRA)
def test_options_of_srun_go_before_a_container(options, tmp_path):
    """Nor is srun to keep the site's variables from the ranks, as sbatch --export=NONE asks it."""
    fake(tmp_path, "srun", 'echo srun "$@" "[$SLURM_EXPORT_ENV$SLURM_CLUSTERS]" > said')
    fake(tmp_path, "scontrol", "")
    fake_hpctrain(tmp_path)
    container = "--mpi=pmix apptainer exec x.sif"
    run_script(
        tmp_path, render(EXTRA[options]), HPCTRAIN_LAUNCHER=f"srun {container}",
        SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="0", SLURM_JOB_NUM_NODES="2",
        SLURM_CPUS_PER_TASK_HET_GROUP_0="1", SLURM_EXPORT_ENV="NONE", SLURM_CLUSTERS="b",
    )  # fmt: skip
    message = (tmp_path / "said").read_text()
    assert message.startswith(f"srun {options} {container} ") and message.endswith(" --resume []\n")


def test_interactive_asks_salloc_for_what_sbatch_would_be_asked(tmp_path):
    fake(tmp_path, "salloc", 'echo "$@ [$SALLOC_PARTITION] [$SALLOC_QOS]" >> said')
    job = Job(nodes=2, interactive=True, options={"exclusive": ""})
    text = render(job, site.Site(title="x", cpu=site.Nodes(), launcher="mpirun -v"))
    for script, started in ((render(job), "srun --kill-on-bad-exit=1"), (text, "mpirun -v")):
        (tmp_path / "said").unlink(missing_ok=True)
        environ = {"SBATCH_PARTITION": "gold", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        words = ["bash", "-c", script, "x", "hpctrain", "doctor", "a b"]
        assert subprocess.run(words, cwd=tmp_path, env=environ).returncode == 0
        options = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=1:00:00 --exclusive"
        reported = (tmp_path / "said").read_text()
        assert reported == f"{options} {started} hpctrain doctor a b [gold] []\n"


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
