"""A model from a user's own function, named `package.module:function` in the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from hpctrain.core import frameworks
from hpctrain.core.config import options, usercode
from hpctrain.core.errors import UsageError
from hpctrain.nn.model import Model

KEY_PATH = "[model] kind"


@options
class FunctionModel:
    """`[model] kind = "package.module:function"`: called with input_shape, outputs, arguments."""

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    folder: str = "."  #: where modules that are not installed are looked up

    def find(self) -> Callable[..., Any]:
        """Import the function and return it; raise UsageError if there is none."""
        return usercode.find(self.target, KEY_PATH, self.folder)

    def build(self, input_shape: Any, outputs: int | None) -> Any:
        """Call the function and return its model; raise UsageError if it returns another type.

        It may be a torch.nn.Module.
        """
        model = usercode.call(
            self.target, KEY_PATH, self.folder, input_shape, outputs, **self.arguments
        )
        if guest := frameworks.as_model(model):
            return guest
        if not isinstance(model, Model):
            type_name = type(model).__name__
            raise UsageError(
                f"{KEY_PATH} '{self.target}': expected hpctrain.nn.Model or torch.nn.Module, seen "
                f"{type_name}"
            )
        return model
