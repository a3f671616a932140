"""Random numbers that follow from the seed and the place, not from what ran before."""

import random

import numpy as np
import pytest
import torch

from lnn_lightning.parallel.step.randomness import is_random, preserved_rng, reseed, seed_of, seed_torch

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seeds_are_far_apart_and_always_the_same() -> None:
    numbers = [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**62, 3), (3, 2**62), ()]
    seeds = [seed_of(*each) for each in numbers]
    assert len(set(seeds)) == len(numbers)
    assert seeds == [seed_of(*each) for each in numbers]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(7, 1) == 5828395167905819585, "resumed runs draw the same numbers in later versions"
    neighbours = [seed_of(0, i) for i in range(1000)]
    assert len({seed >> 43 for seed in neighbours}) > 990, "spread over all bits"


def test_states_are_put_back() -> None:
    reseed(5, CPU)
    expected = draws()
    reseed(5, CPU)
    with preserved_rng(CPU):
        draws()
        reseed(99, CPU)
    assert draws() == expected
    reseed(5, CPU)
    with pytest.raises(KeyError), preserved_rng(CPU):
        reseed(99, CPU)
        raise KeyError
    assert draws() == expected


def test_reseeding_seeds_all() -> None:
    reseed(seed_of(1), CPU)
    first = draws()
    assert len(set(first)) == 3
    reseed(seed_of(2), CPU)
    other = draws()
    assert all(a != b for a, b in zip(first, other, strict=True))
    reseed(seed_of(1), CPU)
    assert draws() == first
    seed_torch(seed_of(1), CPU)
    assert draws()[0] == first[0]


def test_which_operators_are_random() -> None:
    aten = torch.ops.aten
    for op in (aten.rand.default, aten.bernoulli_.float, aten.native_dropout.default, aten.multinomial.default):
        assert is_random(op)
    for op in (aten.add.Tensor, aten.empty.memory_format, aten.mm.default):
        assert not is_random(op)
