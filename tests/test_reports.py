"""What went wrong for users of other systems, tried on this one. The names carry the reports (CASES.md).

Most tests run one function twice: on one process with a strategy of Lightning's, and on several under `PTDPStrategy`.
"""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import ranks
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import (
    Data,
    Run,
    differences,
    quiet_trainer,
    relative_error,
    train_reference,
    train_with_trainer,
)
from tests.zoo import ZOO
from tests.zoo.language import VOCABULARY, LitGPT

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "schedule": "1f1b", "microbatches": 4}
BOTH: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "schedule": "1f1b", "microbatches": 2}


# ----------------------------------------------------------------------------------------------- a model with all steps


class Classifier(pl.LightningModule):
    """Trains, validates, tests and predicts, with metrics."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(12, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(4)])
        self.head = nn.Linear(width, 4)
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_accuracy", self.accuracy)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(dim=-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def samples(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=rng)
    return [(row, (row[:4]).argmax()) for row in x]


def loader(count: int, batch_size: int = 8, seed: int = 0) -> DataLoader:
    return DataLoader(samples(count, seed), batch_size=batch_size)  # type: ignore[arg-type]


def model(kind: Callable[..., pl.LightningModule] = Classifier) -> pl.LightningModule:
    torch.manual_seed(3)
    return kind()


def trainer_for(world_size: int, layout: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    """On one process, or under the layout; in float64 unless told otherwise."""
    strategy: Any = "auto"
    if layout is not None:
        from lnn_lightning import PTDPStrategy

        strategy = PTDPStrategy(**layout)
    return quiet_trainer(strategy, world_size, **{"precision": "64-true", **options})


def full_state(trainer: pl.Trainer) -> dict[str, Tensor]:
    full = getattr(trainer.strategy, "full_state_dict", None)
    state = full() if full is not None else trainer.lightning_module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def plain(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def one_and_many(fn: Callable[..., Any], *args: Any, world_size: int = 2, layout: dict[str, Any] = PIPELINE) -> Any:
    """`fn(rank, world_size, layout, *args)` on one process, and on each rank under the layout."""
    return launch_ranks(fn, 1, None, *args)[0], launch_ranks(fn, world_size, layout, *args)


def assert_same(expected: Any, got: Any, where: str = "", tolerance: float = 1e-9) -> None:
    """Structures of tensors and numbers, equal within the tolerance."""
    if isinstance(expected, dict):
        assert set(got) == set(expected), where
        for key in expected:
            assert_same(expected[key], got[key], f"{where}/{key}", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{where}: {len(got)} entries, not {len(expected)}"
        for index, (left, right) in enumerate(zip(expected, got, strict=True)):
            assert_same(left, right, f"{where}/{index}", tolerance)
    elif isinstance(expected, Tensor):
        assert relative_error(got, expected) <= tolerance, f"{where}: {got} is not {expected}"
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=tolerance, abs=1e-12), where
    else:
        assert got == expected, where


def zoo_equals(
    name: str,
    world_size: int = 2,
    layout: dict[str, Any] = PIPELINE,
    run: Run = Run(),  # noqa: B008
    batches: list[Any] | None = None,
) -> None:
    """A zoo model under the layout gives what one process gives."""
    case = ZOO[name]
    results = launch_ranks(train_with_trainer, world_size, name, layout, run, batches)
    expected = train_reference(case, run, 1 if case.per_sample else layout["microbatches"], batches)
    found = differences(results, expected, case.tolerance, case.loss_tolerance)
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------ pipeline


def _last_batch_smaller(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=2)
    module = model()
    trainer.fit(module, loader(21), loader(13, seed=1))  # 8 + 8 + 5, 8 + 5
    return plain(trainer.callback_metrics), full_state(trainer)


def test_pt126600_last_batch_smaller() -> None:
    expected, many = one_and_many(_last_batch_smaller)
    for got in many:
        assert_same(expected, got)


def test_pt126600_batch_not_a_multiple_of_the_microbatches() -> None:
    case = ZOO["gpt_tied"]
    batches = [batch for size in (8, 6, 7, 1, 8) for batch in case.batches(1, size, torch.float64)]
    zoo_equals("gpt_tied", batches=batches)


def _unequal_shares(rank: int, world_size: int, layout: Any) -> Any:
    """Batches of 8 samples, of which one data rank gets 5 and the other 3."""
    trainer = trainer_for(world_size, layout)

    class Unequal(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            cut = slice(None)
            if layout is not None:
                cut = slice(0, 5) if self.trainer.strategy.data_parallel_rank == 0 else slice(5, 8)
            batches = ZOO["gpt_tied"].batches(4, 8, torch.float64)
            return DataLoader([tuple(t[cut] for t in batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]

    trainer.fit(model(LitGPT), datamodule=Unequal())
    return full_state(trainer)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pt126600_data_ranks_with_batches_of_different_sizes(stages: int) -> None:
    layout = {"pipeline_parallel_size": stages, "data_parallel_size": 2, "microbatches": 2}
    expected, many = one_and_many(_unequal_shares, world_size=2 * stages, layout=layout)
    for got in many:
        assert_same(expected, got)


def test_tt775_fewer_microbatches_than_stages() -> None:
    zoo_equals("gpt_deep", layout={**PIPELINE, "schedule": "interleaved", "stages_per_rank": 2, "microbatches": 2})


@pytest.mark.slow
def test_tt775_fewer_microbatches_than_stages_on_four_ranks() -> None:
    zoo_equals("gpt_tied", 4, {"pipeline_parallel_size": 4, "schedule": "1f1b", "microbatches": 2})


def test_tt1733_accumulation() -> None:
    zoo_equals("gpt_tied", run=Run(accumulate=3))


def _sanity_check_first(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, num_sanity_val_steps=2, val_check_interval=2, max_epochs=2)
    trainer.fit(model(), loader(32), loader(24, seed=1))
    return plain(trainer.callback_metrics), full_state(trainer)


def test_pt162822_evaluation_before_the_first_training_step() -> None:
    expected, many = one_and_many(_sanity_check_first)
    for got in many:
        assert_same(expected, got)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved", "zero_bubble", "gpipe"])
def test_pt162822_evaluation_under_other_schedules(schedule: str) -> None:
    expected, many = one_and_many(_sanity_check_first, layout={**PIPELINE, "schedule": schedule})
    for got in many:
        assert_same(expected, got)


@pytest.mark.parametrize("name", ["sequential", "gpt_tied"])
def test_pt129732_output_dtype_under_autocast(name: str) -> None:
    run = Run(dtype=torch.float32)
    results = launch_ranks(train_with_trainer, 2, name, PIPELINE, run, None, {"precision": "bf16-mixed"})
    expected = train_reference(ZOO[name], run, micro=4, autocast=torch.bfloat16)
    found = differences(results, expected, 1e-5, 1e-5)
    assert not found, "\n".join(found)


def test_pt130055_pt53952_keywords_none_and_values_that_are_no_tensors() -> None:
    zoo_equals("keyword_blocks", layout={**PIPELINE, "schedule": "gpipe"})


@pytest.mark.parametrize("name", ["gpt_tied", "hf_llama"])
def test_pt159942_tt431_mlm5100_sequence_length_changes(name: str) -> None:
    batches = []
    for length in (12, 7, 9, 12, 5):
        batch = ZOO[name].batches(1, 8, torch.float64)[0]
        entries = batch.items() if isinstance(batch, dict) else enumerate(batch)
        cut = {key: value[:, :length].contiguous() for key, value in entries}
        batches.append(cut if isinstance(batch, dict) else tuple(cut.values()))
    zoo_equals(name, batches=batches)


def test_pt62283_pt192920_non_contiguous_activation() -> None:
    zoo_equals("mixer", layout={**PIPELINE, "schedule": "gpipe"})


def _tied_copies(rank: int, world_size: int) -> Any:
    trainer = trainer_for(world_size, PIPELINE, max_steps=3)
    module = model(LitGPT)
    trainer.fit(module, datamodule=Data(ZOO["gpt_tied"].batches(3, 8, torch.float64), 8))
    full = full_state(trainer)
    own = trainer.strategy.lightning_module_state_dict()
    return module.model.lm_head.weight.detach().clone(), module.model.transformer.wte.weight.detach().clone(), full, own


def test_tt1524_tt2252_tied_embedding_stays_equal() -> None:
    (head_0, embedding_0, full, _), (head_1, embedding_1, _, _) = launch_ranks(_tied_copies, 2)
    assert head_0.shape == embedding_1.shape == (VOCABULARY, 16)
    for copy in (embedding_0, head_1, embedding_1):
        assert torch.equal(head_0, copy)
    assert torch.equal(full["model.lm_head.weight"], head_0)
    assert torch.equal(full["model.transformer.wte.weight"], head_0)


def _from_meta(rank: int, world_size: int, layout: Any, name: str) -> Any:
    with torch.device("meta"):
        module = ZOO[name].build()
    trainer = trainer_for(world_size, layout, max_steps=3)
    torch.manual_seed(5)
    trainer.fit(module, datamodule=Data(ZOO[name].batches(3, 8, torch.float64), 8))
    return plain(trainer.callback_metrics), full_state(trainer)


@pytest.mark.parametrize("name", ["gpt_tied", "hf_gpt2"])
def test_tt2252_tied_embedding_from_meta_init(name: str) -> None:
    """The same in every layout; as nothing random but the seed decides, one stage is the reference."""
    expected = launch_ranks(_from_meta, 1, {"pipeline_parallel_size": 1, "microbatches": 4}, name)[0]
    assert all(value.isfinite().all() for value in expected[1].values())
    for got in launch_ranks(_from_meta, 2, PIPELINE, name):
        assert_same(expected, got, tolerance=max(ZOO[name].tolerance, ZOO[name].loss_tolerance))


class Configured(Classifier):
    """Makes its layers where Lightning wants big models to make them."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.blocks, self.head

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        self.embed = nn.Linear(12, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(4)])
        self.head = nn.Linear(16, 4)


