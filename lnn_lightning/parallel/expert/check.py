"""The setup check: a block whose experts are shared out against itself with all of them, results and gradients.

What does not give the same numbers on every rank is not shared out, and that is said.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.comparison import RESULT, Pair, first_difference
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.cuts import Cuts, divide_fused, divide_loop
from lnn_lightning.parallel.expert.find import Seam, router_widths, token_widths
from lnn_lightning.parallel.expert.seam import seam_of
from lnn_lightning.parallel.expert.tries import made_up, made_up_choices, undisturbed
from lnn_lightning.parallel.reduction import mean_over
from lnn_lightning.parallel.step.tree import tree_tensors
from lnn_lightning.parallel.tensor.axis import Spec, take_part

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}  # some blocks compute a part in fp32 whatever they are given
_TOKENS = 24


def check_seam(root: nn.Module, seam: Seam, axis: ExpertAxis, cuts: Cuts, device: torch.device | None) -> str:
    """What is wrong with a seam once its experts are shared out; empty if nothing is. Collective over the ranks.

    Copies are tried, on made-up values that differ from rank to rank.
    """
    name = seam.name if seam.kind == "fused" or seam.name != seam.container else seam.name.rpartition(".")[0]
    block = root.get_submodule(name)
    inner = seam.name[len(name) :].lstrip(".")
    device = device or next(block.parameters()).device
    with undisturbed(block), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected: _Result | None = None
        inputs: tuple[Tensor, ...] = ()
        problem, seed = "", _seed(axis, device)
        try:
            whole = copy.deepcopy(block).to(device)
            inputs, expected = _first_that_runs(whole, seam, inner, seed)
            del whole
        except Exception as error:  # noqa: BLE001 - told to the user
            problem = f"it cannot be run on made-up values to check it ({type(error).__name__}: {error})"
        if problem := _agreed(problem, axis):
            return problem
        assert expected is not None
        divided = copy.deepcopy(block).to(device)
        state = seam_of(divided.get_submodule(inner))
        state.axis, state.guard = axis, []
        own = _divide(divided, seam, inner, axis, cuts)
        found = None
        try:
            found = _run(divided, inputs)
        except Exception as error:  # noqa: BLE001 - told to the user
            problem = f"shared out, it fails ({type(error).__name__}: {error})"
        if problem := _agreed(problem or next(iter(state.guard), ""), axis):
            return problem
        assert found is not None
        return _agreed(_differences(expected, found, own, axis), axis)


@dataclass
class _Result:
    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]
    values: dict[str, Tensor]


def _seed(axis: ExpertAxis, device: torch.device) -> int:
    """Differs between ranks with tokens of their own."""
    if axis.tensor is None:
        return axis.rank
    return int(min(each.item() for each in axis.tensor.all_gather(torch.tensor([axis.rank], device=device))))


def _first_that_runs(block: nn.Module, seam: Seam, inner: str, seed: int) -> tuple[tuple[Tensor, ...], _Result]:
    like = next(block.parameters())
    tokens, module = _TOKENS + 2 * seed, block.get_submodule(inner)
    tries: list[Callable[[], tuple[Tensor, ...]]] = []
    if seam.kind == "fused":
        choices = min(2, seam.experts)
        for width in token_widths(module):
            tries.append(
                lambda width=width: (  # type: ignore[misc]
                    made_up((tokens, width), like, seed),
                    made_up_choices(tokens, choices, seam.experts, like.device, seed),
                    made_up((tokens, choices), like, seed + 1, positive=True),
                )
            )
    else:
        container = block if seam.container == seam.name and not inner else block.get_submodule(_inside(seam, inner))
        for width in router_widths(block, container, seam.experts):
            tries.append(lambda width=width: (made_up((2, tokens // 2, width), like, seed),))  # type: ignore[misc]
            tries.append(lambda width=width: (made_up((tokens, width), like, seed),))  # type: ignore[misc]
    problem: Exception | None = None
    for make in tries:
        try:
            inputs = make()
            return inputs, _run(block, inputs)
        except Exception as error:  # noqa: BLE001 - another width may fit
            problem = problem or error
    raise problem or ValueError("nothing tells how wide its tokens are")


def _inside(seam: Seam, inner: str) -> str:
    return inner if seam.container == seam.name else seam.container[len(seam.name) :].lstrip(".")


def _run(block: nn.Module, inputs: tuple[Tensor, ...]) -> _Result:
    leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    block.zero_grad(set_to_none=True)
    with torch.inference_mode(False), torch.enable_grad():
        out = block.forward(*[each.clone() if each.requires_grad else each for each in leaves])
        outputs = [each for each in tree_tensors(out) if each.is_floating_point()]
        learning = [(each, made_up(each.shape, each, 5)) for each in outputs if each.requires_grad]
        torch.autograd.backward([each for each, _ in learning], [weight for _, weight in learning])
    parameters = dict(block.named_parameters())
    return _Result(
        [each.detach() for each in outputs],
        [each.grad for each in leaves],
        {name: each.grad for name, each in parameters.items()},
        {name: each.detach() for name, each in parameters.items()},
    )


@dataclass(frozen=True)
class _Part:
    """A rank's part of an expert parameter: rows of the stack (None: all), and of each expert."""

    rows: range | None
    spec: Spec | None

    def of(self, whole: Tensor, axis: ExpertAxis) -> Tensor | None:
        """The part of a whole gradient; None: the expert lives elsewhere."""
        if self.rows is not None and not self.rows:
            return None
        part = whole if self.rows is None else whole[self.rows.start : self.rows.stop]
        if self.spec is None or axis.tensor is None:
            return part
        return take_part(part, self.spec, axis.tensor.size, axis.tensor.rank)


