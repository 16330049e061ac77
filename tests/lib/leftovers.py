"""A guard after each test: threads, processes, descriptors, memory and variables end with it.

The state of this process after a test is compared with the state before it; fixtures of wider scope
may add to it. Threads and processes end a moment after they are told to, so a difference has WAIT_S
to go. If it stays, the test fails by name. On MPI ranks descriptors and shared memory are not
compared: MPI opens them when it first meets a peer. Native threads, as of BLAS, are not seen.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hpctrain.core.names import counted

WAIT_S = 10.0
GARBAGE_S = 0.02  # before garbage is collected, which takes longer than most threads to end
SESSION = "HPCTRAIN_TESTS"  #: carried by all processes below these tests, also by orphans
ROOT = Path(__file__).parents[2]
SHARED_MEMORY = "/dev/shm/"
CREATED: set[str] = set()  #: paths in SHARED_MEMORY, by `open_noted`
_open = os.open
#: Begins of names of threads that may stay, with the reason.
ALLOWED_THREADS = {
    "kernels": "the pool of on_host.py, which serves all tests",
    "tqdm_monitor": "of the progress bars of Hugging Face",
    "asyncio_": "the pool of Zarr's event loop, which grows as it is used",
}
#: Parts of paths whose descriptors and mappings may stay, with the reason.
ALLOWED_PATHS = {
    "/memfd:device": "memory of stand-ins for GPUs: ranks free it together, at the next allocation",
    "/matplotlib/mpl-data/fonts/": "matplotlib keeps the fonts of a process open",
}

#: Names of processes that may stay, with the reason.
ALLOWED_PROCESSES = {"slurmd": "of a node that a test lost: the Slurm of all tests starts it again"}

#: Variables that may come and stay, with the reason.
ALLOWED_VARIABLES = {
    b"PYTEST_CURRENT_TEST": "pytest's own",
    b"TORCHINDUCTOR_CACHE_DIR": "the compiler of PyTorch sets it for its own processes",
}

State = dict[str, set]  #: kind: the things that exist


def threads() -> set[threading.Thread]:
    """Return the threads that run; a Python before 3.13 lists ended ones that nothing joins."""
    running = sys._current_frames()
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith(tuple(ALLOWED_THREADS))
        and not (isinstance(thread, threading._DummyThread) and thread.ident not in running)
    }


def variables() -> set[tuple[bytes, bytes]]:
    """Return the environment as bytes: to decode it after each test takes the longest of all."""
    return {pair for pair in os.environ._data.items() if pair[0] not in ALLOWED_VARIABLES}


def descriptors() -> set[tuple[int, str]]:
    """Return the number and the target of each open descriptor."""
    targets = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this very listing
            path = os.readlink(f"/proc/self/fd/{name}")
            if not _is_allowed(path):
                targets.add((int(name), path))
    return targets


def children() -> set[int]:
    """Return the numbers of all child processes, zombies included."""
    pids: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", "rb") as file:
            pids.update(map(int, file.read().split()))
    return pids


def descendants() -> set[int]:
    """Return all processes below these tests: orphans carry the mark of the session."""
    mark, pids = f"{SESSION}={os.environ.get(SESSION)}".encode(), children()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            is_ours = any((variable + b"/").startswith(mark + b"/") for variable in environ)
            if is_ours and Path(f"/proc/{name}/comm").read_text().strip() not in ALLOWED_PROCESSES:
                pids.add(int(name))
    return pids - {os.getpid()}


def shared_files() -> set[str]:
    """Return the files of shared memory that this process made; jobs beside it have their own."""
    return {path for path in CREATED if os.path.exists(path)}


def open_noted(path: str, flags: int, *args: int, dir_fd: int | None = None) -> int:
    """Call `os.open`, in its place; note a file of shared memory that is made here, not read.

    No audit hook: where a Python before 3.12 runs one for sys.settrace, threads that begin then end
    with "Cannot install a trace function while another trace function is being installed", so that
    under coverage some thread would never begin its work (gh-98257).
    """
    if flags & os.O_CREAT and str(path).startswith(SHARED_MEMORY):
        CREATED.add(str(path))
    return _open(path, flags, *args, dir_fd=dir_fd)


def mappings() -> set[tuple[str, str]]:
    """Return the addresses and paths of the package's shared memory in this process."""
    with open("/proc/self/status", "rb") as file:
        if int(file.read().partition(b"RssShmem:")[2].split(maxsplit=1)[0]) == 0:
            return set()
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    named = {(line[0], line[5]) for line in lines if len(line) > 5}
    ours = re.compile("/(memfd:|dev/shm/).*hpctrain")
    return {pair for pair in named if ours.match(pair[1]) and not _is_allowed(pair[1])}


def _is_allowed(path: str) -> bool:
    return any(part in path for part in ALLOWED_PATHS)


