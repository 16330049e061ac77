"""slurm submit and status: output as a table; a few jobs on a real Slurm."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import hpctrain
from hpctrain.cluster.jobs import job_status as status
from hpctrain.cluster.slurm import queries, sbatch, submit
from hpctrain.cluster.slurm.job import Job
from hpctrain.cluster.slurm.reasons import explain_reason, is_permanent
from hpctrain.cluster.slurm.render import DEFAULT_JOBS, SENT_FILE, render
from hpctrain.cluster.slurm.submit import JobState
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.run_files import run_folder

JOB = "JobId={} JobName=my job JobState={} Reason={} Restarts=1 RunTime=00:01:02 NodeList=n[1-2]"
SHOWN = {
    "a job": (
        JOB.format(17, "RUNNING", "None"),
        [JobState("17", "RUNNING", "", 1, "00:01:02", "n[1-2]")],
    ),
    "that waits": (
        JOB.format(17, "PENDING", "Resources").replace("n[1-2]", "(null)"),
        [JobState("17", "PENDING", "Resources", 1, "00:01:02", "")],
    ),
    "an array": (
        JOB.format("19 ArrayJobId=17 ArrayTaskId=10", "RUNNING", "None")
        + "\n"
        + JOB.format("18 ArrayJobId=17 ArrayTaskId=2", "COMPLETED", "None"),
        [
            JobState("17_2", "COMPLETED", "", 1, "00:01:02", "n[1-2]"),
            JobState("17_10", "RUNNING", "", 1, "00:01:02", "n[1-2]"),
        ],
    ),
    "an array of which some have begun": (
        JOB.format("19 ArrayJobId=17 ArrayTaskId=2-3,5%1", "PENDING", "Resources")
        + "\n"
        + JOB.format("18 ArrayJobId=17 ArrayTaskId=1", "RUNNING", "None"),
        [
            JobState(f"17_{task}", *location, 1, "00:01:02", "n[1-2]")
            for task, location in (
                (1, ("RUNNING", "")),
                *((later, ("PENDING", "Resources")) for later in (2, 3, 5)),
            )
        ],
    ),
    "a heterogeneous one": (
        JOB.format("17 HetJobId=17 HetJobOffset=0", "RUNNING", "None")
        + "\n"
        + JOB.format("18 HetJobId=17 HetJobOffset=1", "RUNNING", "None"),
        [JobState("17", "RUNNING", "", 1, "00:01:02", "n[1-2]")],
    ),
}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return a function that puts a command on the PATH, which has no other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(queries.sys, "executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()

    def make(name: str, script: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return make


@pytest.mark.parametrize("case", SHOWN)
def test_what_scontrol_shows(case, commands):
    message, states = SHOWN[case]
    commands("scontrol", f"echo '{message}'")
    assert submit.query_slurm(17) == states


def test_what_the_controller_forgot_is_asked_of_accounting(commands):
    commands("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert submit.query_slurm(17) == [JobState("17", "UNKNOWN", "Slurm has forgotten it")]
    commands("sacct", "echo '17|CANCELLED by 1000|00:01:02|n[1-2]|0:15'")
    assert submit.query_slurm(17) == [
        JobState("17", "CANCELLED", "", None, "00:01:02", "n[1-2]", "0:15")
    ]


def test_a_controller_that_is_away_is_an_error(commands):
    commands("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(HpctrainError, match="show jobs: Unable to contact"):
        submit.query_slurm(17)


def test_status_outlives_a_controller_that_is_away(commands, monkeypatch):
    commands("sbatch", "echo 17")
    told("submit", "digits", "--out", "a")
    away = "[ -e asked ] || { : > asked; echo 'Unable to contact' >&2; exit 1; }"
    commands("scontrol", f"{away}; echo '{JOB.format(17, 'COMPLETED', 'None')}'")
    displayed = told("status", "a")
    assert "NO ANSWER" in displayed
    assert "17: scontrol does not show jobs: Unable to contact" in displayed
    Path("asked").unlink()
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(status, "FILE_DELAY_S", 0.0)
    assert [row["state"] for row in status.wait_for_jobs([Path("a")], 60)] == ["COMPLETED"]


def test_status_shows_all_jobs_that_have_not_ended(commands):
    commands("sbatch", "echo 17")
    told("submit", "digits", "--out", "a")
    run_folder.write_json(Path("a", submit.JOBS_FILE), {"jobs": [17, 18]})
    show = 'case $4 in 17) echo "{}" ;; 18) echo "{}" ;; esac'
    later = JOB.format(18, "PENDING", "Priority")
    for state, observed in (("RUNNING", ["17", "18"]), ("COMPLETED", ["18"])):
        commands("scontrol", show.format(JOB.format(17, state, "None"), later))
        assert [row["job"] for row in status.status_rows([Path("a")])] == observed


@pytest.mark.parametrize("line, sizes, run", [
    ("run='{}/a trial'", "", "a trial"),
    ("run='{}/a trial'/nodes-$nodes", "sizes=(1 2)", "a trial/nodes-2"),
])  # fmt: skip
def test_status_reads_the_run_that_the_script_makes(line, sizes, run, commands, tmp_path):
    job = "18 ArrayJobId=17 ArrayTaskId=1" if sizes else 17
    commands("scontrol", f"echo '{JOB.format(job, 'RUNNING', 'None')}'")
    commands("sbatch", "echo 17")
    submit.submit_script(f"#!/bin/sh\n{line.format(tmp_path)}\n{sizes}\n", Path("study", "a.job"))
    Path(run).mkdir(parents=True)
    run_folder.append_row(Path(run), {"step": 120})
    *rest, row = status.status_rows([Path("study", "a.job")])
    assert (row["run"], row["step"]) == (str(tmp_path / run), 120)
    assert [(item["job"], item["state"]) for item in rest] == [("17_0", "UNKNOWN")] * bool(sizes)


@pytest.mark.parametrize("out", ["afile", "afile/run"])
def test_a_folder_that_cannot_be_made(out, commands):
    Path("afile").touch()
    commands("sbatch", ": > called; echo 17")
    with pytest.raises(UsageError, match=f"--out {out} cannot be made: (File exists|Not a dir)"):
        told("submit", "digits", "--out", out)
    assert not Path("called").exists()


@pytest.mark.parametrize("text", ["", '{"jobs": [17', "[17]", "{}", '{"jobs": [null]}'])
def test_damaged_ids_are_said_before_anything_is_submitted(text, commands):
    commands("sbatch", ": > called; echo 18")
    Path("a").mkdir()
    Path("a", submit.JOBS_FILE).write_text(text)
    with pytest.raises(UsageError, match=r"a/jobs\.json is damaged: expected"):
        told("submit", "digits", "--out", "a")
    assert not Path("called").exists()


INTENDED = {
    "Resources": "waits for nodes",
    "JobArrayTaskLimit": "the sizes of an array run one after the other",
    "PartitionDown": "the partition starts no jobs now",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved": "too few nodes are up",
    "ReqNodeNotAvail,_UnavailableNodes:n1": "nodes are down",
    "QOSMaxNodePerUserLimit": "all jobs together reach a limit of the QOS",
    "QOSMaxNodePerJobLimit": "it asks for more than the QOS allows per job",
    "QOSMinGRES": "it asks for less than the minimum of the QOS",
    "QOSGrpCPURunMinutesLimit": "all jobs together reach a limit of the QOS",
    "QOSGrpCPUMinutesLimit": "the QOS has used up",
    "AssocGrpCPUMinutesLimit": "the account has used up",
    "AssocMaxJobsLimit": "all jobs together reach a limit of the account",
}


@pytest.mark.parametrize("reason", INTENDED)
def test_what_reasons_mean(reason):
    assert explain_reason(reason).startswith(f"{reason}: {INTENDED[reason]}")
    assert explain_reason(f"Un{reason}") == f"Un{reason}"


LASTING = {
    "BadConstraints": True, "PartitionNodeLimit": True, "QOSMaxNodePerJobLimit": True,
    "Resources": False, "Priority": False, "JobHeldUser": False, "QOSGrpCpuLimit": False,
    "ReqNodeNotAvail,_UnavailableNodes:n1": False,
}  # fmt: skip


def test_reasons_that_do_not_pass_by_waiting():
    assert {reason: is_permanent(reason) for reason in LASTING} == LASTING


def test_without_slurm_it_is_told_what_to_do(commands):
    with pytest.raises(UsageError, match=r"the PATH has no sbatch.* `hpctrain slurm render`"):
        submit.submit_script("#!/bin/sh", Path("run"))
    assert not Path("run").exists()


def test_a_folder_that_cannot_be_written(commands):
    """It is found before Slurm is asked; if it goes away later, the job's id is told."""
    commands("sbatch", ": > asked; /bin/rm -r run; echo 17")
    with pytest.raises(UsageError, match="--out /proc cannot be written"):
        submit.submit_script("#!/bin/sh", Path("/proc"))
    assert not Path("asked").exists()
    with pytest.raises(HpctrainError, match="job 17 is submitted, but run cannot keep its id: No"):
        submit.submit_script("#!/bin/sh", Path("run"))