def _configured(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout)
    module = model(Configured)
    trainer.fit(module, loader(32), loader(16))
    return plain(trainer.callback_metrics), full_state(trainer)


@pytest.mark.parametrize("seed", [None, "7"], ids=["unseeded", "seed_everything"])
def test_tt2252_layers_made_in_configure_model(seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`seed_everything` leaves PL_GLOBAL_SEED behind; the layers are the same as on one process all the same."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
    expected, many = one_and_many(_configured)
    for got in many:
        assert_same(expected, got)


@pytest.mark.parametrize("cut", ["model.transformer.h.0", "model.transformer.h.3"])
def test_tt596_clipping_does_not_depend_on_the_partition(cut: str) -> None:
    zoo_equals("gpt_tied", layout={**PIPELINE, "split_points": [cut]}, run=Run(clip=0.05))


def test_pt194033_norm_of_bf16_gradients() -> None:
    run = Run(clip=0.05, dtype=torch.float32)
    batches = ZOO["gpt_untied"].batches(5, 8, torch.float32)
    results = launch_ranks(train_with_trainer, 2, "gpt_untied", PIPELINE, run, batches, {"precision": "bf16-true"})
    expected = train_reference(ZOO["gpt_untied"], Run(clip=0.05, dtype=torch.bfloat16), 4, batches)
    assert all(value.dtype == torch.bfloat16 for value in results[0].state.values())
    for got, reference in zip(results[0].losses, expected.losses, strict=True):
        assert got == pytest.approx(reference, rel=3e-2)


class ClipsItself(LitGPT):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def _clips_itself(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, max_steps=4)
    module = model(ClipsItself)
    trainer.fit(module, DataLoader(ZOO["gpt_tied"].batches(4, 8, torch.float64), batch_size=None))  # type: ignore[arg-type]
    return plain(trainer.callback_metrics), full_state(trainer)


def test_tt1258_clipping_by_the_users_hook() -> None:
    expected, many = one_and_many(_clips_itself)
    for got in many:
        assert_same(expected, got)


class OverflowOnOneStage(pl.Callback):
    """In the second step the gradients of rank 0 alone are not finite."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.states: list[list[Tensor]] = []

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == 0 and trainer.fit_loop.total_batch_idx == 1:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        self.states.append([p.detach().clone() for p in held])


def _overflow(rank: int, world_size: int) -> tuple[list[float], list[bool]]:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    callback = OverflowOnOneStage()
    trainer = trainer_for(
        world_size,
        PIPELINE,
        precision=None,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        max_steps=4,
        callbacks=[callback],
    )
    trainer.fit(model(), loader(32))
    moved = []
    for before, after in zip(callback.states, callback.states[1:], strict=False):
        moved.append(any(not torch.equal(left, right) for left, right in zip(before, after, strict=True)))
    return callback.scales, moved


def test_tt803_fp16_overflow_on_one_stage_skips_the_step_on_all() -> None:
    for scales, moved in launch_ranks(_overflow, 2):
        assert scales[0] == 2.0**10
        assert scales[1] == 2.0**9
        assert moved == [False, True, True]


def _fp16(rank: int, world_size: int, layout: Any) -> Any:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = trainer_for(world_size, layout, precision=None, plugins=[plugin], gradient_clip_val=0.5)
    trainer.fit(model(), loader(48))
    return full_state(trainer)


def test_tt803_fp16_training_equals_one_process() -> None:
    expected, many = one_and_many(_fp16)
    for got in many:
        assert_same(expected, got, tolerance=2e-2)


def test_torchgpipe14_torchgpipe35_batch_norm_as_with_accumulation() -> None:
    zoo_equals("resnet")


class Branching(Classifier):
    """Glue that looks at the data between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e9:
                x = x / 2
        return self.head(x)


def _branching(rank: int, world_size: int) -> None:
    trainer_for(world_size, PIPELINE).fit(model(Branching), loader(16))


def test_cai4613_bionemo815_names_the_module_in_the_way() -> None:
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_branching, 2)
    assert len(caught.value.tracebacks) == 2
    for text in caught.value.tracebacks.values():
        assert "blocks.0" in text.splitlines()[-1] or "blocks.0" in text[-1500:]


