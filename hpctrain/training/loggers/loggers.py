"""The loggers as users make them: for a recipe, a Trainer, or a loop of the user's own."""

from __future__ import annotations

import atexit
import json
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from hpctrain.core import launchers, opening
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.training.loggers.feed import END_S, Feed
from hpctrain.training.loggers.tracker import Target, Tracker
from hpctrain.transport.machine import versions
from hpctrain.world import current_world

EXPORTED = ".exported"  #: in a tracker's folder: `runs export` or `follow` has written it
PROJECT = "hpctrain"  #: of a run without a recipe
_own_feeds = threading.local()  #: of loops of the user's own, by place; a rank may be a thread


@dataclass(eq=False)
class Logger:
    """Rows of numbers in a tracker, by a thread of the first rank; every rank makes its own."""

    kind: ClassVar[str]  #: the name in `[log] to`, of the extra, and of the folder in the run's
    packages: ClassVar[tuple[str, ...]] = ()
    tracker: ClassVar[str]  #: class in the module to_KIND

    folder: str | Path | None = None  #: of the run; in a Trainer by default that of `fit`
    _: KW_ONLY
    config: Mapping[str, Any] | None = None  #: JSON data; a Trainer adds its recipe

    def __post_init__(self) -> None:
        """Raise UsageError for options of a wrong type, and where a package is missing."""
        if not isinstance(self.folder, str | os.PathLike | None):
            raise UsageError(f"{self}: folder: expected a path, seen {brief(self.folder)}")
        try:
            json.dumps(dict(self.config or {}))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self}: config: expected a dict of JSON data: {error}") from None
        require(self.kind, self.packages)
        self._feed: Feed | None = None
        self._step = 0

    def __str__(self) -> str:
        return f"ht.loggers.{type(self).__name__}"

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the numbers of a step, in a loop of your own; only the first rank does.

        `values`: numbers, or arrays and tensors of one, by name. `step`: 1 or more; several calls
        of a step add up. The first step of this process, and one before the last, drop what the
        files hold of it and of later steps: the loop goes on from there. Raises UsageError.
        """
        world = current_world()
        if (launchers.launched(os.environ).rank if world is None else world.rank) > 0:
            return
        step = _as_step(step, self)
        if "step" in values:
            raise UsageError(f"{self}.log: 'step' is the number of the step; name the value else")
        numbers = {name: _as_float(value, name) for name, value in values.items()}
        if self._feed is None:
            job: dict[str, Any] = {"versions": versions()}
            if world is not None:
                job |= {"world_size": world.size, "hosts": sorted(set(world.hosts))}
            target, own_feeds = self.target(None, {"job": job}), vars(_own_feeds)
            place = str(target.folder / self.kind)
            if place in own_feeds and own_feeds[place].is_open:
                raise UsageError(
                    f"{self}: two loggers write to {place}; give each its folder, or close one"
                )
            self._feed = own_feeds[place] = self._open(target)
            self._feed.begin(step - 1)
            atexit.register(self.close)
        elif step < self._step:
            self._feed.begin(step - 1)
        self._step = step
        self._feed.log(step, numbers)

    def close(self, summary: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End the log with a summary; return the number of its rows, and of those dropped.

        Waits a minute at the longest. Also the end of a `with` block, and of the program.
        """
        atexit.unregister(self.close)
        feed, self._feed = self._feed, None
        if feed is None:
            return {}
        feed.finish(summary or {})
        return feed.wait(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(None if error[0] is None else {"status": "failed", "exit_code": 1})

    def target(self, run: Path | None, config: Mapping[str, Any], project: str = PROJECT) -> Target:
        """Return the place of a run in folder `run`; raise UsageError without a folder."""
        folder = run if self.folder is None else Path(self.folder)
        if folder is None:
            raise UsageError(f"{self} needs a folder: {self}('runs/mine'), or fit(out=...)")
        names = vars(self)
        return Target(
            folder=folder.absolute(),
            project=names.get("project") or project,
            name=names.get("name") or folder.absolute().name,
            config={**(self.config or {}), **config},
        )

    @property
    def open_feed(self) -> Feed | None:
        """The feed on this rank, None before it is made and after its end."""
        return self._feed if self._feed is not None and self._feed.is_open else None

    def make_tracker(self, target: Target) -> Tracker:
        """Return the tracker, which imports its library when it begins."""
        module = import_module(f"hpctrain.training.loggers.to_{self.kind}")
        return getattr(module, self.tracker)(target)

    def begin(self, target: Target, step: int, rows: Sequence[Mapping[str, Any]] | None) -> Feed:
        """Go on after `step` of a run of a Trainer; return the feed.

        `rows`: the earlier rows of the run, None if the tracker alone has them.

        After a loss of ranks the thread is there already.
        """
        feed = self.open_feed
        if feed is None or feed.target.folder != target.folder:
            feed = self._feed = self._open(target)
        feed.begin(step, rows)
        return feed

    def _open(self, target: Target) -> Feed:
        target.folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            opening.remove(target.folder / self.kind / EXPORTED, 2)
        return Feed(self.make_tracker(target))


class CSV(Logger):
    """A file csv/metrics.csv in the run's folder, and about.json with configuration and summary."""

    kind, tracker = "csv", "CsvTracker"


class TensorBoard(Logger):
    """Event files of TensorBoard in tensorboard/: `tensorboard --logdir runs`."""

    kind, tracker, packages = "tensorboard", "TensorBoardTracker", ("tensorboard",)


@dataclass(eq=False)
class _ProjectLogger(Logger):
    """A logger whose tracker has projects of several runs."""

    project: str | None = None  #: by default the recipe's name
    name: str | None = None  #: by default the name of the run's folder


class WandB(_ProjectLogger):
    """A run of Weights & Biases in wandb/, offline unless WANDB_MODE says otherwise.

    WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY and other variables count, as in W&B.
    """

    kind, tracker, packages = "wandb", "WandBTracker", ("wandb",)


class MLflow(_ProjectLogger):
    """A run of MLflow in mlflow/mlflow.db: `mlflow ui --backend-store-uri sqlite:///...`.

    `project` is the name of the experiment.
    """

    kind, tracker = "mlflow", "MLflowTracker"
    packages = ("mlflow", "sqlalchemy", "alembic")


def require(kind: str, packages: Sequence[str]) -> None:
    """Raise UsageError with the command to run if a package of a logger is missing."""
    specs = {name: find_spec(name) for name in packages}
    # A folder of that name, as W&B's own, would be a package without an origin.
    if missing := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        raise UsageError(
            f"logger '{kind}' needs {', '.join(missing)}; run: pip install 'hpctrain[{kind}]'"
        )


def _as_step(value: Any, logger: Logger) -> int:
    with suppress(TypeError):
        if (step := operator.index(value)) > 0:
            return step
    raise UsageError(
        f"{logger}.log: step: expected 1 or more, as an integer, seen {brief(value)} of type "
        f"{type(value).__name__}; count from 1, as `epoch + 1`"
    )


def _as_float(value: Any, name: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"log: '{name}': expected a number, seen {brief(value)}") from None
