"""The gradient norm over the mesh."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lnn_lightning.optim import clip_grad_by_mesh_norm, mesh_grad_norm
from tests.helpers.ranks import run_ranks

SHAPES = [(3, 4), (5,), (2, 2), (7,), ()]
ORDERS = [2.0, 1.0, 3.0, math.inf]


def parameters(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    """Parameters of a whole model, each with a gradient."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        made.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        made[-1].grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
    return made


def on_one_process(dtype: torch.dtype, max_norm: float, order: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    whole = parameters(dtype)
    norm = torch.nn.utils.clip_grad_norm_(whole, max_norm, order)
    return norm, [p.grad for p in whole]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_norm", [0.3, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_mesh_it_is_torchs(order: float, max_norm: float, dtype: torch.dtype) -> None:
    expected_norm, expected = on_one_process(dtype, max_norm, order)
    mine = parameters(dtype)
    norm = clip_grad_by_mesh_norm((p for p in mine), max_norm, (), norm_type=order)
    torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close([p.grad for p in mine], expected)
    if max_norm == 1000.0:
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(mine, parameters(dtype), strict=True)), "untouched"


def test_low_precision_is_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    weight.grad = torch.full((4096,), 1.0078125, dtype=torch.bfloat16)
    norm = clip_grad_by_mesh_norm([weight], 1.0, ())
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(1.0078125 * 64, rel=1e-6)
    assert weight.grad.dtype == torch.bfloat16 and weight.grad[0].item() == pytest.approx(1 / 64, rel=1e-2)
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.full((2,), 60000.0, dtype=torch.float16)
    assert mesh_grad_norm([half], ()).item() == pytest.approx(60000 * math.sqrt(2), rel=1e-6), "no overflow"


def test_nothing_here() -> None:
    assert mesh_grad_norm(iter(()), ()).item() == 0.0
    assert mesh_grad_norm([nn.Parameter(torch.ones(2))], (), norm_type=math.inf).item() == 0.0
    empty = nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    assert mesh_grad_norm([empty], (), norm_type=math.inf).item() == 0.0
    with pytest.raises(ValueError, match="positive"):
        mesh_grad_norm([], (), norm_type=0.0)


def test_mixed_dtypes_and_sparse_gradients() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    double.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norm = clip_grad_by_mesh_norm([table.weight, double], 1.0, ())
    expected = math.sqrt(3 * 4 + 3 * 1 + 25)
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(expected)
    assert double.grad[1].item() == pytest.approx(4 / expected, rel=1e-6)
    assert table.weight.grad.to_dense()[1, 0].item() == pytest.approx(2 / expected, rel=1e-6)


def _share(rank: int, world_size: int, whole: list[nn.Parameter]) -> list[nn.Parameter]:
    """Rank 0 has the first two, rank 1 the next two, rank 2 none; the last is shared by ranks 0 and 1."""
    return {0: [whole[0], whole[1], whole[4]], 1: [whole[2], whole[3], whole[4]]}.get(rank, [])


def _partitioned(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    for dtype in (torch.float32, torch.float64):
        for order in ORDERS:
            for max_norm in (0.3, 1000.0):
                expected_norm, expected = on_one_process(dtype, max_norm, order)
                whole = parameters(dtype)
                own = _share(rank, world_size, whole)
                norm = clip_grad_by_mesh_norm(
                    (p for p in own), max_norm, (group,), lambda p, w=whole: p is not w[4] or rank == 0, order
                )
                torch.testing.assert_close(norm.double(), expected_norm.double(), rtol=1e-6, atol=0)
                for p, grad in zip(whole, expected, strict=True):
                    if any(p is q for q in own):
                        torch.testing.assert_close(p.grad, grad)

    whole = parameters()
    own = _share(rank, world_size, whole)
    not_once = mesh_grad_norm(own, (group,))
    if rank == 1:
        for p in own:
            p.grad = None
    without_rank_1 = mesh_grad_norm(own, (group,), lambda p: p is not whole[4] or rank == 0)

    seen = {"not_once": not_once.item(), "without_rank_1": without_rank_1.item()}
    for name, bad in (("nan", math.nan), ("inf", math.inf)):
        for order in (2.0, math.inf):
            weight = nn.Parameter(torch.ones(2))
            weight.grad = torch.tensor([1.0, bad if rank == 1 else 2.0])
            seen[f"{name}{order}"] = mesh_grad_norm([weight] if rank < 2 else [], (group,), norm_type=order).item()
    return seen


def test_the_norm_does_not_depend_on_the_partition() -> None:
    seen = run_ranks(_partitioned, 3)
    grads = [p.grad.double() for p in parameters()]
    squares = [float(g.pow(2).sum()) for g in grads]
    for row in seen:
        assert row["not_once"] == pytest.approx(math.sqrt(sum(squares) + squares[4]), rel=1e-6)
        assert row["without_rank_1"] == pytest.approx(math.sqrt(squares[0] + squares[1] + squares[4]), rel=1e-6)
        assert math.isnan(row["nan2.0"]) and math.isnan(row["naninf"])
        assert row["inf2.0"] == row["infinf"] == math.inf


def _two_axes(rank: int, world_size: int) -> tuple[float, float]:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([float(rank + 1)])
    both = clip_grad_by_mesh_norm([weight], 1.0, (rows[rank // 2], columns[rank % 2]))
    return both.item(), weight.grad.item()


@pytest.mark.slow
def test_over_two_axes() -> None:
    norm = math.sqrt(1 + 4 + 9 + 16)
    for rank, (both, grad) in enumerate(run_ranks(_two_axes, 4)):
        assert both == pytest.approx(norm, rel=1e-6) and grad == pytest.approx((rank + 1) / norm, rel=1e-5)
