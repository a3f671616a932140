"""Units: the sub-modules a step is seen as a sequence of.

A *trunk* is a ``ModuleList`` or ``Sequential`` of blocks. Units are the blocks of the trunks, and every other
sub-module with parameters that does not contain a trunk. What is left between the units (the forwards of the modules
around them, the step itself) is *glue*: every stage runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.loss import _Loss

from lnn_lightning.parallel.errors import StepError


@dataclass(frozen=True)
class Units:
    """Names of the sub-modules a step may be cut between, in registration order.

    Attributes:
        names: maximal units. One that is never called itself but used piece by piece is a group of smaller units.
        blocks: those of ``names`` that are elements of a trunk.
        trunks: names of the trunks.
    """

    names: tuple[str, ...]
    blocks: frozenset[str]
    trunks: tuple[str, ...]


def find_units(root: nn.Module, num_stages: int = 1, split_points: Sequence[str] | None = None) -> Units:
    """Finds the units of a module.

    Blocks too heavy for ``num_stages`` even stages are opened where they hold a trunk of their own, and so is whatever
    holds a split point.

    Raises:
        StepError: a split point names no sub-module.
    """
    opened: set[str] = set()
    for point in split_points or ():
        try:
            root.get_submodule(point)
        except AttributeError as error:
            raise StepError(
                f"`split_points` names {point!r}, which is no sub-module of {type(root).__name__}. Sub-modules "
                f"are named as in `named_modules()`, for example {_examples(root)}."
            ) from error
        parts = point.split(".")
        opened |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    total = max(sum(parameter.numel() for parameter in root.parameters()), 1)
    while True:
        units = _walk(root, opened)
        heavy = {
            name
            for name in units.names
            if _size(root.get_submodule(name)) > total / num_stages and _trunks_in(root.get_submodule(name), name)
        }
        if num_stages == 1 or not heavy:
            return units
        opened |= heavy


def _walk(root: nn.Module, opened: set[str]) -> Units:
    trunks = set(_outermost_trunks(root))
    for name in opened:
        trunks |= set(_trunks_in(root.get_submodule(name), name))
    ancestors = {name for trunk in trunks | opened for name in _ancestors(trunk)} | trunks | opened
    names: list[str] = []
    blocks: set[str] = set()
    seen: set[int] = set()

    def descend(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}.{child_name}" if prefix else child_name
            if id(child) in seen or not is_stateful(child):
                continue
            seen.add(id(child))
            if name in ancestors:
                descend(child, name)
                continue
            names.append(name)
            if prefix in trunks:
                blocks.add(name)

    descend(root, "")
    return Units(tuple(names), frozenset(blocks), tuple(sorted(trunks)))


def is_stateful(module: nn.Module) -> bool:
    """Whether a module holds parameters or saved buffers, and so must live somewhere.

    The class weights of a loss do not count: losses are glue.
    """
    if next(module.parameters(), None) is not None:
        return True
    return any(
        buffer is not None and name not in child._non_persistent_buffers_set
        for child in module.modules()
        if not isinstance(child, _Loss)
        for name, buffer in child._buffers.items()
    )


def _outermost_trunks(root: nn.Module) -> list[str]:
    return next((found for test in _TESTS if (found := _find_trunks(root, "", test))), [])


def _trunks_in(module: nn.Module, name: str) -> list[str]:
    if _holds_blocks(module):
        return [name]
    return next((found for test in _TESTS if (found := _find_trunks(module, name, test))), [])


def _find_trunks(module: nn.Module, prefix: str, is_trunk: Callable[[nn.Module], bool]) -> list[str]:
    found: list[str] = []
    if _is_one_unit(module):
        return found
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        if not is_trunk(child):
            found += _find_trunks(child, name, is_trunk)
            continue
        found.append(name)
        for element_name, element in child.named_children():  # a Sequential of Sequentials is one long trunk
            if _holds_blocks(element):
                found += [f"{name}.{element_name}", *_find_trunks(element, f"{name}.{element_name}", _holds_blocks)]
    return [name for name in found if not _inside_block(name, found)]


def _inside_block(name: str, trunks: Iterable[str]) -> bool:
    """Whether a trunk sits inside an element of another trunk that is not itself a trunk."""
    known = set(trunks)
    for trunk in known:
        if name.startswith(trunk + "."):
            element = ".".join(name.split(".")[: trunk.count(".") + 2])
            if element != name and element not in known:
                return True
    return False


def _holds_blocks(module: nn.Module) -> bool:
    return _is_list(module) and _count(module, blocks=True) >= 2


def _holds_one_block(module: nn.Module) -> bool:
    """A list of one block: a small configuration, or a block that is called again and again (ALBERT)."""
    return _is_list(module) and isinstance(module, nn.ModuleList) and _count(module, blocks=True) == 1


def _holds_layers(module: nn.Module) -> bool:
    return _is_list(module) and _count(module, blocks=False) >= 2


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and not _is_one_unit(module)


def _is_one_unit(module: nn.Module) -> bool:
    """Whether a module must not be cut: its experts are called together."""
    return getattr(module, "is_one_unit", False)


_TESTS = (_holds_blocks, _holds_one_block, _holds_layers)
"""What counts as a trunk; the first of these that any sub-module passes."""


def _count(module: nn.Module, blocks: bool) -> int:
    elements = [child for child in module.children() if is_stateful(child)]
    return sum(1 for child in elements if not blocks or next(child.children(), None) is not None)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _examples(root: nn.Module) -> list[str]:
    return [name for name, module in root.named_modules() if name and is_stateful(module)][:3]
