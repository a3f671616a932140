"""Gradients in fewer bits on the wire."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lnn_lightning.communication import Cast, attach
from tests.helpers.ranks import run_ranks


def _in_ddp(rank: int, world_size: int, dtype: str) -> tuple[list[list[Tensor]], list[list[Tensor]], int]:
    """Gradients of four steps, those of all ranks before they are reduced, and the bytes on the wire."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    compressors = attach(ddp, Cast(dtype))
    own, reduced = [], []
    for step in range(4):
        x = torch.randn(7, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        own.append([g.clone() for g in torch.autograd.grad(model(x).square().mean(), list(model.parameters()))])
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        reduced.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    assert compressors.by_place["data_parallel"].step == 4
    return own, reduced, compressors.traffic.payload


def test_sum_in_half_precision() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        results = run_ranks(_in_ddp, 2, name)
        (first, reduced, payload), (second, same, _) = results
        for step in range(4):
            for a, b, r, s in zip(first[step], second[step], reduced[step], same[step], strict=True):
                assert torch.equal(r, ((a / 2).to(dtype) + (b / 2).to(dtype)).float()) and torch.equal(r, s)
        assert payload == 4 * 2 * sum(gradient.numel() for gradient in first[0])
