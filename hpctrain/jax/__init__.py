"""Functions of JAX under every engine: a loss, a pytree of parameters, and the MPI of the user.

    trainer = ht.jax.Trainer(loss, params, ht.optim.adamw(rate=1e-3), "local-sgd")
    trainer.fit((x, y), epochs=5)
    trainer.params

`ht.jax.allreduce` sums a pytree over all ranks, for loops of the user's own. JAX is imported when a
name is first used. See docs/jax.md.
"""

from typing import TYPE_CHECKING, Any

from hpctrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from hpctrain.jax.public import Model, Trainer, allreduce

__all__ = ["Model", "Trainer", "allreduce"]

_load = lazy_names(__name__, dict.fromkeys(__all__, "public"))


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        from hpctrain.core.errors import UsageError

        raise UsageError(
            f"ht.jax.{name} needs JAX: pip install 'hpctrain[jax]'; seen: {error}"
        ) from None
