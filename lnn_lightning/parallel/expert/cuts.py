"""How each expert is divided over tensor ranks, found by trying: parts whose results add up to the whole's result.

A gated feed-forward is cut along its inner features, Megatron's way (Shoeybi et al. 2019, section 3). Which dimension
that is, and whether gate and up lie side by side or interleaved, shows when the module's own code runs on the parts in
turn. Biases behind the last matrix are whole on every rank; each adds its share of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.find import token_widths
from lnn_lightning.parallel.expert.tries import close, made_up, undisturbed
from lnn_lightning.parallel.step.standin import replace_tensors, stand_in_for
from lnn_lightning.parallel.tensor.axis import Spec, take_part
from lnn_lightning.parallel.tensor.install import remembers_whole
from lnn_lightning.parallel.tensor.modules import Forward, own_forward, take_forward

_TOKENS = 5
_MOST = 400


@dataclass(frozen=True)
class Cuts:
    """How a module with experts, or one expert, is divided.

    Attributes:
        specs: parameter (named within the module) -> the part of it that a tensor rank has; others are whole.
        once: whole parameters that every rank adds: each takes its share.
    """

    specs: Mapping[str, Spec] = field(default_factory=dict)
    once: frozenset[str] = frozenset()


def fused_cuts(module: nn.Module, size: int) -> Cuts | None:
    """How the stacked weights of a module are divided over ``size`` tensor ranks; None if no way works.

    Args:
        module: with whole weights.
        size: number of tensor ranks.
    """
    stacked = {key: each for key, each in module._parameters.items() if each is not None}
    like = next(iter(stacked.values()))
    index = torch.arange(_TOKENS, device=like.device).remainder(like.shape[0]).unsqueeze(1)
    ones = torch.ones_like(index, dtype=like.dtype)

    def run(tokens: Tensor) -> Any:
        return module.forward(tokens, index.clone(), ones.clone())

    tries = (_search(module, stacked, 1, size, run, width) for width in token_widths(module))
    return next((found for found in tries if found is not None), None)


def expert_cuts(expert: nn.Module, size: int) -> Cuts | None:
    """How an expert that is a module of its own is divided over ``size`` tensor ranks; None if no way works."""
    parameters = dict(expert.named_parameters())
    matrices = [each for each in parameters.values() if each.ndim == 2]
    widths = dict.fromkeys(side for each in matrices for side in (each.shape[1], each.shape[0]))
    tries = (_search(expert, parameters, 0, size, expert.forward, width) for width in widths)
    return next((found for found in tries if found is not None), None)


def _search(
    module: nn.Module, parameters: Mapping[str, Tensor], skip: int, size: int, run: Callable[[Tensor], Any], width: int
) -> Cuts | None:
    """The first way to cut parameters, whose first ``skip`` dimensions stay, that adds up."""
    tokens = made_up((_TOKENS, width), next(iter(parameters.values())))
    with undisturbed(module), torch.no_grad():
        try:
            whole = run(tokens.clone())
        except Exception:  # noqa: BLE001 - tokens of another size, or it is called otherwise
            return None
        if not isinstance(whole, Tensor) or whole.ndim != 2 or not whole.isfinite().all():
            return None
        for cuts in itertools.islice(_ways(parameters, skip, size, width), _MOST):
            total = torch.zeros_like(whole, dtype=torch.float64)
            try:
                for rank in range(size):
                    parts = {key: take_part(parameters[key], spec, size, rank) for key, spec in cuts.specs.items()}
                    parts |= {key: parameters[key] / size for key in cuts.once}
                    with replaced_parameters(module, parts):
                        total += run(tokens.clone()).double()
            except Exception:  # noqa: BLE001 - shapes that do not fit together
                continue
            if close(total, whole.double(), whole.dtype):
                return cuts
    return None


def _ways(parameters: Mapping[str, Tensor], skip: int, size: int, width: int) -> Iterator[Cuts]:
    """Every matrix is cut along one of its sides, inner ones first, plainly or in two halves; biases follow."""
    matrices = [key for key, each in parameters.items() if each.ndim == skip + 2]
    biases = [key for key, each in parameters.items() if each.ndim == skip + 1]
    if not matrices or any(each.ndim not in (skip + 1, skip + 2) for each in parameters.values()):
        return
    options = [_specs(parameters[key], skip, size, width) for key in matrices]
    for chosen in itertools.product(*options):
        specs = dict(zip(matrices, chosen, strict=True))
        inner = {spec.sections for spec in chosen} | {(sum(spec.sections),) for spec in chosen}
        choices: list[list[Spec | None]] = []
        for key in biases:
            features = parameters[key].shape[skip]
            fitting: list[Spec | None] = [
                Spec(skip, sections) for sections in sorted(inner) if sum(sections) == features
            ]
            choices.append([*fitting, None])
        for each in itertools.product(*choices):
            cut = {key: spec for key, spec in zip(biases, each, strict=True) if spec is not None}
            yield Cuts({**specs, **cut}, frozenset(biases) - cut.keys())


def _specs(matrix: Tensor, skip: int, size: int, width: int) -> list[Spec]:
    sides = sorted((skip, skip + 1), key=lambda dim: matrix.shape[dim] == width)
    found = []
    for dim in sides:
        features = matrix.shape[dim]
        if features % size == 0:
            found.append(Spec(dim, (features,)))
        if features % (2 * size) == 0:
            found.append(Spec(dim, (features // 2, features // 2)))
    return found


@contextmanager
def replaced_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors are in the place of these parameters inside."""
    saved = []
    try:
        for name, value in values.items():
            owner, _, key = name.rpartition(".")
            store = module.get_submodule(owner)._parameters
            saved.append((store, key, store[key]))
            store[key] = value  # type: ignore[assignment]
        yield
    finally:
        for store, key, before in saved:
            store[key] = before