def test_where_nothing_can_be_submitted(commands, monkeypatch):
    commands("sbatch", "echo welcome")
    with pytest.raises(HpctrainError, match=r"did not return the job's id: 'welcome\\n'"):
        submit.submit_script("#!/bin/sh", Path("run"))
    for name, value in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(UsageError, match="this is rank 1 of 4: each would submit a job"):
        submit.submit_script("#!/bin/sh", Path("run"))


MESSAGE = {
    "invalid partition specified: gold": [4],
    "Batch job submission failed: Requested node configuration is not available": [2, 6, 8],
    "Invalid --time specification": [3],
    "Invalid time specification (pos=0): never\nsbatch: error: Invalid --begin specification": [7],
    "CPU count per node can not be satisfied\nRequested node configuration is not available": [6],
    "Batch job submission failed: Invalid node name specified": [8],
    "Batch job submission failed: More processors requested than permitted": [2, 6],
    "Memory specification can not be satisfied": [],
    "unrecognized option '--partition'": [4],
    "Batch job submission failed: Access denied": [],
}
TEXT = "#!/bin/sh\n#SBATCH --nodes=4\n#SBATCH --time=0:30:00\n#SBATCH --partition=gold\n"
TEXT += "#SBATCH --requeue\n#SBATCH --ntasks-per-node=8\n#SBATCH --begin=never\n"
TEXT += "#SBATCH --nodelist=n9\n"


