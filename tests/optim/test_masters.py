"""fp32 copies in an optimizer's groups, without a Trainer."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lnn_lightning.optim.masters import LEAF, Masters, masters_of, states_of, stochastically_rounded

BF16 = torch.bfloat16
WIDTH = 64


def low(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in ((WIDTH, WIDTH), (WIDTH,))]


def gradient(parameter: Tensor, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(parameter.shape, generator=rng).to(parameter.dtype)


def optimizer_for(parameters: list[nn.Parameter], kind: Any = torch.optim.AdamW, seed: Any = None, **kw: Any) -> Any:
    optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3e-3}], **{"lr": 1e-2, **kw})
    Masters(optimizer, seed).adopt({id(p): f"p{i}" for i, p in enumerate(parameters)}, {})
    return optimizer


def literal(parameters: list[nn.Parameter], steps: int) -> list[Tensor]:
    """Master weights by hand."""
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW([{"params": masters[:1]}, {"params": masters[1:], "lr": 3e-3}], lr=1e-2)
    for step in range(steps):
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = gradient(parameter, step).float()
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master)
    return [*(p.detach() for p in parameters), *(m.detach() for m in masters)]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("closure", [False, True])
def test_bit_equal_to_master_weights_by_hand(dtype: torch.dtype, closure: bool) -> None:
    parameters = low(dtype)
    steps = iter(range(5))

    def backward() -> None:
        step = next(steps)
        for parameter in parameters:
            parameter.grad = gradient(parameter, step)

    optimizer = optimizer_for(parameters)
    for _ in range(5):
        optimizer.zero_grad()
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
    found = [*parameters, *(copy for _, copy in masters_of(optimizer).copies)]  # type: ignore[union-attr]
    for mine, expected in zip(found, literal(low(dtype), 5), strict=True):
        assert mine.dtype == expected.dtype and torch.equal(mine, expected)


def test_small_updates_are_not_lost() -> None:
    moved = {}
    for how in ("rounded", "masters", "stochastic"):
        parameter = nn.Parameter(torch.ones(4096, dtype=BF16))
        optimizer = torch.optim.SGD([parameter], lr=1e-4)
        if how != "rounded":
            counter = iter(range(1000))
            seed = None if how == "masters" else (lambda counter=counter: next(counter))
            Masters(optimizer, seed).adopt({id(parameter): "p"}, {})
        for _ in range(200):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        moved[how] = 1 - parameter.detach().double().mean().item()
    assert moved["rounded"] == 0.0
    assert moved["masters"] == pytest.approx(0.02, abs=2**-9)
    assert moved["stochastic"] == pytest.approx(0.02, rel=0.05)


def test_bytes_a_parameter() -> None:
    """ZeRO's 2 + 2 + K, K = 12; without master weights 2 + 2 + 8 with fp32 moments and stochastic rounding."""
    for seed, kept in ((None, 12), (lambda: 0, 8)):
        parameters = low()
        optimizer = optimizer_for(parameters, seed=seed)
        for step in range(2):
            optimizer.zero_grad()
            for parameter in parameters:
                parameter.grad = gradient(parameter, step)
            if step == 0:
                optimizer.step()
        copies = [copy for _, copy in masters_of(optimizer).copies]  # type: ignore[union-attr]
        moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
        held = [*parameters, *(p.grad for p in parameters), *copies, *(c.grad for c in copies), *moments]
        size = sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)
        assert size == (2 + 2 + kept) * sum(p.numel() for p in parameters)


def test_a_changed_parameter_changes_its_master_where_it_differs() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    masters = Masters(optimizer)
    masters.adopt({id(parameter): "p"}, {})
    copy = masters.copies[0][1]

    def step() -> Tensor:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return copy.detach().clone()

    before = step()
    parameter.data[1] = 5.0  # no version tells of this
    assert torch.equal(step(), torch.stack([before[0], torch.tensor(5.0), before[2]]) - 1e-3)
    swapped = parameter.detach().clone()
    parameter.data.zero_()
    parameter.data.copy_(swapped)  # averages, swapped in for an evaluation and out again
    kept = copy.detach().clone()
    assert torch.equal(step(), kept - 1e-3)


def test_gradients_add_up_until_zero_grad() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=BF16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    masters = Masters(optimizer)
    masters.adopt({id(parameter): "p"}, {})
    for expected in (-1.0, -3.0):  # as torch without zero_grad: 1, then 1 + 1
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert parameter.grad is None and parameter.tolist() == [expected] * 2
    optimizer.zero_grad()
    assert masters.copies[0][1].grad is None
    optimizer.step()
    assert parameter.tolist() == [-3.0] * 2


def test_state_made_when_the_optimizer_is_built_becomes_fp32() -> None:
    parameters = low()
    optimizer = optimizer_for(parameters, torch.optim.Adagrad, initial_accumulator_value=0.1)
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    parameters[0].grad = gradient(parameters[0], 0)
    optimizer.step()
    assert [set(leaves) for _, leaves in states_of(optimizer)] == [{"step", "sum", LEAF}] * 2


# ---------------------------------------------------------------------------------------------- stochastic rounding


def test_stochastic_rounding_is_right_on_average() -> None:
    value = torch.tensor([1.0 + 2**-10, -3.1415926, 1e-30, 65504.5, -1.5 * 2.0**-134])
    rng = torch.Generator().manual_seed(0)
    count = 20000
    drawn = stochastically_rounded(value.repeat(count, 1), rng).double()
    for index, exact in enumerate(value.double().tolist()):
        found = drawn[:, index].unique().tolist()
        assert len(found) == 2 and found[0] < exact < found[1], "the two neighbours"
        share = (exact - found[0]) / (found[1] - found[0])
        spread = (found[1] - found[0]) * math.sqrt(share * (1 - share) / count)
        assert abs(drawn[:, index].mean().item() - exact) < 5 * spread


def test_stochastic_rounding_keeps_what_bf16_has() -> None:
    exact = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, -(2.0**120)])
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        assert torch.equal(stochastically_rounded(exact, rng).float(), exact)
        assert stochastically_rounded(nan, rng).isnan().all()
    first, second = (stochastically_rounded(torch.rand(100) * 0 + 0.1, torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(first, second)
