"""One run of the user's step on one stage.

Calls before the stage answer with received and absent values, calls of the stage run, and behind the stage's last call
the step is abandoned (outside every hook of that unit); the last stage runs to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.parallel.errors import AbsentValueError, StepError
from lnn_lightning.parallel.step.extension import Body, StepExtension, UnitRun, extended
from lnn_lightning.parallel.step.glue import GlueMode, glue_mode
from lnn_lightning.parallel.step.hooks import hooks_set_aside, is_call, run_hooks, runs_hooks
from lnn_lightning.parallel.step.patching import patched_calls
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.randomness import reseed, seed_of
from lnn_lightning.parallel.step.remember import checkpoints_remember
from lnn_lightning.parallel.step.trace import Call, Key, TensorInfo
from lnn_lightning.parallel.step.tree import tree_leaves
from lnn_lightning.parallel.tensor.sharded import plain, whole, wholes, wrap

ALL_ABSENT = -1
"""Stage number of a run in which every unit is absent."""
_GLUE = -1
"""Takes the place of a call's number in the seed of glue code."""


class _StageDone(BaseException):
    """Abandons the step behind the last call of a stage; not an Exception, so that user code does not catch it."""


class _Run:
    """State of the run in progress."""

    def __init__(
        self,
        plan: Plan,
        stage: int,
        values: dict[Key, Tensor],
        seed: int,
        index: int = 0,
        extensions: Sequence[StepExtension] = (),
    ) -> None:
        self.plan, self.stage, self.values, self.seed = plan, stage, values, seed
        self.index, self._extensions = index, extensions
        self.last = None if stage in (ALL_ABSENT, plan.num_stages - 1) else plan.last_call(stage)
        self.sent = set(plan.sent(stage)) if stage != ALL_ABSENT else set()
        self.count = 0
        self.inside = False
        self.glue: GlueMode | None = None

    def enter(self, name: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.plan.num_stages == 1 and self._expected() != name:
            self.inside = True  # one stage holds everything and may do as it likes from here on
            return original(*args, **kwargs)
        call = self._next(name)
        hooked = runs_hooks(unit, original)
        if self.stage == ALL_ABSENT or self.plan.stage_of[call.index] != self.stage:
            out = self.plan.answer(call, args, kwargs, self.values)
            return run_hooks(unit, args, kwargs, out, absent=True) if hooked else out
        self._check_present(call, args, kwargs)
        self.inside = True
        try:
            with self.glue.suspended() if self.glue is not None else nullcontext():
                with hooks_set_aside(unit) if hooked else nullcontext():
                    out = self._body(call, unit, original)(*args, **kwargs)
        finally:
            self.inside = False
        self._keep(call, out)
        if hooked:
            out = run_hooks(unit, args, kwargs, out, absent=False)
        if call.index == self.last:
            raise _StageDone
        return out

    def _body(self, call: Call, unit: nn.Module, original: Body) -> Body:
        def body(*args: Any, **kwargs: Any) -> Any:
            if call.random:
                reseed(seed_of(seed, call.index), device)
            return original(*args, **kwargs)

        seed, device = self.seed, self.plan.device
        run = UnitRun(self.stage, self.index, call, unit, is_call(original))
        return extended(self._extensions, run, body)

    def _expected(self) -> str:
        calls = self.plan.trace.calls
        return calls[self.count].unit if self.count < len(calls) else "the end of the step"

    def _next(self, name: str) -> Call:
        calls = self.plan.trace.calls
        if self._expected() != name:
            raise StepError(
                f"The order of calls in the step changed: call {self.count} was {self._expected()!r} when the step "
                f"was traced and is {name!r} now (stage {self.stage}). A pipeline needs the same calls for every "
                "batch of one shape: make layer drop, early exit and the like independent of chance and data."
            )
        call = calls[self.count]
        self.count += 1
        return call

    def _check_present(self, call: Call, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor):
                missing = sorted(key for key in call.needs if key not in self.values)
                origin = ", ".join(repr(self.plan.trace.calls[index].unit) for index, _ in missing)
                raise AbsentValueError(
                    f"{call.unit!r} on stage {self.stage} needs a value of shape {tuple(leaf.shape)} that lives on "
                    f"another stage{f' (made by {origin})' if origin else ''} and was not sent: the flow of values in "
                    "the step differs from the traced one. Use `split_points` to cut elsewhere."
                )

    def _keep(self, call: Call, out: Any) -> None:
        for index, leaf in enumerate(tree_leaves(out)):
            key = (call.index, index)
            if isinstance(leaf, Tensor) and key in self.sent:
                leaf = leaf if key in self.plan.parts else whole(leaf)
                self.values[key] = leaf.clone() if key in self.plan.trace.mutated else leaf


_runs: list[_Run] = []


def in_glue() -> bool:
    """Whether a step runs, and what is called from here is a unit or holds some."""
    return bool(_runs) and not _runs[-1].inside


class StepRunner:
    """Runs stages of a step; keeps the units patched while it is open.

    Args:
        units: name -> module of everything that counts as a unit when called from glue.
    """

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self._units = units
        self._open = False
        self._run: _Run | None = None
        self._again: dict[str, int] = {}
        self._again_device = torch.device("cpu")
        self.extensions: list[StepExtension] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Routes the calls of the units through the runs made inside; checkpoints within them decide once."""
        if self._open:
            yield
            return
        self._open = True
        try:
            with patched_calls(self._units, self._enter), checkpoints_remember():
                yield
        finally:
            self._open = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Other runs may be made inside a run that is in progress."""
        run, self._run = self._run, None
        try:
            with run.glue.suspended() if run is not None and run.glue is not None else nullcontext():
                yield
        finally:
            self._run = run

    @contextmanager
    def all_absent(self, plan: Plan, seed: int, values: dict[Key, Tensor] | None = None) -> Iterator[None]:
        """Every unit answers with absent (or given) values inside; glue is real, with a real run's random numbers."""
        with self._in_run(_Run(plan, ALL_ABSENT, values or {}, seed)):
            yield

    @contextmanager
    def _in_run(self, run: _Run) -> Iterator[None]:
        previous, self._run = self._run, run
        _runs.append(run)
        device = run.plan.device
        reseed(seed_of(run.seed, _GLUE), device)
        try:
            with glue_mode(run.plan.trace.glue_needs_mode, seed_of(run.seed, _GLUE), device) as run.glue:
                yield
        finally:
            _runs.pop()
            self._run = previous

    @contextmanager
    def backward(self, plan: Plan, stage: int, seed: int) -> Iterator[None]:
        """Units that a checkpoint of glue code calls again inside draw the random numbers of their first call."""
        calls = [call for call in plan.trace.calls if plan.stage_of[call.index] == stage and call.region is not None]
        self._again = {call.unit: seed_of(seed, call.index) for call in calls if call.random}
        self._again_device = plan.device
        try:
            yield
        finally:
            self._again = {}

    def _enter(self, name: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._run is None and name in self._again:
            again, seed = self._again, self._again[name]
            self._again = {}  # units within this one belong to it
            reseed(seed, self._again_device)
            try:
                return original(*args, **kwargs)
            finally:
                self._again = again
        if self._run is None or self._run.inside:
            return original(*args, **kwargs)
        return self._run.enter(name, unit, original, args, kwargs)

    def run_stage(
        self, plan: Plan, stage: int, received: Sequence[Tensor], step: Callable[[], Any], seed: int, index: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Runs ``step`` as one stage.

        Args:
            plan: the cut step.
            stage: number of the stage.
            received: values of ``plan.received(stage)``.
            step: the user's step on a micro-batch.
            seed: seed of this micro-batch.
            index: number of the micro-batch.

        Returns:
            The values of ``plan.sent(stage)``, and what the step returned (last stage only).

        Raises:
            StepError: the calls differ from the traced ones, or end before the stage's last.
            AbsentValueError: a unit of this stage is given a value that is not here.
        """
        values = {
            key: self._incoming(plan, key, tensor) for key, tensor in zip(plan.received(stage), received, strict=True)
        }
        last_stage = stage == plan.num_stages - 1
        if not last_stage and plan.last_call(stage) is None:
            return self._outgoing(plan, stage, values, received), None
        run = _Run(plan, stage, values, seed, index, self.extensions)
        result = None
        try:
            with self._in_run(run):
                result = step()
        except _StageDone:
            pass
        else:
            if run.count < len(plan.trace.calls) and plan.num_stages > 1:
                raise StepError(
                    f"The step ended after {run.count} unit calls; it made {len(plan.trace.calls)} when it was traced "
                    f"(next would be {plan.trace.calls[run.count].unit!r}). A pipeline needs the same calls for every "
                    "batch of one shape."
                )
        return self._outgoing(plan, stage, values, received), wholes(result)

    @staticmethod
    def _incoming(plan: Plan, key: Key, tensor: Tensor) -> Tensor:
        if (spec := plan.parts.get(key)) is not None and plan.axis is not None:
            return wrap(tensor.view(tensor.shape), spec, plan.axis)
        return tensor.clone() if key in plan.trace.mutated else tensor

    def _outgoing(
        self, plan: Plan, stage: int, values: dict[Key, Tensor], received: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        outgoing: list[Tensor] = []
        taken = {tensor.untyped_storage()._cdata for tensor in received}
        for key in plan.sent(stage):
            value, info = plain(values[key]), plan.wire(key)
            self._check_sent(plan, stage, key, value, info)
            storage = value.untyped_storage()._cdata
            if value._is_view() or not value.is_contiguous() or storage in taken:
                value = value.clone(memory_format=torch.contiguous_format)
            taken.add(storage)
            outgoing.append(value)
        return tuple(outgoing)

    @staticmethod
    def _check_sent(plan: Plan, stage: int, key: Key, value: Tensor, info: TensorInfo) -> None:
        unit = plan.trace.calls[key[0]].unit
        if isinstance(value, FakeTensor):
            raise AbsentValueError(f"Stage {stage} must send a result of {unit!r} that is not here.")
        if tuple(value.shape) != info.shape or value.dtype != info.dtype or value.requires_grad != info.requires_grad:
            raise StepError(
                f"{unit!r} returned a tensor of shape {tuple(value.shape)}, {value.dtype}, "
                f"requires_grad={value.requires_grad}; it was traced as {info.shape}, {info.dtype}, "
                f"requires_grad={info.requires_grad}. A value that crosses from stage {stage} to {stage + 1} must not "
                "depend on the data in these; use `split_points` to cut elsewhere. Around blocks, "
                "`torch.utils.checkpoint` must be used with `use_reentrant=False`."
            )
