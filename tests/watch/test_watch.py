"""The watch: records survive their rank, and the rank that others wait for is named."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
from limits import clock
from processes import Job

from hpctrain import watch
from hpctrain.watch import (
    Call,
    Snapshot,
    Watch,
    WatchRecord,
    code_location,
    make_report,
    node_file,
    read_records,
    unrecorded,
)
from hpctrain.watch.code_lines import frame_of_each_thread
from hpctrain.watch.ended import EndedRanks
from hpctrain.watch.inside import LastingCalls
from hpctrain.watch.layout import decode
from hpctrain.watch.node_file import Node, NodeFile

# Rank 1 of 2, without MPI. `compute` lies in no library, so its line is the one to be shown.
CHILD = """
import sys, time
from pathlib import Path
from hpctrain.watch import WatchRecord, Watch
from hpctrain.watch.node_file import NodeFile, read_nodes

def compute():
    time.sleep(60)

folder = Path(sys.argv[1])
(node,) = (node for node in read_nodes(folder) if 1 in node.ranks)
file = NodeFile(node.file, len(node.ranks))
record = WatchRecord(1, 2, file.pages(node.ranks.index(1)))
record.step = 6
record.step = 7
entry = record.entry("main")
entry.enter(b"sendrecv", 0, 4096)
if sys.argv[2] == "compute":
    entry.leave()