def _divide(block: nn.Module, seam: Seam, inner: str, axis: ExpertAxis, cuts: Cuts) -> dict[str, _Part]:
    """Leaves a copy its share; expert parameters by their names within it."""
    prefix = f"{inner}." if inner else ""
    module, here = block.get_submodule(inner), axis.span(seam.experts)
    state = seam_of(module)
    if seam.kind == "fused":
        state.once = cuts.once
        divide_fused(module, seam.experts, axis, cuts)
        return {
            prefix + key: _Part(here, cuts.specs.get(key))
            for key, each in module._parameters.items()
            if each is not None
        }
    own: dict[str, _Part] = {}
    for index, member in enumerate(state.members):
        for name, _ in module.get_submodule(member).named_parameters():
            own[f"{prefix}{member}.{name}"] = _Part(None if index in here else range(0), cuts.specs.get(name))
    divide_loop(module, state.members, axis, cuts)
    return own


def _differences(expected: _Result, found: _Result, own: dict[str, _Part], axis: ExpertAxis) -> str:
    if [each.shape for each in expected.outputs] != [each.shape for each in found.outputs]:
        return "shared out, it returns values of other shapes"
    pairs: list[Pair] = []
    pairs += [(RESULT, a, b) for a, b in zip(expected.outputs, found.outputs, strict=True)]
    pairs += [("the gradient of an input", a, b) for a, b in zip(expected.inputs, found.inputs, strict=True)]
    for name, value in expected.values.items():
        wanted, got = expected.parameters[name], found.parameters[name]
        if name in own:
            wanted = torch.zeros_like(value) if wanted is None else wanted
            wanted = mean_over(mean_over(wanted, axis.group if axis.size > 1 else None), axis.same)  # over all data
            wanted = own[name].of(wanted, axis)
            if wanted is not None:  # as in training: each of these ranks has the share of the tokens it was sent
                got = mean_over(torch.zeros_like(wanted) if got is None else got, axis.same)
        pairs.append((f"the gradient of {name!r}", wanted, got))
    difference = first_difference(pairs, _TOLERANCE)
    return difference and f"shared out, {difference}"


def _agreed(problem: str, axis: ExpertAxis) -> str:
    """The first problem that any rank has."""
    groups = [axis.group] if axis.size > 1 else []
    groups += [axis.tensor.group] if axis.tensor is not None else []
    groups += [axis.same] if axis.same is not None else []
    for group in groups:
        everyones: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyones, problem, group=group)
        problem = next((each for each in everyones if each), "")
    return problem
