"""What each stage keeps of a micro-batch between its forward and its backward, counted on tensors without data.

The whole step runs once on one process: every unit computes on fake tensors, divided as on a tensor rank, and what
autograd saves is booked on the stage that the running call belongs to. Glue belongs to the stage of the call behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.parallel.step.batch import own_copy
from lnn_lightning.parallel.step.extension import StepExtension, UnitRun, extended
from lnn_lightning.parallel.step.graph import nodes_behind
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.patching import patched_calls
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.randomness import preserved_generators, preserved_rng
from lnn_lightning.parallel.step.saved import watching_saved
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.step.tree import tree_flatten, tree_tensors


@dataclass
class KeptBytes:
    """Bytes that stages keep of one micro-batch.

    Attributes:
        saved: stage -> bytes of all memory saved for backward.
        of_calls: stage -> the same by unit call, as if it were alone.
        used: names of the parameters that the loss depends on; None: the step did not get to its end.
    """

    saved: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    of_calls: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    used: set[str] | None = None


class _Counter:
    """Answers unit calls and books what is saved."""

    def __init__(self, root: nn.Module, plan: Plan, batch: Any, extensions: Sequence[StepExtension]) -> None:
        self.plan, self.extensions = plan, extensions
        self.kept = KeptBytes()
        self.stage = plan.stage_of[0]
        self.call: int | None = None
        self.around = ExitStack()
        self._count = 0
        self._alive: list[Any] = []  # memory that is used again must not be taken for the same
        outside = [*root.parameters(), *root.buffers(), *tree_tensors(batch)]
        fakes = [self._fake(tensor) for tensor in outside if not is_stand_in(tensor)]
        self._outside = [tensor.untyped_storage() for tensor in (*outside, *fakes)]
        self._ignored = {storage._cdata for storage in self._outside}
        self._known: set[tuple[Any, int]] = set()

    def enter(self, name: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.call is not None:
            return original(*args, **kwargs)
        call = self.plan.trace.calls[self._count]
        self.call = call.index
        run = UnitRun(self.stage, 0, call, unit)
        body = extended(self.extensions, run, original)
        leaves, unflatten = tree_flatten((args, kwargs))
        args, kwargs = unflatten([leaf if isinstance(leaf, nn.Parameter) else self._fake(leaf) for leaf in leaves])
        try:
            with self.plan.fake_mode:
                return body(*args, **kwargs)
        finally:
            self._count += 1
            self.call = None
            stages = (*self.plan.stage_of, self.plan.num_stages - 1)
            if stages[self._count] != self.stage:
                self.begin_stage(stages[self._count])

    def begin_stage(self, stage: int) -> None:
        """What follows belongs to this stage."""
        self.around.close()
        self.stage = stage
        for extension in self.extensions:
            self.around.enter_context(extension.forward(stage, 0))

    @property
    def is_through(self) -> bool:
        """Whether all calls have been made."""
        return self._count == len(self.plan.trace.calls)

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return self.plan.fake_mode.from_tensor(leaf, static_shapes=True)

    def note(self, tensor: Tensor) -> None:
        """Books a tensor that is saved."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._ignored:
            return
        self._alive.append(storage)
        if (self.stage, key) not in self._known:
            self._known.add((self.stage, key))
            self.kept.saved[self.stage] += size
        if self.call is not None and (f"call {self.call}", key) not in self._known:
            self._known.add((f"call {self.call}", key))
            self.kept.of_calls[self.stage][self.call] += size


def count_kept(
    root: nn.Module,
    plan: Plan,
    step: Callable[[Any], Any],
    batch: Any,
    observer: StepObserver,
    extensions: Sequence[StepExtension] = (),
) -> KeptBytes:
    """Runs a step without data and counts what its stages keep.

    Args:
        root: the module, whole or with this process's tensor rank's parts of its parameters.
        plan: the cut step.
        step: the user's step.
        batch: one micro-batch, as the plan was traced with.
        observer: mutes the step.
        extensions: what is put around the units.

    Raises:
        Exception: what a unit raises on tensors without data; such a step cannot be counted.
    """
    batch = own_copy(batch)
    counter = _Counter(root, plan, batch, extensions)
    units = {call.unit: root.get_submodule(call.unit) for call in plan.trace.calls}
    loss = None
    with ExitStack() as stack:
        stack.enter_context(preserved_rng(plan.device))
        stack.enter_context(preserved_generators(root))
        stack.enter_context(observer.muted())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(patched_calls(units, counter.enter))
        stack.enter_context(watching_saved(counter.note))
        for extension in extensions:
            stack.callback(extension.finish)
            extension.begin(1, training=True)
        stack.enter_context(counter.around)
        counter.begin_stage(counter.stage)
        try:
            loss = step(batch)
        except Exception:
            if plan.trace.tail_error is None or not counter.is_through:
                raise
    loss = loss.get("loss") if isinstance(loss, dict) else loss
    if isinstance(loss, Tensor) and loss.requires_grad:
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        reached = {id(node.variable) for node in nodes_behind([loss]) if hasattr(node, "variable")}
        counter.kept.used = {name for key, name in names.items() if key in reached}
    return counter.kept