class _Share(torch.autograd.Function):
    """A rank's share of what all of them add; every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        return value / size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def shares(module: nn.Module, once: frozenset[str], size: int) -> dict[str, Tensor]:
    """This rank's shares of whole parameters."""
    return {name: _Share.apply(module.get_parameter(name), size) for name in once}


def divide_fused(module: nn.Module, experts: int, axis: ExpertAxis, cuts: Cuts) -> None:
    """Leaves this rank's part of stacked parameters; the objects stay if nothing remembers their shape."""
    here = axis.span(experts)
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            _cut(module, key, parameter, parameter.data[here.start : here.stop], axis, cuts.specs.get(key))


def divide_loop(root: nn.Module, members: Sequence[str], axis: ExpertAxis, cuts: Cuts) -> None:
    """Leaves only the names and shapes of experts that live on other ranks, and this rank's part of the others."""
    here = axis.span(len(members))
    for index, name in enumerate(members):
        expert = root.get_submodule(name)
        if index not in here:
            replace_tensors(expert, lambda _, tensor: stand_in_for(tensor))
            continue
        for each, spec in cuts.specs.items():
            owner, _, key = each.rpartition(".")
            parameter = expert.get_parameter(each)
            _cut(expert.get_submodule(owner), key, parameter, parameter.data, axis, spec)
        if cuts.once and axis.tensor is not None:
            vars(expert)["lnn_shares"] = cuts.once, axis.tensor.size
            take_forward(expert, _sharing_forward)


def _cut(
    module: nn.Module, key: str, parameter: nn.Parameter, part: Tensor, axis: ExpertAxis, spec: Spec | None
) -> None:
    if spec is not None and axis.tensor is not None:
        part = take_part(part, spec, axis.tensor.size, axis.tensor.rank)
    parameter.data = part.clone(memory_format=torch.contiguous_format)
    if remembers_whole(parameter):
        module._parameters[key] = nn.Parameter(parameter.data, parameter.requires_grad)


def _sharing_forward(self: nn.Module, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a divided expert that adds its share of what is whole."""
    once, size = vars(self)["lnn_shares"]
    with replaced_parameters(self, shares(self, once, size)):
        return own_forward(self, before)(*args, **kwargs)
