"""Functions of JAX under every engine: a loss, a pytree of parameters, and the MPI of the user.

    trainer = ht.jax.Trainer(loss, params, ht.optim.adamw(rate=1e-3), "local-sgd")
    trainer.fit((x, y), epochs=5)
    trainer.params

`ht.jax.allreduce` sums a pytree over all ranks, for loops of the user's own. JAX is imported when a
name is first used. See docs/jax.md.
"""

from typing import TYPE_CHECKING

from hpctrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from hpctrain.jax.public import Model, Trainer, allreduce

__all__ = ["Model", "Trainer", "allreduce"]

__getattr__ = lazy_names(__name__, dict.fromkeys(["Model", "Trainer", "allreduce"], "public"))