def test_cai4613_wrapper_round_a_known_model() -> None:
    zoo_equals("wrapped")


def _validation(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout)
    module = model(LitGPT)
    data = DataLoader(ZOO["gpt_tied"].batches(3, 8, torch.float64), batch_size=None)  # type: ignore[arg-type]
    return plain(trainer.validate(module, data, verbose=False)[0])


def test_megatron_bridge6025_tt1490_validation_equals_one_process() -> None:
    expected, many = one_and_many(_validation)
    for got in many:
        assert_same(expected, got)


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 1, "data_parallel_size": 2}, PIPELINE])
def test_torchgpipe16_recomputation_is_reduced_once(layout: dict[str, Any]) -> None:
    zoo_equals("gpt_checkpointed", layout=layout)


# ------------------------------------------------------------------------------------------------ logs and jobs


def _any_order(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=2)
    module = model()
    results: list[Any] = [trainer.validate(module, loader(16), verbose=False)]
    results.append(trainer.test(module, loader(13), verbose=False))
    trainer.fit(module, loader(32), loader(16, seed=1))
    results.append(plain(trainer.callback_metrics))
    results.append(trainer.predict(module, loader(12)))
    results.append(trainer.test(module, loader(16), verbose=False))
    results.append(trainer.validate(module, loader(16), verbose=False))
    results.append(full_state(trainer))
    return results


