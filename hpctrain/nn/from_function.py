"""A model from a user's own function, named `package.module:function` in the recipe."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from hpctrain.config import options, usercode
from hpctrain.core.errors import UsageError
from hpctrain.nn.layer import Shape
from hpctrain.nn.model import Model


@options
class FunctionModel:
    """`[model] kind = "package.module:function"`: called with input_shape, classes, arguments."""

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    folder: str = "."  #: of modules that are not installed

    def build(self, input_shape: Shape | None, classes: int | None) -> Model:
        """Return the Model of the function; raise UsageError if it returns another type."""
        place = "[model] kind"
        model = usercode.call(
            self.target, place, self.folder, input_shape, classes, **self.arguments
        )
        if not isinstance(model, Model):
            kind = type(model).__name__
            raise UsageError(f"{place} '{self.target}': expected hpctrain.nn.Model, seen {kind}")
        return model