@pytest.mark.parametrize("message", MESSAGE)
def test_refusals_name_the_line(message, commands):
    commands("sbatch", f'echo "sbatch: error: {message}" >&2; exit 1')
    with pytest.raises(UsageError) as error:
        submit.submit_script(TEXT, Path("run"))
    assert f"sbatch: error: {message}" in str(error.value)
    assert [int(n) for n in re.findall(r"line (\d+): #SBATCH", str(error.value))] == MESSAGE[
        message
    ]
    assert not Path("run").exists()


def told(*words: str) -> str:
    """Return what `hpctrain slurm WORDS` prints."""
    result = CliRunner().invoke(hpctrain, ["slurm", *words], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


# words -> what the error says
REFUSED = {
    "--nodes 4 --ranks 10": "--ranks 10 cannot be shared out evenly among --nodes 4",
    "--ranks 4 --tasks-per-node 4": "exclude each other",
    "--sizes 1,two": "--sizes 1,two: expected numbers of nodes",
    "--nodes 2 --servers 1 --engine gossip": "--engine gossip has no servers",
    "--nodes 2 --engine ps-sync --set engine.servers=2": "needs at least 3 ranks, seen 2",
    "--engine gossip": "'gossip' needs at least 2 workers",
    "--engine single --nodes 4": "'single' trains on one rank, but 4 were started",
    "--nodes 3 --set optimizer.batch=2": "2 samples per batch for 3 workers",
    "--sizes 1,2,16 --set wire.reduction=ordered": (
        "a job of 16 ranks on 16 nodes: [wire] blocks is 8, but 16 ranks"
    ),
    "--nodes 2 --engine ps-sync --set engine.backup_workers=1": "backup_workers is 1 of 1",
    "--nodes 2 --engine ps-async --set engine.softsync=2": "at most the 1 workers, seen 2",
    "--option constrain=a100": "did you mean 'constraint'",
    "--set run.epoch=1": "did you mean 'epochs'",
    "--site cpus": "did you mean 'cpu'",
    "--nodes 0": "--nodes: expected 1 or more, seen 0",
    "--sizes=": "--sizes: expected a value, seen ''",
    "--site=": "--site: expected a value, seen ''",
    "--job-name=": "--job-name: expected a value, seen ''",
    "--out=": "--out: expected a value, seen ''",
    "--option account=": "--option account=: expected a value behind the =",
    "--warn-s 70000 --time 2-0": "--warn-s: expected at most 65535, sbatch's limit, seen 70000",
    "--interactive --sizes 1,2": "salloc for nodes and trains nothing: leave out --sizes",
    "--interactive --nodes 2 --servers 1 --server-nodes 1": "leave out --servers, --server-nodes",
    "--interactive --out a --warn-s 60 --max-restarts 1 --engine single --set run.epochs=1": (
        "leave out --out, --warn-s, --max-restarts, --engine, --set"
    ),
    "--interactive --option output=a --option qos=b": "leave out --option output",
    "--nodes 4 --set faults.slow_rank=4 --set faults.slow_factor=2": "less than 4, the number of",
    "--nodes 4 --set faults.slow_rank=1": "needs both of slow_rank and slow_factor",
    "--nodes 2 --servers 1 --set faults.slow_rank=2 --set faults.slow_factor=2": "is a server",
    "--nodes 4 --set wire.algorithm=direct": "direct works inside one node, seen 4",
    "--ranks 200 --nodes 50 --set wire.compression=top-k --set optimizer.batch=200": (
        "with 200 ranks expected less than 1/200, seen 0.01"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_command_lines_are_refused(words):
    with pytest.raises(UsageError) as error:
        told("render", "digits", *words.split())
    assert REFUSED[words] in str(error.value)


def test_names_are_not_shown_as_they_are_where_a_terminal_would_obey_them():
    for words in (("a\x1b[2J",), ("digits", "--out", "a\nb"), ("digits", "--set", "run.name=\r")):
        with pytest.raises(UsageError, match=r"one line without control characters, seen '"):
            told("render", *words)


def test_render_prints_what_was_asked_for():
    text = told("render", "digits", "--sizes", "1,2", "--ranks", "4", "--option", "qos=debug",
                "--option", "exclusive", "--set", "run.epochs=1")  # fmt: skip
    for line in ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH --qos=debug",
                 "#SBATCH --exclusive", "sizes=(1 2)", "#SBATCH --array=0-1%1",
                 "train=(hpctrain train digits --set run.epochs=1)"):  # fmt: skip
        assert line in text.splitlines()
    text = told("render", "digits", "--servers", "1", "--nodes", "2")
    assert "--engine ps-sync --set engine.servers=1 --set engine.placement=dedicated" in text
    text = told("render", "digits", "--interactive", "--time", "1")  # nothing to stop in time
    assert text.splitlines()[-1].startswith("exec salloc")


def test_status_shows_job_and_run(commands):
    commands("sbatch", "echo welcome to the cluster; echo '17;cluster'")
    commands("scontrol", f"echo '{JOB.format(17, 'PENDING', 'BeginTime')}'")
    assert told("submit", "digits", "--out", "runs/a") == "17  runs/a\n"
    assert submit.read_job_ids(Path("runs/a")) == [17]
    assert "run=runs/a\n" in Path("runs/a", submit.SCRIPT_FILE).read_text()
    run_folder.write_recipe(Path("runs/a"), "[run]\nsteps = 360\n")
    row = {"step": 120, "epoch": 10, "train_loss": 0.25, "test_accuracy": None}
    run_folder.append_row(Path("runs/a"), row)
    displayed = told("status")
    for words in ("PENDING", "120 of 360", "0.2500", "runs/a", "17: BeginTime: Slurm waits two"):
        assert words in displayed
    (outcome,) = json.loads(told("status", "--json", "runs/a"))
    assert (outcome["state"], outcome["restarts"], outcome["step"]) == ("PENDING", 1, 120)
    Path("runs/a", run_folder.SLURM_JOB).write_text("17\n")
    run_folder.write_summary(Path("runs/a"), {"status": "failed", "reason": "rank 1: disk full"})
    commands("scontrol", f"echo '{JOB.format(17, 'FAILED', 'NonZeroExitCode')}'")
    assert "17: rank 1: disk full" in told("status", "runs/a")
    run_folder.write_summary(Path("runs/a"), {"status": "stopped", "reason": ""})
    for reason, displayed in (("JobHeldUser", False), ("DependencyNeverSatisfied", True)):
        commands("scontrol", f"echo '{JOB.format(17, 'CANCELLED', reason)}'")
        assert (f"17: {reason}" in told("status", "runs/a")) == displayed


def test_what_a_job_says_goes_where_it_was_asked_to(commands):
    commands("sbatch", 'echo "$@" > said; echo 17')
    told("submit", "digits", "--sizes", "1,2", "--out", "100%")
    assert Path("said").read_text().endswith("/100%%/slurm-%A_%a.out\n")
    told("submit", "digits", "--option", "output=mine.txt", "--out", "b")
    assert Path("said").read_text() == "--parsable\n"


def test_variables_do_not_undo_what_was_asked_for(commands, monkeypatch):
    """For sbatch they go before the lines of a script."""
    own = ("TIMELIMIT", "GPUS_PER_NODE", "QOS", "NO_REQUEUE", "SIGNAL", "PARTITION")
    for name in own:
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    commands("sbatch", "".join(f'echo "$SBATCH_{name}" >> said\n' for name in own) + "echo 17")
    told("submit", "digits", "--gpus-per-node", "2", "--option", "qos=a", "--out", "a")
    assert Path("said").read_text() == "\n\n\n\n\n1\n"


def test_status_asks_the_cluster_that_a_job_was_given_to(commands, monkeypatch):
    commands("sbatch", "echo '17;b'")
    monkeypatch.setenv("SBATCH_CLUSTERS", "b")
    with pytest.raises(
        UsageError, match="would query another cluster: also export SLURM_CLUSTERS=b"
    ):
        told("submit", "digits", "--out", "a")
    assert not Path("a").exists()
    monkeypatch.setenv("SLURM_CLUSTERS", "b")
    assert told("submit", "digits", "--out", "a") == "17  a\n"
    commands("scontrol", "echo Invalid job id >&2; exit 1")
    commands("sacct", 'echo "$@" > asked; echo "17|COMPLETED|00:01:02|n1|0:0"')
    assert "COMPLETED" in told("status", "a")
    assert "--clusters=b" in Path("asked").read_text().split()


def test_status_wants_a_run_that_was_submitted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"runs/ holds no submitted run"):
        told("status")
    with pytest.raises(UsageError, match=r"elsewhere holds no jobs\.json"):
        told("status", "elsewhere")


@pytest.mark.processes
@pytest.mark.either
def test_on_a_real_slurm(slurm, tmp_path, monkeypatch):
    """Options are known, a refusal is shown, a job that waits tells why, one that runs is done."""
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_MPI_TYPE", slurm.srun.rpartition("=")[2])
    monkeypatch.setattr(status, "POLL_INTERVAL_S", 1.0)
    of_sbatch, of_salloc = (
        set(re.findall(r"--([a-z][a-z-]+)", slurm.run(name, "--help")))
        for name in ("sbatch", "salloc")
    )
    assert of_sbatch <= {*sbatch.ALL_OPTIONS}
    alone = of_sbatch - of_salloc
    assert (
        sbatch.SBATCH_ONLY_OPTIONS
        <= alone
        <= sbatch.SBATCH_ONLY_OPTIONS | sbatch.RESERVED_OPTIONS.keys()
    )
    with pytest.raises(
        UsageError, match=r"(?s)invalid partition.*line \d+: #SBATCH --partition=no"
    ):
        told("submit", "digits", "--option", "partition=no-such")
    assert not list(Path("runs").glob("*"))

    message = told("submit", "digits", "--nodes", "4", "--option", "hold", "--out", "held")
    slurm.jobs.append(int(message.split()[0]))  # it does not end by itself
    assert "JobHeldUser: held: scontrol release it" in told("status", "held")

    shell = ["bash", "-c", render(DEFAULT_JOBS["interactive.sh"]), "x", "printenv", "SLURM_PROCID"]
    assert sorted(slurm.run(*shell, cwd=tmp_path).split()) == ["0", "1", "2", "3"]

    short, name = ("--set", "run.epochs=1", "--out"), "it's 100% $HOME"
    told("submit", "digits", "--sizes", "1,2", *short, name)
    told("submit", "digits", "--nodes", "1", "--servers", "1", "--server-nodes", "1", *short, "het")
    *rows, served = json.loads(told("status", "--json", "--wait", "90", name, "het"))
    assert [row["state"] for row in (*rows, served)] == ["COMPLETED"] * 3, rows
    assert [row["run"] for row in rows] == [f"{name}/nodes-1", f"{name}/nodes-2"]
    summaries = [run_folder.read_summary(Path(row["run"])) for row in (*rows, served)]
    assert [item["status"] for item in summaries] == ["done"] * 3
    assert [item["world_size"] for item in summaries] == [1, 2, 2]
    assert summaries[2]["servers"] == 1


@pytest.mark.processes
@pytest.mark.either
def test_who_sees_which_gpus(slurm, tmp_path):
    """Ranks take turns on the nodes, workers see all GPUs of theirs, servers none.

    All see what the site has set, also where jobs begin without variables.
    """
    observed = tmp_path / "seen.sh"
    observed.write_text(
        '#!/bin/sh\necho $SLURM_PROCID $OURS $SLURMD_NODENAME "$CUDA_VISIBLE_DEVICES" >> seen\n'
    )
    observed.chmod(0o755)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/site.env").write_text("export OURS=ours\n")
    shutil.copy(SENT_FILE, tmp_path / "slurm")  # such a job has no PATH with hpctrain
    text = render(Job(nodes=2, gpus_per_node=2, servers=1, max_restarts=0))
    assert "train=(hpctrain" in text
    text = text.replace("train=(hpctrain", "train=(./seen.sh")
    job = slurm.sbatch(text, "--export=NONE", cwd=tmp_path)
    assert slurm.wait(job) == "FAILED"  # no summary says that it is done
    told = sorted(line.split() for line in (tmp_path / "seen").read_text().splitlines())
    assert told == [
        ["0", "ours", "n1", "0,1"], ["1", "ours", "n2", "0,1"], ["2", "ours", "n1", "0,1"],
        ["3", "ours", "n2", "0,1"], ["4", "ours", "n1"],
    ], slurm.told(job)  # fmt: skip
