"""Parameters, states of optimizers and objects of one rank, or of every rank, on all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hpctrain.horovod.torch.handles import synchronize
from hpctrain.horovod.torch.job import rank
from hpctrain.horovod.torch.movements import allgather, broadcast_, broadcast_async_
from hpctrain.horovod.torch.process_sets import ProcessSet, global_process_set
from hpctrain.torch.tensors import copy_back

#: cloudpickle, where it is installed, pickles functions and classes of the script, too.
PICKLER: Any = import_module("cloudpickle") if find_spec("cloudpickle") else pickle
UNPICKLABLE = -1  #: the number of bytes of an object that cannot be pickled
HOST = torch.device("cpu")


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
) -> None:
    """Broadcast the tensors of rank `root_rank` to all ranks, in place; collective.

    `params`: a dict such as `model.state_dict()`, or an iterable of tensors or of pairs (name,
    tensor) such as `model.named_parameters()`; in any memory layout. Raises ValueError for others.
    """
    if isinstance(params, Mapping):
        params = sorted(params.items())
    elif isinstance(params, torch.Tensor | str) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    pairs = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"invalid params: expected a tensor for '{name}', seen {type(tensor)}")
    _broadcast_tensors(pairs, root_rank, "broadcast_parameters")


def _broadcast_tensors(
    pairs: Iterable[tuple[str, torch.Tensor]], root_rank: int, prefix: str
) -> None:
    begun = []
    for name, tensor in pairs:
        dense = tensor.detach().contiguous()
        begun.append((broadcast_async_(dense, root_rank, f"{prefix}.{name}"), dense, tensor))
    for handle, dense, tensor in begun:
        synchronize(handle)
        copy_back(dense, tensor)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks the optimizer's state and options of rank `root_rank`; collective.

    For optimizers of any class: a rank allocates the tensors that only the root has, and drops
    those that only it has; parameters stay as they are. Where the optimizer is new, gradients that
    are None become zeros, but for sparse layers of `model`.
    Raises ValueError for LBFGS, and on all ranks if they optimize other parameters than the root.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not (optimizer.state or isinstance(optimizer, torch.optim.SparseAdam)):
        _zero_gradients(optimizer, model)
    groups = optimizer.param_groups
    shapes = [[tuple(p.shape) for p in group["params"]] for group in groups]
    options = [{k: _to_host(v) for k, v in group.items() if k != "params"} for group in groups]
    parameters = [p for group in groups for p in group["params"]]
    numbers = {p: number for number, p in enumerate(parameters)}
    layout = {numbers.get(k, k): _describe(v, _home(k)) for k, v in optimizer.state.items()}
    name = "broadcast_optimizer_state"
    root_shapes, root_options, layout = broadcast_object(
        (shapes, options, layout), root_rank, f"{name}.layout"
    )
    differing = [r for r, equal in enumerate(allgather_object(shapes == root_shapes)) if not equal]
    if differing:
        raise ValueError(
            f"{name}: expected parameters of the same shapes and groups as on rank {root_rank}, "
            f"seen others on ranks {differing}"
        )
    if rank() != root_rank:
        for group, group_options in zip(groups, root_options, strict=True):
            _take_options(group, group_options)
        state = {}
        for number, items in layout.items():
            key = parameters[number] if isinstance(number, int) else number
            state[key] = _allocate(items, optimizer.state.get(key), _home(key))
        optimizer.state.clear()
        optimizer.state.update(state)
    tensors = _tensors_of(dict(optimizer.state))
    _broadcast_tensors(((str(i), tensor) for i, tensor in enumerate(tensors)), root_rank, name)


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = () if model is None else model.modules()
    sparse = {id(p) for m in modules if getattr(m, "sparse", False) for p in m.parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in sparse:
            parameter.grad = torch.zeros_like(parameter)


class _TensorLayout(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_home: bool  #: on the parameter's device, not on the host


def _home(key: Any) -> torch.device:
    return key.device if isinstance(key, torch.Tensor) else HOST


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _describe(value: Any, home: torch.device) -> Any:
    """Return `value` with layouts in place of tensors in dicts."""
    if isinstance(value, dict):
        return {key: _describe(item, home) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return _TensorLayout(tuple(value.shape), value.dtype, value.device == home)
    return value


def _allocate(layout: Any, own: Any, home: torch.device) -> Any:
    """Return a state of this layout, with the tensors of `own` that fit."""
    if isinstance(layout, dict):
        own = own if isinstance(own, dict) else {}
        return {key: _allocate(item, own.get(key), home) for key, item in layout.items()}
    if not isinstance(layout, _TensorLayout):
        return layout
    if isinstance(own, torch.Tensor) and _describe(own, home) == layout:
        return own
    return torch.empty(layout.shape, dtype=layout.dtype, device=home if layout.is_home else HOST)


def _tensors_of(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, dict):
        for item in state.values():
            yield from _tensors_of(item)
    elif isinstance(state, torch.Tensor):
        yield state


def _take_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                own.copy_(value)  # a captured or compiled step holds this tensor
        else:
            group[key] = value


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the pickled and broadcast object of rank `root_rank`; collective over `process_set`.

    Raises an error on all ranks if it cannot be pickled. Never from ranks that you do not trust:
    to unpickle is to run code.
    """
    name, is_root = name or "broadcast_object", rank() == root_rank
    data, error = _pickle(obj) if is_root else (torch.empty(0, dtype=torch.uint8), None)
    length = torch.tensor([UNPICKLABLE if error else data.numel()])
    broadcast_(length, root_rank, f"{name}.bytes", process_set)
    if length.item() == UNPICKLABLE:
        raise error or ValueError(f"{name}: rank {root_rank} cannot pickle its object; see there")
    if not is_root:
        data = data.new_empty(int(length))
    broadcast_(data, root_rank, name, process_set)
    return obj if is_root else pickle.loads(data.numpy())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank, pickled on the way; collective.

    Raises an error on all ranks if one cannot be pickled.
    """
    name = name or "allgather_object"
    data, error = _pickle(obj)
    own_length = torch.tensor([UNPICKLABLE if error else data.numel()])
    lengths = allgather(own_length, f"{name}.bytes").tolist()
    if UNPICKLABLE in lengths:
        ranks = [r for r, length in enumerate(lengths) if length == UNPICKLABLE]
        raise error or ValueError(f"{name}: ranks {ranks} cannot pickle their objects; see there")
    return [pickle.loads(part.numpy()) for part in allgather(data, name).split(lengths)]


def _pickle(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    try:
        return torch.frombuffer(bytearray(PICKLER.dumps(obj)), dtype=torch.uint8), None
    except Exception as error:
        return torch.empty(0, dtype=torch.uint8), error
