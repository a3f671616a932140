"""Sparse upcycling: feed-forward modules of a dense model become experts (Komatsuzaki et al. 2023, arXiv 2212.05055).

Each expert starts as a copy of the dense module, and a new router chooses among them. Where the weights of a token's
experts add up to one, the model first computes what the dense one did.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.find import Seam, find_seams, has_values
from lnn_lightning.parallel.expert.layer import MoELayer, moe_layers
from lnn_lightning.parallel.expert.router import make_gate
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.expert.tries import mixes_tokens
from lnn_lightning.parallel.step.leftovers import attributes_preserved
from lnn_lightning.parallel.step.randomness import preserved_rng, reseed, seed_of
from lnn_lightning.parallel.tensor.trial import on_meta

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
    layers = moe_layers(root)
    if done := [name for name, layer in layers.items() if layer.upcycled == settings]:
        return done
    matches = _matches(root, settings.blocks)
    chosen = matches[settings.every - 1 :: settings.every]
    if not chosen:
        raise LayoutError(
            f"`upcycle.every={settings.every}` takes none of the {len(matches)} modules that `upcycle.blocks="
            f"{settings.blocks!r}` matches ({', '.join(matches)}). Set `every` to at most {len(matches)}."
        )
    seams = find_seams(root)
    widths = {name: _check(root, name, settings, chosen, layers, seams) for name in chosen}
    for name, width in widths.items():
        layer = _layer_of(root.get_submodule(name), width, settings, seed_of(seed, *name.encode()))
        parent, _, attribute = name.rpartition(".")
        root.get_submodule(parent)._modules[attribute] = layer
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
    """Some names, one for each place in a block: those of feed-forward modules, if any is found."""
    first: dict[str, str] = {}
    for name in names:
        if next(root.get_submodule(name).children(), None) is not None:
            first.setdefault(_numberless(name), name)
    fitting = [name for name in first.values() if _has_parameters(root, name) and token_size(root.get_submodule(name))]
    known = fitting or [name for name in names if _has_parameters(root, name)]
    return ", ".join(map(repr, known[:_EXAMPLES])) or "... but none of its modules has parameters"


def _has_parameters(root: nn.Module, name: str) -> bool:
    return next(root.get_submodule(name).parameters(), None) is not None


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check(
    root: nn.Module,
    name: str,
    settings: Upcycle,
    chosen: Sequence[str],
    layers: Mapping[str, MoELayer],
    seams: Sequence[Seam],
) -> int:
    """The size of the tokens that a module takes, if it can become experts."""
    module = root.get_submodule(name)
    what = f"`upcycle.blocks={settings.blocks!r}` matches {name!r} ({type(module).__name__}), which"
    if name in layers or any(inner.startswith(name + ".") for inner in layers):
        raise LayoutError(f"{what} is upcycled already, with other settings ({_settings_in(layers, name)}).")
    if inner := [other for other in chosen if other.startswith(name + ".")]:
        raise LayoutError(f"{what} contains another match, {inner[0]!r}. Use a glob that matches one of them.")
    if seam := next((seam for seam in seams if _overlap(name, seam)), None):
        raise LayoutError(
            f"{what} is or belongs to a block of {seam.experts} experts already ({seam.name!r}). Only dense modules "
            "can be upcycled; `size` alone shares out the experts that there are."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise LayoutError(f"{what} is a container that is never called itself. Match what is called.")
    own = {id(parameter) for parameter in module.parameters()}
    if not own:
        raise LayoutError(f"{what} has no parameters: its copies would all be the same. Match the module around it.")
    if _places(root, module) > 1:
        raise LayoutError(f"{what} stands in several places of the model. What is shared cannot become experts.")
    if tied := [other for other, key in _parameters_outside(root, module).items() if key in own]:
        raise LayoutError(f"{what} shares a parameter with {tied[0]!r}. What is tied cannot become experts.")
    width = token_size(module)
    if width is None:
        raise LayoutError(
            f"{what} is no feed-forward module: it gives no tensor like the one that it is given, for tokens of any "
            "size that its parameters suggest, or wants more arguments. Match the feed-forward inside of a block."
        )
    if has_values(module) and mixes_tokens(module, width):
        raise LayoutError(
            f"{what} makes something else of a token when it has others beside it (attention and BatchNorm do). "
            "Experts are given tokens of many samples together. Match the feed-forward inside of a block."
        )
    return width


def _overlap(name: str, seam: Seam) -> bool:
    """Whether a module is a block of experts, holds one or is in one."""
    places = {seam.name, seam.container, *seam.members}
    return any(f"{place}.".startswith(f"{name}.") for place in places) or any(
        f"{name}.".startswith(f"{place}.") for place in {seam.container, *seam.members}
    )


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


def token_size(module: nn.Module) -> int | None:
    """The size of tokens of which a module makes as many of the same size, found by trying it without data."""
    sizes = dict.fromkeys(size for parameter in module.parameters() for size in reversed(parameter.shape))
    dtype = next(parameter.dtype for parameter in module.parameters())
    with torch.no_grad(), attributes_preserved(module), on_meta(module):
        for size in sizes:
            for shape in ((2, size), (1, 2, size), (1, 1, 2, size)):
                try:
                    made = module.forward(torch.empty(shape, dtype=dtype, device="meta"))
                except Exception:  # noqa: BLE001 - it takes tokens of another size, or something else
                    continue
                if isinstance(made, torch.Tensor) and made.shape == shape:
                    return size
    return None


def _layer_of(module: nn.Module, width: int, settings: Upcycle, seed: int) -> MoELayer:
    first, cpu = next(module.parameters()), torch.device("cpu")
    with preserved_rng(cpu):
        reseed(seed, cpu)
        router = make_gate(settings, width, "meta" if first.is_meta else cpu, first.dtype).to(first.device)
    router.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))
    experts = [module, *(copy.deepcopy(module) for _ in range(settings.experts - 1))]
    layer = MoELayer(router, experts, settings.aux_loss, settings.z_loss, settings)
    layer.training = layer.experts.training = router.training = module.training
    return layer


def dense_names(layers: Iterable[str], names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Names of tensors of upcycled layers -> their names in a file of the dense model; empty: there is none.

    Args:
        layers: names of the layers.
        names: names of tensors of the upcycled module.
        stored: names in the file, with or without a prefix. A layer whose router it has is no dense one there.
    """
    stored, names, found = set(stored), list(names), dict[str, str]()
    for layer in layers:
        if any(_same_but_for_prefix(name, f"{layer}.router.weight") for name in stored):
            continue
        for name in names:
            if name.startswith(f"{layer}.router."):
                found[name] = ""
            elif name.startswith(f"{layer}.experts."):
                rest = name.removeprefix(f"{layer}.experts.").partition(".")[2]
                found[name] = f"{layer}.{rest}"
    return found


def _same_but_for_prefix(one: str, other: str) -> bool:
    one, other = (name.replace("_orig_mod.", "") for name in (one, other))  # what torch.compile puts between
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")
