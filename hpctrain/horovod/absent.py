"""The parts of Horovod that are not here, with what to do instead."""

from __future__ import annotations

_TO_PYTORCH = (
    "run this script with Horovod itself, or move its model to PyTorch (`import "
    "hpctrain.horovod.torch as hvd`) or JAX (docs/jax.md)"
)
_RANKS = "start the script with `hpctrain-horovodrun -np N python SCRIPT`, mpirun or srun"
#: module: why it is absent, and what to do
ABSENT = {
    "keras": f"hpctrain trains no models of Keras: {_TO_PYTORCH}",
    "mxnet": f"hpctrain trains no models of MXNet, which was retired in 2023: {_TO_PYTORCH}",
    "ray": f"hpctrain starts no ranks by Ray: {_RANKS}",
    "runner": f"hpctrain starts no ranks from within a script: {_RANKS}",
    "spark": f"hpctrain starts no ranks by Spark: {_RANKS}",
    "tensorflow": f"hpctrain trains no models of TensorFlow: {_TO_PYTORCH}",
}


def refusal(name: str) -> ImportError:
    """Return the error of an import of `name`, a module of this package."""
    return ImportError(f"no {name}: {ABSENT[name.rpartition('.')[2]]}", name=name)
