"""What a seam knows while it runs, and how a module's ``forward`` is taken over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.loop import run_loop
from lnn_lightning.parallel.expert.loop_shapes import loop_without_data
from lnn_lightning.parallel.step.remember import in_second_run
from lnn_lightning.parallel.step.tree import tree_tensors
from lnn_lightning.parallel.tensor.modules import Forward, is_suspended, own_forward
from lnn_lightning.parallel.tensor.sharded import book_wholes, is_sharded, wholes


@dataclass(eq=False)
class SeamState:
    """A module of the user's whose experts are, or will be, shared out.

    Attributes:
        name: of the module, for people.
        experts: how many there are on all ranks.
        members: names within the module of experts that are modules of their own, in order.
        axis: who holds which; None: all are here, and the module does what it always did.
        capacity_factor: see :class:`~.settings.ExpertParallel`.
        load: rows sent to each expert since the last reading, before any are dropped; made at the first call.
        dropped: rows that found no place since then.
        copied: it was unpickled: its experts are part of a whole that is not here.
        guard: while it is checked: what the module's own code raised; others do not wait for this rank in vain.
        once: whole parameters of which each tensor rank adds its share, where each expert is divided over them.
        beside: other modules of the block around may run while tokens travel (``shared.py``).
    """

    name: str
    experts: int
    members: tuple[str, ...] = ()
    axis: ExpertAxis | None = None
    capacity_factor: float | None = None
    load: Tensor | None = None
    dropped: Tensor | None = None
    copied: bool = False
    guard: list[str] | None = None
    once: frozenset[str] = frozenset()
    beside: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Ranks cannot be written to a file."""
        return {**vars(self), "axis": None, "copied": self.copied or self.axis is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> SeamState:
        made = replace(self, load=None, dropped=None, guard=None)
        memo[id(self)] = made
        return made

    @property
    def is_active(self) -> bool:
        """Whether experts are shared out, or there is something to do with where tokens go."""
        if self.copied:
            raise StepError(
                f"{self.name!r} was read from a file that a rank wrote with its own share of the experts. Save "
                "`state_dict()` or a checkpoint of the trainer instead: these hold all of them."
            )
        return self.axis is not None

    @torch.no_grad()
    def count(self, index: Tensor, kept: Tensor | None = None) -> None:
        """Adds up where tokens go; without waiting for the device, and not again where a block runs again."""
        if in_second_run() or torch._C._current_graph_task_id() != -1 or self.guard is not None:
            return
        numbers = torch.arange(self.experts, device=index.device)
        load = (index.reshape(-1, 1) == numbers).sum(0)
        if self.load is None or self.load.device != load.device:
            self.load, self.dropped = torch.zeros_like(load), load.new_zeros(())
        assert self.dropped is not None
        self.load += load
        if kept is not None:
            self.dropped += load.sum() - ((kept >= 0) & (kept < self.experts)).sum()

    def read(self) -> tuple[Tensor, Tensor] | None:
        """Load and dropped rows since the last reading; None: no token came by."""
        if self.load is None or self.dropped is None:
            return None
        read, self.load, self.dropped = (self.load, self.dropped), None, None
        return read


def seam_of(module: nn.Module) -> SeamState:
    """The state of a module that is a seam."""
    return vars(module)["lnn_seam"]


def loop_forward(self: nn.Module, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module that calls its experts in a loop."""
    forward, state = own_forward(self, before), seam_of(self)
    if any(is_sharded(each) for each in tree_tensors((args, kwargs))):
        book_wholes("experts", args, kwargs)
        args, kwargs = wholes((args, kwargs))
    if any(without_values(each) for each in tree_tensors((args, kwargs))):
        experts = [self.get_submodule(name) for name in state.members]
        return loop_without_data(self, forward, experts, args, kwargs, name=state.name)
    if is_suspended() or not state.is_active:
        return forward(*args, **kwargs)
    return _run(self, state, forward, args, kwargs)


@torch.compiler.disable
def _run(module: nn.Module, state: SeamState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    experts = [module.get_submodule(name) for name in state.members]
    note = state.count if module.training else None
    assert state.axis is not None
    return run_loop(module, forward, experts, state.axis, args, kwargs, name=state.name, note=note, guard=state.guard)


def without_values(tensor: Tensor) -> bool:
    """Whether a tensor has a shape alone."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
