"""A gradient scale for each block besides the loss scale (Ramesh et al. 2021, arXiv 2102.12092, appendix D).

One loss scale must keep the largest gradient of a deep model below fp16's largest number and the smallest above its
smallest. Here the gradient is multiplied by a block's own scale where it enters the block's backward and divided by it
where it leaves, the gradients of the block's parameters included: inside, where autocast computes in fp16, each block
uses the range of fp16 by itself. Between blocks it flows as the module has it there, in fp32 for a residual stream in
fp32; to a block that returns fp16 it comes in fp16, at the loss scale alone. What overflows in a block is not handed to
the blocks before it; that block's scale is lowered, the loss scale stays, and the step is skipped. A block must get
what it computes with as arguments and hand on what it computes by returning it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lnn_lightning.parallel.data.shards import leaves_of
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.extension import Body, StepExtension, UnitRun
from lnn_lightning.parallel.step.graph import nodes_behind
from lnn_lightning.parallel.step.tree import tree_map, tree_tensors
from lnn_lightning.parallel.tensor.sharded import Sharded, like


@dataclass(frozen=True)
class BlockScaling:
    """How the scales of blocks move; they are factors on the loss scale.

    Attributes:
        init_scale: of every block.
        growth_factor: a block's scale grows by it after enough steps without overflow.
        backoff_factor: a block's scale is multiplied by it when something in the block overflows.
        growth_interval: steps without overflow in a block after which its scale grows.

    Raises:
        ValueError: a value is out of range.
    """

    init_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000

    def __post_init__(self) -> None:
        if not (self.init_scale > 0 and self.growth_factor > 1 and 0 < self.backoff_factor < 1):
            raise ValueError(
                "`BlockScaling` needs `init_scale` > 0, `growth_factor` > 1 and `backoff_factor` between 0 and 1, got "
                f"{self.init_scale}, {self.growth_factor} and {self.backoff_factor}."
            )
        if self.growth_interval < 1:
            raise ValueError(f"`growth_interval` must be at least 1, got {self.growth_interval}.")


_LARGEST = 2.0**60
"""Of a scale; gradients in fp32 must stay finite with it."""


class BlockScales(StepExtension):
    """The scales of a module's blocks, the same on all ranks.

    Args:
        blocks: names of the blocks, the same on all ranks, whose parameters nothing else uses.
        settings: how the scales move.
        device: of the values.
        group: ranks that agree on overflows; None: this one alone.
    """

    def __init__(
        self, blocks: Sequence[str], settings: BlockScaling, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.settings, self._group = settings, group
        self.scales = dict.fromkeys(blocks, settings.init_scale)
        self._good = dict.fromkeys(blocks, 0)
        self._place = {name: index for index, name in enumerate(blocks)}
        self._found = torch.zeros(len(blocks) + 1, device=device)
        """By block, and at last outside of all: whether something was not finite since the last optimizer step."""
        self._agreed: list[float] = []
        self._hooked: set[int] = set()
        self._looked_at: set[str] = set()
        self._active = False

    # ---------------------------------------------------------------- in a step

    @override
    def begin(self, parts: int, training: bool) -> None:
        self._active = training

    @override
    def finish(self) -> None:
        self._active = False

    @override
    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        name = run.call.group
        if name not in self.scales or not self._active or not torch.is_grad_enabled():
            return body(*args, **kwargs)
        args, kwargs = tree_map(partial(_through, _Leave, self, name, run.call.in_place), (args, kwargs))
        out = body(*args, **kwargs)
        for parameter in leaves_of(run.unit):  # which are whole now, if data ranks hold pieces
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_hook(partial(self._of_parameter, name))
        if run.call.unit not in self._looked_at:
            self._looked_at.add(run.call.unit)
            _refuse_left_behind(run.call.unit, run.unit)
            _refuse_other_inputs(run.call.unit, run.unit, (args, kwargs), out)
        return tree_map(partial(_through, _Enter, self, name, True), out)  # glue may change it in place

    def _of_parameter(self, name: str, gradient: Tensor) -> Tensor | None:
        if not self._active:
            return None
        self.look(self._place[name], gradient)
        return gradient / self.scales[name]

    def entered(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient on its way into a block's backward."""
        self.look(-1, gradient)
        return gradient * self.scales[name]

    def left(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient on its way to what is before the block; what is not finite ends here."""
        self.look(self._place[name], gradient)
        return torch.nan_to_num(gradient, 0.0, 0.0, 0.0) / self.scales[name]

    def look(self, place: int, gradient: Tensor) -> None:
        """Notes whether a gradient is finite, without waiting for the device."""
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        bad = torch.logical_not(values.isfinite().all()).to(self._found)
        self._found[place] = torch.maximum(self._found[place], bad)

    # ---------------------------------------------------------------- behind it

    @torch.no_grad()
    def agree(self, found: Tensor) -> Tensor:
        """Whether a step must be skipped, on all ranks: something was not finite in a block, outside, or at last.

        Collective.

        Args:
            found: whether a gradient that the optimizer gets is not finite.
        """
        both = torch.cat([self._found, found.to(self._found).reshape(1)])
        if self._group is not None:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        self._agreed = both.tolist()
        self._found.zero_()
        return both.max()

    def update(self) -> bool:
        """Moves the scales behind an optimizer step or one that was skipped.

        Returns:
            Whether blocks alone were to blame, so that the loss scale may stay.
        """
        *blocks, outside, at_last = self._agreed or [0.0] * (len(self.scales) + 2)
        self._agreed = []
        if outside or (at_last and not any(blocks)):
            return False
        settings = self.settings
        for name, overflowed in zip(self.scales, blocks, strict=True):
            if overflowed:
                self.scales[name] *= settings.backoff_factor
                self._good[name] = 0
                continue
            self._good[name] += 1
            if self._good[name] >= settings.growth_interval:
                self.scales[name] = min(self.scales[name] * settings.growth_factor, _LARGEST)
                self._good[name] = 0
        return any(blocks)

    def state_dict(self) -> dict[str, Any]:
        """Scales and steps since they last moved, by block."""
        return {name: [scale, self._good[name]] for name, scale in self.scales.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the scales of the blocks that are known here."""
        for name, (scale, good) in state.items():
            if name in self.scales:
                self.scales[name], self._good[name] = float(scale), int(good)


def scaled_blocks(root: nn.Module, blocks: Sequence[str], used_elsewhere: set[str]) -> list[str]:
    """The blocks that can have a scale: their parameters are used by their own calls alone, and nobody listens.

    Args:
        root: the module.
        blocks: names of its units.
        used_elsewhere: names of parameters that code outside of units uses.
    """
    owners: dict[int, set[str]] = {}
    names: dict[int, set[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        owners.setdefault(id(parameter), set()).add(owner)
        names.setdefault(id(parameter), set()).add(name)

    def own(block: str) -> bool:
        return all(
            owners[id(p)] == {block} and not names[id(p)] & used_elsewhere and not p._backward_hooks
            for p in root.get_submodule(block).parameters()
        )

    return [block for block in blocks if own(block)]


def _refuse_left_behind(name: str, unit: nn.Module) -> None:
    """A gradient that enters a block by another way than what it returned would not be scaled.

    Raises:
        StepError: the block keeps a value (an auxiliary loss) that such a gradient could come from.
    """
    for inner, module in unit.named_modules(prefix=name):
        for attribute, value in vars(module).items():
            if any(tensor.grad_fn is not None for tensor in tree_tensors(value)):
                raise StepError(
                    f"{inner!r} keeps a value with gradients in its attribute {attribute!r}. With `gradient_scales` a "
                    "block must hand on all it computes by returning it. Return it, or leave `gradient_scales` out."
                )


def _refuse_other_inputs(name: str, block: nn.Module, arguments: Any, out: Any) -> None:
    """Gradients leave a block scaled but through its arguments, where they are divided again.

    Raises:
        StepError: they flow through something else too, which the block has from elsewhere.
    """
    inputs = {tensor.grad_fn for tensor in tree_tensors(arguments)}
    own = {id(parameter) for parameter in leaves_of(block)}
    for node in nodes_behind(tree_tensors(out), inputs):
        variable = getattr(node, "variable", None)
        another = issubclass(getattr(node, "_forward_cls", object), _Leave)
        if another or (isinstance(variable, Tensor) and id(variable) not in own):
            what = f"shape {tuple(variable.shape)}" if isinstance(variable, Tensor) else "another block"
            raise StepError(
                f"{name!r} computes with a value with gradients of {what} that is not among its arguments (a closure, "
                "an attribute): it would get a gradient with the scale of the block. Pass it as an argument, or leave "
                "`gradient_scales` out."
            )


class _Leave(torch.autograd.Function):
    """Before a block; in backward the last."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scales: BlockScales, name: str, copy: bool) -> Tensor:
        ctx.scales, ctx.name = scales, name
        return value.clone() if copy else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.scales.left(ctx.name, gradient), None, None, None


class _Enter(_Leave):
    """Behind a block; in backward the first."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.scales.entered(ctx.name, gradient), None, None, None


def _through(function: type[_Leave], scales: BlockScales, name: str, copy: bool, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad or not value.is_floating_point():
        return value
    with torch._C.DisableTorchFunctionSubclass():
        result = function.apply(value, scales, name, copy)
    return like(result, value._spec, value) if isinstance(value, Sharded) else result
