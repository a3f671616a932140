"""What layers of experts add to a training step besides their results: auxiliary losses, and how they were loaded.

The user's loss knows nothing of a router. So the auxiliary losses of a layer are put into the gradients: a function
that returns its input and gives the loss, in backward, the gradient that it would have had as a term of the step's
loss. That is the same number for every micro-batch, stage and layer, whatever form the user's loss has: the auxiliary
loss of a step is the mean over its micro-batches (each of as many tokens), and that over the data ranks, which average
gradients. So it is next to a loss that is a sum over all samples, too. Ranks whose batches differ in size count alike
in it, where a mean loss weighs them by their samples: a token of the smaller batch counts a bit more for the balance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lnn_lightning.parallel.expert.balance import Average, auxiliary_loss, update_bias
from lnn_lightning.parallel.expert.gates import Routing
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.parallel.step.remember import in_second_run

if TYPE_CHECKING:
    from lnn_lightning.parallel.expert.layer import MoELayer


@dataclass
class Tally:
    """What happened in the runs of a block so far, on this rank.

    Attributes:
        load: tokens that chose each expert, before any was dropped, [experts].
        dropped: choices (or tokens) that found no room.
        asked: of so many.
        loss: the sum of the weighted auxiliary losses.
    """

    load: Tensor
    dropped: Tensor
    asked: Tensor
    loss: Tensor

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Tally(*(mine + theirs for mine, theirs in pairs))


class Account(StepExtension):
    """Puts auxiliary losses into the gradients of training steps, and keeps the books on loads.

    Args:
        layers: layers of a module by name.
        scale: gives the factor on the loss within the step that begins (loss scaling, accumulation).
        average: averages a small tensor over the data ranks; None: there is one.

    Attributes:
        layers: the same.
        average: the same.
        unbalanced: name of a layer whose router has a bias -> load since that was last moved.
    """

    may_split = False
    """A backward in two parts would meet the exchanges of tokens twice."""

    def __init__(
        self, layers: Mapping[str, MoELayer], scale: Callable[[], float], average: Average | None = None
    ) -> None:
        self._names = {id(layer): name for name, layer in layers.items()}
        self.layers, self._scale, self.average = layers, scale, average
        self._factor = 1.0
        self._parts = 0
        self._tallies: dict[str, Tally] = {}
        self.unbalanced: dict[str, Tensor] = {}

    @override
    def begin(self, parts: int, training: bool) -> None:
        if not training:
            return
        self._factor = self._scale() / parts
        self._parts += parts
        _running.append(self)

    @override
    def finish(self) -> None:
        if self in _running:
            _running.remove(self)

    def knows(self, layer: MoELayer) -> bool:
        """Whether a layer is one of the module's, and no copy."""
        return id(layer) in self._names

    def enter(self, layer: MoELayer, routing: Routing, tokens: int) -> Tensor:
        """Books a run of a layer; the weights of its experts, through which its losses get into the gradients."""
        loss = auxiliary_loss(routing.losses, layer.aux_loss, layer.z_loss)
        if not in_second_run():
            self._count(self._names[id(layer)], routing, loss, tokens, layer.router.gate == "expert_choice")
            if layer.router.bias is not None:
                name = self._names[id(layer)]
                self.unbalanced[name] = self.unbalanced.get(name, torch.zeros_like(routing.load)) + routing.load
        if loss is None or not loss.requires_grad:
            return routing.weights
        return _WithLoss.apply(routing.weights, loss, self._factor)

    def _count(self, name: str, routing: Routing, loss: Tensor | None, tokens: int, by_token: bool) -> None:
        asked = torch.full_like(routing.dropped, tokens) if by_token else routing.load.sum()
        value = loss.detach() if loss is not None else torch.zeros((), device=routing.load.device)
        tally = Tally(routing.load, routing.dropped, asked, value)
        self._tallies[name] = self._tallies[name] + tally if name in self._tallies else tally

    def read(self) -> tuple[dict[str, Tally], int]:
        """What happened in each layer since the last reading, and micro-batches since then."""
        read = self._tallies, self._parts
        self._tallies, self._parts = {}, 0
        return read


_running: list[Account] = []


def running_account(layer: MoELayer) -> Account | None:
    """The account of the training step in progress, if the layer is of its module."""
    return _running[-1] if _running and _running[-1].knows(layer) else None


class _WithLoss(torch.autograd.Function):
    """Returns a value as it is; in backward the loss gets a gradient, as a term of what is differentiated would."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.dtype = factor, loss.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full((), ctx.factor, dtype=ctx.dtype, device=gradient.device), None


def balance_biases(account: Account, group: dist.ProcessGroup | None) -> None:
    """Moves the biases of routers that balance by them, once an optimizer step. Collective over the data ranks.

    Args:
        account: has counted the loads since the last time.
        group: ranks that have other tokens; None: there are none.
    """
    loads, account.unbalanced = account.unbalanced, {}
    if not loads:
        return
    names = sorted(loads)
    summed = torch.cat([loads[name] for name in names])
    if group is not None:
        dist.all_reduce(summed, group=group)
    for name, load in zip(names, summed.split([len(loads[name]) for name in names]), strict=True):
        bias = account.layers[name].router.bias
        assert bias is not None
        update_bias(bias, load)