watch = Watch(record, folder, 0.8, print)
print("ready", flush=True)
compute()
"""
COMPUTE_LINE = 1 + CHILD.splitlines().index("    time.sleep(60)")


@pytest.fixture
def child(start: Callable, tmp_path: Path) -> Iterator[Callable]:
    """Return what starts rank 1, whose record lies in a folder of its own."""

    script = tmp_path / "child.py"
    script.write_text(CHILD)  # once: a child that starts may be reading it

    folders = []

    def child(does: str, *, nodes: int = 1) -> tuple[Job, Path]:
        folder = Path(mkdtemp(dir=tmp_path))
        folders.append(folder)
        make_nodes(folder, [[0, 1]] if nodes == 1 else [[0], [1]])
        return start(script, folder, does), folder

    yield child
    for folder in folders:
        node_file.remove_earlier(folder)


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path) -> Iterator[None]:
    yield
    node_file.remove_earlier(tmp_path)


def make_nodes(folder: Path, ranks: list[list[int]]) -> list[Node]:
    """Make the files of a job whose nodes have these ranks."""
    token = uuid.uuid4().hex
    nodes = [
        Node(f"n{number}", node_file.create(token, of_node[0], len(of_node)), tuple(of_node))
        for number, of_node in enumerate(ranks)
    ]
    node_file.publish(folder, token, nodes)
    return nodes


def record_of(node: Node, rank: int, size: int) -> WatchRecord:
    """Return the record of a rank of `node`, in its file."""
    file = NodeFile(node.file, len(node.ranks))
    return WatchRecord(rank, size, file.pages(node.ranks.index(rank)))


def settle(job: Job, folder: Path) -> None:
    """Wait until the record of rank 1 tells that it is in `compute`."""
    job.until("ready")
    limit = clock() + 60
    while "compute" not in read_records(folder)[1].line and clock() < limit:
        time.sleep(0.05)


@contextmanager
def watched(
    folder: Path | None, timeout_s: float, factor: float = 10
) -> Iterator[tuple[WatchRecord, Queue[str]]]:
    """Give rank 0 of 2 a record, past its first step, and a watch that reports into a queue."""
    nodes = node_file.read_nodes(folder) if folder else []
    record = record_of(nodes[0], 0, 2) if nodes else WatchRecord(0, 2)
    reports: Queue[str] = Queue()
    guard = Watch(record, folder, timeout_s, lambda report: reports.put(report.text), factor)
    try:
        yield record, reports
    finally:
        guard.stop()
        record.close()


def hangs(reports: Queue[str], within_s: float) -> bool:
    """Return whether a report comes in time."""
    try:
        return bool(reports.get(timeout=within_s))
    except Empty:
        return False


# What rank 1 does, what is sent to it -> what is said of it, and of its last call
SILENT = [
    ("compute", signal.SIGSTOP, "stopped or dead", "last operation"),
    ("compute", signal.SIGKILL, "stopped or dead", "last operation"),
    ("wait", signal.SIGSTOP, "stopped or dead", "in"),
    ("compute", None, "alive, computing", "last operation"),
    ("wait", None, "waiting", "in"),
]


def test_the_rank_that_does_not_answer_is_named(child: Callable) -> None:
    """All five side by side: most of it is waiting."""
    jobs = [child(row[0]) for row in SILENT]
    with ThreadPoolExecutor(len(SILENT)) as pool:
        list(pool.map(is_named, jobs, SILENT))


def is_named(started: tuple[Job, Path], row: tuple) -> None:
    (job, folder), (_, sent, judgement, call) = started, row
    settle(job, folder)
    if sent is not None:
        job.process.send_signal(sent)
    with watched(folder, 0.8) as (record, reports):
        record.step = 6
        record.step = 7
        record.entry("main").enter(b"recv", 1, 512)
        text = reports.get(timeout=60)
        assert not hangs(reports, 1.0)  # once
    remote = next(line for line in text.splitlines() if line.startswith("  rank 1 on "))
    assert f"(pid {job.process.pid}), step 7, at child.py:{COMPUTE_LINE} compute: " in remote
    assert f"{judgement}; {call} sendrecv with rank 0, 4096 bytes, begun " in remote
    assert "waiting; in recv with rank 1, 512 bytes, begun " in text
    headings = text.splitlines()[1::2]
    assert headings[0] == (
        "all ranks wait: mismatched calls" if judgement == "waiting" else "the job waits for:"
    )
    assert judgement == "waiting" or text.splitlines()[2] == remote


def test_a_record_survives_kill_9(child: Callable) -> None:
    jobs = {does: child(does) for does in ("compute", "wait")}
    for does, (job, folder) in jobs.items():
        settle(job, folder)
        job.process.kill()
        job.finish()
        observed = read_records(folder)[1]
        (call,) = observed.calls
        assert (observed.rank, observed.size, observed.pid, observed.step) == (
            1,
            2,
            job.process.pid,
            7,
        )
        assert call == Call(
            "main", "sendrecv", 7, 0, 4096, call.start_s, does == "wait", call.end_s
        )
        assert (call.end_s is None) == (does == "wait")
        assert (
            0 <= time.time() - call.start_s < 3600 and 0 <= time.time() - observed.heartbeat < 3600
        )


# Steps begun, the limit, its factor in the first step -> whether a call then counts as hung
LIMITS = [
    ([], 0.2, 100, False),
    ([0], 0.2, 100, False),
    ([0, 1], 0.2, 100, True),
    ([1200], 0.2, 100, False),  # resumed: that first step compiles as well
    ([1200, 1201], 0.2, 100, True),
    ([0], 0.2, 2, True),
    ([0, 1], 60, 1, False),
]


def test_limit() -> None:
    def reported(row: tuple) -> bool:
        steps, timeout_s, factor, expected = row
        with watched(None, timeout_s, factor) as (record, reports):
            for record.step in steps:
                pass
            record.entry("main").enter(b"recv", 1, 512)
            return hangs(reports, 60 if expected else 1.0)

    with ThreadPoolExecutor(len(LIMITS)) as pool:
        assert list(pool.map(reported, LIMITS)) == [expected for *_, expected in LIMITS]


def test_a_new_call_starts_a_new_wait() -> None:
    with watched(None, 2.0, 1) as (record, reports):
        entry = record.entry("main")
        for _ in range(120):  # 2.4 s, almost all of it inside of a call
            entry.enter(b"recv", 1, 512)
            time.sleep(0.02)
        assert reports.empty()
        entry.leave()
        assert not hangs(reports, 1.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "jumps", ["hpctrain.watch.deadline.time.monotonic", "hpctrain.watch.deadline.clock"]
)
def test_a_job_that_slept_does_not_wake_up_hung(
    monkeypatch: pytest.MonkeyPatch, jumps: str
) -> None:
    real = time.monotonic if jumps.endswith("monotonic") else time.time
    with watched(None, 6.0, 1) as (record, reports):
        record.entry("main").enter(b"recv", 1, 512)
        time.sleep(0.7)
        monkeypatch.setattr(jumps, lambda: real() + 1000)
        assert not hangs(reports, 0.6)
        assert hangs(reports, 60)


NOW = 1000.0
WAIT = Call("main", "recv", 5, 0, 64, 990.0, True)
COMPLETED = replace(WAIT, operation="send", start_s=980.0, is_waiting=False)
COMM = Call("comm", "barrier", 4, -1, 0, 970.0, True)
WAITING = Snapshot(0, 3, 70, "n0", 999.5, 5, "ring.py:57 ring", (WAIT,))
COMPUTING = replace(WAITING, calls=(COMPLETED,))
STOPPED = replace(WAITING, heartbeat=994.0)


def ranks(*snapshots: Snapshot | None) -> list[Snapshot]:
    """Return them as ranks 0, 1, ... of one job; None is a rank without a record."""
    size = len(snapshots)
    return [replace(s, rank=i, size=size) for i, s in enumerate(snapshots) if s is not None]


AT = "on n0 (pid 70), step 5, at ring.py:57 ring"
RECV = "recv with rank 0, 64 bytes, begun 10.0 s ago, step 5, thread main"
SEND = "send with rank 0, 64 bytes, begun 20.0 s ago, step 5, thread main"
ALL = "barrier with all ranks, 0 bytes, begun 30.0 s ago, step 4, thread comm"
ALIVE = "heartbeat 0.5 s ago: alive, computing"
DEAD = "no heartbeat for 6 s: stopped or dead"


@pytest.mark.parametrize(
    ("snapshots", "body"),
    [
        (
            ranks(WAITING, COMPUTING),
            [
                "the job waits for:",
                f"  rank 1 {AT}: {ALIVE}; last operation {SEND}",
                "these wait:",
                f"  rank 0 {AT}: waiting; in {RECV}",
            ],
        ),
        (
            ranks(COMPUTING, None, STOPPED, replace(STOPPED, calls=()), None, WAITING),
            [
                "the job waits for:",
                f"  rank 2 {AT}: {DEAD}; in {RECV}",
                f"  rank 3 {AT}: {DEAD}; last operation none",
                "  rank 1: left no record: see its output",
                "  rank 4: left no record: see its output",
                f"  rank 0 {AT}: {ALIVE}; last operation {SEND}",
                "these wait:",
                f"  rank 5 {AT}: waiting; in {RECV}",
            ],
        ),
        (
            ranks(WAITING, replace(WAITING, calls=(COMPLETED, COMM))),
            [
                "all ranks wait: mismatched calls",
                f"  rank 0 {AT}: waiting; in {RECV}",
                f"  rank 1 {AT}: waiting; in {ALL}",
            ],
        ),
        (
            ranks(replace(WAITING, calls=(WAIT, COMM))),
            ["all ranks wait: mismatched calls", f"  rank 0 {AT}: waiting; in {RECV}, {ALL}"],
        ),
    ],
)
def test_report(snapshots: list[Snapshot], body: list[str]) -> None:
    lines = make_report(snapshots, NOW, 300).text.splitlines()
    assert lines[0] == "hung: a call has waited for longer than 300 s (run.timeout_s)"
    assert lines[1 : len(body) + 1] == body
    assert lines[len(body) + 1].startswith("what to do: ")
    assert "--resume" in lines[-2]
    assert re.match(r"\d of \d ranks? waits? at ", lines[-1])


def test_a_script_has_no_steps() -> None:
    text = make_report(
        ranks(WAITING, replace(COMPUTING, has_ended=True)), NOW, 300, has_folder=False
    ).text
    assert "step" not in text and "  rank 1 on n0 (pid 70): has ended its script\n" in text


ENDED = replace(WAITING, has_ended=True)
#: at a beat each: the ranks of the node; the beat at which rank 0 reports, if it does
ENDS = {
    "one waits": ([(WAITING, ENDED)] * 8, 6),
    "a rank before it reports": ([(ENDED, WAITING)] * 8, None),
    "a rank computes": ([(WAITING, ENDED, COMPUTING)] * 8, None),
    "a rank is stopped": ([(WAITING, ENDED, STOPPED)] * 8, None),
    "none has ended": ([(WAITING, WAITING)] * 8, None),
    "all have ended": ([(ENDED, ENDED)] * 8, None),
    "the wait changes": (
        [(WAITING, ENDED)] * 4 + [(COMPUTING, ENDED)] + [(WAITING, ENDED)] * 7,
        11,
    ),
    "a long array": ([(replace(WAITING, calls=(replace(WAIT, nbytes=3 * 10**8),)), ENDED)] * 12, 8),
}


@pytest.mark.parametrize("case", ENDS)
def test_waits_for_ranks_that_have_ended(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.watch.ended.clock", lambda: NOW)
    beats, expected = ENDS[case]
    ended_ranks = EndedRanks()
    reports = [ended_ranks.check(ranks(*beat), 0, at) for at, beat in enumerate(beats)]
    assert [at for at, report in enumerate(reports) if report] == [expected] * (
        expected is not None
    )
    if expected is not None:
        assert reports[expected].text.startswith(
            "hung: rank 1 has ended its script, rank 0 waits in recv (ring.py:57): do ranks have "
        )


GRADIENTS = replace(WAIT, thread="sync", operation="ht.torch.sync backward", peer=-1)
BACKWARD = replace(WAITING, calls=(GRADIENTS, replace(WAIT, thread="wire")))
CALLS = replace(WAITING, calls=(replace(WAIT, thread="main"),))
TAKES_BUFFERS = replace(WAITING, calls=(replace(WAIT, thread="sync"),))
#: the ranks of the node at eight beats; the ranks that the report names first, if there is one
MAIN_WAITS = {
    "gradients and another call": ([BACKWARD, CALLS], (0, 1)),
    "gradients and buffers": ([TAKES_BUFFERS, BACKWARD, BACKWARD], (0, 1)),
    "buffers and another call": ([TAKES_BUFFERS, TAKES_BUFFERS, CALLS], (0, 2)),
    "gradients": ([BACKWARD, BACKWARD], None),
    "another call": ([CALLS, CALLS], None),
    "a rank computes": ([BACKWARD, CALLS, COMPUTING], None),
    "a main thread computes": ([BACKWARD, replace(CALLS, calls=(COMM,))], None),
}


@pytest.mark.parametrize("case", MAIN_WAITS)
def test_main_threads_that_wait_in_different_calls(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.watch.ended.clock", lambda: NOW)
    snapshots, named = MAIN_WAITS[case]
    ended_ranks = EndedRanks()
    reports = [ended_ranks.check(ranks(*snapshots), 0, at) for at in range(8)]
    texts = [(at, report.text) for at, report in enumerate(reports) if report]
    assert [at for at, _ in texts] == ([] if named is None else [6])
    if named is not None:
        first, second = named
        assert re.match(
            rf"hung: rank {first} waits in .* \(ring.py:57\), rank {second} in .*: do ranks have "
            "different numbers of batches", texts[0][1],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("timeout_s", "age_s", "dead"),
    [(300, 2.9, False), (300, 3.1, True), (1, 0.7, False), (1, 0.8, True)],
)
def test_silence_is_three_heartbeats(timeout_s: float, age_s: float, dead: bool) -> None:
    snapshot = replace(COMPUTING, size=1, heartbeat=NOW - age_s)
    assert ("stopped or dead;" in make_report([snapshot], NOW, timeout_s).text) == dead


def test_torn_records_are_read_as_something() -> None:
    record, noise = WatchRecord(0, 2), random.Random(0)
    for index in range(watch.MAX_ENTRIES):
        record.entry(f"thread {index}").enter(b"recv", 1, index)
    raw = record.node_bytes()
    for start in [noise.randrange(8, 1500) for _ in range(200)] + [*range(4096, 4160)] * 4:
        length = noise.randrange(1, 400)
        torn = raw[:start] + noise.randbytes(length) + raw[start + length :]
        # A size of 2^31 is no torn read: it never changes.
        snapshot = replace(decode(torn, history=True), size=2)
        report = make_report([snapshot], NOW, 300)
        assert report.text.startswith("hung: ")
        json.dumps(report.facts, allow_nan=False)


@pytest.mark.parametrize("raw", [b"", b"hpcwtch2", bytes(1 << 17), b"hpcwtch1" + bytes(1 << 17)])
def test_what_is_no_record_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a record"):
        decode(raw)
    assert read_records(tmp_path) == {}
    (node,) = make_nodes(tmp_path, [[3]])
    Path(node.file).write_bytes(raw)
    assert node_file.collect(tmp_path) == [] and read_records(tmp_path) == {}


def make_hostile(path: Path, kind: str) -> None:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2 << 30)


@pytest.mark.parametrize("kind", ["FIFO", "link", "sparse"])
def test_strange_files_in_the_memory_of_a_node_are_not_read(tmp_path: Path, kind: str):
    path = tmp_path / f"hpctrain-watch-{'0' * 32}-00000"
    make_hostile(path, kind)
    tracemalloc.start()
    node_file._remove_abandoned(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert os.path.lexists(path) and peak < 1 << 20


@pytest.mark.parametrize("target", ["watch", "watch/.nodes.json"])
def test_records_are_published_in_the_folder_of_the_run_alone(tmp_path: Path, target: str):
    outside, link = tmp_path / "outside", tmp_path / "run" / target
    outside.mkdir()
    victim = outside / "node-00000"
    victim.write_text("mine")
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if target == "watch" else victim)
    with suppress(OSError):
        node_file.publish(tmp_path / "run" / "watch", "0" * 32, [])
    assert [path.read_text() for path in outside.iterdir()] == ["mine"]


@pytest.mark.parametrize("folder", [True, False])
def test_record_holds_what_was_entered(tmp_path: Path, folder: bool) -> None:
    (node,) = make_nodes(tmp_path, [[11, 12]])
    record = record_of(node, 12, 16) if folder else WatchRecord(12, 16)
    record.step = 3
    names = ["main", "comm", *map(str, range(watch.MAX_ENTRIES - 2))]
    for index, name in enumerate(names):
        record.entry(name).enter(b"operation " * 3, -1, 2**40 + index)
    record.step = 4
    record.entry("comm").leave()
    record.write_heartbeat()
    observed = read_records(tmp_path)[12] if folder else record.snapshot()
    assert (observed.rank, observed.size, observed.step, observed.line.split()[-1]) == (
        12, 16, 4, "test_record_holds_what_was_entered",
    )  # fmt: skip
    assert [
        (c.thread, c.operation, c.step, c.peer, c.nbytes, c.is_waiting) for c in observed.calls
    ] == [
        (name, ("operation " * 3)[:24], 3, -1, 2**40 + index, name != "comm")
        for index, name in enumerate(names)
    ]
    with pytest.raises(ValueError, match="rank 12: one more"):
        record.entry("one more")
    record.close()
    record.close()
    assert read_records(tmp_path) == {}
    NodeFile(node.file, 2).remove_if_closed()
    assert not Path(node.file).exists()


#: What a thread does (E enters, L leaves), and the operations in its record: number, whether over
RINGS = {
    "none": ("", []),
    "one": ("EL", [(0, True)]),
    "waits": ("ELE", [(0, True), (1, False)]),
    "an exception in a call": ("EEL", [(0, False), (1, True)]),
    "64": ("EL" * 64, [(i, True) for i in range(64)]),
    "65": ("EL" * 64 + "E", [*((i, True) for i in range(1, 64)), (64, False)]),
    "many": ("EL" * 200, [(i, True) for i in range(136, 200)]),
    "leaves first": ("LEL", [(0, True)]),
}


@pytest.mark.parametrize("case", RINGS)
def test_the_last_operations_of_a_thread(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order also where the wall clock is set back; only the last may be one that waits."""
    calls, expected = RINGS[case]
    record, number = WatchRecord(0, 1), 0
    entry = record.entry("main")
    for call in calls:
        if call == "E":
            record.step = number
            entry.enter(b"send", 1, 10 * number)
            number += 1
        else:
            entry.leave()
        monkeypatch.setattr("hpctrain.watch.record.clock", lambda n=number: 1e9 - 10 * n)
    record.write_heartbeat()
    (observed,) = record.node_snapshots(history=True)
    assert [(c.step, c.end_s is not None) for c in observed.history] == expected
    assert [c.nbytes for c in observed.history] == [10 * step for step, _ in expected]
    assert observed.calls == observed.history[-1:]
    assert [c.is_waiting for c in observed.history] == [
        case in ("waits", "65") and c is observed.history[-1] for c in observed.history
    ]


