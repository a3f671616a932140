"""Local SGD: against a simulation on one process, in Lightning's DDPStrategy and in PTDPStrategy."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import ExpertParallel, LocalSGD, Offload, PTDPStrategy
from lnn_lightning.parallel.errors import LayoutError, ParallelError
from lnn_lightning.precision import MeshHalfPrecision, MeshMixedPrecision
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

WIDTH, BATCH, STEPS = 6, 4, 14
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
}


class Model(pl.LightningModule):
    """Blocks between two uses of one table."""

    def __init__(self, optimizer: str = "sgd", overflow_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.table.weight
        self.optimizer, self.overflow_at = optimizer, overflow_at

    def loss(self, batch: Tensor) -> Tensor:
        x = self.table(batch)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.roll(1, 1).flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == self.overflow_at and self.trainer.strategy.global_rank % 2:
            loss = loss * torch.inf
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def batches(rank: int, count: int = STEPS) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(12, (BATCH, 5), generator=random) for _ in range(count)]


class Data(pl.LightningDataModule):
    def __init__(self, count: int = STEPS) -> None:
        super().__init__()
        self.count = count

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        rank = getattr(strategy, "data_parallel_rank", strategy.global_rank)
        return DataLoader(batches(rank, self.count), batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(batches(9, 2), batch_size=None)  # type: ignore[arg-type]


class Seen(Callback):
    """The first parameter behind every batch, and as validation sees it."""

    def __init__(self) -> None:
        self.behind: list[Tensor] = []
        self.in_validation: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.behind.append(_first(module))

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.in_validation.append(_first(module))


def _first(module: Model) -> Tensor:
    return next(p for p in module.parameters() if p.numel() > 1 and p.stride() != (0,) * p.dim()).detach().clone()


def fit(rank: int, world_size: int, strategy: Any, model: Model, **options: Any) -> tuple[pl.Trainer, Seen]:
    seen = Seen()
    path, count = options.pop("ckpt_path", None), options.pop("count", STEPS)
    options = {"limit_val_batches": 0, "precision": "64-true", **options}
    options["callbacks"] = [seen, *options.get("callbacks", [])]
    trainer = quiet_trainer(strategy, world_size, **options)
    trainer.fit(model, datamodule=Data(count), ckpt_path=path)
    return trainer, seen


def in_ddp(**settings: Any) -> DDPStrategy:
    return DDPStrategy(ddp_comm_hook=LocalSGD(**settings))


def in_ptdp(layout: dict[str, Any], **settings: Any) -> PTDPStrategy:
    return PTDPStrategy(gradient_compression=LocalSGD(**settings), **layout)


def simulated(
    optimizer: str,
    every: int,
    start: int,
    steps: int = STEPS,
    count: int = STEPS,
    accumulate: int = 1,
    clip: float | None = None,
    averaged_at: tuple[int, ...] = (),
    saved_at: tuple[int, ...] = (),
) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Post-local SGD on two ranks, literally: the final parameters, and the table behind every step on both."""
    models = [Model(optimizer).double() for _ in range(2)]
    optimizers = [model.configure_optimizers() for model in models]
    data = [batches(rank, count) for rank in range(2)]
    tables: list[list[Tensor]] = []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            for index in range((step - 1) * accumulate, step * accumulate):
                (model.loss(data[rank][index % count]) / accumulate).backward()
        pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
        if step <= start:
            for a, b in pairs:
                a.grad = b.grad = (a.grad + b.grad) / 2
        for model, each in zip(models, optimizers, strict=True):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            each.step()
        if step > start and ((step - start) % every == 0 or step in {*averaged_at, *saved_at, steps}):
            for a, b in pairs:
                a.data = (a.data + b.data) / 2
                b.data = a.data.clone()
            if step in saved_at:
                for a, b in pairs:
                    ours, theirs = optimizers[0].state[a], optimizers[1].state[b]
                    for key in ours.keys() - {"step"}:
                        ours[key] = (ours[key] + theirs[key]) / 2
                        theirs[key] = ours[key].clone()
        tables.append([model.table.weight.detach().clone() for model in models])
    return {name: p.detach() for name, p in models[0].named_parameters()}, tables


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


# ---------------------------------------------------------------- numbers


