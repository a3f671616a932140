"""Glue code on several stages: the same random numbers, and masks on what is not here."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lnn_lightning.parallel.step.glue import GlueMode, glue_mode

CPU = torch.device("cpu")
FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)


def absent(*shape: int) -> Tensor:
    with FAKE_MODE:
        return torch.empty(shape)


def run(seed: int, body: Any, state: int = 0) -> Any:
    torch.manual_seed(state)
    with GlueMode(seed, CPU):
        return body()


def three() -> list[Tensor]:
    return [torch.rand(4), F.dropout(torch.ones(64), 0.5), torch.randint(0, 1000, (4,))]


def test_numbers_do_not_depend_on_the_state() -> None:
    first, second = run(3, three, 0), run(3, three, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, run(4, three), strict=True))
    twice = run(3, lambda: [torch.rand(4), torch.rand(4)])
    assert not torch.equal(*twice)


def test_operations_in_between_change_nothing() -> None:
    def with_more() -> list[Tensor]:
        a = torch.rand(4)
        (a * 2).sum().item()
        torch.empty(3)
        return [a, F.dropout(torch.ones(64), 0.5), torch.randint(0, 1000, (4,))]

    assert all(torch.equal(a, b) for a, b in zip(run(3, three), run(3, with_more), strict=True))


def test_operations_on_absent_values_count() -> None:
    """A stage whose value is not here draws nothing, and the next mask is still the other stages'."""

    def with_absent() -> list[Tensor]:
        first = torch.rand(4)
        dropped = F.dropout(absent(64), 0.5)
        assert isinstance(dropped, FakeTensor)
        return [first, torch.randint(0, 1000, (4,))]

    first, _, third = run(3, three)
    got = run(3, with_absent)
    assert torch.equal(got[0], first)
    assert torch.equal(got[1], third)


def test_suspended_within_a_unit() -> None:
    def body() -> list[Tensor]:
        mode = modes[0]
        a = torch.rand(4)
        with mode.suspended():
            torch.manual_seed(11)
            inside = torch.rand(4)
            torch.rand(100)
        return [a, inside, torch.rand(4)]

    modes: list[GlueMode] = []

    def go() -> list[Tensor]:
        with GlueMode(3, CPU) as mode:
            modes[:] = [mode]
            return body()

    a, inside, b = go()
    without = run(3, lambda: [torch.rand(4), torch.rand(4)])
    assert torch.equal(a, without[0])
    assert torch.equal(b, without[1]), "what the unit draws does not count"
    assert torch.equal(inside, torch.rand(4, generator=torch.Generator().manual_seed(11)))


def test_suspended_where_it_is_not_active() -> None:
    mode = GlueMode(3, CPU)
    with mode.suspended():
        torch.manual_seed(11)
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(11)))


def test_generators_of_the_user_follow_too() -> None:
    generator = torch.Generator().manual_seed(1)
    first = run(3, lambda: torch.rand(4, generator=generator))
    generator.manual_seed(2)
    assert torch.equal(run(3, lambda: torch.rand(4, generator=generator)), first)


def test_no_need_no_mode() -> None:
    torch.manual_seed(11)
    with glue_mode(False, 1, CPU) as mode:
        assert mode is None
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(11)))
    with glue_mode(True, 1, CPU) as mode:
        assert isinstance(mode, GlueMode)


# ------------------------------------------------------------------------------------------------ masks

MASK = torch.tensor([True, False, True, True])
ROWS = torch.tensor([[True, False, False], [True, True, False], [False, False, False], [False, False, True]])


def masked(x: Tensor) -> list[Tensor]:
    changed = x.clone()
    changed[ROWS] = -1.0
    return [
        x[MASK],
        x[ROWS],
        x[:, torch.tensor([True, False, True])],
        x[MASK, 1],
        changed,
        x[torch.tensor([3, 0])],
    ]


def test_masks_of_absent_values_have_a_shape() -> None:
    x = torch.arange(12.0).view(4, 3)
    with GlueMode(1, CPU):
        got, real = masked(absent(4, 3)), masked(x)
    for fake, here, expected in zip(got, real, masked(x), strict=True):
        assert isinstance(fake, FakeTensor)
        assert fake.shape == expected.shape
        assert torch.equal(here, expected), "values that are here are masked as ever"


@pytest.mark.parametrize(
    "mask", [ROWS, MASK[:, None], torch.tensor([True, False, True])], ids=["full", "rows", "columns"]
)
def test_masked_select_of_absent_values_has_a_shape(mask: Tensor) -> None:
    expected = torch.masked_select(torch.zeros(4, 3), mask)
    with GlueMode(1, CPU):
        assert torch.masked_select(absent(4, 3), mask).shape == expected.shape


def test_masks_that_are_not_known_fail() -> None:
    with GlueMode(1, CPU), pytest.raises(RuntimeError):
        absent(4)[absent(4) > 0]
