"""What a module keeps beside its trained parameters, in the buffer plane of an arena.

    floating point, frozen parameters    lie in the plane
    integers, booleans, complex          are the module's own; the plane has a copy, exact,
                                         written after a gradient, and read where an engine has
                                         changed it
    not saved (persistent=False)         the module's own

A forward pass may replace a buffer by another tensor: its values are copied into the plane.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.gradients import integers
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.modules.names import Names, Place

log = logging.getLogger(__name__)


class ModuleBuffers:
    """The frozen parameters and the buffers of a module."""

    def __init__(self, names: Names, dtype: torch.dtype):
        """`names` of the module; floating-point tensors get `dtype`."""
        places, self._unsaved = names.kept, names.unsaved
        self._own_dtypes = {name: place.tensor.dtype for name, place in places.items()}  # type: ignore[union-attr]
        self._flat = {n: p for n, p in places.items() if self._own_dtypes[n].is_floating_point}
        coded_names = [name for name in places if name not in self._flat]
        self._coded = {
            n: places[n] for n in sorted(coded_names, key=lambda n: _kind(self._own_dtypes[n]))
        }
        self._dtype = dtype
        #: The tensors that the module has, by name; a place with another one was written anew.
        self._tensors = {name: place.tensor for name, place in places.items()}
        self._places = [*places.values()]
        self._views: dict[str, Array] = {}
        self._code = np.zeros(0)  #: of the tensors outside the plane, as it is there
        self._versions = self._unsaved_versions()
        self._warned: set[str] = set()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the slots, by name."""
        return {name: self._slot_shape(name) for name in (*self._flat, *self._coded)}

    @property
    def integers(self) -> dict[str, str]:
        """The dtypes of the tensors that integers.py encodes, by name."""
        dtypes = {name: self._own_dtypes[name] for name in self._coded}
        return {name: _name_of(dtype) for name, dtype in dtypes.items() if not dtype.is_complex}

    @property
    def cast_names(self) -> dict[str, torch.dtype]:
        """The buffers of another floating-point dtype than the parameters, with that dtype."""
        frozen = {name for name, x in self._tensors.items() if isinstance(x, nn.Parameter)}
        own_dtypes = {n: t for n, t in self._own_dtypes.items() if n in self._flat}
        return {n: t for n, t in own_dtypes.items() if t != self._dtype and n not in frozen}

    def bind(self, views: dict[str, Array]) -> None:
        """Let the tensors lie in `views` of a plane, which has their values; see `fill`."""
        self._views = {name: views[name] for name in (*self._flat, *self._coded)}
        for name in self._flat:
            self._tensors[name].data = as_tensor(self._views[name])  # type: ignore[union-attr]

    def fill(self, views: dict[str, Array]) -> None:
        """Copy all values into `views`."""
        for name in self._flat:
            as_tensor(views[name]).copy_(self._tensors[name].detach())  # type: ignore[union-attr]
        self._views = views
        self._write_code()

    def store(self) -> None:
        """Copy tensors that a forward pass has replaced into the plane."""
        self._warn_of_unsaved()
        for (name, x), place in zip(self._tensors.items(), self._places, strict=True):
            if place.table.get(place.key) is not x:
                self._copy_replaced(name, place)
        self._write_code()

    def load(self) -> None:
        """Copy changes that an engine made in the plane into the module's tensors."""
        if not self._coded:
            return
        views = [self._views[name].reshape(-1) for name in self._coded]
        code = xp.to_host(xp.namespace(views[0]).concatenate(views))
        if not np.array_equal(code, self._code):
            self._code = code
            for name in self._coded:
                self._decode(name, xp.to_host(self._views[name]))

    def _write_code(self) -> None:
        """Write into the plane what the module's own tensors hold, if they have changed."""
        if not self._coded:
            return
        plane = [self._views[name] for name in self._coded]
        code = self._encode().astype(plane[0].dtype)
        if not np.array_equal(code, self._code):
            self._code = code
            start, code = 0, xp.like(plane[0], code)
            for x in plane:
                x.reshape(-1)[...] = code[start : start + x.size]
                start += x.size

    def leave(self) -> None:
        """Move floating-point tensors to private memory, with their values."""
        for name in self._flat:
            x = self._tensors[name]
            x.data = x.data.clone()  # type: ignore[union-attr]

    def _warn_of_unsaved(self) -> None:
        """Warn once of each buffer with persistent=False that was written since the last call."""
        if not self._unsaved:
            return
        old_versions, self._versions = self._versions, self._unsaved_versions()
        pairs = zip(self._unsaved, old_versions, self._versions, strict=True)
        written_names = {place.name for place, old, new in pairs if old != new}
        for name in sorted(written_names - self._warned):
            log.warning(
                "module: buffer '%s', which forward passes write, is of each rank alone and in no "
                "checkpoint, since it has persistent=False",
                name,
            )
        self._warned |= written_names

    def _unsaved_versions(self) -> list[tuple[int, int]]:
        tensors = [place.tensor for place in self._unsaved]
        return [(id(x), getattr(x, "_version", 0)) for x in tensors]

    def _copy_replaced(self, name: str, place: Place) -> None:
        """Copy the values of a replaced buffer into its tensor, and put that tensor back."""
        new, x = place.tensor, self._tensors[name]
        assert x is not None
        if new is None or new.shape != x.shape or new.dtype.is_complex != x.dtype.is_complex:
            actual = "None" if new is None else f"{new.dtype} {tuple(new.shape)}"
            raise UsageError(
                f"module: expected buffer '{name}' to stay {x.dtype} {tuple(x.shape)}, seen "
                f"{actual} after a forward pass; register it with persistent=False"
            )
        with torch.no_grad():
            x.copy_(new)
        place.table[place.key] = x

    def _slot_shape(self, name: str) -> tuple[int, ...]:
        x, dtype = self._tensors[name], self._own_dtypes[name]
        assert x is not None
        if dtype.is_complex:
            return (*x.shape, 2)
        is_flat = dtype.is_floating_point
        return tuple(x.shape) if is_flat else integers.coded_shape(tuple(x.shape), _name_of(dtype))

    def _encode(self) -> np.ndarray:
        """Return the codes of the tensors outside the plane, one after the other."""
        groups: dict[int, list[torch.Tensor]] = {}
        for name in self._coded:
            x = self._tensors[name].detach()  # type: ignore[union-attr]
            groups.setdefault(_kind(x.dtype), []).append(x.reshape(-1))
        return np.concatenate(
            [_code_of(kind, torch.cat(tensors)) for kind, tensors in groups.items()]
        )

    def _decode(self, name: str, code: np.ndarray) -> None:
        x = self._tensors[name]
        assert x is not None
        if x.dtype.is_complex:
            values = torch.view_as_complex(torch.from_numpy(code.astype(np.float64)))
        else:
            values = torch.from_numpy(integers.decode(code, _name_of(x.dtype)))
        with torch.no_grad():
            x.copy_(values)


def _name_of(dtype: torch.dtype) -> str:
    """Return NumPy's name of a dtype of integers."""
    return str(dtype).removeprefix("torch.")


WIDE, NARROW, COMPLEX = range(3)


def _kind(dtype: torch.dtype) -> int:
    """Return the code of tensors of `dtype`, numbered in the order of the plane."""
    if dtype.is_complex:
        return COMPLEX
    return WIDE if integers.is_wide(_name_of(dtype)) else NARROW


def _code_of(kind: int, flat: torch.Tensor) -> np.ndarray:
    if kind == COMPLEX:
        return torch.view_as_real(flat).cpu().numpy().ravel()
    if kind == NARROW:
        return flat.cpu().double().numpy()
    return integers.encode(flat.cpu().long().numpy()).ravel()
