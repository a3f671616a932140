"""Plans for every kind of step and every shape of batch, traced when first seen."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.install import ExpertSharding
from lnn_lightning.parallel.pipeline.ownership import Ownership
from lnn_lightning.parallel.pipeline.partition import live_values
from lnn_lightning.parallel.step.batch import own_copy, signature_of
from lnn_lightning.parallel.step.interception import no_backward
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.randomness import preserved_generators, preserved_rng
from lnn_lightning.parallel.step.shapes import ShapeRule
from lnn_lightning.parallel.step.trace import HIDDEN, Key, Trace, trace_step
from lnn_lightning.parallel.step.tree import tree_tensors
from lnn_lightning.parallel.step.units import Units, is_stateful
from lnn_lightning.parallel.tensor.install import TensorSharding


class PlanBook:
    """Traces steps and keeps their plans.

    Args:
        root: the module whose sub-modules are the units.
        units: its units.
        num_stages: stages of the pipeline.
        observer: mutes the step while it is traced.

    Attributes:
        whole_shapes: makes a context in which parameters of which this rank holds a piece have their whole shapes.
    """

    def __init__(self, root: nn.Module, units: Units, num_stages: int, observer: StepObserver) -> None:
        self.root, self.units, self.num_stages = root, units, num_stages
        self.groups = unit_groups(root, units)
        self.tracing = False
        self.whole_shapes: Callable[[], AbstractContextManager[None]] = nullcontext
        self._observer = observer
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.tensor: TensorSharding | None = None
        self.expert: ExpertSharding | None = None
        self._rules: dict[str, ShapeRule] = {}
        self._plans: dict[Any, Plan] = {}
        self._ownership: Ownership | None = None
        self._reference: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    def trace(self, step: Callable[[Any], Any], batch: Any) -> Trace:
        """Follows ``step(batch)``; leaves nothing behind. On one stage that may fail: the trace has no calls then."""
        try:
            return self._trace(step, batch)
        except Exception as error:
            if self.num_stages > 1:
                raise
            traceback.clear_frames(error.__traceback__)  # what they hold would keep graphs of parameters alive
            return Trace([], tail_error=error)

    def _trace(self, step: Callable[[Any], Any], batch: Any) -> Trace:
        device = next(iter([tensor.device for tensor in tree_tensors(batch)]), torch.device("cpu"))
        self.tracing = True
        try:
            with (
                self._whole(),
                preserved_rng(device),
                preserved_generators(self.root),
                no_backward() if self.num_stages > 1 else nullcontext(),
            ):
                trace = trace_step(
                    self.root, self.groups, step, own_copy(batch), self._observer.muted, self._rules, self.fake_mode
                )
                self._check_end(trace)
        finally:
            self.tracing = False
        return trace

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Parameters have the shapes of the user's module inside."""
        divided = [each.whole_shapes for each in (self.tensor, self.expert) if each is not None]
        with ExitStack() as stack:
            for whole_shapes in [self.whole_shapes, *divided]:
                stack.enter_context(whole_shapes())
            yield

    def _check_end(self, trace: Trace) -> None:
        """A step that fails while it is traced must have got behind its last block; blocks must not talk in secret."""
        if self.num_stages == 1:
            return
        if writers := [call.unit for call in trace.calls if call.writes]:
            raise StepError(
                f"{writers[0]!r} writes into a list or dict that it is given: on another stage nobody would see it. "
                "Return the value instead, or train without a pipeline (pipeline_parallel_size=1)."
            )
        self._check_inner_hooks(trace)
        if trace.tail_error is None:
            return
        called = {call.group for call in trace.calls}
        for trunk in self.units.trunks:
            blocks = [name for name in self.units.names if name in self.units.blocks and name.startswith(trunk + ".")]
            left = [name for name in blocks if name not in called]
            if left and len(left) < len(blocks):
                raise StepError(
                    f"The step cannot be followed from {trace.calls[-1].unit!r} to {left[0]!r}: it looks at values "
                    f"between blocks, which are not known beforehand ({type(trace.tail_error).__name__}: "
                    f"{trace.tail_error}). Move "
                    "the code that does into a block, or train without a pipeline (pipeline_parallel_size=1)."
                ) from trace.tail_error

    def _check_inner_hooks(self, trace: Trace) -> None:
        """What hooks deep inside a unit collect would lack the units of other stages."""
        read = trace.tail.union(*(call.needs for call in trace.calls))
        for index, leaf in sorted(read):
            unit = self.root.get_submodule(trace.calls[index].unit)
            if leaf == HIDDEN and any(module._forward_hooks for module in unit.modules() if module is not unit):
                raise StepError(
                    f"A value that a forward hook inside of {trace.calls[index].unit!r} collects (attention weights "
                    "or router logits, say) is used outside of it: the hooks of blocks on other stages do not run "
                    "here. Switch it off (`output_attentions=False`, ...), or train without a pipeline "
                    "(pipeline_parallel_size=1)."
                )

    def decide(self, kind: str, names: tuple[str, ...], stage_of: Sequence[int], ownership: Ownership) -> None:
        """Fixes where the calls of a kind of step run and where the units live."""
        self._ownership = ownership
        self._reference[kind] = (names, tuple(stage_of))

    def plan(self, kind: str, step: Callable[[Any], Any], batch: Any, device: torch.device) -> Plan:
        """Plan of a step for batches of this shape, traced if none is known."""
        key = (
            kind,
            tuple(parameter.requires_grad for parameter in self.root.parameters()),
            self.root.training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            device,
            signature_of(batch),
        )
        if key not in self._plans:
            trace = self.trace(step, batch)
            if self.tensor is not None and torch.is_grad_enabled():
                with self._whole():
                    self.tensor.follow(trace)
            stage_of = self._assign(kind, trace)
            self._plans[key] = self.cut_plan(trace, stage_of, device)
        return self._plans[key]

    def cut_plan(self, trace: Trace, stage_of: Sequence[int], device: torch.device) -> Plan:
        """A traced step, cut into stages."""
        live = self.cut(trace, stage_of)
        if self.tensor is None:
            return Plan(trace, tuple(stage_of), live, self.fake_mode, device)
        parts, axis = self.tensor.plan.parts(trace), self.tensor.outside
        return Plan(trace, tuple(stage_of), live, self.fake_mode, device, parts, axis)

    def cut(self, trace: Trace, stage_of: Sequence[int]) -> tuple[tuple[Key, ...], ...]:
        """Values that cross from each stage to the next."""
        return live_values(trace, stage_of, self.num_stages)

    def _assign(self, kind: str, trace: Trace) -> tuple[int, ...]:
        """Stage of each call, given where the units live."""
        for names, stage_of in self._reference.values():
            if names == trace.names:
                return stage_of
        assert self._ownership is not None
        stages: list[int] = []
        current = 0
        for call in trace.calls:
            possible = [stage for stage in sorted(self._ownership.units[call.group]) if stage >= current]
            if not possible:
                raise StepError(
                    f"{kind} calls {call.unit!r}, which lives on pipeline stage "
                    f"{max(self._ownership.units[call.group])}, after {trace.calls[call.index - 1].unit!r} on stage "
                    f"{current}: it goes through the pipeline more than once, or in another order than the step the "
                    "stages were made for. Run one pass through the blocks a step, or train without a pipeline "
                    "(pipeline_parallel_size=1)."
                )
            current = possible[0]
            stages.append(current)
        self._reference.setdefault(kind, (trace.names, tuple(stages)))
        return tuple(stages)


def unit_groups(root: nn.Module, units: Units) -> dict[str, str]:
    """Everything that counts as a unit when glue calls it -> the maximal unit it belongs to."""
    first_names = {id(module): name for name, module in root.named_modules()}
    groups: dict[str, str] = {}
    for unit in units.names:
        for module in root.get_submodule(unit).modules():
            if is_stateful(module):
                groups.setdefault(first_names[id(module)], unit)
    return groups
