"""Experts by strategy: settings, refusals, uneven batches, evaluation, averages of weights."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader

from lnn_lightning import Adafactor, ExpertParallel, ExpertParallelStrategy, PTDPStrategy, Upcycle
from lnn_lightning.parallel.errors import LayoutError
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import (
    SEED,
    Data,
    Losses,
    Result,
    Run,
    build,
    differences,
    global_batches,
    quiet_trainer,
    train_all,
    train_reference,
)
from tests.zoo import ZOO
from tests.zoo.experts import BLOCKS, ExpertsLM

EP2: dict[str, Any] = {"expert": ExpertParallel(2)}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"expert": 2}, "`expert` must be None or ExpertParallel"),
        ({"expert": ExpertParallel(3), "data_parallel_size": 2}, "does not divide the 2 data ranks"),
    ],
)
def test_refused_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        PTDPStrategy(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n"
        "  strategy:\n"
        "    class_path: lnn_lightning.ExpertParallelStrategy\n"
        "    init_args:\n"
        "      expert_parallel_size: 2\n"
        "      capacity_factor: 1.25\n"
        "      upcycle: {blocks: '*.mlp', experts: 8, top_k: 2, every: 2}\n"
        "      dict_kwargs: {zero_stage: 1}\n".replace("      dict_kwargs", "    dict_kwargs")
    )
    cli = LightningCLI(BoringModel, args=["--config", str(config)], run=False, save_config_callback=None)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ExpertParallelStrategy) and strategy._zero.stage == 1
    upcycle = Upcycle("*.mlp", 8, 2, 2)
    assert strategy._settings.expert == ExpertParallel(2, capacity_factor=1.25, upcycle=upcycle)
    other = tmp_path / "other.yaml"
    other.write_text(
        "trainer:\n  strategy:\n    class_path: lnn_lightning.PTDPStrategy\n    init_args:\n"
        "      expert: {class_path: lnn_lightning.ExpertParallel, init_args: {size: 2, divide_experts: true}}\n"
    )
    cli = LightningCLI(BoringModel, args=["--config", str(other)], run=False, save_config_callback=None)
    assert cli.trainer.strategy._settings.expert == ExpertParallel(2, divide_experts=True)
    assert isinstance(pl.Trainer(strategy="expert_parallel", accelerator="cpu").strategy, ExpertParallelStrategy)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt_untied", "found no experts in LitGPT"),
        ("moe_skipping_uneven", "has 3 experts, too few for 4 expert ranks"),
    ],
)
def test_refused_modules(name: str, words: str) -> None:
    size = 2 if name == "gpt_untied" else 4
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(train_all, size, [(name, {"expert": ExpertParallel(size)}, Run(n_steps=1))])
    assert all(words in text for text in caught.value.tracebacks.values())


# ---------------------------------------------------------------- batches of different sizes


class Uneven(pl.LightningDataModule):
    """Of seven samples a rank has four, the other one three; evaluation gives them different numbers, too."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.strategy.data_parallel_rank
        part = slice(0, 4) if rank == 0 else slice(4, 7)
        return DataLoader([(x[part], y[part]) for x, y in self.batches], batch_size=None, collate_fn=lambda b: b)  # type: ignore[arg-type]

    val_dataloader = predict_dataloader = train_dataloader


class Evaluated(ExpertsLM):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def _uneven(rank: int, world_size: int, batches: list[Any]) -> Result:
    torch.manual_seed(SEED)
    module, losses = Evaluated(BLOCKS["moe_skipping"]), Losses()
    strategy = PTDPStrategy(microbatches=2, evaluation_microbatches=2, **EP2)
    trainer = quiet_trainer(strategy, world_size, max_epochs=1, precision="64-true", callbacks=[losses])
    trainer.fit(module, datamodule=Uneven(batches))
    trainer.predict(module, datamodule=Uneven(batches))
    weight = [8 / 7, 6 / 7][rank]
    state = strategy.full_state_dict()
    return Result([float(loss) * weight for loss in losses.losses], state if rank == 0 else {})


def test_batches_of_different_sizes() -> None:
    """Ranks that cut them into different numbers of micro-batches would wait for each other for ever."""
    case, run = ZOO["moe_skipping"], Run(n_steps=3, batch_size=7)
    batches = global_batches(case, run)
    results = launch_ranks(_uneven, 2, batches, timeout=60)
    expected = train_reference(case, run, batches=batches)
    expected.losses = [sum(one.losses[i] for one in results) / 2 for i in range(3)]  # weighted by the ranks' samples
    assert not (found := differences(results, expected, 1e-9)), found


def _uneven_prediction(rank: int, world_size: int) -> None:
    module = Evaluated(BLOCKS["moe_skipping"])
    samples = [(torch.arange(12) % 7, torch.arange(12) % 5)] * 5
    trainer = quiet_trainer(PTDPStrategy(**EP2), world_size, use_distributed_sampler=True)
    trainer.validate(module, DataLoader(samples, batch_size=1))  # a sample twice, as DistributedSampler has it
    trainer.predict(module, DataLoader(samples, batch_size=1))


def test_different_numbers_of_batches() -> None:
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_uneven_prediction, 2, timeout=60)
    assert all(r"batches to predict (3, 2)" in text for text in caught.value.tracebacks.values()), caught.value


# ---------------------------------------------------------------- optimizers and averages of weights


class Changed(ExpertsLM):
    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        for block in self.blocks:  # the gradient of keys' biases is noise, which Adafactor would blow up
            block.attention.c_attn.register_parameter("bias", None)

    def configure_optimizers(self) -> Any:
        return Adafactor(self.parameters(), lr=1e-2)


def _changed(rank: int, world_size: int, kind: str, layout: dict[str, Any] | None) -> dict[str, Tensor]:
    case, run = ZOO["moe_skipping"], Run(n_steps=3)
    torch.manual_seed(SEED)
    module = Changed(BLOCKS["moe_skipping"]) if kind == "adafactor" else build(case)
    if kind == "adafactor_stacked":
        module = build(ZOO["moe_mixtral"])
        module.configure_optimizers = lambda: Adafactor(module.parameters(), lr=1e-2)
        case = ZOO["moe_mixtral"]
    callbacks = [EMAWeightAveraging(decay=0.6)] if kind == "ema" else []
    trainer = quiet_trainer(
        PTDPStrategy(**(layout or {})), world_size, max_steps=3, precision="64-true", callbacks=callbacks
    )
    trainer.fit(module, datamodule=Data(global_batches(case, run), run.batch_size))
    return trainer.strategy.full_state_dict()


def _changed_all(
    rank: int, world_size: int, kinds: list[str], layout: dict[str, Any] | None
) -> list[dict[str, Tensor]]:
    return [_changed(rank, world_size, kind, layout) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EP2, {**EP2, "zero_stage": 3}], ids=["ep2", "zero3"])
def test_adafactor_and_averages(layout: dict[str, Any]) -> None:
    kinds = ["adafactor", "adafactor_stacked", "ema"]
    (alone,) = launch_ranks(_changed_all, 1, kinds, None)
    for world_size in (2, 4):
        spread = launch_ranks(_changed_all, world_size, kinds, layout)[0]
        for kind, one, many in zip(kinds, alone, spread, strict=True):
            found = differences([Result([], many)], Result([], one), 1e-6)
            assert not found, (kind, world_size, found[:3])