def place(frame_or_code: object) -> str:
    """Return FILE:LINE of a frame or a code object."""
    code = getattr(frame_or_code, "f_code", frame_or_code)
    line = getattr(frame_or_code, "f_lineno", None) or code.co_firstlineno
    path = Path(code.co_filename)
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def describe_threads(things: set[threading.Thread]) -> Iterator[str]:
    """Yield a thread's name, its function, and the place where it waits."""
    frames = sys._current_frames()
    for thread in sorted(things, key=lambda thread: thread.name):
        function = getattr(thread, "_target", None) or type(thread).run
        function = getattr(function, "func", function)  # of a partial
        code = getattr(function, "__code__", None)
        began = f" of {place(code)}" if code else ""
        frame = frames.get(thread.ident)
        yield f"thread {thread.name!r}{began}" + (f", now at {place(frame)}" if frame else "")


def describe_variables(things: set[tuple[bytes, bytes]]) -> Iterator[str]:
    """Yield a variable's value now, and give it back the value before the test."""
    for name in sorted({name for name, _ in things}):
        now = os.environb.pop(name, None)
        yield f"no variable {name.decode()}" if now is None else f"variable {name.decode()}={now!r}"
        os.environb.update({key: value for key, value in things if key == name and value != now})


def describe_descriptors(things: set[tuple[int, str]]) -> Iterator[str]:
    for path, count in sorted(Counter(path for _, path in things).items()):
        yield f"{counted(count, 'descriptor')} of {path}"


def describe_processes(things: set[int]) -> Iterator[str]:
    """Yield a process's command, and kill it: it would take cores from other tests."""
    for pid in sorted(things):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            zombie = process.status() == psutil.STATUS_ZOMBIE  # has no command any more
            yield f"process {pid}: {process.name() if zombie else ' '.join(process.cmdline())}"
            process.kill()


def describe_files(things: set[str]) -> Iterator[str]:
    """Yield a file's path, and remove it."""
    for name in sorted(things):
        yield f"file {name}"
        Path(name).unlink(missing_ok=True)


def describe_mappings(things: set[tuple[str, str]]) -> Iterator[str]:
    for path, count in sorted(Counter(path for _, path in things).items()):
        yield f"{counted(count, 'mapping')} of {path}"


DESCRIBE: dict[str, Callable[[set], Iterator[str]]] = {
    "thread": describe_threads,
    "variable": describe_variables,
    "process": describe_processes,
    "descriptor": describe_descriptors,
    "file": describe_files,
    "mapping": describe_mappings,
}


class Guard:
    """Fails each test that leaves something behind, and names it."""

    def __init__(self, on_mpi: bool) -> None:
        # A session that is started by a test of another session has a longer mark.
        os.environ[SESSION] = f"{os.environ.get(SESSION, '')}/{os.getpid()}"
        self._kinds: dict[str, Callable[[], set]] = {"thread": threads, "variable": variables}
        if not on_mpi:
            self._kinds |= {"descriptor": descriptors, "file": shared_files, "mapping": mappings}
            os.open = open_noted
            os.supports_dir_fd.add(open_noted)  # as of what it calls
        self._before: State = {}
        self._allowed: State = {}  # made by fixtures of wider scope
        self._has_failed = False

    def pytest_collection_finish(self) -> None:
        """Hide the collected rows from the garbage collector, which would visit them each time."""
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._has_failed = False
        if not self._before or "processes" in item.keywords:
            self._before = self._state(item)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._state()
        result = yield
        for kind, things in self._state().items():
            self._allowed[kind] = self._allowed.get(kind, set()) | before[kind] ^ things
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[pytest.TestReport]:
        report = yield
        self._has_failed |= report.failed
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Compare after all fixtures have ended; the frames of a failed test may hold anything."""
        try:
            result = yield
        except BaseException:
            self._before = {}
            raise
        state = self._state(item)
        if self._leftovers(state):
            leftovers = {} if self._has_failed else self._wait(item)
            texts = [text for kind, things in leftovers.items() for text in DESCRIBE[kind](things)]
            state = self._state(item)
            if texts:
                self._before = state
                pytest.fail(f"{item.nodeid} left: {', '.join(texts)}", pytrace=False)
        self._before = state
        return result

    def _state(self, item: pytest.Item | None = None) -> State:
        """Return the things that exist; grandchildren only where a test starts processes."""
        shallow = item is not None and "processes" not in item.keywords
        state = {kind: collect() for kind, collect in self._kinds.items()}
        return state | {"process": children() if shallow else descendants()}

    def _leftovers(self, state: State) -> State:
        result = {}
        for kind, things in state.items():
            before = self._before[kind]
            # A variable that a test has removed is missing in the tests after it.
            new = before ^ things if kind == "variable" else things - before
            if new := new - self._allowed.get(kind, set()):
                result[kind] = new
        return result

    def _wait(self, item: pytest.Item) -> State:
        """Return the leftovers that do not go by themselves, nor as garbage."""
        start_s, nap_s, has_collected = time.monotonic(), 0.001, False
        while leftovers := self._leftovers(self._state(item)):
            waited_s = time.monotonic() - start_s
            if waited_s > WAIT_S or (has_collected and leftovers.keys() == {"variable"}):
                break
            if waited_s > GARBAGE_S and not has_collected:
                gc.collect()
                has_collected = True
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, 0.1)
        return leftovers
