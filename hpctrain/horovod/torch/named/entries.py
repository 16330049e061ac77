"""An operation under way on this rank: its request, its tensors, its result or error."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from hpctrain.horovod.torch.named.requests import Request


class HorovodInternalError(RuntimeError):
    """An operation failed on all ranks, or a rank was lost."""


class Entry:
    """An operation that this rank has submitted."""

    def __init__(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        targets: Sequence[torch.Tensor] = (),
        splits: Sequence[int] = (),
    ):
        """`outputs`: where results are written, if their shapes are known.

        `targets`: where they are copied in the end, unless they are there. `splits`: rows of the
        input for each rank.
        """
        self.request, self.inputs, self.outputs, self.targets = request, inputs, outputs, targets
        self.splits, self.start_s = splits, perf_counter()
        self.result: Any = None  #: what `synchronize` returns
        self.is_over, self.error, self.is_reported = False, "", False
        self.cause: BaseException | None = None
        #: of the caller's stream, after which the inputs may be read
        self.event: Any = None
        if inputs and inputs[0].is_cuda:
            self.event = torch.cuda.current_stream(inputs[0].device).record_event()

    def finish(self, result: Any) -> None:
        """Let waits return `result`."""
        self.result = result
        self.is_over = True

    def fail(self, error: str, cause: BaseException | None = None) -> None:
        """Let waits raise `error`."""
        self.error, self.cause = error, cause
        self.is_over = True
