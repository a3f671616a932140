"""What state dicts of the module are called in a checkpoint, and what belongs to them besides their tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

OURS = "lnn_lightning"
"""Where a checkpoint has what only this package knows."""
MODULE_STATES = ("state_dict", "current_model_state")
"""State dicts of the module in a checkpoint; the second is what `WeightAveraging` calls the one that is trained."""


def callback_part(callback: str, name: str) -> str:
    """What a state dict of the module in a callback's state is called in a checkpoint."""
    return f"callback.{callback}.{name}"


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as torch has it: with the versions of the modules, by which some know an old form of theirs."""
    versioned: OrderedDict[str, Any] = OrderedDict(state)
    versioned._metadata = versions  # type: ignore[attr-defined]
    return versioned


def whole_state(entries: Mapping[str, Any], part: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict from all that a checkpoint has: under all names of tied tensors, with the versions of the modules.

    Args:
        entries: what the checkpoint has, by its names there.
        part: what the state dict is called.
        ours: what only this package knows of the checkpoint.
    """
    start = f"{part}."
    state = {name.removeprefix(start): value for name, value in entries.items() if name.startswith(start)}
    state |= {key: state[first] for key, first in ours.get("tied", {}).items() if first in state}
    return with_versions(state, ours["versions"]) if "versions" in ours else state


def same_values(first: Any, second: Any) -> bool:
    """Whether two trees of dicts, lists, tensors and plain values are equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool((first == second).all())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_values(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_values, first, second))
    return bool(first == second)
