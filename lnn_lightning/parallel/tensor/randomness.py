"""Random numbers that differ between tensor ranks, next to those that are the same.

Where activations are whole on every tensor rank, dropout must drop the same elements everywhere; where they are cut,
every rank must draw its own (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3). Megatron keeps a second stream
and swaps it in; here the second stream follows from the first at the place where it is needed, so that it is
recomputed, resumed and reseeded with it, and nobody has to save it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lnn_lightning.parallel.step.randomness import seed_of

_CUDA_STEP = 4
"""By how much an operation moves CUDA's generator at least: its offset is a multiple of it."""


@contextmanager
def forked_rng(device: torch.device, rank: int) -> Iterator[None]:
    """Random operations inside draw numbers of this tensor rank's own from the device's default generator.

    Outside, the generator goes on as if one number had been drawn, on every rank alike, whatever was drawn inside. What
    is drawn inside follows from the generator's state at the entry and the rank: code recomputed by
    `torch.utils.checkpoint.checkpoint` (with `preserve_rng_state`, the default) draws the same again.

    On CUDA the host does not wait for the device; a CUDA graph cannot capture it.

    Args:
        device: where the random operations run.
        rank: this rank's place among the tensor ranks.
    """
    if device.type == "cuda":
        generator = _cuda_generator(device)
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(seed_of(seed, offset, rank))
        try:
            yield
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset + _CUDA_STEP)
    elif device.type == "cpu":
        generator = torch.default_generator
        seed, state = _drawn(device), generator.get_state()
        generator.manual_seed(seed_of(seed, rank))
        try:
            yield
        finally:
            generator.set_state(state)
    elif device.type == "meta":
        yield  # nothing is drawn there
    else:
        module = torch.get_device_module(device.type)
        seed, state = _drawn(device), module.get_rng_state(device)
        module.manual_seed(seed_of(seed, rank))
        try:
            yield
        finally:
            module.set_rng_state(state, device)


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # no generators before
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _drawn(device: torch.device) -> int:
    """A number from the default generator, also under fake tensors and where modes follow what the user's code does."""
    with ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
        return int(torch.empty((), dtype=torch.int64, device=device).random_())
