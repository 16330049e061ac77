"""The planes that hold a model's gradients, one per dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.gradient_sync.gradient_plane import GradientPlane, Parameters, Totals
from hpctrain.torch.gradient_sync.shared_state import kind_of
from hpctrain.world import World


class GradientPlanes:
    """The planes of a model, alike on every rank."""

    def __init__(self, options: WireOptions):
        """Have no plane yet; see `build`."""
        self._options = options
        self._planes: list[GradientPlane] = []
        self._places: dict[int, tuple[GradientPlane, str]] = {}  # by the identity of a parameter

    def build(self, world: World, parameters: Parameters) -> None:
        """Replace the planes by new ones for `parameters`; collective."""
        self.close()
        planes = []
        for kind in sorted({kind_of(p) for p in parameters.values()}):
            kind_parameters = {name: p for name, p in parameters.items() if kind_of(p) == kind}
            planes.append(GradientPlane(world, kind_parameters, self._options))
        for plane in self._planes:
            plane.free()
        self._planes = planes
        self._places = {
            id(p): (plane, name) for plane in planes for name, p in plane.parameters.items()
        }

    def rebuild(self, world: World) -> None:
        """Allocate the planes for other ranks; see `GradientPlane.build`."""
        for plane in self._planes:
            plane.build(world)

    @property
    def parameters(self) -> Parameters:
        return {name: p for plane in self._planes for name, p in plane.parameters.items()}

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes)

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether `parameter` has a place in a plane."""
        return id(parameter) in self._places

    def hold(self, parameters: Parameters) -> bool:
        """Return whether each of `parameters` has a place in a plane."""
        return all(map(self.has, parameters.values()))

    def collect_gradient(self, parameter: torch.Tensor) -> None:
        """Collect the gradient of `parameter` unless it is new; see GradientPlane."""
        if (place := self._places.get(id(parameter))) is not None:
            plane, name = place
            plane.collect_gradient(name)

    def finish(self, *, is_changed: bool = False, has_failed: bool = False) -> None:
        """Send the remaining gradients; see `GradientPlane.finish`."""
        for plane in self._planes:
            plane.finish(is_changed=is_changed, has_failed=has_failed)

    def wait(self) -> None:
        """Wait for the sums; collective."""
        for plane in self._planes:
            plane.wait()

    def totals(self) -> Totals:
        """Return the counts of the flags, after `wait`."""
        totals = [plane.totals() for plane in self._planes]
        return totals[0]._replace(late=sum(total.late for total in totals))

    def send_late(self) -> list[torch.Tensor]:
        """Send late gradients; return the sums before."""
        return [plane.send_late() for plane in self._planes]

    def add_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Add earlier `sums`."""
        for plane, plane_sums in zip(self._planes, sums, strict=True):
            plane.add_sums(plane_sums)

    def give_gradients(self) -> None:
        """Let each parameter have its mean, and forget this rank's own gradients."""
        for plane in self._planes:
            plane.give_gradients()
            plane.local.clear()

    def drop_gradients(self) -> bool:
        """Forget an unfinished backward pass, unless a part was sent; return whether it could."""
        if any(plane.has_sent for plane in self._planes):
            return False
        for plane in self._planes:
            plane.drop_gradients()
        return True

    def close(self) -> None:
        """End the communication threads."""
        for plane in self._planes:
            plane.close()