def test_pl20373_pl19015_validate_test_fit_predict_in_any_order() -> None:
    expected, many = one_and_many(_any_order)
    for got in many:
        assert_same(expected, got)


def _two_fits(rank: int, world_size: int, layout: Any) -> Any:
    module = model()
    trainer = trainer_for(world_size, layout, max_epochs=1)
    trainer.fit(module, loader(32))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(32))
    return plain(trainer.callback_metrics), full_state(trainer)


def test_pl19015_fit_twice() -> None:
    expected, many = one_and_many(_two_fits)
    for got in many:
        assert_same(expected, got)


def _unequal_batches(rank: int, world_size: int) -> int:
    trainer = trainer_for(world_size, BOTH if world_size == 4 else {"data_parallel_size": 2, "microbatches": 2})

    class Unequal(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader(24 if self.trainer.strategy.data_parallel_rank == 0 else 16)

    trainer.fit(model(), datamodule=Unequal())
    return trainer.global_step


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_pl5060_ranks_with_different_numbers_of_batches(world_size: int) -> None:
    """No hang: either all stop after the same step, or the job says what is wrong."""
    try:
        steps = launch_ranks(_unequal_batches, world_size, timeout=60)
    except RanksFailed as error:
        assert not any("no answer in time" in text for text in error.tracebacks.values()), str(error)
        assert any("batches" in text[-1000:] for text in error.tracebacks.values()), str(error)
    else:
        assert set(steps) == {2}


def _padded(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, use_distributed_sampler=True)
    return plain(trainer.validate(model(), loader(13, batch_size=4 if layout else 8), verbose=False)[0])


def test_pl20561_rf_detr1507_padded_samples_do_not_count() -> None:
    layout = {"pipeline_parallel_size": 1, "data_parallel_size": 2}
    expected, many = one_and_many(_padded, layout=layout)
    for got in many:
        assert got["val_accuracy"] == pytest.approx(expected["val_accuracy"], abs=1e-9)


def _raises_in_hook(rank: int, world_size: int, layout: dict[str, Any], hook: str, failing: int) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == failing:
            raise ValueError("this rank does not want to go on")

    module = model()
    setattr(module, hook, fail)
    trainer_for(world_size, layout, max_epochs=3).fit(module, loader(32), loader(16))


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_validation_epoch_end"])
@pytest.mark.parametrize("failing", [0, 1])
def test_pl6430_pl11267_one_rank_raises_in_a_hook(hook: str, failing: int) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="does not want to go on") as caught:
        launch_ranks(_raises_in_hook, 2, PIPELINE, hook, failing, timeout=60)
    assert "does not want to go on" in caught.value.tracebacks[failing]
    assert not any("killed. It was here" in text for text in caught.value.tracebacks.values()), str(caught.value)
    assert time.monotonic() - start < ranks.GRACE + 20


