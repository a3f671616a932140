"""Outputs that can be made again from what is kept anyway, bit by bit, and so are not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lnn_lightning.memory.saved_tensors import Encoded, Packed, Saved, SavedTensors

REBUILT = "made again"
_MOST_OPERATIONS = 4
"""Of what is longer in the making the end is kept; what follows begins from there."""
_SMALL = 8
"""Operands (parameters, statistics) with so many times fewer elements than the result are copied."""


@dataclass(frozen=True)
class Recipe:
    """How to make a tensor again.

    Attributes:
        function: the operation, not in place.
        args: its arguments; tensors are recipes, packed tensors, or small copies.
        kwargs: its keyword arguments, without tensors.
        operations: how many operations it takes.
        dtype: of the result.
        shape: of the result.
        stride: of the result.
    """

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operations: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def make(self) -> Tensor:
        """The tensor."""
        result = self.function(*map(_value, self.args), **self.kwargs)
        if result.stride() == self.stride:
            return result
        as_it_was = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=result.device)
        return as_it_was.copy_(result)


def _value(argument: Any) -> Any:
    if isinstance(argument, Recipe):
        return argument.make()
    return argument.unpack() if isinstance(argument, Packed) else argument


class Rebuilding:
    """The recipes of one forward; as an encoder, keeps what has one as the recipe."""

    def __init__(self) -> None:
        self.saved: SavedTensors
        """Knows what is kept."""
        self._recipes: dict[tuple[int, int], tuple[Recipe, StorageWeakRef]] = {}

    def clear(self) -> None:
        """Forgets the recipes of a forward, and with them what they are made from."""
        self._recipes.clear()

    def encode(self, tensor: Tensor, saved: Saved) -> Encoded | None:
        """See :class:`lnn_lightning.memory.saved_tensors.Encoder`."""
        recipe, _ = self._recipes.get((saved.storage, saved.version), (None, None))
        if recipe is None or not saved.whole or recipe.dtype != tensor.dtype:
            return None
        return Encoded(REBUILT, [], partial(_rebuilt, recipe))

    def run(self, function: Callable[..., Tensor], again: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Runs an operation and remembers how to make its result again.

        Args:
            function: the operation.
            again: makes of its arguments what makes the result again: a function, and its arguments.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        try:
            operation, operands, settings = again(*args, **kwargs)
        except TypeError:  # a spelling of its own: the operation says what is wrong with it, or does it
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            sources = [self._source(each) for each in operands]  # an operation in place leaves nothing to look for
            versions = [each._version if isinstance(each, Tensor) else 0 for each in operands]
        result = function(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._note(result, operation, operands, sources, versions, settings)
        return result

    def _note(
        self,
        result: Tensor,
        operation: Callable[..., Tensor],
        operands: Sequence[Any],
        sources: list[Any],
        versions: list[int],
        settings: dict[str, Any],
    ) -> None:
        if isinstance(result, FakeTensor) or not result.requires_grad:
            return
        storage = result.untyped_storage()
        if storage.nbytes() != result.numel() * result.element_size():
            return
        if len(operands) == 1 and operands[0].shape != result.shape:
            return  # not what the operation makes of this tensor: of its whole, of which this is a part
        for place, each in enumerate(operands):
            if not isinstance(each, Tensor):
                sources[place] = each
                continue
            if isinstance(sources[place], Packed) and each._version != versions[place]:
                return  # the operation has just changed it
            if sources[place] is not None:
                continue
            if each.numel() * _SMALL <= result.numel():
                sources[place] = each.detach().clone()
            elif each._version == versions[place]:
                sources[place] = self._source(each)
            if sources[place] is None:
                return
        operations = 1 + sum(each.operations for each in sources if isinstance(each, Recipe))
        made_of = [each for each in sources if isinstance(each, (Recipe, Packed))]
        if operations > _MOST_OPERATIONS or any(each.dtype != result.dtype for each in made_of):
            return  # another dtype: autocast had a hand in it, and will not in the backward
        recipe = Recipe(
            operation, tuple(sources), settings, operations, result.dtype, result.shape, tuple(result.stride())
        )
        self._recipes[storage._cdata, result._version] = recipe, StorageWeakRef(storage)

    def _source(self, operand: Any) -> Recipe | Packed | None:
        if not isinstance(operand, Tensor) or operand.is_inference():
            return None
        kept = self.saved.find(operand)
        if kept is not None and kept.name != REBUILT:
            return self.saved.hold(operand)
        recipe, _ = self._recipes.get((operand.untyped_storage()._cdata, operand._version), (None, None))
        fits = recipe is not None and (recipe.shape, recipe.stride) == (operand.shape, operand.stride())
        return recipe if fits else None


def _rebuilt(recipe: Recipe, tensors: list[Tensor]) -> Tensor:
    result = recipe.make()
    return result.as_strided((result.numel(),), (1,))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training:
        running_mean = running_var = None  # the batch's own statistics; the running ones were updated
    return F.batch_norm, (input, running_mean, running_var, weight, bias, training, momentum, eps), {}


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return F.layer_norm, (input, tuple(normalized_shape), weight, bias, eps), {}


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return F.group_norm, (input, num_groups, weight, bias, eps), {}


def _relu(input: Tensor, inplace: bool = False) -> Any:
    return torch.relu, (input,), {}


def _silu(input: Tensor, inplace: bool = False) -> Any:
    return F.silu, (input,), {}


def _gelu(input: Tensor, approximate: str = "none") -> Any:
    return F.gelu, (input,), {"approximate": approximate}


def _add(input: Any, other: Any, *, alpha: float = 1) -> Any:
    return torch.add, (input, other), {"alpha": alpha}


RECIPES: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.relu: _relu,
    torch.relu: _relu,
    torch.relu_: _relu,
    Tensor.relu: _relu,
    Tensor.relu_: _relu,
    F.silu: _silu,
    F.gelu: _gelu,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.add_: _add,
}
"""Operation -> makes of its arguments what :meth:`Rebuilding.run` needs."""

ELEMENTWISE = {each for each, again in RECIPES.items() if again in (_relu, _silu, _gelu)}
"""Operations that do to a part of a tensor what they do to the whole."""