PACKAGE = str(Path(watch.__file__).parents[1])
LIBRARY = str(Path(threading.__file__).parent)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/home/me/user.py"], "user.py:1 call"),
        (["<stdin>"], "<stdin>:1 call"),
        (
            ["user.py", f"{PACKAGE}/collectives/ring.py", f"{PACKAGE}/transport/mpi/link.py"],
            "user.py:1 call, ring.py:1 call",
        ),
        (
            ["user.py", f"{PACKAGE}/training/trainer.py", f"{PACKAGE}/watch/deadline.py"],
            "user.py:1 call, trainer.py:1 call",
        ),
        (["user.py", "/venv/lib/site-packages/numpy/linalg.py"], "user.py:1 call"),
        (
            ["user.py", "/usr/lib/python3/dist-packages/a.py", f"{LIBRARY}/threading.py"],
            "user.py:1 call",
        ),
        (["user.py", "<frozen importlib._bootstrap>"], "user.py:1 call"),
        (["r\u00e9seau\u4e00\U0001f600.py"], "r\u00e9seau\u4e00\U0001f600.py:1 call"),
    ],
)
def test_code_location(files: list[str], expected: str) -> None:
    # No function of this file, or its line would be the user's.
    call: Callable[[], str] = partial(code_location, threading.get_ident())
    for file in reversed(files):
        scope: dict[str, Callable[[], str]] = {"inner": call}
        exec(compile("def call(): return inner()", file, "exec"), scope)
        call = scope["call"]
    assert call() == expected


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_frames_are_made(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or CPython 3.11.0 to 3.11.8 may stop for good; afterwards all is as it was."""
    monkeypatch.setattr(sys, "_current_frames", lambda: {0: gc.isenabled()})
    if not collects:
        gc.disable()
    try:
        assert frame_of_each_thread() == {0: False}
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_where_of_a_thread_that_ended() -> None:
    created: Queue[WatchRecord] = Queue()
    thread = threading.Thread(target=lambda: created.put(WatchRecord(0, 1)))
    thread.start()
    thread.join(60)
    record = created.get(timeout=60)
    record.write_heartbeat()
    assert record.snapshot().line == "(its main thread has ended)"


def test_a_heartbeat_needs_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    record = WatchRecord(0, 1)
    monkeypatch.setattr(os, "memfd_create", refuse)
    record.write_heartbeat()
    assert record.snapshot().line == "(unknown: Too many open files)"


def test_where_of_the_oldest_of_many_threads() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(100)]
    for thread in threads:
        thread.start()
    try:
        assert code_location(threading.main_thread().ident) == "(one of over 100 threads)"
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_one_rank_speaks(tmp_path: Path) -> None:
    won: Queue[bool] = Queue()
    gate, report = threading.Barrier(8, timeout=60), make_report(ranks(WAITING), NOW, 300)

    def rank() -> None:
        gate.wait()
        won.put(watch.write_report(tmp_path, report))

    for _ in range(2):  # rank 0 of the next job takes the old report away
        for _ in range(8):
            threading.Thread(target=rank, daemon=True).start()
        assert sum(won.get(timeout=60) for _ in range(8)) == 1
        assert (tmp_path / watch.REPORT_NAME).read_text() == report.text
        assert json.loads((tmp_path / watch.FACTS_NAME).read_text()) == report.facts
        make_nodes(tmp_path, [])
        assert not (tmp_path / watch.REPORT_NAME).exists()
        assert not (tmp_path / watch.FACTS_NAME).exists()
    assert watch.write_report(tmp_path / "lost", report)


WAITS = """
import sys, threading
from pathlib import Path
from hpctrain import watch

def waits_elsewhere():
    over.wait(60)

def asks():
    watch.dump_stacks(Path(sys.argv[1]))

over = threading.Event()
thread = threading.Thread(target=waits_elsewhere)
thread.start()
asks()
over.set()
thread.join(10)
"""


@pytest.mark.parametrize("folder", [".", "lost"])
def test_stacks_of_all_threads(tmp_path: Path, folder: str) -> None:
    """In a process of its own: of more than 100 threads, which tests leave, only some are shown."""
    path = tmp_path / folder / "stacks"
    completed = subprocess.run([sys.executable, "-c", WAITS, path], capture_output=True, text=True)
    text = path.read_text() if folder == "." else completed.stderr
    assert "in asks" in text and "in waits_elsewhere" in text, completed.stderr


def test_a_call_that_notes_nothing_is_noted_by_the_watch() -> None:
    """Once it lasts for two looks; its note goes when it is over, but no later call's."""
    record, insides = WatchRecord(0, 2), LastingCalls()
    link = SimpleNamespace(entry=record.entry("main"))
    gates = [threading.Lock(), threading.Lock()]

    def work() -> None:
        for gate in gates:
            unrecorded(partial(gate.acquire), link, b"MPI_Allreduce", 12)()
        link.entry.enter(b"barrier", -1, 0)

    for gate in gates:
        gate.acquire()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for gate in gates:
        waits: tuple[Call, ...] | list[Call] = []
        for _ in range(60_000):
            if waits := record.snapshot().waiting_calls:
                break
            insides.scan()
            time.sleep(0.001)  # the thread comes to the call when it may run
        assert [(c.operation, c.peer, c.nbytes) for c in waits] == [("MPI_Allreduce", -1, 12)]
        insides.scan()
        assert record.snapshot().waiting_calls == waits
        gate.release()
        while insides._notes:
            insides.scan()
            assert len(record.snapshot().waiting_calls) <= 1
            time.sleep(0.001)
    thread.join(60)
    insides.scan()
    assert [call.operation for call in record.snapshot().waiting_calls] == ["barrier"]
