"""Finds the experts of a model by their structure: modules whose work can be shared out by expert.

There are two kinds. *Fused*: one module holds the weights of all experts, stacked, and is called with the tokens, the
experts that each goes to, and the weights of these. *Loop*: the experts are modules of their own in a list, and the
module around them calls each on its tokens. What can be tried is tried, on made-up values; a model on the meta device
is judged by its structure alone, and the check before anything is divided has the last word.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lnn_lightning.parallel.expert.layer import MoELayer
from lnn_lightning.parallel.expert.tries import calls_its_experts, is_fused
from lnn_lightning.parallel.step.standin import is_stand_in

_NO_BLOCKS = (nn.Sequential, nn.Linear, nn.Embedding)
"""Containers and layers that never are a block around experts."""

_WITHOUT_FORWARD = (nn.ModuleList.forward, nn.ModuleDict.forward)


@dataclass(frozen=True)
class Seam:
    """A module of the user's whose ``forward`` is taken over while experts are divided.

    Attributes:
        name: of that module, from the root.
        kind: how it holds its experts.
        experts: how many there are.
        parameters: root names of stacked parameters (fused).
        members: root names of the experts, in order (loop).
        container: root name of the list that holds them (loop); that of the module itself (fused).
        layer: it is a :class:`MoELayer` of ours, which shares out its experts by itself.
    """

    name: str
    kind: Literal["fused", "loop"]
    experts: int
    parameters: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    container: str = ""
    layer: bool = False


def find_seams(root: nn.Module) -> list[Seam]:
    """The seams of a model, in the order of its modules. Nothing is changed."""
    found: list[Seam] = []
    known: dict[Any, bool] = {}
    for name, module in root.named_modules():
        if any(_within(name, seam) for seam in found):
            continue
        seam = _fused_seam(name, module, known) or _loop_seam(root, name, module, known)
        if seam is not None:
            found.append(seam)
    return found


def stacked_parameters(module: nn.Module) -> tuple[int, tuple[str, ...]] | None:
    """Number of experts and own names of the stacked parameters of a module; None if it does not look fused."""
    own = {key: each for key, each in module._parameters.items() if each is not None}
    wide = [each for each in own.values() if each.ndim >= 2]
    if not any(each.ndim >= 3 for each in wide) or next(iter(_inner_parameters(module)), None) is not None:
        return None
    sizes = {each.shape[0] for each in own.values()}
    if len(sizes) != 1 or (experts := sizes.pop()) < 2:
        return None
    return experts, tuple(own)


def call_names(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of the three arguments (tokens, index, weights) of a module; None if it has others."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD]
    if len(positional) < 3 or len(required) > 3 or any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return None
    first, second, third = (each.name for each in positional[:3])
    return first, second, third


def token_widths(module: nn.Module) -> list[int]:
    """Sizes that the tokens of a fused module may have: those of its stacked matrices."""
    matrices = [each for each in module._parameters.values() if each is not None and each.ndim >= 3]
    return list(dict.fromkeys(size for each in matrices for size in (each.shape[-1], *each.shape[1:-1])))


def has_values(module: nn.Module) -> bool:
    """Whether a module can be run: its values are here."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and not any(
        each.is_meta or is_stand_in(each) or type(each).__name__ == "FakeTensor" for each in tensors
    )


def _within(name: str, seam: Seam) -> bool:
    holders = seam.members if seam.members else (seam.name,)
    return name == seam.container or any(name == each or name.startswith(each + ".") for each in holders)


def _inner_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    for child in module.children():
        yield from child.parameters()


def _fused_seam(name: str, module: nn.Module, known: dict[Any, bool]) -> Seam | None:
    stacked = stacked_parameters(module)
    if stacked is None or call_names(module) is None:
        return None
    experts, keys = stacked
    if has_values(module):
        key = (type(module), tuple(sorted((each, value.shape) for each, value in module.named_parameters())))
        if key not in known:
            known[key] = is_fused(module, experts, token_widths(module))
        if not known[key]:
            return None
    return Seam(name, "fused", experts, tuple(_join(name, each) for each in keys), container=name)


def _loop_seam(root: nn.Module, name: str, module: nn.Module, known: dict[Any, bool]) -> Seam | None:
    if isinstance(module, _NO_BLOCKS):
        return None
    if isinstance(module, MoELayer):
        count = len(module.experts)
        places = tuple(_join(name, f"experts.{index}") for index in range(count))
        return Seam(name, "loop", count, (), places, _join(name, "experts"), layer=True)
    if type(module).forward in (*_WITHOUT_FORWARD, nn.Module.forward):
        return None
    itself = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    around = _parent(root, name) if itself else module
    for key, container in [("", module)] if itself else module.named_children():
        keys = _equal_members(container)
        if keys is None or (not itself and type(container).forward not in _WITHOUT_FORWARD):
            continue
        if around is None or not (widths := router_widths(around, container, len(keys))):
            continue
        at = _join(name, key) if key else name
        members = tuple(_join(at, each) for each in keys)
        named = "expert" in f"{at} {type(root.get_submodule(members[0])).__name__}".lower()
        if has_values(around):
            what = (type(around), key, tuple((each, value.shape) for each, value in around.named_parameters()))
            if what not in known:
                known[what] = calls_its_experts(around, [root.get_submodule(each) for each in members], widths, named)
            if not known[what]:
                continue
        elif not named:
            continue  # cannot be tried, and nothing says that these are experts
        return Seam(name, "loop", len(keys), (), members, at)
    return None


def _equal_members(container: nn.Module) -> list[str] | None:
    """Keys of the members of a list of equal modules; those without parameters may be something else."""
    if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
        return None
    places = {key: each for key, each in container._modules.items() if each is not None}
    members = {key: each for key, each in places.items() if next(each.parameters(), None) is not None}
    if len(members) < 2 or len({id(each) for each in members.values()}) != len(members):
        return None
    looks = {
        (type(each), tuple((key, value.shape) for key, value in each.named_parameters())) for each in members.values()
    }
    return list(members) if len(looks) == 1 else None


def router_widths(block: nn.Module, container: nn.Module, experts: int) -> list[int]:
    """Sizes of tokens that a router of the block, outside of its experts, takes; it tells ``experts`` apart."""
    inside = {id(each) for each in container.parameters()}
    widths = []
    for each in block.parameters():
        if id(each) not in inside and each.ndim == 2 and experts in each.shape:
            widths.append(each.shape[1] if each.shape[0] == experts else each.shape[0])
    return list(dict.fromkeys(widths))


def _parent(root: nn.Module, name: str) -> nn.Module | None:
    return root.get_submodule(name.rpartition(".")[0]) if name else None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
