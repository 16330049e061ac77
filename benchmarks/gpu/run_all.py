"""Everything that a machine with one GPU or more is to show, in one command of under ten minutes.

    python benchmarks/gpu/run_all.py [--ranks 2,4] [--only doctor,p2p] [--out FOLDER] [--small]

Checks every path that GPU memory takes here, compares training on GPUs with training on a CPU,
and measures; several ranks share a GPU where there are more of them. Each piece is a command of its
own, ended at its time limit, so that one that fails leaves the others. JSON and plots go to
benchmarks/results/gpu (`--out`), what became of each piece into run_all.json there; the claims of
all pieces end as a table. `--small`: sizes that prove nothing but that all of it runs.

Ends with 0, with 1 if a piece failed or a claim does not hold, and with 2 where there is no GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from _common import RESULTS
from _kept import OUTCOMES
from equal import told as reason

from hpctrain.core.errors import UsageError
from hpctrain.transport.device import gpus

HERE = Path(__file__).parent
TOTAL_S, GRACE_S = 585.0, 5.0
_LAST_WORDS = 400


@dataclass(frozen=True)
class Piece:
    """A command, the seconds it may take, which of its exit codes are good, where its JSON goes."""

    name: str
    command: Sequence[str]
    limit_s: float
    good: Sequence[int] = (0,)
    result: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a piece went."""

    name: str
    holds: bool
    seconds: float
    code: int | None
    said: str