def _local(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        for name, strategy in (("ddp", in_ddp), ("ptdp", lambda **s: in_ptdp({"microbatches": 2}, **s))):
            model = Model(optimizer)
            trainer, seen = fit(rank, world_size, strategy(every=4, start_step=3), model, gradient_clip_val=0.5)
            results[f"{name} {optimizer}"] = (_state(trainer, model), seen.behind)
    model = Model()
    trainer, _ = fit(rank, world_size, in_ddp(every=3), model, accumulate_grad_batches=2)
    results["accumulated"] = (_state(trainer, model), [])
    return results


def _state(trainer: pl.Trainer, model: Model) -> dict[str, Tensor]:
    if isinstance(trainer.strategy, PTDPStrategy):
        return trainer.strategy.full_state_dict()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_numbers_of_a_simulation() -> None:
    first, second = launch_ranks(_local, 2)
    for optimizer in OPTIMIZERS:
        expected, tables = simulated(optimizer, every=4, start=3, clip=0.5)
        for name in ("ddp", "ptdp"):
            (state, behind), (same, other) = first[f"{name} {optimizer}"], second[f"{name} {optimizer}"]
            assert difference(state, expected) < 1e-6 and difference(state, same) == 0
            for step, (ours, theirs) in enumerate(zip(behind, other, strict=True), 1):
                for mine, table in zip((ours, theirs), tables[step - 1], strict=True):
                    assert float((mine - table).abs().max()) < 1e-6 or step == STEPS
                assert torch.equal(ours, theirs) == (step <= 3 or step in (7, 11)), (name, step)
    expected, _ = simulated("sgd", every=3, start=0, steps=STEPS // 2, accumulate=2)
    assert (
        difference(first["accumulated"][0], expected) < 1e-9 and difference(second["accumulated"][0], expected) < 1e-9
    )


def _stages(rank: int, world_size: int) -> dict[str, Tensor]:
    model = Model("adamw")
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2}
    trainer, _ = fit(rank, world_size, in_ptdp(layout, every=4, start_step=3), model)
    tables = trainer.strategy.all_gather(torch.zeros(1))
    assert len(tables) == 2
    return _state(trainer, model)


def test_pipeline_with_a_shared_table() -> None:
    expected, _ = simulated("adamw", every=4, start=3)
    for state in launch_ranks(_stages, 4):
        assert difference(state, expected) < 1e-9


# ---------------------------------------------------------------- checkpoints and validation


def _saves(rank: int, world_size: int, folder: str) -> list[Any]:
    results = []
    for name, strategy in (("ddp", in_ddp), ("ptdp", lambda **s: in_ptdp({"microbatches": 1}, **s))):
        saving = ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        through = Model("adamw")
        options: dict[str, Any] = {
            **{"count": 7, "max_epochs": 2},
            **{"limit_val_batches": 2, "val_check_interval": 5, "num_sanity_val_steps": 0},
        }
        saves: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True}
        trainer, seen = fit(rank, world_size, strategy(every=5, start_step=3), through, **saves, **options)
        final = _state(trainer, through)
        again = Model("adamw").double()  # Lightning loads before it converts
        path = f"{folder}/{name}/epoch=0.ckpt"
        trainer, _ = fit(rank, world_size, strategy(every=5, start_step=3), again, ckpt_path=path, **options)
        results.append((final, seen.in_validation, _state(trainer, again)))
    return results


def test_checkpoints_and_validation(tmp_path: Path) -> None:
    """What is saved and validated is the average, and a resumed run is the one that saved."""
    first, second = launch_ranks(_saves, 2, str(tmp_path))
    times: dict[str, Any] = {"averaged_at": (5, 12), "saved_at": (7, 14)}
    expected, tables = simulated("adamw", every=5, start=3, count=7, **times)
    for (final, validated, resumed), (same, also, _) in zip(first, second, strict=True):
        assert difference(final, same) == 0 and difference(final, expected) < 1e-9
        assert difference(resumed, final) == 0
        assert all(torch.equal(a, b) for a, b in zip(validated, also, strict=True)) and len(validated) == 4
    saved = torch.load(tmp_path / "ddp" / "epoch=0.ckpt", weights_only=True)
    assert float((saved["state_dict"]["table.weight"] - tables[6][0]).abs().max()) < 1e-9


# ---------------------------------------------------------------- loss scaling, refusals


def _scaled(rank: int, world_size: int) -> tuple[dict[str, Tensor], float]:
    model = Model(overflow_at=7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=100)
    plugin = MeshMixedPrecision("16-mixed", "cpu", scaler)
    layout = {"microbatches": 1}
    trainer, _ = fit(rank, world_size, in_ptdp(layout, every=4), model, plugins=[plugin], precision=None)
    return _state(trainer, model), plugin.scaler.get_scale()  # type: ignore[union-attr]


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    (state, scale), (same, also) = launch_ranks(_scaled, 2)
    assert scale == also == 2**5 and difference(state, same) == 0
    assert all(bool(value.isfinite().all()) for value in state.values())


def _refused(rank: int, world_size: int) -> list[str]:
    said = []
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    copies = MeshHalfPrecision("bf16-true", master_weights=True)
    averaging: dict[str, Any] = {"callbacks": [WeightAveraging()]}
    for strategy, options in (
        (in_ddp(), {"plugins": [scaled], "precision": None}),
        (in_ptdp({}), {"plugins": [copies], "precision": None}),
        (in_ddp(), averaging),
    ):
        try:
            fit(rank, world_size, strategy, Model(), **options)
        except ParallelError as error:
            said.append(str(error))
    return said


def test_refused() -> None:
    for said in launch_ranks(_refused, 2):
        assert len(said) == 3
        assert "loss scaler" in said[0] and "fp32 copies" in said[1] and "WeightAveraging" in said[2]
    for layout, reason in (
        ({"zero_stage": 1}, "zero_stage=1"),
        ({"expert": ExpertParallel(size=2)}, "expert"),
        ({"offload": Offload("cpu")}, "offload"),
    ):
        with pytest.raises(LayoutError, match=reason):
            in_ptdp(layout)
    for settings in ({"every": 0}, {"every": 2.5}, {"start_step": -1}, {"start_step": True}):
        with pytest.raises(LayoutError, match=next(iter(settings))):
            LocalSGD(**settings)  # type: ignore[arg-type]