class LogsLargeValues(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("large", torch.tensor(60000.0, dtype=torch.float16), sync_dist=True)
        return loss


def _logs_large_values(rank: int, world_size: int) -> float:
    trainer = trainer_for(world_size, {"data_parallel_size": 2, "microbatches": 2}, precision="bf16-mixed")
    trainer.fit(model(LogsLargeValues), loader(16))
    return float(trainer.callback_metrics["large"])


def test_pl17414_sync_dist_of_half_precision_is_reduced_in_fp32() -> None:
    for value in launch_ranks(_logs_large_values, 2):
        assert value == 60000.0


def _metrics(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=2, use_distributed_sampler=False)
    module = model()
    trainer.fit(module, loader(32), loader(24, seed=1))
    return plain(trainer.callback_metrics)


def test_bionemo382_metrics_of_the_last_stage_are_known_everywhere() -> None:
    expected, many = one_and_many(_metrics)
    assert {"train_accuracy", "val_accuracy", "train_loss_epoch", "train_loss_step"} <= set(expected)
    for got in many:
        assert_same(expected, got)


def _cli(strategy: Any) -> Any:
    from lightning.pytorch.cli import LightningCLI

    import lnn_lightning  # noqa: F401

    trainer = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy}
    return LightningCLI(Classifier, run=False, args={"trainer": trainer}, save_config_callback=None)


