"""Adasum: a sum of gradients that adds what is orthogonal and averages what is parallel.

    a + b      if a and b are orthogonal
    (a + b)/2  if they are equal

Source: Maleki et al., "Scaling distributed training with adaptive summation", 2021.
"""

from __future__ import annotations

import torch

from hpctrain.collectives import Group
from hpctrain.torch.tensors import as_bytes


def adasum(group: Group, x: torch.Tensor) -> None:
    """Replace `x` (n,) by the Adasum over all ranks, a power of two, in log2 P exchanges of `x`.

    Products are computed in float64, so that the two partners of an exchange get equal bits.
    """
    link, other = group.link, torch.empty_like(x)
    for level in range(link.size.bit_length() - 1):
        partner = link.rank ^ (1 << level)
        link.sendrecv(as_bytes(x), partner, as_bytes(other), partner)
        lower, upper = (x, other) if link.rank < partner else (other, x)
        a, b = lower.double(), upper.double()
        product, a_square, b_square = (float(torch.dot(u, v)) for u, v in ((a, b), (a, a), (b, b)))
        a_factor = 1 - product / (2 * a_square) if a_square else 1.0
        b_factor = 1 - product / (2 * b_square) if b_square else 1.0
        x.copy_(a.mul_(a_factor).add_(b, alpha=b_factor))
