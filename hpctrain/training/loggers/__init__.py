"""Loggers: a run's rows in TensorBoard, Weights & Biases, MLflow or a CSV file, by their libraries.

    rank 0   step ... row ---queue of 1,000 rows---> thread: the tracker's own library
    others   step ... row

A thread writes, so that a tracker that raises, hangs or has no room costs training nothing: rows
that find the queue full, or that the tracker refuses, are counted, and reported at the end and in
summary.json. The end of a run waits for the thread, up to a limit.

`[log] to = [...]` in a recipe, `callbacks=[ht.loggers.CSV()]` of a Trainer, or in a loop of the
user's own:

    with ht.loggers.CSV("runs/mine", config={"rate": 0.1}) as logger:
        for step in range(1, 101):
            logger.log({"loss": train(step)}, step)

All ranks make the logger, and the first one writes. After its loss the next one goes on in the same
files; so does a run that is resumed: what is later than the step from which it goes on is dropped.
"""

from typing import TYPE_CHECKING

from hpctrain.core.lazy import LazyTable, lazy_names

if TYPE_CHECKING:
    from hpctrain.training.loggers.loggers import CSV, MLflow, TensorBoard, WandB

__all__ = ["CSV", "MLflow", "TensorBoard", "WandB"]

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "loggers"))

#: `[log] to`
LOGGERS = LazyTable(
    __name__,
    {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow", "csv": "CSV"},
)
