"""Bytes of parameters, gradients and optimizer state that each rank of a layout holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lnn_lightning.optim.cuts import KnowsCuts
from lnn_lightning.optim.elementwise import copies_onto
from lnn_lightning.optim.masters import LOW
from lnn_lightning.optim.shares import deal
from lnn_lightning.parallel.data.shards import span_of

Copies = Literal["kept", "passing"] | None
"""fp32 copies of half-precision parameters for the optimizer: master weights, stochastic rounding, none."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter or buffer.

    Attributes:
        shape: of what its optimizer sees: the whole, a tensor rank's part of it, or a data rank's rows of that.
        dtype: of its elements.
        bytes: of its memory, padding included.
        whole_bytes: of the whole (or the tensor rank's part), as it is while its unit runs.
        sharded: data ranks hold different rows.
        learns: it gets a gradient.
        apart: an expert: those that hold the same one share it out among them, not all data ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    whole_bytes: int
    sharded: bool = False
    learns: bool = False
    apart: bool = False


def held(
    tensor: Tensor, learns: bool, shards: int = 1, rank: int = 0, part: Sequence[int] | None = None, apart: bool = False
) -> Held:
    """What data rank ``rank`` holds of a tensor that is cut into so many shards by its rows (one: it is not).

    ``part``: the shape of what is cut, if that is not all of it.
    """
    shape, size = tuple(tensor.shape if part is None else part), tensor.dtype.itemsize
    whole = prod(shape) * size
    if shards == 1:
        return Held(shape, tensor.dtype, whole, whole, learns=learns, apart=apart)
    rows, inner = -(-shape[0] // shards), shape[1:]
    here = (span_of(shape[0], rank, shards)[1], *inner)
    return Held(here, tensor.dtype, rows * prod(inner) * size, whole, True, learns, apart)


def optimizer_bytes(
    optimizers: Sequence[Optimizer],
    held_here: Mapping[int, Held],
    dealt_to: tuple[int, int] | None,
    copies: Copies = None,
    experts_dealt_to: tuple[int, int] | None = None,
) -> int:
    """Bytes of optimizer state on a rank, after the first step.

    Each optimizer's twin steps on tensors without data.

    Args:
        optimizers: as the user's ``configure_optimizers`` made them for the whole module.
        held_here: ``id`` of the parameters on this rank -> what it holds of them.
        dealt_to: this rank's place among those that share out what is whole, and their number; None: nobody does.
        copies: fp32 copies of half-precision parameters that optimizers work on; what is kept counts.
        experts_dealt_to: as ``dealt_to``, for what is apart.

    Raises:
        RuntimeError: an optimizer cannot step on tensors without data.
    """
    total = 0
    for optimizer in optimizers:
        circles = [(place or (0, 1), [0] * (place[1] if place else 1)) for place in (dealt_to, experts_dealt_to)]
        pieces: dict[int, Tensor] = {}
        groups: list[list[Tensor]] = []
        in_parts = isinstance(optimizer, KnowsCuts)  # it has empty ones too
        for group in optimizer.param_groups:
            here = [p for p in group["params"] if id(p) in held_here]
            whole = [p for p in here if not held_here[id(p)].sharded]
            mine: set[int] = set()
            for apart, ((place, _), loads) in enumerate(circles):
                dealt = [p for p in whole if held_here[id(p)].apart == bool(apart)]
                owners = deal([prod(held_here[id(p)].shape) for p in dealt], loads)
                mine |= {id(p) for p, owner in zip(dealt, owners, strict=True) if owner == place}
            kept: list[Tensor] = []
            for parameter in group["params"]:
                what = held_here.get(id(parameter))
                takes = what is not None and (
                    id(parameter) in mine or what.sharded and (prod(what.shape) > 0 or in_parts)
                )
                pieces[id(parameter)] = _piece(what if takes else None, copies)
                if takes and what is not None:
                    total += prod(what.shape) * 4 if copies == "kept" and what.dtype in LOW else 0
                    kept.append(pieces[id(parameter)])
            groups.append(kept)
        if any(groups):
            total += _state_bytes(optimizer, pieces, groups)
    return total


def _piece(what: Held | None, copies: Copies) -> Tensor:
    if what is None:
        return nn.Parameter(torch.empty(0, device="meta"))
    dtype = torch.float32 if copies is not None and what.dtype in LOW else what.dtype
    made = nn.Parameter(torch.empty(what.shape, dtype=dtype, device="meta"))
    made.grad = torch.empty_like(made) if what.learns else None
    return made


def _state_bytes(optimizer: Optimizer, pieces: Mapping[int, Tensor], groups: list[list[Tensor]]) -> int:
    failures: list[str] = []
    ways = copies_onto(optimizer, pieces, groups)
    for make in reversed(ways) if optimizer.state else ways:
        try:
            twin = make()
            with warnings.catch_warnings(), _NumbersAreOne():
                warnings.simplefilter("ignore")
                twin.step()
            return storage_bytes(tree_leaves(list(twin.state.values())))
        except Exception as error:  # noqa: BLE001 - whatever the user's optimizer raises on tensors without data
            failures.append(f"{type(error).__name__}: {error}")
    raise RuntimeError(f"{type(optimizer).__name__} did not step on tensors without data ({'; '.join(failures)})")


class _NumbersAreOne(TorchFunctionMode):
    """Python numbers read from tensors without data are one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            name = getattr(func, "__name__", "")
            if name in ("item", "__float__"):
                return 1.0
            if name in ("__bool__", "__int__"):
                return name == "__bool__" or 1
        return func(*args, **(kwargs or {}))


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct memories of tensors; what is no tensor counts nothing."""
    found: dict[int, int] = {}
    alive = []
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            alive.append(storage := tensor.untyped_storage())
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())
