"""The functional collective of PyTorch that its C++ does not give to process groups in Python.

`all_gather_into_tensor_out` asks a group for its backend in C++; ours has none. Its kernel is
replaced by one that calls the group itself, of any backend.
"""

from __future__ import annotations

from functools import cache

import torch
from torch._C._distributed_c10d import _register_work, _resolve_process_group


@cache
def add_out_variants() -> torch.library.Library:
    """Replace the kernels, once; they stay as long as the library is kept, here."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device_type in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device_type)
    return library


def _all_gather_into_tensor_out(
    input: torch.Tensor,
    group_size: int,
    group_name: str,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    group = _resolve_process_group(group_name)
    _register_work(out, group._allgather_base(out, input))
    return out
