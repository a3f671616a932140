"""Experts that every rank holds whole (`size=1`): they are parameters like any other, and ranks keep pace."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lnn_lightning import ExpertParallel, PTDPStrategy, Upcycle
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.exchange import RemoteError
from lnn_lightning.parallel.pipeline import engine
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, Result, Run, differences, quiet_trainer, train_all, train_reference
from tests.parallel.expert.upcycled import BATCH, batches, build, train_plainly
from tests.zoo import ZOO

RUN = Run(n_steps=2, accumulate=2, clip=0.1)
ROOM = ExpertParallel(capacity_factor=100.0)
UPCYCLE = Upcycle("*.mlp", experts=3, every=2, router_std=0.5)
JOBS: list[tuple[str, dict[str, Any], Run]] = [
    ("moe_mixtral", {"expert": ROOM}, RUN),
    ("moe_mixtral", {"expert": ROOM, "zero_stage": 1}, RUN),
]


class Uneven(pl.LightningDataModule):
    """Four samples on one rank, three on the other: two micro-batches and one, if each cut them by itself."""

    def train_dataloader(self) -> DataLoader:
        part = slice(0, 4) if self.trainer.strategy.data_parallel_rank == 0 else slice(4, 7)
        return DataLoader([batch[part] for batch in batches(2)], batch_size=None)  # type: ignore[arg-type]


def _upcycled(size: int, data: pl.LightningDataModule, **layout: Any) -> dict[str, Tensor]:
    strategy = PTDPStrategy(expert=ExpertParallel(upcycle=UPCYCLE), **layout)
    trainer = quiet_trainer(strategy, size, max_steps=2)
    module = build()
    torch.manual_seed(5)
    trainer.fit(module, datamodule=data)
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def _all(rank: int, size: int) -> tuple[list[Result], dict[str, Tensor], dict[str, Tensor]]:
    even = _upcycled(size, Data(batches(2), BATCH))
    results = train_all(rank, size, JOBS), even, _upcycled(size, Uneven(), microbatches=2)
    with pytest.raises(StepError, match="is for experts that are one module with stacked weights"):
        train_all(rank, size, [("moe_skipping", {"expert": ROOM}, RUN)])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(engine, "find_experts", lambda *_: [])
        with pytest.raises((StepError, RemoteError), match=r"Blocks of experts are \[\] on rank 1"):
            train_all(rank, size, [("moe_mixtral", {"expert": ROOM}, RUN)])
    return results


def test_whole_experts_on_two_data_ranks() -> None:
    """Gradients of experts that are not shared out are averaged over all data ranks."""
    results = launch_ranks(_all, 2, timeout=120)
    for index, (name, layout, run) in enumerate(JOBS):
        expected = train_reference(ZOO[name], run, 1 if ZOO[name].per_sample else 2)
        found = differences([each[0][index] for each in results], expected, 1e-6)
        assert not found, (name, layout, found)
    wanted, _ = train_plainly(UPCYCLE, 2, 2, 1, 1, 5)
    for _, even, uneven in results:
        for name, value in wanted.items():
            torch.testing.assert_close(even[name], value, rtol=0, atol=1e-9)
            torch.testing.assert_close(uneven[name], results[0][2][name], rtol=0, atol=1e-12)
