"""What went wrong for users of other systems with ZeRO and clipping, tried on this one (CASES.md has the reports)."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import DataLoader

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.data.shards import is_sharded
from lnn_lightning.precision import MeshGradScaler, MeshMixedPrecision
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import quiet_trainer, relative_error, share

FEATURES, WIDTH, CLASSES, BATCH = 6, 7, 3, 12
ZERO: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"data_parallel_size": 2, "microbatches": 2, "zero_stage": stage} for stage in range(4)},
}
BOTH: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 3, "zero_stage": 3}
SHARDED = ["zero1", "zero2", "zero3"]


class Block(nn.Module):
    """Odd sizes, a parameter of one row, and a frozen layer between learning ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.frozen(x))))


class Model(pl.LightningModule):
    clip: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        learning = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=0.02, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Shares(pl.LightningDataModule):
    """Each data rank's share of the same global batches, also for Lightning's own strategies."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.batches = [
            (
                torch.randn(BATCH, FEATURES, generator=rng, dtype=torch.float64).to(dtype),
                torch.randint(0, CLASSES, (BATCH,), generator=rng),
            )
            for _ in range(count)
        ]

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        rank, size = getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
        return DataLoader([share(batch, rank, size, BATCH) for batch in self.batches], batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def fit(
    rank: int,
    world_size: int,
    layout: dict[str, Any] | None,
    kind: type[Model],
    options: dict[str, Any],
    count: int = 6,
) -> dict[str, Any]:
    torch.manual_seed(1)
    module = kind()
    strategy: Any = "auto" if layout is None else PTDPStrategy(**layout)
    trainer = quiet_trainer(strategy, world_size, **{"precision": "64-true", **options})
    trainer.fit(module, datamodule=Shares(count))
    full = getattr(trainer.strategy, "full_state_dict", module.state_dict)()
    return {
        "state": {name: value.detach().clone() for name, value in full.items()},
        "norms": module.norms,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def equal(layout: dict[str, Any], kind: type[Model] = Model, count: int = 6, **options: Any) -> None:
    """One process with Lightning's own strategy and the layout end with the same parameters and metrics."""
    size = layout.get("pipeline_parallel_size", 1) * layout["data_parallel_size"]
    expected = launch_ranks(fit, 1, None, kind, options, count)[0]
    for found in launch_ranks(fit, size, layout, kind, options, count):
        assert found["steps"] == expected["steps"]
        assert found["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            assert relative_error(found["state"][name], value) < 1e-9, name
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert found["metrics"]["val_loss"] == pytest.approx(expected["metrics"]["val_loss"], rel=1e-9)


# ---------------------------------------------------------------------------------------------- sharded parameters


@pytest.mark.parametrize("name", SHARDED)
def test_pt91167_fs643_frozen_and_trainable_in_one_unit(name: str) -> None:
    """PT#136228 as well: first dimensions that do not divide, a parameter of one row on two ranks, and a scalar."""
    equal(ZERO[name])


@pytest.mark.slow
def test_pt136228_under_a_pipeline() -> None:
    equal(BOTH, gradient_clip_val=0.1, accumulate_grad_batches=2)


class Clipped(Model):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.norms.append(self.temperature.grad.item() if self.temperature.grad is not None else math.nan)


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_pl19235_torchtune2420_clipping(algorithm: str, name: str) -> None:
    """Sharded parameters and one that is not (the temperature, which glue code uses), in one norm."""
    equal(ZERO[name], gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)


def _norms(rank: int, world_size: int, layout: dict[str, Any] | None) -> list[float]:
    from lnn_lightning.precision import plugins

    norms: list[float] = []
    if layout is None:
        real: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_

        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            norms.append(float(norm := real(parameters, *args, **kwargs)))
            return norm

        torch.nn.utils.clip_grad_norm_ = clip
    else:
        ours = plugins.clip_grad_by_mesh_norm

        def clip_mesh(*args: Any, **kwargs: Any) -> Tensor:
            norms.append(float(norm := ours(*args, **kwargs)))
            return norm

        plugins.clip_grad_by_mesh_norm = clip_mesh
    fit(rank, world_size, layout, Model, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2})
    return norms


@pytest.mark.parametrize("layout", [*(ZERO[name] for name in SHARDED), BOTH], ids=[*SHARDED, "pipeline"])
def test_twinkle290_the_norm_is_reduced_once(layout: dict[str, Any]) -> None:
    expected = launch_ranks(_norms, 1, None)[0]
    assert len(expected) == 3
    for norms in launch_ranks(_norms, 4 if layout is BOTH else 2, layout):
        assert norms == pytest.approx(expected, rel=1e-9)


# ---------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("name", SHARDED)
def test_pl19987_the_last_window_is_incomplete(name: str) -> None:
    equal(ZERO[name], count=5, accumulate_grad_batches=3, max_epochs=2)


