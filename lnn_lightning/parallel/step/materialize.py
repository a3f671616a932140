"""Parameters built on the meta device, made real unit by unit on the stage they live on.

Values follow from the seed and the module's name, so they are the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.randomness import preserved_rng, reseed, seed_of
from lnn_lightning.parallel.step.standin import StandInBuffer, replace_tensors, stand_in_for

_META = "_lnn_from_meta"


def defer_meta_tensors(root: nn.Module) -> bool:
    """Replaces tensors on the meta device by stand-ins on the CPU, to be traced. Returns whether there were any."""
    found = False

    def decide(name: str, tensor: Tensor) -> Tensor:
        nonlocal found
        if not tensor.is_meta:
            return tensor
        found = True
        result = stand_in_for(tensor, torch.device("cpu"))
        setattr(result, _META, True)
        return result

    replace_tensors(root, decide)
    return found


def materialize(root: nn.Module, lives_here: Callable[[str], bool], seed: int, unset: set[str] | None = None) -> None:
    """Makes the deferred tensors real that live here and initialises them.

    A module is initialised by its ``reset_parameters()`` and by the ``_init_weights(module)`` of the modules around it,
    as ``torch.nn``, transformers and nanoGPT-style code have them.

    Args:
        root: the module.
        lives_here: whether this rank holds a tensor.
        seed: the run's.
        unset: gets the names of tensors that neither initialises, which are random for now; None: that is an error.

    Raises:
        StepError: a tensor is initialised by neither.
    """
    made: dict[int, int] = {}

    def decide(name: str, tensor: Tensor) -> Tensor:
        if not getattr(tensor, _META, False) or not lives_here(name):
            return tensor
        fill = float("nan") if tensor.dtype.is_floating_point else 0
        real = torch.full(tensor.shape, fill, dtype=tensor.dtype)
        result = real if isinstance(tensor, StandInBuffer) else nn.Parameter(real, tensor.requires_grad)
        made[id(result)] = result._version
        return result

    replace_tensors(root, decide)
    with preserved_rng(torch.device("cpu")), torch.no_grad():
        for name, module in root.named_modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            if any(id(tensor) in made for tensor in own if tensor is not None):
                reseed(seed_of(seed, *name.encode()), torch.device("cpu"))
                _initialise(root, name, module)
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if id(tensor) not in made or tensor.numel() == 0:
            continue
        if tensor._version == made[id(tensor)] or (tensor.is_floating_point() and bool(tensor.isnan().any())):
            if unset is not None:
                unset.add(name)
                random = torch.Generator().manual_seed(seed_of(seed, *name.encode()))
                with torch.no_grad():  # layers are tried out before the real values are there
                    tensor.normal_(0, 0.02, generator=random) if tensor.is_floating_point() else tensor.zero_()
                continue
            raise StepError(
                f"{name!r} was built on the meta device and nothing initialises it: give its module a "
                "`reset_parameters()` method, or a module around it an `_init_weights(module)` method, or build the "
                "model without meta device."
            )


def _initialise(root: nn.Module, name: str, module: nn.Module) -> None:
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, method, None)):
            reset()
            break
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        around = root.get_submodule(".".join(parts[:depth]))
        if callable(initialise := getattr(around, "_init_weights", None)):
            initialise(module)
            return