def test_pl19682_strategy_in_yaml() -> None:
    from lnn_lightning import PTDPStrategy

    settings = {"pipeline_parallel_size": 2, "schedule": "interleaved", "microbatches": 4, "stages_per_rank": 2}
    cli = _cli({"class_path": "lnn_lightning.PTDPStrategy", "init_args": settings})
    assert isinstance(cli.trainer.strategy, PTDPStrategy)
    assert isinstance(_cli("ptdp").trainer.strategy, PTDPStrategy)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_size": 2}, ["pipeline_size"]),
        ({"pipeline_parallel_size": "two"}, ["pipeline_parallel_size", "two"]),
        ({"pipeline_parallel_size": 2, "schedule": "1f2b"}, ["1f2b", "1f1b"]),
        ({"pipeline_parallel_size": 2, "microbatches": -1}, ["microbatches", "-1"]),
        ({"pipeline_parallel_size": 2, "schedule": "zbv", "stages_per_rank": 3}, ["zbv", "stages_per_rank"]),
    ],
)
def test_pl19682_errors_in_yaml_are_clear(
    settings: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, Exception)) as caught:
        _cli({"class_path": "lnn_lightning.PTDPStrategy", "init_args": settings})
    text = str(caught.value) + capsys.readouterr().err
    for word in words:
        assert word in text, text


def _port_taken(rank: int, world_size: int, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    trainer_for(world_size, PIPELINE).fit(model(), loader(16))


def test_accelerate2246_port_taken_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has chosen the port: nothing to do but say so."""
    monkeypatch.setattr(ranks, "GRACE", 2.0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RanksFailed) as caught:
            launch_ranks(_port_taken, 2, port, timeout=60)
    assert str(port) in caught.value.tracebacks[0]
    assert "in use" in caught.value.tracebacks[0]


SCRIPT = """
    import sys
    import torch
    from tests.test_reports import PIPELINE, loader, model, trainer_for

    if __name__ == "__main__":
        trainer = trainer_for(2, PIPELINE)
        trainer.fit(model(), loader(32))
        print("done", trainer.global_rank, trainer.global_step)
"""


@pytest.mark.slow
def test_accelerate2246_two_jobs_at_once_find_ports(tmp_path: Path) -> None:
    """Started without torchrun: `python train.py`, twice."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[1])
    inherited = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    environment = {**inherited, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        outputs = [job.communicate(timeout=120) for job in jobs]
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
    for job, (out, err) in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, err
        assert "done 0 4" in out


# ------------------------------------------------------------------------------------------------ also worth a test


def test_buffer_read_on_two_stages() -> None:
    zoo_equals("buffer", layout={**PIPELINE, "schedule": "gpipe"})


def test_parameter_used_in_training_step_and_forward() -> None:
    zoo_equals("temperature", layout={**PIPELINE, "schedule": "gpipe"})


def test_loss_that_needs_the_inputs_on_the_last_stage() -> None:
    zoo_equals("auto_encoder", layout={**PIPELINE, "schedule": "gpipe"})


def test_in_place_operation_on_a_received_activation() -> None:
    zoo_equals("in_place", layout={**PIPELINE, "schedule": "gpipe"})


def _with_options(rank: int, world_size: int, layout: Any, options: dict[str, Any]) -> Any:
    trainer = trainer_for(world_size, layout, **options)
    trainer.fit(model(), loader(40), loader(24, seed=1))
    return trainer.global_step, plain(trainer.callback_metrics), full_state(trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.7},
        {"overfit_batches": 2, "max_epochs": 3},
        {"detect_anomaly": True},
        {"accumulate_grad_batches": 2},
        {"max_epochs": 3, "check_val_every_n_epoch": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=str,
)
def test_trainer_options(options: dict[str, Any]) -> None:
    expected, many = one_and_many(_with_options, options)
    for got in many:
        assert_same(expected, got)


class HasRate(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)


def _lr_finder(rank: int, world_size: int, layout: Any, folder: str) -> Any:
    from lightning.pytorch.tuner import Tuner

    trainer = trainer_for(world_size, layout, default_root_dir=folder)
    module = model(HasRate)
    found = Tuner(trainer).lr_find(module, loader(80), num_training=20, early_stop_threshold=None)
    assert found is not None
    losses = [float(loss) for loss in found.results["loss"]]
    trainer.fit(module, loader(40))
    return losses, module.lr, full_state(trainer)


def test_lr_finder(tmp_path: Path) -> None:
    expected = launch_ranks(_lr_finder, 1, None, str(tmp_path / "one"))[0]
    for got in launch_ranks(_lr_finder, 2, PIPELINE, str(tmp_path / "many")):
        assert_same(expected, got, tolerance=1e-6)


class ReadsGradients(pl.Callback):
    """Reads the gradients of all parameters, as callbacks that watch a training do."""

    def __init__(self) -> None:
        self.squares: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        norms = grad_norm(module, norm_type=2)
        self.squares.append(float(norms["grad_2.0_norm_total"]) ** 2 if norms else 0.0)


def _reads_gradients(rank: int, world_size: int, layout: Any) -> list[float]:
    callback = ReadsGradients()
    trainer = trainer_for(world_size, layout, callbacks=[callback])
    trainer.fit(model(), loader(32))
    return callback.squares


def test_callback_that_reads_gradients() -> None:
    expected, many = one_and_many(_reads_gradients)
    total = [sum(squares) for squares in zip(*many, strict=True)]
    assert total == pytest.approx(expected, rel=1e-3)  # grad_norm rounds to four digits
    assert all(square > 0 for squares in many for square in squares)


class Normalised(Classifier):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)) for _ in range(4)])


