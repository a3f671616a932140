"""Bytes on each rank by the formula; pieces of tensors; evaluation of a sharded module."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.data.sharding import unreduced
from lnn_lightning.parallel.data.shards import is_sharded, local_of, span_of
from lnn_lightning.parallel.errors import LayoutError
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, Run, build, global_batches, quiet_trainer
from tests.zoo import ZOO

RUN = Run(n_steps=2)


class Scales(pl.Callback):
    """Bytes behind a step, before the gradients are dropped."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        optimizer = trainer.optimizers[0]
        self.parameters = sum(local_of(p).numel() for p in module.parameters())
        self.gradients = sum(local_of(p.grad).numel() for p in module.parameters() if p.grad is not None)
        self.state = sum(v.numel() for values in optimizer.state.values() for v in values.values() if v.dim())
        self.updated = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        sharding = trainer.strategy.engine.sharding  # type: ignore[attr-defined]
        self.leftover = 0
        for modules in sharding._units.values() if sharding is not None else ():
            for unit in modules.values():
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    for each in group.fsdp_params:
                        self.leftover += unreduced(each)
                        self.leftover += sum(out.untyped_storage().size() for out in each.all_gather_outputs)


def _bytes(rank: int, world_size: int, name: str, stage: int, replicas: int) -> tuple[Any, ...]:
    case = ZOO[name]
    scales = Scales()
    size: Any = world_size if replicas == 1 else (replicas, world_size // replicas)
    strategy = PTDPStrategy(data_parallel_size=size, zero_stage=stage, microbatches=2)
    trainer = quiet_trainer(strategy, world_size, max_steps=2, precision="64-true", callbacks=[scales])
    module = build(case)
    trainer.fit(module, datamodule=Data(global_batches(case, RUN), RUN.batch_size))
    whole = [tuple(p.shape) for p in module.parameters()]
    return scales.parameters, scales.gradients, scales.state, scales.updated, scales.leftover, whole


def rows(shape: tuple[int, ...], rank: int, size: int) -> int:
    _, count = span_of(shape[0], rank, size)
    return count * torch.Size(shape[1:]).numel()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_tied", "gpt_untied"])
def test_bytes_on_each_rank(name: str, stage: int, replicas: int) -> None:
    """P parameters, as many gradients and twice as much of Adam's state; N ranks share what the stage says."""
    if stage == 0 and replicas > 1:
        with pytest.raises(LayoutError, match="shards nothing"):
            PTDPStrategy(data_parallel_size=(2, 2))
        return
    n, world_size = 2, 2 * replicas
    results = launch_ranks(_bytes, world_size, name, stage, replicas)
    shapes = results[0][5]
    total = sum(torch.Size(shape).numel() for shape in shapes)
    largest = max(torch.Size(shape).numel() for shape in shapes)
    for rank, (parameters, gradients, state, updated, leftover, _) in enumerate(results):
        piece = sum(rows(shape, rank % n, n) for shape in shapes)
        assert leftover == 0, "whole parameters or gradients that were not freed"
        assert parameters == (piece if stage >= 2 else total)
        assert gradients == (piece if stage >= 2 else total)
        assert state == 2 * updated
        if stage == 1:
            assert abs(updated - total / n) <= largest / 2, "dealt out evenly"
        else:
            assert updated == (piece if stage >= 2 else total)
    if stage > 0:
        assert sum(result[3] for result in results) == total * replicas


@pytest.mark.parametrize(("length", "size"), [(8, 2), (7, 2), (1, 2), (5, 4), (3, 4), (0, 3)])
def test_spans_are_those_of_chunk(length: int, size: int) -> None:
    whole = torch.arange(length)
    parts = [whole[start : start + count] for start, count in (span_of(length, rank, size) for rank in range(size))]
    expected = list(torch.chunk(whole, size)) if length else []
    assert torch.equal(torch.cat(parts), whole)
    for got, one in zip(parts, expected, strict=False):
        assert torch.equal(got, one)


class Odd(pl.LightningModule):
    """An inner piece is called alone in validation, and a weight is read by glue there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = self.embed(batch[0])
        x = self.blocks[0][0](x) @ self.blocks[1][2].weight + self.blocks[2](x)
        self.log("val", nn.functional.cross_entropy(self.head(x), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.blocks[1](self.embed(batch[0])))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _odd(rank: int, world_size: int, layout: dict[str, Any] | None) -> Any:
    rng = torch.Generator().manual_seed(0)
    # the last batch is smaller: traced when the module is sharded already
    batches = [(torch.randn(n, 6, generator=rng), torch.randint(0, 4, (n,), generator=rng)) for n in (8, 8, 4)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = Odd()
    strategy: Any = "auto" if layout is None else PTDPStrategy(**layout)
    trainer = quiet_trainer(strategy, world_size, max_epochs=2, num_sanity_val_steps=2)
    (before,) = trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    predictions = trainer.predict(module, loader)
    sharded = any(is_sharded(parameter) for parameter in module.parameters())
    return (
        before["val"],
        float(trainer.callback_metrics["val"]) if "val" in trainer.callback_metrics else None,
        [prediction.clone() for prediction in predictions or []],
        sharded,
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_in_any_order_with_other_calls(stage: int) -> None:
    """Each data rank is fed the same batches, so one process is the reference."""
    before, _, predictions, _ = launch_ranks(_odd, 1, None)[0]
    layout = {"data_parallel_size": 2, "microbatches": 2, "zero_stage": stage}
    for own_before, _, own_predictions, sharded in launch_ranks(_odd, 2, layout):
        assert sharded
        assert own_before == pytest.approx(before, rel=1e-6)
        for got, expected in zip(own_predictions, predictions, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
