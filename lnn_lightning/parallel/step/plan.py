"""What a stage knows about a step when it runs it: the trace, the cuts, and answers for calls of other stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lnn_lightning.parallel.step.trace import Call, Key, TensorInfo, Trace
from lnn_lightning.parallel.step.tree import tree_flatten
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis


@dataclass
class Plan:
    """A traced step, cut into stages.

    Attributes:
        trace: calls and the values between them.
        stage_of: call number -> stage.
        live: values each cut carries, see :func:`~lnn_lightning.parallel.pipeline.partition.live_values`.
        fake_mode: mode of the absent values.
        device: device of the values.
        parts: unit outputs that tensor ranks hold parts of, with how.
        axis: the tensor ranks.
    """

    trace: Trace
    stage_of: tuple[int, ...]
    live: tuple[tuple[Key, ...], ...]
    fake_mode: FakeTensorMode
    device: torch.device
    parts: dict[Key, Spec] = field(default_factory=dict)
    axis: TensorAxis | None = None
    _absent: dict[Key, Tensor] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Number of stages, empty ones included."""
        return len(self.live) + 1

    def received(self, stage: int) -> tuple[Key, ...]:
        """Values that ``stage`` gets from the one before it."""
        return self.live[stage - 1] if stage > 0 else ()

    def sent(self, stage: int) -> tuple[Key, ...]:
        """Values that ``stage`` hands to the next one."""
        return self.live[stage] if stage < self.num_stages - 1 else ()

    def info(self, key: Key) -> TensorInfo:
        """Shape, dtype and gradient need of a live value."""
        return self.trace.calls[key[0]].outputs[key[1]]

    def wire(self, key: Key) -> TensorInfo:
        """The same of what is sent: a rank's part, where it holds one."""
        info = self.info(key)
        if (spec := self.parts.get(key)) is None or self.axis is None:
            return info
        return TensorInfo(spec.part_shape(info.shape, self.axis.size), info.dtype, info.requires_grad)

    def last_call(self, stage: int) -> int | None:
        """Number of the last call of a stage; None if it has none."""
        own = [index for index, owner in enumerate(self.stage_of) if owner == stage]
        return own[-1] if own else None

    def answer(self, call: Call, args: Any, kwargs: Any, values: dict[Key, Tensor]) -> Any:
        """Result of a call that runs elsewhere: received values where they are here, absent ones where not."""
        inputs: list[Any] | None = None
        leaves: list[Any] = []
        for index, leaf in enumerate(call.outputs):
            if not isinstance(leaf, TensorInfo):
                leaves.append(leaf)
            elif (source := call.aliases.get(index)) is not None:
                inputs = inputs if inputs is not None else tree_flatten((args, kwargs))[0]
                leaves.append(inputs[source])
            else:
                key = (call.index, index)
                leaves.append(values[key] if key in values else self.absent(key))
        assert call.unflatten is not None
        return call.unflatten(leaves)

    def absent(self, key: Key) -> Tensor:
        """A value that is not here: a fake tensor, shape without data."""
        if key in self._absent:
            return self._absent[key]
        info = self.info(key)
        with self.fake_mode:
            made = torch.empty(info.shape, dtype=info.dtype, device=self.device)
        if key not in self.trace.mutated:  # one that is changed in place may even change its shape
            self._absent[key] = made
        return made