def _uninterrupted(rank: int, world_size: int, layout: Any, kind: type[pl.LightningModule]) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=3)
    trainer.fit(model(kind), loader(32), loader(16, seed=1))
    return plain(trainer.callback_metrics), full_state(trainer)


def _resumed(rank: int, world_size: int, layout: Any, kind: type[pl.LightningModule], folder: str) -> Any:
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    trainer = trainer_for(world_size, layout, max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(model(kind), loader(32), loader(16, seed=1))
    trainer = trainer_for(world_size, layout, max_epochs=3)
    trainer.fit(kind(), loader(32), loader(16, seed=1), ckpt_path=checkpoint.last_model_path)
    return plain(trainer.callback_metrics), full_state(trainer)


@pytest.mark.parametrize("kind", [Classifier, Normalised])
def test_torchgpipe35_resumed_is_uninterrupted(kind: type[pl.LightningModule], tmp_path: Path) -> None:
    expected = launch_ranks(_uninterrupted, 2, PIPELINE, kind)[0]
    for got in launch_ranks(_resumed, 2, PIPELINE, kind, str(tmp_path)):
        assert_same(expected, got)


class Collects(Classifier):
    """Keeps what its steps computed, the way Lightning 2 wants it, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.train_outputs: list[Any] = []
        self.val_outputs: list[Tensor] = []
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_outputs.append({"loss": loss.detach(), "logits": logits.detach(), "labels": y})
        self.seen += x.size(0)
        return loss

    def on_train_epoch_end(self) -> None:
        logits = torch.cat([output["logits"] for output in self.train_outputs])
        labels = torch.cat([output["labels"] for output in self.train_outputs])
        self.log("epoch_accuracy", (logits.argmax(dim=-1) == labels).to(logits.dtype).mean())
        self.log("epoch_loss", F.cross_entropy(logits, labels))
        self.train_outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_outputs.append(F.cross_entropy(self(x), y))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.val_outputs).mean())
        self.val_outputs.clear()


def _collects(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=2)
    module = model(Collects)
    trainer.fit(module, loader(32), loader(16, seed=1))
    return plain(trainer.callback_metrics), module.seen, full_state(trainer)


def test_outputs_collected_by_the_module() -> None:
    expected, many = one_and_many(_collects)
    for got in many:
        assert_same(expected, got)


class LogsOnTheWay(Classifier):
    """Logs values of early stages, and others than tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        self.log("embedding", h.pow(2).mean())
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        loss = F.cross_entropy(self.head(h), y)
        self.log_dict({"train_loss": loss, "size": float(x.size(0)), "epoch_number": float(self.current_epoch)})
        self.log("epoch_mean", loss, on_step=False, on_epoch=True)
        self.log("epoch_maximum", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss


def _logs_on_the_way(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=2)
    trainer.fit(model(LogsOnTheWay), loader(32))
    return plain(trainer.callback_metrics)


def test_values_logged_on_the_way() -> None:
    layout = {**PIPELINE, "microbatches": 1, "schedule": "naive"}
    expected, many = one_and_many(_logs_on_the_way, layout=layout)
    for got in many:
        assert_same(expected, got)
    for got in launch_ranks(_logs_on_the_way, 2, PIPELINE):
        for name in ("embedding", "train_loss", "epoch_mean", "epoch_number"):
            assert got[name] == pytest.approx(expected[name], rel=1e-9), name


class SkipsBatches(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class LayerDrop(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.5:
                x = x + torch.tanh(block(x))
        return self.head(x)


def _fit(rank: int, world_size: int, kind: type[pl.LightningModule]) -> None:
    trainer_for(world_size, PIPELINE, max_epochs=3).fit(model(kind), loader(40))


@pytest.mark.parametrize("kind", [SkipsBatches, LayerDrop])
def test_step_that_differs_from_batch_to_batch_is_refused_or_runs(kind: type[pl.LightningModule]) -> None:
    """No batch now and then (Lightning allows it on one device only), blocks left out by chance: no hang, a reason."""
    try:
        launch_ranks(_fit, 2, kind, timeout=60)
    except RanksFailed as error:
        assert any("StepError" in text for text in error.tracebacks.values()), str(error)
        assert not any("killed. It was here" in text for text in error.tracebacks.values()), str(error)


class GradientPenalty(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.requires_grad_()
        loss = F.cross_entropy(self(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.pow(2).sum()


def test_gradient_through_the_whole_model_is_refused() -> None:
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_fit, 2, GradientPenalty, timeout=60)
    assert not any("killed. It was here" in text for text in caught.value.tracebacks.values()), str(caught.value)
    assert any("StepError" in text or "grad" in text[-600:] for text in caught.value.tracebacks.values())


def _warns(rank: int, world_size: int, name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_with_trainer(rank, world_size, name, PIPELINE, Run(n_steps=1))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", ["masked_mean", "contrastive"])
def test_loss_that_micro_batches_change_is_warned_of(name: str) -> None:
    texts = launch_ranks(_warns, 2, name)
    assert any("microbatches=1" in text for text in texts[0])


@pytest.mark.parametrize("name", ["masked_mean", "contrastive"])
def test_loss_of_the_whole_batch_with_one_micro_batch(name: str) -> None:
    case, run = ZOO[name], Run()
    results = launch_ranks(train_with_trainer, 2, name, {**PIPELINE, "microbatches": 1}, run)
    assert not differences(results, train_reference(case, run), case.tolerance)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("train_loss", loss)


def _manual(rank: int, world_size: int, layout: Any) -> Any:
    trainer = trainer_for(world_size, layout)
    trainer.fit(model(Manual), loader(40))
    return plain(trainer.callback_metrics), full_state(trainer)


def test_manual_optimization() -> None:
    expected, many = one_and_many(_manual)
    for got in many:
        assert_same(expected, got)
