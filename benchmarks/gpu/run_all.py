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
from equal import error_line
from lib.common import RESULTS
from lib.outcomes import OUTCOMES

from hpctrain.core.errors import UsageError
from hpctrain.transport.device import gpus

SCRIPTS = Path(__file__).parent
TOTAL_S, GRACE_S = 585.0, 5.0
_MAX_ERROR_CHARS = 400


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
    """The outcome of a piece."""

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
    options = parser.parse_args()
    try:
        visible_gpus = gpus.visible_gpus("gpu")
    except UsageError as error:
        print(f"no GPU here, nothing was measured: {error}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    options.out.mkdir(parents=True, exist_ok=True)
    print("; ".join(map(str, visible_gpus)), flush=True)
    about = {"gpus": [asdict(gpu) for gpu in visible_gpus]}
    finished: list[tuple[Piece, Outcome]] = []
    for piece, deadline in with_deadline(select_pieces(options)):
        finished.append((piece, run_piece(piece, deadline)))
        # Save now: the next piece may exhaust the time of this process.
        save_report(options.out / "run_all.json", about, finished)
    print_claims(collect_claims(finished))
    sys.exit(not all(outcome.holds for _, outcome in finished))


def make_pieces(ranks: Sequence[int], out: Path, small: bool = False) -> list[Piece]:
    """Return all pieces, the surest first; for two numbers of ranks there is time for each."""
    main = [sys.executable, "-m", "hpctrain"]
    p2p = "4KiB,64KiB" if small else "4KiB:256MiB*4"
    has_matplotlib = find_spec("matplotlib") is not None
    plot = ["--plot", str(out / "p2p.png")] if has_matplotlib else []
    all_ranks = ",".join(map(str, ranks))

    def make_script_piece(name: str, limit_s: float, *words: str, file: str = "") -> Piece:
        result, script = out / f"{name}.json", SCRIPTS / f"{file or name}.py"
        line = [sys.executable, str(script), *words, "--json", str(result)]
        return Piece(name, line, limit_s, result=result)

    def small_options(*words: str) -> Sequence[str]:
        return (*words, "--rounds", "2") if small else ()

    return [
        # Its JSON lists faults of the node; the pieces below show whether they matter.
        Piece("doctor", [*main, "doctor", "--json", str(out / "doctor.json")], 70, (0, 1)),
        make_script_piece("equal", 160, "--ranks", all_ranks),
        *(make_script_piece(f"allreduce-{p}-ranks", 40, "--ranks", str(p),
                            *small_options("--sizes", "4096,65536"), file="allreduce")
          for p in ranks),
        make_script_piece("paths", 35, *small_options("--bytes", "65536")),
        *([make_script_piece("tensors", 40, *small_options("--sizes", "4096,65536"))]
          if find_spec("torch") is not None else []),
        make_script_piece("steps", 60, *small_options("--sizes", "small")),
        make_script_piece("optimizer", 30, *small_options("--bytes", "4194304")),
        make_script_piece("precision", 75, "--limit", "70", *(SMALL_PRECISION if small else ())),
        Piece("p2p", [*main, "launch", "-n", "2", "bench", "p2p", "--device", "gpu", "--sizes",
                      p2p, "--json", str(out / "p2p.json"), *plot], 60),
        *([Piece("plot", [sys.executable, str(SCRIPTS / "plot.py"), str(out)], 15)]
          if has_matplotlib else []),
    ]  # fmt: skip


SMALL_PRECISION = ("--steps", "3", "--set", "model.width=16", "--set", "model.layers=1",
         "--set", "data.test_fraction=0.0001")  # fmt: skip


def select_pieces(options: Namespace) -> list[Piece]:
    """Return the pieces that were asked for, all by default."""
    all_pieces = make_pieces(
        [int(word) for word in options.ranks.split(",")], options.out, options.small
    )
    names = [word for word in options.only.split(",") if word]
    unknown = set(names) - {piece.name for piece in all_pieces}
    if unknown:
        sys.exit(f"--only: no {', '.join(sorted(unknown))}; there are "
                 f"{', '.join(piece.name for piece in all_pieces)}")  # fmt: skip
    return [piece for piece in all_pieces if not names or piece.name in names]


def with_deadline(pieces: Sequence[Piece]) -> list[tuple[Piece, float]]:
    """Return each piece and the moment at which all must be over."""
    deadline = time.monotonic() + TOTAL_S
    return [(piece, deadline) for piece in pieces]


def run_piece(piece: Piece, deadline: float) -> Outcome:
    """Run a piece to its end or its time limit; return its outcome."""
    start = time.monotonic()
    limit_s = min(piece.limit_s, deadline - start)
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
        stop_piece(process)
        code, said = None, f"ended after {error.timeout:.0f} s"
    seconds, holds = time.monotonic() - start, code in piece.good
    print(f"== {piece.name}: {'good' if holds else 'FAILED'}, {seconds:.0f} s", flush=True)
    if not holds:
        print(said[-_MAX_ERROR_CHARS:], flush=True)
    return Outcome(piece.name, holds, seconds, code, "" if holds else error_line(said))


def stop_piece(process: subprocess.Popen[str]) -> None:
    """End a piece; the second interrupt lets `hpctrain launch` kill its ranks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
            return


def collect_claims(finished: Sequence[tuple[Piece, Outcome]]) -> list[Claim]:
    """Return the claims of all pieces; of one that did not come to its end, that as well."""
    return [claim for piece, outcome in finished for claim in _piece_claims(piece, outcome)]


def _piece_claims(piece: Piece, outcome: Outcome) -> Iterator[Claim]:
    claims = {}
    if piece.result is not None and piece.result.exists():
        claims = json.loads(piece.result.read_text())["claims"]
    for claim, is_held in claims.items():
        yield Claim(piece.name, claim, OUTCOMES[is_held])
    if outcome.code not in (0, 1):
        said = " ".join(outcome.said.split())[-120:]
        missing_part = "all the rest" if claims else "all of it"
        yield Claim(
            piece.name, f"{missing_part}: {said or f'exit code {outcome.code}'}", OUTCOMES[None]
        )
    elif not claims:
        outcome_text = OUTCOMES[True] if outcome.holds else OUTCOMES[None]
        yield Claim(piece.name, "it runs" if outcome.holds else outcome.said[-120:], outcome_text)


def save_report(path: Path, about: dict, finished: Sequence[tuple[Piece, Outcome]]) -> None:
    """Write what became of the pieces so far."""
    outcomes = [asdict(outcome) for _, outcome in finished]
    report = {
        **about,
        "pieces": outcomes,
        "claims": [claim._asdict() for claim in collect_claims(finished)],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def print_claims(claims: Sequence[Claim]) -> None:
    """Print the claims as a table."""
    table = Table("piece", "claim", "outcome", title="claims")
    for claim in claims:
        table.add_row(*claim)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
