"""The names of `ht.jax` that need JAX."""

from hpctrain.jax.collectives import allreduce
from hpctrain.jax.model import JaxModel as Model
from hpctrain.jax.trainer import Trainer

__all__ = ["Model", "Trainer", "allreduce"]
