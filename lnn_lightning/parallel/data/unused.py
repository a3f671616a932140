"""Parameters without a gradient: an optimizer leaves them alone, so what counts is whether any rank has one.

Which parameters a step uses may depend on the data (experts that get no tokens), and so differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Unused:
    """Asks all ranks of a group who has gradients; the answer is awaited where it matters alone. Collective.

    Args:
        parameters: the same on all ranks, in the same order; their gradients are as this rank made them.
        group: the ranks.
        absent: whether this rank has no gradient for each; None: as ``parameter.grad`` says.
    """

    def __init__(
        self, parameters: Sequence[Tensor], group: dist.ProcessGroup, absent: Sequence[bool] | None = None
    ) -> None:
        self._parameters = tuple(parameters)
        self._absent = [p.grad is None for p in self._parameters] if absent is None else list(absent)
        self._work: Any = None
        if self._parameters:
            present = [not each for each in self._absent]
            self._present = torch.tensor(present, dtype=torch.int32, device=self._parameters[0].device)
            self._work = dist.all_reduce(self._present, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def drop(self) -> None:
        """Behind the reduction: takes away the gradients that no rank had."""
        if self._work is None:
            return
        self._work.wait()
        if not any(self._absent):  # nothing to wait for on an accelerator
            return
        for parameter, present in zip(self._parameters, self._present.tolist(), strict=True):
            if not present:
                parameter.grad = None
