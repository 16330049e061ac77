"""The range of class labels."""

from __future__ import annotations

from typing import Any

import numpy as np

LABELS_PER_CHECK = 1 << 20  #: rows checked at once; bounds the memory for labels in files


def find_invalid_label(y: np.ndarray, classes: int, numbers: Any = None) -> str:
    """Return a message about the first label outside 0 .. classes - 1; empty if all are valid.

    `y` holds integers (n, ...); `numbers` (n,) count the samples in their data set, None from 0.
    """
    for start in range(0, len(y), LABELS_PER_CHECK):
        block = y[start : start + LABELS_PER_CHECK].astype(np.int64)
        is_invalid = (block < 0) | (block >= classes)
        if is_invalid.any():
            index = np.argwhere(is_invalid)[0]
            row = start + index[0]
            number = row if numbers is None else numbers[row]
            return (
                f"label {y[start:][tuple(index)]} of sample {number} is out of range; "
                f"expected labels in 0 .. {classes - 1}: remove such samples, or renumber the "
                "labels"
            )
    return ""
