"""`python -m hpctrain.torch` as `python`: arguments, variables and ends; no PyTorch is imported."""

from __future__ import annotations

import json
import re
import sys

import pytest

MODULE = ("-m", "hpctrain.torch")
LAUNCH = ("-m", "hpctrain", "launch", "-n", "2", "--")
NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip

PROBE = """
import json, os, sys, __main__
argv = [os.path.abspath(sys.argv[0]), *sys.argv[1:]]
print(json.dumps([argv, sys.path[:1], __name__, getattr(__main__, "__file__", ""),
                  __main__.__dict__ is globals(), "torch" in sys.modules]))
"""
FORMS = {
    "script": ("folder/probe.py", "--rank", "-m"),
    "module": ("-m", "folder.probe", "x", "-c"),
    "code": ("-c", PROBE, "--help"),
    "folder": ("package", "x"),
}


@pytest.mark.either
@pytest.mark.parametrize("form", FORMS)
def test_a_script_sees_what_python_gives_it(start, tmp_path, form):
    for folder, name in (("folder", "probe.py"), ("package", "__main__.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(PROBE)
    plain, under_mpi = (
        json.loads(start(*words, *FORMS[form]).finish().stdout) for words in ((), MODULE)
    )
    if form == "code":
        plain[1], under_mpi[1] = [], []  # "" or the folder's path
    assert under_mpi == plain


VARIABLES = f"import json, os; print(json.dumps({{n: os.environ.get(n) for n in {NAMES}}}))"
STALE = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "no.such.host", "MASTER_PORT": "1"}
STALE |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize("stale", [{}, STALE])
@pytest.mark.parametrize(
    ("words", "ranks"), [((*MODULE, "-c"), 2), ((*LAUNCH, sys.executable, "-c"), None)]
)
def test_variables_are_set_before_the_script(start, words, ranks, stale):
    completed = start(*words, VARIABLES, ranks=ranks, env=stale).finish()
    assert completed.returncode == 0, completed.stderr
    objects = re.findall("{[^}]*}", completed.stdout)  # two may be on one line
    first, second = sorted(map(json.loads, objects), key=lambda v: v["RANK"])
    port = first.pop("MASTER_PORT")
    assert int(port) > 1023 and second.pop("MASTER_PORT") == port
    for rank, values in enumerate((first, second)):
        assert values == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": None,
        }


@pytest.mark.either
def test_other_programs_start_as_they_are(start):
    completed = start(
        *LAUNCH, "sh", "-c", "echo ${RANK-unset}", env={"OMP_NUM_THREADS": "1"}
    ).finish()
    assert completed.stdout.split() == ["unset", "unset"]


END = """
import os, sys, time
def hook(*_):
    raise OSError("in the hook")
if {condition}:
    {end}
time.sleep({rest_s})
"""
#: MPI_Abort that does not return, and holds the interpreter's lock
STUCK_ABORT = (
    "import ctypes; from types import SimpleNamespace; from hpctrain.transport.mpi import startup; "
    "world = SimpleNamespace(Abort=lambda code: ctypes.PyDLL(None).sleep(60)); "
    "startup.MPI = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False, "
    "COMM_WORLD=world); raise ValueError('planted')"
)
#: the end, what the others do -> exit code of the job, and what is printed
ENDS = {
    "error": ("raise ValueError('planted')", "1", 60, 1, "] ValueError: planted"),
    "stuck abort": (STUCK_ABORT, "1", 60, 1, "] ValueError: planted"),
    "exit": ("sys.exit(7)", "1", 60, 7, ""),
    "text": ("sys.exit('planted')", "1", 60, 1, "planted"),
    "hook": ("sys.excepthook = hook; raise ValueError", "1", 60, 1, "in the hook"),
    "interrupt": ("raise KeyboardInterrupt", "1", 60, 1, "KeyboardInterrupt"),
    "late": ("sys.exit(0)", "1", 1, 0, ""),
    "agreed": ("sys.exit(3)", "01", 0, 3, ""),
}
FULL_ENDS = ("text", "hook", "interrupt")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * (case in FULL_ENDS)) for case in ENDS],
)
def test_the_end_of_one_rank_ends_the_job(start, case):
    end, ranks, rest_s, exit_code, message = ENDS[case]
    code = END.format(condition=f"os.environ['RANK'] in {ranks!r}", end=end, rest_s=rest_s)
    completed = start(*MODULE, "-c", code, ranks=2).finish(timeout=40)  # less than the others' rest
    assert completed.returncode == exit_code, completed.stderr
    assert message in completed.stderr
    assert "runpy" not in completed.stderr


#: arguments -> exit code, and what is printed
REFUSALS = [
    (("--help",), 0, "mpirun -n 4 python -m hpctrain.torch train.py"),
    ((), 2, "usage: python -m hpctrain.torch SCRIPT"),
    (("no.py",), 2, "hpctrain: no script 'no.py' in "),
    (("-m",), 2, "hpctrain: -m needs an argument"),
    (("--nproc-per-node", "2", "x.py"), 2, "hpctrain: unknown option --nproc-per-node"),
]


@pytest.mark.either
@pytest.mark.parametrize(("words", "exit_code", "message"), REFUSALS)
def test_wrong_arguments_are_refused_before_mpi(start, words, exit_code, message):
    completed = start(*MODULE, *words).finish()
    assert (completed.returncode, message in completed.stdout + completed.stderr) == (
        exit_code,
        True,
    )
    assert "Traceback" not in completed.stderr