def _collectives(rank: int, world_size: int, layout: dict[str, Any], accumulate: int) -> list[tuple[int, int]]:
    counts = {"gather": 0, "reduce": 0}
    gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce

    def count_gather(*args: Any, **kwargs: Any) -> Any:
        counts["gather"] += 1
        return gather(*args, **kwargs)

    def count_reduce(*args: Any, **kwargs: Any) -> Any:
        counts["reduce"] += 1
        return reduce(*args, **kwargs)

    _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = count_gather, count_reduce
    per_step: list[tuple[int, int]] = []

    class Counting(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            counts.update(gather=0, reduce=0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            per_step.append((counts["gather"], counts["reduce"]))

    options = {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    fit(rank, world_size, layout, Counting, options, 4)
    return per_step


@pytest.mark.parametrize(
    ("settings", "gathers"),
    [
        ({"zero_stage": 2, "microbatches": 3}, 6),
        ({"zero_stage": 3, "microbatches": 3}, 6),
        ({"zero_stage": 3, "microbatches": 1}, 11),
        ({"zero_stage": 3, "microbatches": 3, "reshard_between_microbatches": True}, 36),
    ],
    ids=str,
)
def test_cosmos161_collectives_of_an_accumulation_window(settings: dict[str, Any], gathers: int) -> None:
    """Six units. Each is gathered once a step (or as often as it is freed), and reduced once a window.

    With one micro-batch the last one is not freed: its backward comes next.
    """
    for per_step in launch_ranks(_collectives, 2, {"data_parallel_size": 2, **settings}, 2):
        assert [reduced for _, reduced in per_step] == [0, 6, 0, 6]
        assert {gathered for gathered, _ in per_step} == {gathers}


# ---------------------------------------------------------------------------------------------- optimizers


class TwoOptimizers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05)  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]
        self.lr_schedulers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SHARDED)
def test_ds1229_two_optimizers_are_refused(name: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(fit, 2, ZERO[name], TwoOptimizers, {})
    for traceback in caught.value.tracebacks.values():
        assert "Use one optimizer with several parameter groups" in traceback


@pytest.mark.parametrize("name", SHARDED)
def test_ds1229_manual_optimization(name: str) -> None:
    equal(ZERO[name], Manual)


class Overflowing(Model):
    """The gradient that this rank's optimizer holds overflows on the second data rank alone, in the second step."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and self.trainer.strategy.data_parallel_rank == 1:
            for parameter in self.trainer.optimizers[0].param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.fill_(math.inf)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.norms.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]


def _overflow(rank: int, world_size: int, layout: dict[str, Any]) -> Any:
    plugin = MeshMixedPrecision("16-mixed", "cpu", MeshGradScaler("cpu", init_scale=2.0**8, growth_interval=100))
    torch.manual_seed(1)
    module = Overflowing()
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, plugins=[plugin], limit_val_batches=0)
    trainer.fit(module, datamodule=Shares(4, torch.float32))
    full = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return module.norms, {name: value.clone() for name, value in full.items()}


@pytest.mark.parametrize("name", SHARDED)
def test_fs180_an_overflow_on_one_data_rank_skips_the_step_on_all(name: str) -> None:
    results = launch_ranks(_overflow, 2, ZERO[name])
    for scales, state in results:
        assert scales == [2.0**8, 2.0**7, 2.0**7, 2.0**7]
        for key, value in state.items():
            assert torch.isfinite(value).all() and torch.equal(value, results[0][1][key]), key


# ---------------------------------------------------------------------------------------------- bf16


def _bf16(rank: int, world_size: int, layout: dict[str, Any]) -> Any:
    import warnings

    torch.manual_seed(1)
    module = Model()
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, precision="bf16-true", limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Shares(4, torch.float32))
    dtypes = {parameter.dtype for parameter in module.parameters()}
    held = {p.dtype for group in trainer.optimizers[0].param_groups for p in group["params"]}
    full = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    said = [str(warning.message) for warning in caught if "bfloat16" in str(warning.message)]
    return dtypes, held, any(is_sharded(p) for p in module.parameters()), said, full


@pytest.mark.parametrize("name", SHARDED)
def test_pl18717_areal1292_bf16_true(name: str) -> None:
    """Parameters really are bf16, and it is said that AdamW's state is too."""
    results = launch_ranks(_bf16, 2, ZERO[name])
    for rank, (dtypes, held, sharded, said, full) in enumerate(results):
        assert dtypes == held == {torch.bfloat16}
        assert sharded == (name != "zero1")
        assert all(torch.equal(value, results[0][4][key]) for key, value in full.items())
        if rank == 0:
            assert len(said) == 1 and "bf16-mixed" in said[0]
