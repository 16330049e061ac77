"""The sum of sparse tensors: every rank gathers all entries, and adds entries at the same index."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.collectives import Group
from hpctrain.torch import collectives
from hpctrain.torch.tensors import as_bytes


def all_reduce(group: Group, tensor: torch.Tensor) -> None:
    """Replace COO `tensor` by the sum over all ranks; the numbers of entries may differ.

    Cost: all ranks' entries reach each rank, and are sorted there.
    """
    own_entries = tensor.detach().coalesce()
    counts = np.zeros(group.link.size, np.int64)
    collectives.all_gather(group, np.array([own_entries._nnz()]), counts)
    indices = [own_entries.indices().new_empty((own_entries.sparse_dim(), int(n))) for n in counts]
    values = [
        own_entries.values().new_empty((int(n), *own_entries.values().shape[1:])) for n in counts
    ]
    for part, parts in ((own_entries.indices(), indices), (own_entries.values(), values)):
        source, arrays = part.contiguous(), list(map(as_bytes, parts))
        collectives.all_gather_uneven(group, as_bytes(source), arrays)
    entries = torch.cat(indices, 1), torch.cat(values)
    total = torch.sparse_coo_tensor(*entries, tensor.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
