"""Running a unit on the meta device, with parts in place of wholes, and what that shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.parallel.step.tree import Unflatten
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis
from lnn_lightning.parallel.tensor.layers import Role
from lnn_lightning.parallel.tensor.modules import (
    conv1d_forward,
    give_back_forward,
    is_conv1d,
    multihead_forward,
    planning,
    take_forward,
)
from lnn_lightning.parallel.tensor.sharded import is_sharded


@dataclass(frozen=True)
class CallSample:
    """What a unit was called with when the step was traced.

    Attributes:
        leaves: real values where they follow from the batch alone, fake tensors for results of other units.
        unflatten: builds ``(args, kwargs)`` from leaves.
        loss_outputs: numbers of output leaves that a cross entropy is computed from.
    """

    leaves: tuple[Any, ...]
    unflatten: Unflatten
    loss_outputs: frozenset[int] = frozenset()

    @property
    def signature(self) -> tuple[Any, ...]:
        """What another call must share for its shapes to be the same."""
        return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in self.leaves)


@dataclass
class Trial:
    """What a run on the meta device showed; also the ledger of that run."""

    roles: dict[str, Role] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    biases: dict[str, str] = field(default_factory=dict)
    partial_ids: list[tuple[int, int]] = field(default_factory=list)
    whole_ids: set[int] = field(default_factory=set)
    used_whole: set[str] = field(default_factory=set)
    gathers: dict[str, tuple[str, set[tuple[int, ...]]]] = field(default_factory=dict)
    forward: int = 0
    backward: int = 0
    waste: float = 0.0
    error: Exception | None = None
    out: Any = None

    def sent(self, what: str, forward: int, backward: int) -> None:
        """See :class:`~lnn_lightning.parallel.tensor.axis.Ledger`."""
        self.forward += forward
        self.backward += backward

    def partial(self, parameter: Tensor) -> None:
        """See :class:`~lnn_lightning.parallel.tensor.axis.Ledger`."""
        self.partial_ids.append((id(parameter), parameter.numel() * parameter.element_size()))

    def used_on_whole(self, parameter: Tensor) -> None:
        """See :class:`~lnn_lightning.parallel.tensor.axis.Ledger`."""
        self.whole_ids.add(id(parameter))

    def mark(self) -> Any:
        """See :class:`~lnn_lightning.parallel.tensor.axis.Ledger`."""
        return self.forward, self.backward, len(self.partial_ids)

    def take_back(self, mark: Any) -> None:
        """See :class:`~lnn_lightning.parallel.tensor.axis.Ledger`."""
        self.forward, self.backward, partial = mark
        del self.partial_ids[partial:]

    def gathered(self, operation: str, origins: frozenset[str], sections: tuple[int, ...] | None) -> None:
        """See :class:`~lnn_lightning.parallel.tensor.axis.Ledger`."""
        for name in origins:
            _, hints = self.gathers.setdefault(name, (operation, set()))
            if sections is not None:
                hints.add(sections)

    @property
    def cost(self) -> float:
        """Bytes of a call, of a step's partial gradients, and what every rank computes again, as bytes."""
        return self.call_cost + sum(size for _, size in set(self.partial_ids))

    @property
    def call_cost(self) -> float:
        """The same without partial gradients."""
        return float("inf") if self.error is not None else self.forward + self.backward + self.waste

    @property
    def partial_parameters(self) -> set[int]:
        """``id`` of the parameters whose gradients are partial."""
        return {key for key, _ in self.partial_ids}


def replace_ledger(axis: TensorAxis, trial: Trial, inside: bool = True) -> TensorAxis:
    """The planning axis that books into a trial."""
    return TensorAxis(axis.size, 0, inside=inside, ledger=trial)


def is_uneven(spec: Spec, size: int) -> bool:
    """Whether some section is no multiple of the ranks."""
    return any(section % size for section in spec.sections)


def computes(func: Any) -> bool:
    """Whether a function does more than ask a tensor what it is."""
    return getattr(func, "__name__", "") not in (
        "__get__",
        "size",
        "dim",
        "numel",
        "__hash__",
        "is_floating_point",
        "__len__",
    )


def reason_of(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def meta_of(value: Any, leaf: bool = False) -> Any:
    """Tensors like these, without data."""
    if isinstance(value, (tuple, list)):
        return type(value)(meta_of(each) for each in value) if type(value) in (tuple, list) else value
    if (
        not isinstance(value, Tensor)
        or is_sharded(value)
        or (value.device.type == "meta" and not isinstance(value, FakeTensor))
    ):
        return value
    if isinstance(value, FakeTensor) or leaf:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return made.requires_grad_().clone() if value.requires_grad else made
    return value.to("meta")


@contextmanager
def on_meta(unit: nn.Module) -> Iterator[dict[int, str]]:
    """Puts the unit's tensors on the meta device inside; yields ``id(parameter)`` -> name of those."""
    names: dict[int, str] = {}
    made: dict[int, Tensor] = {}
    saved: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for prefix, module in unit.named_modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in list(store.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                        is_parameter = store is module._parameters
                        made[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if is_parameter else blank
                        if is_parameter:
                            names[id(made[id(tensor)])] = f"{prefix}.{name}" if prefix else name
                    saved.append((store, name, tensor))
                    store[name] = made[id(tensor)]
        yield names
    finally:
        for store, name, tensor in saved:
            store[name] = tensor


@contextmanager
def swapped_forwards(unit: nn.Module) -> Iterator[None]:
    """Attention and transposed linear layers compute in operations that have rules."""
    taken: list[nn.Module] = []
    try:
        for module in unit.modules():
            if forward := forward_with_rules(module):
                take_forward(module, forward)
                taken.append(module)
        with planning():
            yield
    finally:
        for module in taken:
            give_back_forward(module)


def forward_with_rules(module: nn.Module) -> Callable[..., Any] | None:
    """Another ``forward`` for modules whose own one has no rule."""
    if "forward" in vars(module):
        return None
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return multihead_forward
    return conv1d_forward if is_conv1d(module) else None
