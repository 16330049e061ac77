"""The names of `ht.jax` that need JAX."""

from hpctrain.core.errors import UsageError

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise UsageError(f"ht.jax needs JAX: pip install 'hpctrain[jax]'; seen: {error}") from None

from hpctrain.jax.collectives import allreduce
from hpctrain.jax.model import JaxModel as Model
from hpctrain.jax.trainer import Trainer

__all__ = ["Model", "Trainer", "allreduce"]
