"""What is logged of gradient compression, in both strategies and in pipelines; and compression between hosts."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lnn_lightning import CompressionMonitor, Hierarchical, PTDPStrategy
from lnn_lightning.communication import Cast, Compression, Compressor
from lnn_lightning.communication.compression import Ranks
from lnn_lightning.parallel.errors import LayoutError, StepError
from tests.communication.test_hierarchical import APART, on_host
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, quiet_trainer, relative_error

STEPS = 4
ELEMENTS = 4 * (6 * 6 + 6) + 6 * 3 + 3


class Blocks(pl.LightningModule):
    """Blocks that a pipeline can cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.last(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Halves(Compression):
    """Sends half of what should be sent."""

    def compressor(self, ranks: Ranks) -> Compressor:
        return _Halves(ranks)


class _Halves(Compressor):
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            wanted = self.errors.wanted(name, gradient, self.scale)
            mean = (wanted / 2).to(gradient.dtype)
            self.average([mean])
            self.errors.keep(name, wanted, wanted / 2, mean, self.scale)
            gradient.copy_(mean)


class Kept(DummyLogger):
    """What was logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    @property
    def save_dir(self) -> None:
        return None


def batches(size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, size, 6, generator=generator)
    return [(each, (each[:, 0] > 0).long() + (each[:, 1] > 0).long()) for each in x]


class Shares(Data):
    """As many data ranks as there are ranks, for Lightning's own strategy."""

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            strategy.data_parallel_rank, strategy.data_parallel_size = self.trainer.global_rank, self.trainer.world_size
        return super().train_dataloader()


def _fit(
    rank: int, world_size: int, strategies: list[Any], every: int, hosts: str, options: dict[str, Any]
) -> list[Any]:
    """Rows logged, metrics of the Trainer and parameters, for each strategy."""
    results = []
    for strategy in strategies:
        logger, module = Kept(), Blocks()
        monitor = [CompressionMonitor(every)] if every else []
        with on_host(hosts[rank]):
            trainer = quiet_trainer(strategy, world_size, callbacks=monitor, logger=logger, **options)
            trainer.fit(module, datamodule=Shares(batches(), 8))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        state = strategy.full_state_dict() if isinstance(strategy, PTDPStrategy) else module.state_dict()
        results.append((logger.rows, metrics, {name: value.clone() for name, value in state.items()}))
    return results


def test_logged_in_a_pipeline_and_in_ddp() -> None:
    """Bytes of all stages; the same numbers on all ranks, logged by the first."""
    strategies = [
        PTDPStrategy(pipeline_parallel_size=2, microbatches=2, gradient_compression=Cast()),
        DDPStrategy(ddp_comm_hook=Cast()),
    ]
    ranks = launch_ranks(_fit, 4, strategies, 2, "aaaa", {})
    for index, sent in enumerate((2 * ELEMENTS, 2 * 1.5 * ELEMENTS)):  # two data ranks, four
        for _, metrics, _ in (each[index] for each in ranks):
            assert metrics["compression/ratio"] == pytest.approx(2.0)
            assert metrics["compression/payload_mb"] == pytest.approx(2 * ELEMENTS / 1e6)
            assert metrics["compression/sent_mb"] == pytest.approx(sent / 1e6)
            assert "compression/error_norm" not in metrics
        rows = ranks[0][index][0]
        assert [step for step, row in rows.items() if "compression/ratio" in row] == [1, 3]


def test_error_norms() -> None:
    """Halves keep as much as they send: the error of a rank, relative to the gradient that arrives."""
    strategies = [PTDPStrategy(pipeline_parallel_size=2, microbatches=1, gradient_compression=Halves())]
    (rows, _, _) = launch_ranks(_fit, 4, strategies, 1, "aaaa", {"max_steps": 1})[0][0]
    module = Blocks()
    x, y = batches()[0]
    parts, gradients = [], []
    for part in (slice(0, 4), slice(4, 8)):
        loss = module.training_step((x[part], y[part]), 0)
        gradients.append(
            torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(module.parameters()))]) / 2
        )
        parts.append(gradients[-1].square().sum())
    error = torch.stack(parts).mean().sqrt()
    assert rows[0]["compression/error_norm"] == pytest.approx(error.item(), rel=1e-5)
    relative = error / ((gradients[0] + gradients[1]) / 2).norm()
    assert rows[0]["compression/relative_error"] == pytest.approx(relative.item(), rel=1e-5)


def test_between_hosts_in_a_strategy() -> None:
    """Four data ranks on two hosts: bytes of each level are logged, and training is as without compression."""
    plain, exact = (
        PTDPStrategy(),
        PTDPStrategy(gradient_compression=Hierarchical(inner=Cast("fp16"), outer=Cast("fp16"))),
    )
    without = launch_ranks(_fit, 4, [plain], 0, APART, {})
    ranks = launch_ranks(_fit, 4, [exact], 4, APART, {})
    metrics = ranks[0][0][1]
    assert metrics["compression/outer/ratio"] == pytest.approx(2.0)
    assert metrics["compression/outer/payload_mb"] < 0.6 * metrics["compression/inner/payload_mb"]
    total = metrics["compression/outer/payload_mb"] + metrics["compression/inner/payload_mb"]
    assert metrics["compression/payload_mb"] == pytest.approx(total)
    for name, value in ranks[0][0][2].items():
        assert relative_error(value, without[0][0][2][name]) < 1e-3
        assert all(torch.equal(value, each[0][2][name]) for each in ranks)


def _refused(rank: int, world_size: int) -> list[str]:
    texts = []
    for strategy in (PTDPStrategy(), DDPStrategy()):
        with pytest.raises(StepError) as caught:
            trainer = quiet_trainer(strategy, world_size, callbacks=[CompressionMonitor()])
            trainer.fit(Blocks(), datamodule=Shares(batches(), 8))
        texts.append(str(caught.value))
    return texts


def test_refused() -> None:
    first, second = launch_ranks(_refused, 1)[0]
    assert "this PTDPStrategy does not compress gradients" in first
    assert "this DDPStrategy does not compress gradients" in second
    with pytest.raises(LayoutError, match="every_n_steps"):
        CompressionMonitor(0)
