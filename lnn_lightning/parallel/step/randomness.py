"""Random numbers that do not depend on the layout.

Every random operation of a step draws from a state that follows from the seed of the run, the step, the data rank, the
micro-batch and the place in the step, never from what ran before on this rank. So a stage that recomputes glue code
sees the mask another stage saw, and dropout is the same for one stage and for four.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lnn_lightning.parallel.step.leftovers import modules_outside


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from whole numbers."""
    digest = hashlib.blake2b(b"".join(n.to_bytes(16, "little", signed=True) for n in numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Puts the global random states (torch, Python, numpy) back on exit."""
    put_back = random_as_now(device)
    try:
        yield
    finally:
        put_back()


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds torch's generators of the CPU and of one device (``torch.manual_seed`` formats a stack trace for each)."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device.type).manual_seed(seed)


def reseed(seed: int, device: torch.device) -> None:
    """Seeds all global generators."""
    seed_torch(seed, device)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


_forks: list[int] = []


@contextmanager
def forked_as(rank: int) -> Iterator[None]:
    """Random operations inside are those of one tensor rank: seeds of their own for whoever seeds them."""
    _forks.append(rank)
    try:
        yield
    finally:
        _forks.pop()


def current_forks() -> tuple[int, ...]:
    """Ranks of the :func:`forked_as` contexts around."""
    return tuple(_forks)


def is_random(func: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


@contextmanager
def preserved_generators(root: nn.Module) -> Iterator[None]:
    """Puts back generators that modules keep as attributes (torch's, numpy's, Python's) on exit."""
    put_back = generators_as_now(root)
    try:
        yield
    finally:
        put_back()


def generators_as_now(root: nn.Module, without: Collection[nn.Module] = ()) -> Callable[[], None]:
    """Makes a function that puts the generators that modules keep as attributes into the state of now."""
    numpy = sys.modules.get("numpy")
    kept: list[tuple[Any, Any]] = []
    for module in modules_outside(root, without):
        for value in vars(module).values():
            if isinstance(value, random.Random):
                kept.append((value.setstate, value.getstate()))
            elif isinstance(value, torch.Generator):
                kept.append((value.set_state, value.get_state()))
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                kept.append((value.set_state, value.get_state()))
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                kept.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))

    def put_back() -> None:
        for set_state, state in kept:
            set_state(state)

    return put_back


def random_as_now(device: torch.device) -> Callable[[], None]:
    """Makes a function that puts all global generators into the state of now."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torchs = [device_random_as_now(each) for each in dict.fromkeys((torch.device("cpu"), device))]

    def put_back() -> None:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for each in torchs:
            each()

    return put_back


def device_random_as_now(device: torch.device) -> Callable[[], None]:
    """Makes a function that puts torch's generator of one device into the state of now."""
    if device.type == "cpu":
        state = torch.get_rng_state()
        return lambda: torch.set_rng_state(state)
    module = torch.get_device_module(device.type)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)
