"""Everything that a machine with one GPU or more is to show, in one command of under ten minutes.

    python benchmarks/gpu/run_all.py [--ranks 2,4] [--only doctor,p2p] [--out FOLDER]

Checks every path that GPU memory takes here, compares training on GPUs with training on a CPU,
and measures; several ranks share a GPU where there are more of them. Each piece is a command of its
own, ended at its time limit, so that one that fails leaves the others. JSON and plots go to
benchmarks/results/gpu (`--out`), what became of each piece into run_all.json there.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from _common import RESULTS

from hpctrain.errors import UsageError
from hpctrain.transport import gpus

HERE = Path(__file__).parent
TOTAL_S, GRACE_S = 580.0, 5.0
_LAST_WORDS = 400


@dataclass(frozen=True)
class Piece:
    """A command, the seconds it may take, and which of its exit codes are good."""

    name: str
    command: Sequence[str]
    limit_s: float
    good: Sequence[int] = (0,)


@dataclass(frozen=True)
class Outcome:
    """How a piece went."""

    name: str
    holds: bool
    seconds: float
    code: int | None
    said: str


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="how many ranks, a list")
    parser.add_argument("--only", default="", help="which pieces, a list")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="where results go")
    given = parser.parse_args()
    try:
        found = gpus.visible("gpu")
    except UsageError as error:
        print(f"no GPU here, nothing was measured: {error}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    given.out.mkdir(parents=True, exist_ok=True)
    print("; ".join(map(str, found)), flush=True)
    outcomes = [run(piece, until) for piece, until in timed(wanted(given))]
    told = {"gpus": [asdict(gpu) for gpu in found], "pieces": [asdict(one) for one in outcomes]}
    (given.out / "run_all.json").write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(not all(one.holds for one in outcomes))


def pieces(ranks: Sequence[int], out: Path) -> list[Piece]:
    """Return all pieces, the surest first."""
    launch = [sys.executable, "-m", "hpctrain", "launch", "-n"]
    p2p = [*launch, "2", "bench", "p2p", "--device", "gpu", "--sizes", "4KiB:256MiB*4"]
    listed = ",".join(map(str, ranks))
    return [
        # What is bad about the node is told in its JSON; the pieces below say whether it matters.
        Piece("doctor", [sys.executable, "-m", "hpctrain", "doctor", *_kept(out, "doctor")], 120,
              (0, 1)),
        Piece("p2p", [*p2p, *_kept(out, "p2p"), "--plot", str(out / "p2p.png")], 90),
        *(Piece(f"allreduce-{p}", [sys.executable, str(HERE / "allreduce.py"), "--ranks", str(p),
                                   *_kept(out, f"allreduce-{p}-ranks")], 60) for p in ranks),
        Piece("paths", [sys.executable, str(HERE / "paths.py"), *_kept(out, "paths")], 60),
        Piece("equal", [sys.executable, str(HERE / "equal.py"), "--ranks", listed,
                        *_kept(out, "equal")], 200),
    ]  # fmt: skip


def wanted(given: Namespace) -> list[Piece]:
    """Return the pieces that were asked for, all by default."""
    all_pieces = pieces([int(word) for word in given.ranks.split(",")], given.out)
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
    return Outcome(piece.name, holds, seconds, code, said[-_LAST_WORDS:])


def end(process: subprocess.Popen[str]) -> None:
    """End a piece; the second interrupt lets `hpctrain launch` kill its ranks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
            return


def _kept(out: Path, name: str) -> list[str]:
    return ["--json", str(out / f"{name}.json")]


if __name__ == "__main__":
    main()
