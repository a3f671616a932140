"""A feed-forward layer of experts: a router sends each token to a few of them, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.account import running_account
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.dispatch import run_experts
from lnn_lightning.parallel.expert.recording import buffers_aside
from lnn_lightning.parallel.expert.router import Router
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.step.leftovers import attributes_preserved
from lnn_lightning.parallel.step.randomness import preserved_rng
from lnn_lightning.parallel.step.remember import remembered
from lnn_lightning.parallel.step.tree import tree_flatten
from lnn_lightning.parallel.tensor.sharded import book_wholes, is_sharded, whole

Run = Callable[[nn.Module, Tensor], Tensor]
"""Runs an expert on rows [rows, d]."""

_NOT_FINITE = (
    "The router of a layer of experts gives numbers that are not finite: tokens cannot be sent by them. Its weights or "
    "the activations before it have diverged: lower the learning rate, clip gradients, or give `upcycle` a `z_loss` of "
    "0.001."
)


class MoELayer(nn.Module):
    """Experts in place of one feed-forward module: any modules that take tokens [..., d] and return as many of them.

    It is called as the module was, with one tensor; what else it is given must hold no tensor and goes to every expert.

    Args:
        router: chooses among the experts.
        experts: modules of the same kind.
        aux_loss: weight of the router's balancing losses in the gradients.
        z_loss: weight of its z-loss.
        upcycled: the settings that made this layer of a dense module.

    Attributes:
        axis: the ranks that share out the experts; the experts of others are stand-ins.
    """

    is_one_unit = True
    """Nothing within is a unit of its own: the list of experts is no trunk."""

    def __init__(
        self,
        router: Router,
        experts: Iterable[nn.Module],
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        upcycled: Upcycle | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.aux_loss, self.z_loss, self.upcycled = aux_loss, z_loss, upcycled
        self.axis = ExpertAxis()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the chosen experts make of each token, weighted and summed."""
        leaves, unflatten = tree_flatten((args, kwargs))
        place = _place_of_tokens(leaves)
        if is_sharded(leaves[place]):
            book_wholes(type(self).__name__, leaves[place : place + 1], {})
        hidden = whole(leaves[place])
        around = (1,) * (hidden.dim() - 2)  # experts may have been written for a batch and a length

        def run(expert: nn.Module, rows: Tensor) -> Tensor:
            given = rows.view(*around, *rows.shape)
            args, kwargs = unflatten([given if index == place else leaf for index, leaf in enumerate(leaves)])
            return _checked(expert, expert(*args, **kwargs), given).reshape(rows.shape)

        if hidden.is_meta and not isinstance(hidden, FakeTensor):
            return hidden.clone()  # planners try blocks out on the meta device; experts are not theirs to plan
        tokens = hidden.reshape(-1, hidden.shape[-1])
        if isinstance(hidden, FakeTensor):
            return self._traced(tokens, run).view(hidden.shape)
        account = running_account(self)
        average = account.average if account is not None and self.aux_loss else None  # a balancing loss alone needs it
        routing = self.router(tokens, average, remembered)
        weights = routing.weights if account is None else account.enter(self, routing, len(tokens))
        compute = partial(self._compute, run)
        problem = _NOT_FINITE, ~routing.finite
        rows = run_experts(tokens, routing.expert.flatten(), len(self.experts), self.axis, compute, problem=problem)
        return weighted_sum(rows, weights).view(hidden.shape)

    def _compute(self, run: Run, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's experts on their rows; one without rows is not run."""
        own = [self.experts[index] for index in self.axis.span(len(self.experts))]
        parts = zip(own, rows.split(list(counts)), strict=True)
        results = [run(expert, part) for expert, part in parts if len(part)]
        if results:
            return results[0] if len(results) == 1 else torch.cat(results)
        # other ranks send in the dtype that autocast, say, gives theirs; of two rows, which a batch norm wants at least
        with torch.no_grad(), preserved_rng(rows.device), attributes_preserved(own[0]), buffers_aside(own[0].modules()):
            return rows.to(run(own[0], rows.new_zeros((2, rows.shape[1]))).dtype)

    def _traced(self, tokens: Tensor, run: Run) -> Tensor:
        """Shapes and work without data: which expert a token goes to is nothing to be followed."""
        F.linear(tokens, self.router.weight.to(tokens.dtype))
        choices = self.router.k
        expert = self.experts[self.axis.span(len(self.experts))[0]]
        return run(expert, tokens.repeat_interleave(choices, 0)).view(len(tokens), choices, -1).sum(1)

    @property
    def has_losses(self) -> bool:
        """Whether its router's losses are to get into the gradients."""
        balances = self.router.gate not in ("bias", "expert_choice")
        return self.z_loss > 0 or (self.aux_loss > 0 and balances)

    def extra_repr(self) -> str:
        """The weights of the losses, for the printed module."""
        return f"aux_loss={self.aux_loss}, z_loss={self.z_loss}"


def moe_layers(root: nn.Module) -> dict[str, MoELayer]:
    """The layers of experts in a module, by name and in registration order."""
    return {name: module for name, module in root.named_modules() if isinstance(module, MoELayer)}


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Results of all choices [tokens * choices, d] summed with weights [tokens, choices], in the dtype of the results.

    Sums are made in the order of the choices, and weights of rows of zeros do not matter.
    """
    tokens, choices = weights.shape
    rows = rows.view(tokens, choices, rows.shape[-1])
    return (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1)


def _place_of_tokens(leaves: Sequence[Any]) -> int:
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(places) != 1:
        raise StepError(
            f"A layer of experts was called with {len(places)} tensors. What `upcycle` makes experts of must be "
            "called with the tokens as its only tensor: rows of others would have to be sent along. Match another "
            "module (the feed-forward inside)."
        )
    return places[0]


def _checked(expert: nn.Module, result: Any, tokens: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != tokens.shape:
        what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise StepError(
            f"An expert ({type(expert).__name__}) was given tokens of shape {tuple(tokens.shape)} and returned {what}. "
            "What `upcycle` makes experts of must return one tensor like the one that it is given. Match another "
            "module."
        )
    return result
