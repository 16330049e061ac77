"""`[log]`: the trackers that a run also writes to."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from hpctrain.core import config
from hpctrain.training.loggers import LOGGERS

if TYPE_CHECKING:
    from hpctrain.training.loggers.loggers import Logger


@config.options
class LogOptions:
    """`[log]`: names of trackers, and the project of W&B and the experiment of MLflow."""

    to: config.Names = field(default_factory=list)  #: "tensorboard", "wandb", "mlflow", "csv"
    project: str | None = None  #: by default the recipe's name

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown name."""
        for name in self.names:
            config.pick(dict.fromkeys(LOGGERS), name, "logger in [log] to:")

    @property
    def names(self) -> list[str]:
        """The names in `to`, each once."""
        return list(dict.fromkeys(self.to))

    def make(self) -> list[Logger]:
        """Return the loggers; raise UsageError if the package of one is missing."""
        return [LOGGERS[name]() for name in self.names]
