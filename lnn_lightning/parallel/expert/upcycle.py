"""Sparse upcycling: feed-forward modules of a dense model become experts (Komatsuzaki et al. 2023, arXiv 2212.05055).

Each expert starts as a copy of the dense module, and a new router chooses among them. Where the weights of a token's
experts add up to one, the model first computes what the dense one did.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.gates import make_router
from lnn_lightning.parallel.expert.layer import MoELayer
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.step.randomness import preserved_rng, reseed, seed_of
from lnn_lightning.parallel.tensor.layers import is_conv1d

_EXAMPLES = 6


def upcycle(root: nn.Module, settings: Upcycle, seed: int = 0) -> list[str]:
    """Replaces feed-forward modules by layers of experts, in place.

    A module that has been upcycled with the same settings stays as it is.

    Args:
        root: the dense module.
        settings: which modules, and what becomes of them.
        seed: seed of the routers; ranks that give the same one have the same routers.

    Returns:
        Names of the layers of experts, in registration order.

    Raises:
        LayoutError: nothing matches, or something that cannot become experts.
    """
    layers = {name: module for name, module in root.named_modules() if isinstance(module, MoELayer)}
    if done := [name for name, layer in layers.items() if layer.upcycled == settings]:
        return done
    matches = _matches(root, settings.blocks)
    chosen = matches[settings.every - 1 :: settings.every]
    if not chosen:
        raise LayoutError(
            f"`upcycle.every={settings.every}` takes none of the {len(matches)} modules that `upcycle.blocks="
            f"{settings.blocks!r}` matches ({', '.join(matches)}). Set `every` to at most {len(matches)}."
        )
    for name in chosen:
        _check(root, name, settings, chosen, layers)
    for name in chosen:
        _replace(root, name, _layer_of(root.get_submodule(name), settings, seed_of(seed, *name.encode())))
    return chosen


def _matches(root: nn.Module, pattern: str) -> list[str]:
    names = [name for name, module in root.named_modules() if name and not _is_inside_experts(root, name)]
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        raise LayoutError(
            f"`upcycle.blocks={pattern!r}` matches no module of {type(root).__name__}. It is a glob of names as in "
            f"`named_modules()`, such as {_examples(root, names)}."
        )
    return matches


def _is_inside_experts(root: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(isinstance(root.get_submodule(".".join(parts[:depth])), MoELayer) for depth in range(1, len(parts)))


def _examples(root: nn.Module, names: Sequence[str]) -> str:
    """Names with parameters, those of modules that occur in many places first: these are the parts of blocks."""
    with_parameters = [name for name in names if next(root.get_submodule(name).parameters(), None) is not None]
    kinds = Counter(_numberless(name) for name in with_parameters)
    often = sorted(kinds, key=lambda kind: -kinds[kind])[:_EXAMPLES]
    first = {kind: next(name for name in with_parameters if _numberless(name) == kind) for kind in often}
    return ", ".join(repr(name) for name in first.values()) or "... but it has none with parameters"


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check(
    root: nn.Module, name: str, settings: Upcycle, chosen: Sequence[str], layers: Mapping[str, MoELayer]
) -> None:
    """Whether a module can become experts."""
    module = root.get_submodule(name)
    what = f"`upcycle.blocks={settings.blocks!r}` matches {name!r} ({type(module).__name__}), which"
    if name in layers or any(inner.startswith(name + ".") for inner in layers):
        raise LayoutError(f"{what} is upcycled already, with other settings ({_settings_in(layers, name)}).")
    if inner := [other for other in chosen if other.startswith(name + ".")]:
        raise LayoutError(f"{what} contains another match, {inner[0]!r}. Use a glob that matches one of them.")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise LayoutError(f"{what} is a container that is never called itself. Match what is called.")
    parameters = list(module.parameters())
    if not parameters:
        raise LayoutError(f"{what} has no parameters: its copies would all be the same. Match the module around it.")
    if _places(root, module) > 1:
        raise LayoutError(f"{what} stands in several places of the model: what they share cannot become experts.")
    own = {id(parameter) for parameter in parameters}
    outside = _parameters_outside(root, module)
    if tied := [other for other, key in outside.items() if key in own]:
        raise LayoutError(f"{what} shares a parameter with {tied[0]!r}: what is tied cannot become experts.")
    if seams := _experts_in(module):
        raise LayoutError(f"{what} is a block of experts itself ({seams[0]}). Only dense modules can be upcycled.")


def _settings_in(layers: Mapping[str, MoELayer], name: str) -> Upcycle | None:
    return next(layer.upcycled for inner, layer in layers.items() if inner == name or inner.startswith(name + "."))


def _places(root: nn.Module, module: nn.Module) -> int:
    return sum(found is module for _, found in root.named_modules(remove_duplicate=False))


def _parameters_outside(root: nn.Module, module: nn.Module) -> dict[str, int]:
    """Names of the parameters that modules outside of one hold -> their ids."""
    inside = {id(child) for child in module.modules()}
    return {
        f"{prefix}.{name}".lstrip("."): id(parameter)
        for prefix, child in root.named_modules()
        if id(child) not in inside
        for name, parameter in child._parameters.items()
        if parameter is not None
    }


def _layer_of(module: nn.Module, settings: Upcycle, seed: int) -> MoELayer:
    first = next(module.parameters())
    cpu = torch.device("cpu")
    features = _features(module)
    with preserved_rng(cpu):
        reseed(seed, cpu)
        router = make_gate(settings, features, "meta" if first.is_meta else cpu, first.dtype).to(first.device)
    router.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))
    experts = [module, *(copy.deepcopy(module) for _ in range(settings.experts - 1))]
    layer = MoELayer(router, experts, settings.aux_loss, settings.z_loss, settings)
    layer.training = router.training = layer.experts.training = module.training
    return layer


def _replace(root: nn.Module, name: str, layer: MoELayer) -> None:
    parent, _, attribute = name.rpartition(".")
    root.get_submodule(parent)._modules[attribute] = layer
