"""Encoded images, such as JPEG and PNG, decoded by Pillow to the pixels that they hold.

8 bits, grey       uint8 (h, w)
8 bits, colour     uint8 (h, w, 3), with transparency (h, w, 4); palettes become colours
16 bits, grey      uint16 (h, w)
"""

from __future__ import annotations

import io

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.formats.libraries import faults_of, load_library

#: mode of Pillow -> mode of its pixels, without a loss
_MODES = {"1": "L", "P": "RGB", "PA": "RGBA"}
_PLAIN = ("L", "RGB", "RGBA", "I;16", "I", "F")


def decode_image(data: bytes, place: str, extra: str) -> np.ndarray:
    """Return the pixels of an encoded image; raise DataError, which begins with `place`."""
    open_image = load_library("PIL.Image", extra).open
    guard = faults_of(place, "a whole image", "encode it again", DataError)
    with guard, open_image(io.BytesIO(data)) as image:
        is_transparent = image.mode == "P" and "transparency" in image.info
        mode = "RGBA" if is_transparent else _MODES.get(image.mode, image.mode)
        if mode not in _PLAIN:
            raise DataError(
                f"{place}: expected an image of {', '.join(_PLAIN)}, seen {image.mode}; "
                "convert it to RGB"
            )
        return np.array(image if mode == image.mode else image.convert(mode))


def stack_values(
    values: list[np.ndarray], shape: tuple[int, ...], dtype: np.dtype, places: list[str]
) -> np.ndarray:
    """Return `values` (n, *shape); raise DataError for one of another shape or dtype."""
    for value, place in zip(values, places, strict=True):
        if value.shape != shape or value.dtype != dtype:
            raise DataError(
                f"{place}: expected {dtype} {shape}, as in the first row of the file, seen "
                f"{value.dtype} {value.shape}; give all rows one shape and one dtype"
            )
    return np.stack(values) if values else np.empty((0, *shape), dtype)
