"""Each way of compression in PTDPStrategy does what it does in Lightning's DDPStrategy."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lnn_lightning import Cast, OneBit, PTDPStrategy, Quantized, SignSGD, TopK
from lnn_lightning.communication import Compression
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

STEPS = 4
WAYS = {
    "topk": TopK(density=0.1, min_size=20),
    "deep": TopK(density=0.05, momentum=0.9, warmup_steps=2, clip=0.1, min_size=20),
    "onebit": OneBit(),
    "signs": SignSGD(),
    "eight": Quantized(),
    "chance": Quantized(4, block=32, stochastic=True),
    "fp8": Cast("fp8"),
}


class Layers(pl.LightningModule):
    """A small network in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.layers(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _weights(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """Parameters after training with each way, in PTDPStrategy and in DDPStrategy."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(STEPS * 6, 12, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.tanh(x[:, :5])), 6)
    return {name: [_fit(loader, world_size, way, ours) for ours in (True, False)] for name, way in WAYS.items()}


def _fit(loader: DataLoader[Tensor], world_size: int, way: Compression, ours: bool) -> list[Tensor]:
    module = Layers()
    pl.seed_everything(11, verbose=False)  # of the random numbers of both
    strategy = (
        PTDPStrategy(data_parallel_size=world_size, microbatches=1, gradient_compression=way)
        if ours
        else DDPStrategy(ddp_comm_hook=way)
    )
    options: dict[str, Any] = {"precision": "64-true", "max_steps": STEPS, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, world_size, **options)
    trainer.fit(module, loader)
    assert trainer.global_step == STEPS
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_ways_are_the_same_in_both_strategies() -> None:
    first, second = launch_ranks(_weights, 2)
    start = list(Layers().parameters())
    for name in WAYS:
        ours, theirs = first[name]
        for own, other, mine, begun in zip(ours, theirs, second[name][0], start, strict=True):
            assert torch.equal(own, mine), name
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12, msg=name)
            assert not torch.equal(own, begun.double()), name
