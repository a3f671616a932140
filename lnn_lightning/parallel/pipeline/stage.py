"""A stage of ``torch.distributed.pipelining`` whose sub-module is the user's step.

Differences to its parent: shapes come from the plan of each micro-batch, and receive buffers are made when they are
needed, not for all micro-batches at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta, _TensorMeta
from torch.distributed.pipelining.stage import _RecvInfo
from typing_extensions import override

from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.trace import Key, TensorInfo
from lnn_lightning.parallel.watch.activity import doing

Body = Callable[[int, Sequence[Tensor], int], Any]
"""``body(stage, received, micro_batch)``: the live values for the next stage, or on the last one the scaled loss."""


class _StageModule(nn.Module):
    """What the schedule sees as the stage's module; parameters stay where the user registered them."""

    def __init__(self, stage: int, body: Body, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._stage, self._body, self._own = stage, body, list(parameters)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._own)

    def forward(self, *received: Tensor, mb: Tensor) -> Any:
        return self._body(self._stage, received, int(mb))


class WatchedStage(PipelineStage):
    """One stage of the user's step.

    Args:
        stage: number of the stage.
        plan: plan of the first micro-batch; decides how many values cross.
        body: runs the stage.
        parameters: the stage's parameters.
        device: device of the values.
        group: ranks of the pipeline.
        during_backward: ``during_backward(stage, micro_batch)`` makes a context for its backward.
        before_last_backward: called with the outputs before the last full backward of a step.
        before_backward: ``before_backward(stage, last)`` is called before every backward.
        may_split: the backward of inputs and of weights may be made apart (zero bubble).
    """

    def __init__(
        self,
        stage: int,
        plan: Plan,
        body: Body,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        group: dist.ProcessGroup,
        during_backward: Callable[[int, int], AbstractContextManager[None]],
        before_last_backward: Callable[[Any], None],
        before_backward: Callable[[int, bool], None],
        may_split: bool = True,
    ) -> None:
        self._before_backward, self._may_split = before_backward, may_split
        self._during_backward = during_backward
        self._before_last_backward = before_last_backward
        self._plans: Sequence[Plan] = [plan]
        super().__init__(
            _StageModule(stage, body, parameters),
            stage,
            plan.num_stages,
            device,
            input_args=_metas(plan, plan.received(stage)),
            output_args=_metas(plan, plan.sent(stage)) if stage < plan.num_stages - 1 else _loss_meta(),
            group=group,
        )

    def load(self, plans: Sequence[Plan]) -> None:
        """Takes the plans of the next step's micro-batches."""
        self._plans = plans
        if self._stage_meta.inputs is not None:
            self._stage_meta.inputs = tuple(_meta(plans[0].wire(key)) for key in plans[0].received(self.stage_index))
            self._setup_forward_recv_info(len(plans), True)
            self._setup_forward_send_info()
            self._setup_backward_recv_info(len(plans))

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self.grad_send_info = None
        source = self.stage_index - 1
        for chunk, plan in enumerate(self._plans):
            self.args_recv_info[chunk] = tuple(
                _RecvInfo(f"value {key} of stage {source}", source, None, _meta(plan.wire(key)))
                for key in plan.received(self.stage_index)
            )

    def _setup_forward_send_info(self) -> None:
        count = len(self._plans[0].sent(self.stage_index))
        self.act_send_info = {0: []} if self.is_last else {index: [self.stage_index + 1] for index in range(count)}

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        target = self.stage_index + 1
        for chunk, plan in enumerate(self._plans):
            self.grad_recv_info[chunk] = tuple(
                _RecvInfo(f"gradient {key} of stage {target}", target, None, _gradient_meta(plan.wire(key)))
                for key in plan.sent(self.stage_index)
            )

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[_RecvInfo]) -> None:
        for info in infos:
            if info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)

    def _get_grad_send_meta(self, input_idx: int) -> _TensorMeta | None:
        keys = self._plans[0].received(self.stage_index)
        return _gradient_meta(self._plans[0].wire(keys[input_idx]))

    @override
    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if gradient is not None:
                info.buffer = gradient
            elif info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device).zero_()

    @override
    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        doing("forward of micro-batch %d, stage %d", fwd_chunk_id, self.stage_index)
        try:
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        except RuntimeError as error:  # the parent wraps the user's exception into a text of its own
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None
        return output

    @override
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        doing("backward of micro-batch %d, stage %d", bwd_chunk_id, self.stage_index)
        whole = full_backward or not self._can_split(bwd_chunk_id)
        try:
            with self._during_backward(self.stage_index, bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        except RuntimeError as error:  # as in the forward
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
        self.bwd_cache[bwd_chunk_id] = tuple(
            gradient if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
        )
        if whole and not full_backward:
            self.dw_runner[bwd_chunk_id] = _nothing
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.dw_runner.get(bwd_chunk_id) is _nothing:
            del self.dw_runner[bwd_chunk_id]
            return
        with self._during_backward(self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _can_split(self, chunk: int) -> bool:
        return self._may_split and can_split(self._plans[chunk], self.stage_index)

    @override
    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        outputs = bwd_kwargs["stage_output"]
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        self._before_backward(self.stage_index, last_backward)
        if backward_type == "full" and not any(output.requires_grad for output in outputs):
            return tuple(None for _ in bwd_kwargs["input_values"]), None  # everything up to here is frozen
        if backward_type == "full" and last_backward:
            self._before_last_backward(outputs)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def can_split(plan: Plan, stage: int) -> bool:
    """Whether a stage's backward can be made by inputs and by weights apart.

    Torch's split is right for a chain of units only: it goes through the graph twice where a value feeds several units,
    a parameter is used by several calls, or glue computes with parameters.
    """
    own = [call for call in plan.trace.calls if plan.stage_of[call.index] == stage]
    is_last = stage == plan.num_stages - 1
    if any(call.glue_parameters for call in own) or (is_last and plan.trace.tail_parameters):
        return False
    used = Counter(name for call in own for name in call.parameters)
    if any(count > 1 for count in used.values()):
        return False
    uses = Counter(key for call in own for key in call.needs)
    uses.update(plan.sent(stage))
    if is_last:
        uses.update(plan.trace.tail)
    return all(count == 1 for key, count in uses.items() if plan.info(key).requires_grad)


def _nothing() -> None:
    """Weight backward of a micro-batch whose backward was not split."""


def _meta(info: TensorInfo) -> _TensorMeta:
    strides, step = [], 1
    for size in reversed(info.shape):
        strides.append(step)
        step *= max(size, 1)
    return _TensorMeta(torch.Size(info.shape), tuple(reversed(strides)), info.dtype, info.requires_grad)


def _gradient_meta(info: TensorInfo) -> _TensorMeta | None:
    if not info.requires_grad:
        return None
    return _meta(TensorInfo(info.shape, info.dtype, False))


def _metas(plan: Plan, keys: Sequence[Key]) -> tuple[Tensor, ...]:
    infos = [plan.wire(key) for key in keys]
    return tuple(
        torch.empty(info.shape, dtype=info.dtype, device="meta", requires_grad=info.requires_grad) for info in infos
    )


def _loss_meta() -> tuple[Tensor, ...]:
    return (torch.empty((), device="meta", requires_grad=True),)