class Claim(NamedTuple):
    """A claim of a piece: held, short or not measured."""

    piece: str
    claim: str
    outcome: str


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="how many ranks, a list")
    parser.add_argument("--only", default="", help="which pieces, a list")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="where results go")
    parser.add_argument("--small", action="store_true", help="sizes for a trial of the scripts")
    given = parser.parse_args()
    try:
        found = gpus.visible_gpus("gpu")
    except UsageError as error:
        print(f"no GPU here, nothing was measured: {error}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    given.out.mkdir(parents=True, exist_ok=True)
    print("; ".join(map(str, found)), flush=True)
    about = {"gpus": [asdict(gpu) for gpu in found]}
    done: list[tuple[Piece, Outcome]] = []
    for piece, until in timed(wanted(given)):
        done.append((piece, run(piece, until)))
        keep(given.out / "run_all.json", about, done)  # now: what comes next may end us
    show(claims(done))
    sys.exit(not all(outcome.holds for _, outcome in done))


def pieces(ranks: Sequence[int], out: Path, small: bool = False) -> list[Piece]:
    """Return all pieces, the surest first; for two numbers of ranks there is time for each."""
    main = [sys.executable, "-m", "hpctrain"]
    p2p = "4KiB,64KiB" if small else "4KiB:256MiB*4"
    draws = find_spec("matplotlib") is not None
    plot = ["--plot", str(out / "p2p.png")] if draws else []
    many = ",".join(map(str, ranks))

    def ours(name: str, limit_s: float, *words: str, file: str = "") -> Piece:
        result, script = out / f"{name}.json", HERE / f"{file or name}.py"
        line = [sys.executable, str(script), *words, "--json", str(result)]
        return Piece(name, line, limit_s, result=result)

    def sized(*words: str) -> Sequence[str]:
        return (*words, "--rounds", "2") if small else ()

    return [
        # What is bad about the node is told in its JSON; the pieces below say whether it matters.
        Piece("doctor", [*main, "doctor", "--json", str(out / "doctor.json")], 70, (0, 1)),
        ours("equal", 160, "--ranks", many),
        *(ours(f"allreduce-{p}-ranks", 40, "--ranks", str(p), *sized("--sizes", "4096,65536"),
               file="allreduce") for p in ranks),
        ours("paths", 35, *sized("--bytes", "65536")),
        ours("steps", 60, *sized("--sizes", "small")),
        ours("optimizer", 30, *sized("--bytes", "4194304")),
        ours("precision", 75, "--limit", "70", *(SHORT if small else ())),
        Piece("p2p", [*main, "launch", "-n", "2", "bench", "p2p", "--device", "gpu", "--sizes",
                      p2p, "--json", str(out / "p2p.json"), *plot], 60),
        *([Piece("plot", [sys.executable, str(HERE / "plot.py"), str(out)], 15)] if draws else []),
    ]  # fmt: skip


SHORT = ("--steps", "3", "--set", "model.width=16", "--set", "model.layers=1",
         "--set", "data.test_fraction=0.0001")  # fmt: skip


def wanted(given: Namespace) -> list[Piece]:
    """Return the pieces that were asked for, all by default."""
    all_pieces = pieces([int(word) for word in given.ranks.split(",")], given.out, given.small)
    names = [word for word in given.only.split(",") if word]
    unknown = set(names) - {piece.name for piece in all_pieces}
    if unknown:
        sys.exit(f"--only: no {', '.join(sorted(unknown))}; there are "
                 f"{', '.join(piece.name for piece in all_pieces)}")  # fmt: skip
    return [piece for piece in all_pieces if not names or piece.name in names]


def timed(wanted: Sequence[Piece]) -> list[tuple[Piece, float]]:
    """Return each piece and the moment at which all must be over."""
    until = time.monotonic() + TOTAL_S
    return [(piece, until) for piece in wanted]


def run(piece: Piece, until: float) -> Outcome:
    """Run a piece to its end or its limit; say how it went."""
    start = time.monotonic()
    limit_s = min(piece.limit_s, until - start)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if piece.result is not None:
        piece.result.unlink(missing_ok=True)  # it would be taken for today's
    print(f"== {piece.name}: {' '.join(piece.command)}", flush=True)
    process = subprocess.Popen(
        piece.command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, code = process.communicate(timeout=max(0.0, limit_s))[1], process.returncode
    except subprocess.TimeoutExpired as error:
        end(process)
        code, said = None, f"ended after {error.timeout:.0f} s"
    seconds, holds = time.monotonic() - start, code in piece.good
    print(f"== {piece.name}: {'good' if holds else 'FAILED'}, {seconds:.0f} s", flush=True)
    if not holds:
        print(said[-_LAST_WORDS:], flush=True)
    return Outcome(piece.name, holds, seconds, code, "" if holds else reason(said))


def end(process: subprocess.Popen[str]) -> None:
    """End a piece; the second interrupt lets `hpctrain launch` kill its ranks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
            return


def claims(done: Sequence[tuple[Piece, Outcome]]) -> list[Claim]:
    """Return the claims of all pieces; of one that did not come to its end, that as well."""
    return [claim for piece, outcome in done for claim in _claims(piece, outcome)]


def _claims(piece: Piece, outcome: Outcome) -> Iterator[Claim]:
    found = {}
    if piece.result is not None and piece.result.exists():
        found = json.loads(piece.result.read_text())["claims"]
    for claim, how in found.items():
        yield Claim(piece.name, claim, OUTCOMES[how])
    if outcome.code not in (0, 1):
        said = " ".join(outcome.said.split())[-120:]
        rest = "all the rest" if found else "all of it"
        yield Claim(piece.name, f"{rest}: {said or f'exit code {outcome.code}'}", OUTCOMES[None])
    elif not found:
        how = OUTCOMES[True] if outcome.holds else OUTCOMES[None]
        yield Claim(piece.name, "it runs" if outcome.holds else outcome.said[-120:], how)


def keep(path: Path, about: dict, done: Sequence[tuple[Piece, Outcome]]) -> None:
    """Write what became of the pieces so far."""
    outcomes = [asdict(outcome) for _, outcome in done]
    told = {**about, "pieces": outcomes, "claims": [one._asdict() for one in claims(done)]}
    path.write_text(json.dumps(told, indent=1) + "\n")


def show(found: Sequence[Claim]) -> None:
    """Print the claims as a table."""
    table = Table("piece", "claim", "outcome", title="claims")
    for one in found:
        table.add_row(*one)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
