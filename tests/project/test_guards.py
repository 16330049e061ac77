"""What one function does for the whole package is done nowhere else in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hpctrain

ROOT = Path(hpctrain.__file__).parent


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (file, name of the function, call) of each call in the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


#: Output beside core/printing.py and the console of core/fitted_table.py, and why it is none.
OUTPUT = {
    ("cluster/guard.py", "print"): "runs without the package",
    ("cluster/slurm/batch_job.py", "print"): "runs without the package",
    ("cluster/supervision.py", "os.write"): "bytes of the ranks, to their own terminal",
    ("core/rank_marks.py", "print"): "runs without the package",
    ("core/signals.py", "os.write"): "while the main thread may hold the lock of stderr",
}


def test_text_is_printed_by_one_function():
    """Another would obey escape sequences and markup in recipes, host names and files."""
    printing = set()
    for file, name, call in calls():
        words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        to_terminal = ast.unparse(call.args[0]) in ("1", "2") if call.args else False
        if (
            name in ("print", "click.echo", "click.secho", "Console", "Text.from_markup")
            or name.startswith(("sys.stdout.write", "sys.stderr.write"))
            or (name == "os.write" and to_terminal)
            or (name == "TextColumn" and words.get("markup") != "False")
            or (name.endswith("StreamHandler") and file not in ("cli.py", "core/progress.py"))
        ):
            printing.add((file, name))
    assert printing == OUTPUT.keys()


OPENING = re.compile(
    r"open|os\.(open|fdopen)|tempfile\.mk.+|shutil\.copy.*|np\.(load|loadtxt|save.*|memmap|fromfile)"
    r"|.*\.(open|read_text|read_bytes|write_text|write_bytes|touch)"
)
#: no files, files of the kernel and of the package, and calls of the one function
OTHERS = re.compile(
    r".*(/proc|PROC|MAPS|_KERNEL|os\.devnull|memfd_create|note_descriptor|resources\.files)"
    r"|(archive|files|opening|pci|self\.sealer|super\(\))\."
)
KERNEL, PACKAGES = "in /proc and /sys", "in installed packages"
MEMORY = "memory without a name of another process of the job, /proc/PID/fd"
NAMED, NEW = "a user names it", "has a random name, and is new"
#: Files that open others without core/opening.py, and which.
OPENED = {
    "tools/bench/base.py": NAMED, "cluster/program.py": NAMED, "commands/_options.py": NAMED,
    "commands/doctor.py": NAMED, "data/text.py": NAMED,
    "tools/doctor/job/examine.py": NAMED,
    "tuning/table.py": PACKAGES,
    "cluster/slurm/submit.py": PACKAGES,
    "cluster/launch.py": KERNEL, "hardware/pci.py": KERNEL,
    "training/stragglers.py": KERNEL, "transport/placement/core_binding.py": KERNEL,
    "transport/shared_memory/dev_shm.py": KERNEL, "watch/liveness/channel.py": KERNEL,
    "core/run_files/run_folder.py": MEMORY, "transport/mpi/segments.py": MEMORY,
    "training/loggers/to_mlflow.py": "a copy of a file in a new folder, renamed into place",
    "tools/doctor/job/output_folder.py": NEW, "transport/shared_memory/host.py": NEW,
    "checkpoint/parts.py": "a folder, to write it through to the disk",
    "cluster/guard.py": "runs without the package",
    "cluster/slurm/batch_job.py": "runs without the package",
    "cluster/netlab/namespaces.py": "in a file system of its own",
    "core/opening.py": "the one function", "core/files.py": "calls it",
}  # fmt: skip


def test_files_are_opened_by_one_function():
    """Another would follow links out of a run's folder, and wait for FIFOs there."""
    opening = {
        file
        for file, name, call in calls()
        if OPENING.fullmatch(name) and not OTHERS.match(ast.unparse(call))
    }
    # A campaign of faults reads and writes the folder of its own runs.
    assert {file for file in opening if not file.startswith("tools/chaos/")} == OPENED.keys()
