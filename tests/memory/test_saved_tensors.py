"""Saved tensors kept another way: each memory once, the same values, and no longer than needed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lnn_lightning.memory.report import Report
from lnn_lightning.memory.saved_tensors import Encoded, Saved, SavedTensors


class Elsewhere:
    """Keeps copies, and counts what is there."""

    def __init__(self) -> None:
        self.tensors: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.put_bytes = 0

    def put(self, tensor: Tensor, microbatch: tuple[int, int]) -> Any:
        assert microbatch == (1, 2)
        self.put_bytes += tensor.numel() * tensor.element_size()
        token = _Token(tensor.clone())
        self.tensors[id(token)] = token
        return token

    def get(self, token: Any) -> Tensor:
        return token.tensor.clone()


class _Token:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Bits16:
    def encode(self, tensor: Tensor, saved: Saved) -> Encoded | None:
        if not saved.requires_grad or tensor.dtype is not torch.float32:
            return None
        return Encoded("half", [tensor.half()], lambda tensors: tensors[0].float())


class Attention(nn.Module):
    """Views of one memory, a value saved twice, values saved by their own operation, a recomputed block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def core(self, x: Tensor) -> Tensor:
        q, k, v = self.all(self.norm(x)).view(4, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 8, 16)
        return x + self.out(F.dropout(y, 0.1)).exp()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.core, self.core(x), use_reentrant=False)
        return (x[:, 0] * x[:, 1:].sum(1)).square().mean()


def gradients(module: nn.Module, x: Tensor, saved: SavedTensors | None) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    if saved is None:
        loss = module(x)
    else:
        with saved.forward(1, 2):
            loss = module(x)
    loss.backward(retain_graph=True)
    module.zero_grad()
    loss.backward()  # what was unpacked can be unpacked again
    return [parameter.grad.clone() for parameter in module.parameters()]  # type: ignore[union-attr]


def test_gradients_are_the_same_and_nothing_stays() -> None:
    module, x = Attention(), torch.randn(4, 8, 16)
    expected = gradients(module, x, None)
    keeper = Elsewhere()
    gc.collect()
    gc.disable()  # cycles would be found below
    try:
        for saved in (SavedTensors(smallest=0), SavedTensors(smallest=0, keeper=keeper)):
            assert all(map(torch.equal, gradients(module, x, saved), expected))
            assert not len(saved._kept)
        assert keeper.put_bytes > 0 and not len(keeper.tensors)
        lossy = gradients(module, x, SavedTensors(smallest=0, keeper=keeper, encoders=[Bits16()]))
        assert not len(keeper.tensors)
    finally:
        gc.enable()
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(lossy, expected, strict=True)]
    assert 0 < max(errors) < 5e-3


def test_each_memory_once_and_parameters_never() -> None:
    keeper = Elsewhere()
    saved = SavedTensors(smallest=0, keeper=keeper)
    saved.report = Report()
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)
    with saved.forward(1, 2), torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x * weight.sum()).sin()  # x; the argument of sin
        z = y @ weight.t() + weight * 2.0  # y in bfloat16; the cast weight and its views stay
        (z.t() * z).exp()  # z, saved as it is and transposed; the result of exp
    assert keeper.put_bytes == 64 * 64 * (4 + 4 + 2 + 4 + 4)
    assert saved.report.total.after == keeper.put_bytes


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: x.sin().exp_().add_(1),  # saved by its own operation
        lambda x, weight: (lambda y: (y.exp() * y, y.add_(1))[0])(x.sin() * 1),  # an operand
        lambda x, weight: (lambda y: (y.t() @ y, y[:1].zero_())[0])(x.sin() * 1),  # through a view
        lambda x, weight: (x @ weight, weight.data.dim(), _doubled(weight))[0],  # a parameter
    ],
)
@pytest.mark.parametrize("encoders", [[], [Bits16()]])
def test_changes_in_place_are_noticed(change: Callable[..., Tensor], encoders: list[Any]) -> None:
    x, weight = torch.randn(8, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        change(x, weight).sum().backward()
    saved = SavedTensors(smallest=0, encoders=encoders)
    with saved.forward(1, 2):
        y = change(x, weight)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[8, 8\]"):
        y.sum().backward()


def _doubled(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def test_memory_used_again_is_another() -> None:
    """A freed memory's address comes back at once; what is kept must not be taken for it."""
    saved = SavedTensors(smallest=0, encoders=[Bits16()])
    x = torch.randn(256, requires_grad=True)
    with saved.forward(1, 2):
        total = sum((x * (factor / 4)).exp().mul(0.5).sin().sum() for factor in range(5))
    (found,) = torch.autograd.grad(total, x)
    (expected,) = torch.autograd.grad(sum((x * (f / 4)).exp().mul(0.5).sin().sum() for f in range(5)), x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_a_function_of_the_users_may_have_a_name() -> None:
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.name = "mine"
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient

    x = torch.randn(4, requires_grad=True)
    with SavedTensors(smallest=0).forward(0, 0):
        y = Named.apply(x).square().sum()
    y.backward()
    assert torch.equal(x.grad, 2 * x)
