"""The strategy in the Trainer: checkpoints, precision, launching, and what else Lightning does with a strategy."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint import is_distributed_checkpoint, load_full_state_dict, load_metadata, tensor_names
from lnn_lightning.precision import MeshMixedPrecision
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import quiet_trainer, relative_error

FEATURES, WIDTH, CLASSES = 6, 8, 4
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "microbatches": 4}
DATA: dict[str, Any] = {"data_parallel_size": 2, "microbatches": 2}
BOTH: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2}
ONE: dict[str, Any] = {"microbatches": 4}


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.fc(self.norm(x))))


class Model(pl.LightningModule):
    """Blocks, a buffer that learns, a schedule for the rate, and everything a checkpoint may hold."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(x), self.hparams["dropout"], self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0] if isinstance(batch, list | tuple) else batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss) * self.trainer.accumulate_grad_batches)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": self.hparams["lr"] / 2}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], eps=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"rank that wrote": self.global_rank}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def samples(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=rng)
    return [(row, row[:CLASSES].argmax()) for row in x]


def loader(count: int = 40, size: int = 8, seed: int = 0) -> DataLoader:
    return DataLoader(samples(count, seed), batch_size=size)  # type: ignore[arg-type]


def model(kind: type = Model, **options: Any) -> Any:
    torch.manual_seed(3)
    return kind(**options)


def trainer_for(world_size: int, layout: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    strategy: Any = "auto" if layout is None else PTDPStrategy(**layout)
    return quiet_trainer(strategy, world_size, **{"precision": "64-true", **options})


def full_state(trainer: pl.Trainer) -> dict[str, Tensor]:
    full = getattr(trainer.strategy, "full_state_dict", None)
    state = full() if full is not None else trainer.lightning_module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same_state(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        if tolerance == 0.0:
            assert torch.equal(got[name], value), name
        else:
            assert relative_error(got[name], value) <= tolerance, name


def one_and_many(fn: Callable[..., Any], *args: Any, layout: dict[str, Any] = PIPELINE) -> tuple[Any, list[Any]]:
    """`fn(rank, world_size, layout, *args)` with Lightning's own strategy on one process, and on two."""
    return launch_ranks(fn, 1, None, *args)[0], launch_ranks(fn, 2, layout, *args)


# ------------------------------------------------------------------------------------------------ resuming


def _train(
    rank: int,
    world_size: int,
    layout: dict[str, Any] | None,
    epochs: int,
    save: str,
    resume: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Trains up to an epoch, from a checkpoint if one is given, and saves one."""
    trainer = trainer_for(world_size, layout, max_epochs=epochs, **options)
    module = model(dropout=0.2)
    if resume:  # nothing may come from here
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)
        torch.manual_seed(1234)
    trainer.fit(module, loader(), ckpt_path=resume or None)
    if save:
        trainer.save_checkpoint(save)
    return {
        "losses": module.losses,
        "rates": module.rates,
        "state": full_state(trainer),
        "step": trainer.global_step,
        "note": getattr(module, "note", None),
    }


def check_resumed(world_size: int, layout: dict[str, Any], path: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Two and two epochs are, bit for bit, four; what the ranks saw in the four and in the last two."""
    whole = launch_ranks(_train, world_size, layout, 4, "", "", options)
    half = launch_ranks(_train, world_size, layout, 2, path, "", options)
    rest = launch_ranks(_train, world_size, layout, 4, "", path, options)
    for uninterrupted, first, second in zip(whole, half, rest, strict=True):
        assert [*first["losses"], *second["losses"]] == uninterrupted["losses"]
        assert [*first["rates"], *second["rates"]] == uninterrupted["rates"]
        assert_same_state(second["state"], uninterrupted["state"])
    return whole, rest


@pytest.mark.parametrize("layout", [PIPELINE, {**PIPELINE, "schedule": "zbv"}, DATA, ONE], ids=str)
def test_resumed_is_uninterrupted_bit_for_bit(layout: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, accumulation over the last batch of the epoch, and a rate that changes with each step."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    world_size = 1 if layout is ONE else 2
    whole, rest = check_resumed(world_size, layout, str(tmp_path / "half.ckpt"), options)
    for uninterrupted, second in zip(whole, rest, strict=True):
        assert uninterrupted["step"] == second["step"] == 12
        assert len(set(uninterrupted["rates"])) > 6
        assert second["note"] == {"rank that wrote": 0}


@pytest.mark.parametrize(
    ("saved", "resumed"), [(PIPELINE, ONE), (ONE, PIPELINE), ({**PIPELINE, "schedule": "zbv"}, PIPELINE)]
)
def test_resumed_under_another_layout(saved: dict[str, Any], resumed: dict[str, Any], tmp_path: Path) -> None:
    """The same micro-batches draw the same numbers, so the trajectory is the same."""
    path = str(tmp_path / "half.ckpt")
    whole = launch_ranks(_train, 1, ONE, 4, "", "", {})[0]
    launch_ranks(_train, 1 if saved is ONE else 2, saved, 2, path, "", {})
    for found in launch_ranks(_train, 1 if resumed is ONE else 2, resumed, 4, "", path, {}):
        assert found["losses"] == pytest.approx(whole["losses"][-10:], rel=1e-9)
        assert found["rates"] == whole["rates"][-10:]
        assert_same_state(found["state"], whole["state"], 1e-9)


@pytest.mark.slow
def test_resumed_on_a_mesh_of_four(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = launch_ranks(_train, 4, BOTH, 4, "", "", {})
    launch_ranks(_train, 4, BOTH, 2, path, "", {})
    for found, expected in zip(launch_ranks(_train, 4, BOTH, 4, "", path, {}), whole, strict=True):
        assert_same_state(found["state"], expected["state"])
        assert found["losses"] == expected["losses"][-10:]


def _from_one_process(rank: int, world_size: int, layout: Any, epochs: int, save: str, resume: str) -> Any:
    trainer = trainer_for(world_size, layout, max_epochs=epochs)
    module = model()
    trainer.fit(module, loader(), ckpt_path=resume or None)
    if save:
        trainer.save_checkpoint(save)
    return module.losses, module.rates, full_state(trainer)


@pytest.mark.parametrize("layout", [PIPELINE, {"data_parallel_size": 2, "microbatches": 1}], ids=str)
def test_a_checkpoint_of_one_process_goes_on(layout: dict[str, Any], tmp_path: Path) -> None:
    """A plain file written by Lightning without this package, with its optimizer state."""
    path = str(tmp_path / "plain.ckpt")
    losses, rates, state = launch_ranks(_from_one_process, 1, None, 4, "", "")[0]
    launch_ranks(_from_one_process, 1, None, 2, path, "")
    assert Path(path).is_file()
    for found in launch_ranks(_from_one_process, 2, layout, 4, "", path):
        assert found[0] == pytest.approx(losses[-10:], rel=1e-9)
        assert found[1] == pytest.approx(rates[-10:], rel=1e-12)
        assert_same_state(found[2], state, 1e-9)


# ------------------------------------------------------------------------------------------------ files


def _saves(rank: int, world_size: int, layout: Any, folder: str) -> Any:
    checkpoint = ModelCheckpoint(
        folder, filename="{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True, mode="max"
    )
    trainer = trainer_for(world_size, layout, max_epochs=4, callbacks=[checkpoint], enable_checkpointing=True)
    module = model()
    trainer.fit(module, loader(), loader(16, seed=1))
    trainer.save_checkpoint(folder + "/mine")
    trainer.save_checkpoint(folder + "/weights.ckpt", weights_only=True)
    trainer.save_checkpoint(folder + "/mine")  # written over
    return {
        "best": checkpoint.best_model_path,
        "last": checkpoint.last_model_path,
        "kept": sorted(checkpoint.best_k_models),
        "score": float(checkpoint.best_model_score),
        "state": full_state(trainer),
        "rank": trainer.global_rank,
    }


def test_checkpoints_have_the_users_names(tmp_path: Path) -> None:
    expected = launch_ranks(_saves, 1, None, str(tmp_path / "one"))[0]
    results = launch_ranks(_saves, 2, PIPELINE, str(tmp_path / "many"))
    one, many = tmp_path / "one", tmp_path / "many"
    assert sorted(path.name for path in many.iterdir()) == sorted(path.name for path in one.iterdir())
    for found in results:
        assert {key: found[key] for key in ("best", "last")} == {
            key: expected[key].replace(str(one), str(many)) for key in ("best", "last")
        }
        assert [Path(path).name for path in found["kept"]] == [Path(path).name for path in expected["kept"]]
        assert found["score"] == pytest.approx(expected["score"], rel=1e-9)
    for path in (*results[0]["kept"], results[0]["last"], many / "mine", many / "weights.ckpt"):
        assert is_distributed_checkpoint(path), path


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    found = launch_ranks(_saves, 2, PIPELINE, str(tmp_path))[0]
    plain = model().double()
    names = tensor_names(tmp_path / "mine")
    weights = {name.removeprefix("state_dict.") for name in names if name.startswith("state_dict.")}
    assert weights == set(plain.state_dict()), "under the names the user gave them"
    metadata = load_metadata(tmp_path / "mine")
    numbers = metadata["lnn_lightning"]["values"]
    assert {name.rpartition(".")[2] for name in numbers} == {"step"}, "numbers are no tensors of their own"
    moments = {name for name in [*names, *numbers] if name.startswith("optimizer.0.")}
    leaves = ("exp_avg", "exp_avg_sq", "step")
    assert moments == {f"optimizer.0.{name}.{leaf}" for name, _ in plain.named_parameters() for leaf in leaves}
    for name, (shape, dtype) in names.items():
        if name.startswith("state_dict."):
            assert shape == tuple(plain.state_dict()[name.removeprefix("state_dict.")].shape)
            assert dtype == torch.float64
    assert metadata["hyper_parameters"] == {"dropout": 0.0, "lr": 0.02}
    assert metadata["note"] == {"rank that wrote": 0}
    assert metadata["epoch"] == 4
    assert metadata["global_step"] == 20
    assert any("ModelCheckpoint" in key for key in metadata["callbacks"])
    state = load_full_state_dict(tmp_path / "mine")
    assert_same_state(state, found["state"])
    plain.load_state_dict(state)


def test_weights_only(tmp_path: Path) -> None:
    found = launch_ranks(_saves, 2, PIPELINE, str(tmp_path))[0]
    assert not [name for name in tensor_names(tmp_path / "weights.ckpt") if name.startswith("optimizer.")]
    assert "lr_schedulers" not in load_metadata(tmp_path / "weights.ckpt")
    assert_same_state(load_full_state_dict(tmp_path / "weights.ckpt"), found["state"])
    for layout, world_size in ((PIPELINE, 2), (ONE, 1)):
        for value in launch_ranks(_validates, world_size, layout, str(tmp_path / "weights.ckpt")):
            plain = model().double()
            plain.load_state_dict(found["state"])
            plain.eval()
            x, y = (torch.stack(parts) for parts in zip(*samples(16, 1), strict=True))
            assert value == pytest.approx(float(F.cross_entropy(plain(x.double()), y).detach()), rel=1e-6)


def _validates(rank: int, world_size: int, layout: Any, path: str) -> float:
    trainer = trainer_for(world_size, layout)
    (metrics,) = trainer.validate(model(), loader(16, seed=1), ckpt_path=path, verbose=False)
    return metrics["val_loss"]


def _saves_last_as_link(rank: int, world_size: int, folder: str) -> str:
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last="link")
    trainer = trainer_for(world_size, PIPELINE, max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(model(), loader())
    return checkpoint.last_model_path


def test_last_as_a_link(tmp_path: Path) -> None:
    paths = launch_ranks(_saves_last_as_link, 2, str(tmp_path))
    assert set(paths) == {str(tmp_path / "last.ckpt")}
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "epoch=1.ckpt"
    assert is_distributed_checkpoint(tmp_path / "last.ckpt")


def _fails_to_save(rank: int, world_size: int, folder: str) -> Any:
    from lnn_lightning.checkpoint import distributed

    path = folder + "/last.ckpt"
    trainer = trainer_for(world_size, PIPELINE, max_epochs=1)
    module = model()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    good = full_state(trainer)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    real, distributed.dcp.save = distributed.dcp.save, fail
    try:
        trainer.save_checkpoint(path)
    except Exception as error:  # noqa: BLE001
        said = str(error)
    finally:
        distributed.dcp.save = real
    trainer.strategy.barrier()
    kept = load_full_state_dict(path)
    trainer.strategy.barrier()
    trainer.save_checkpoint(path)
    new = load_full_state_dict(path)
    names = sorted(entry.name for entry in Path(folder).iterdir())
    return said, good, kept, new, full_state(trainer), names


def test_a_crash_while_saving_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    for said, good, kept, new, state, names in launch_ranks(_fails_to_save, 2, str(tmp_path)):
        assert "no space left" in said
        assert_same_state(kept, good)
        assert_same_state(new, state)
        assert names == ["last.ckpt"], "and nothing half done stays beside it"


def _misfits(rank: int, world_size: int, path: str, save: bool) -> None:
    trainer = trainer_for(world_size, PIPELINE, max_epochs=1)
    module = model()
    if not save:
        module.extra = nn.Linear(2, 2)
        trainer.fit(module, loader(), ckpt_path=path)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    launch_ranks(_misfits, 2, path, True)
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_misfits, 2, path, False, timeout=60)
    tracebacks = caught.value.tracebacks
    assert set(tracebacks) == {0, 1}
    assert not any("killed. It was here" in text for text in tracebacks.values())
    assert any("extra.weight" in text.splitlines()[-1] for text in tracebacks.values()), str(caught.value)


# ------------------------------------------------------------------------------------------------ without memory first


class Configured(Model):
    """Builds its layers where Lightning wants big models to build them."""

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        del self.embed, self.blocks, self.head
        self.on_meta = on_meta

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        torch.manual_seed(3)
        with torch.device("meta" if self.on_meta else "cpu"):
            self.embed = nn.Linear(FEATURES, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(4)])
            self.head = nn.Linear(WIDTH, CLASSES)


def _empty(rank: int, world_size: int, layout: dict[str, Any], how: str) -> Any:
    pl.seed_everything(5, verbose=False)
    trainer = trainer_for(world_size, layout, precision="32-true")
    if how == "init_module":
        with trainer.init_module(empty_init=True):
            module = Model()
    else:
        module = Configured(on_meta=how == "configure_model on meta")
    was_meta = how == "init_module" and module.head.weight.is_meta
    trainer.fit(module, loader())
    return module.losses, full_state(trainer), was_meta


@pytest.mark.parametrize("how", ["init_module", "configure_model", "configure_model on meta"])
def test_built_without_memory(how: str) -> None:
    """Every layout starts from the same values."""
    ((losses, state, _),) = launch_ranks(_empty, 1, ONE, how)
    assert losses[-1] < losses[0]
    for found, values, was_meta in launch_ranks(_empty, 2, PIPELINE, how):
        assert was_meta == (how == "init_module")
        assert found == pytest.approx(losses, rel=1e-5)
        assert_same_state(values, state, 1e-5)


# ------------------------------------------------------------------------------------------------ schedules, callbacks


class Plateau(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def _fits(rank: int, world_size: int, layout: Any, kind: type, options: dict[str, Any], callbacks: list[Any]) -> Any:
    trainer = trainer_for(world_size, layout, **{"max_epochs": 6, **options}, callbacks=callbacks)
    module = model(kind)
    trainer.fit(module, loader(), loader(16, seed=1))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.losses, module.rates, metrics, full_state(trainer), trainer.current_epoch


def check_fits(kind: type = Model, callbacks: list[Any] | None = None, **options: Any) -> Any:
    expected, many = one_and_many(_fits, kind, options, callbacks or [])
    for losses, rates, metrics, state, epoch in many:
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert rates == pytest.approx(expected[1], rel=1e-12)
        assert metrics == pytest.approx(expected[2], rel=1e-7)
        assert_same_state(state, expected[3], 1e-9)
        assert epoch == expected[4]
    return expected


def test_reduce_on_plateau() -> None:
    rates = check_fits(Plateau)[1]
    assert len(set(rates)) > 1, "or it never happened"


def test_early_stopping() -> None:
    *_, epoch = check_fits(callbacks=[EarlyStopping("val_loss", min_delta=0.15, patience=1)], max_epochs=20)
    assert epoch < 20


def test_changing_accumulation() -> None:
    check_fits(callbacks=[GradientAccumulationScheduler({0: 1, 2: 2, 4: 3})])


class Backbone(Model):
    """Its `backbone` is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-4)


def _finetunes(rank: int, world_size: int, layout: Any, folder: str) -> Any:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=False)
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = trainer_for(world_size, layout, max_epochs=3, callbacks=[callback, checkpoint], enable_checkpointing=True)
    module = model(Backbone)
    trainer.fit(module, loader(), loader(16, seed=1))
    return module.losses, full_state(trainer)


def test_a_backbone_that_thaws(tmp_path: Path) -> None:
    """Parameters join the optimizer in the middle of the training."""
    losses, state = launch_ranks(_finetunes, 1, None, str(tmp_path / "one"))[0]
    for found, values in launch_ranks(_finetunes, 2, PIPELINE, str(tmp_path / "many")):
        assert found == pytest.approx(losses, rel=1e-9)
        assert_same_state(values, state, 1e-9)


def _goes_on_finetuning(rank: int, world_size: int, layout: Any, folder: str, resume: str) -> Any:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=False)
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = trainer_for(world_size, layout, max_epochs=3, callbacks=[callback, checkpoint], enable_checkpointing=True)
    module = model(Backbone)
    trainer.fit(module, loader(), loader(16, seed=1), ckpt_path=resume or None)
    return module.losses, full_state(trainer)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_backbone_that_thaws_resumes(epoch: int, tmp_path: Path) -> None:
    """From before it thaws, and from behind, with one group and with two."""
    whole = launch_ranks(_goes_on_finetuning, 2, PIPELINE, str(tmp_path / "one"), "")
    path = str(tmp_path / "one" / f"epoch={epoch}.ckpt")
    rest = launch_ranks(_goes_on_finetuning, 2, PIPELINE, str(tmp_path / "two"), path)
    for (losses, state), (later, resumed) in zip(whole, rest, strict=True):
        assert later == losses[5 * (epoch + 1) :]
        assert_same_state(resumed, state)


def _resumes_within_an_epoch(rank: int, world_size: int, layout: Any, folder: str, resume: str) -> Any:
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_for(
        world_size, layout, max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True, precision="32-true"
    )
    module = model()
    trainer.fit(module, loader(), loader(16, seed=1), ckpt_path=resume or None)
    return module.losses, full_state(trainer), trainer.global_step


def test_resuming_within_an_epoch_does_what_lightning_does(tmp_path: Path) -> None:
    found = {}
    for name, world_size, layout in (("one", 1, None), ("many", 2, PIPELINE)):
        launch_ranks(_resumes_within_an_epoch, world_size, layout, str(tmp_path / name), "")
        path = str(tmp_path / name / "step=3.ckpt")
        found[name] = launch_ranks(_resumes_within_an_epoch, world_size, layout, str(tmp_path / f"{name}-2"), path)
    losses, state, step = found["one"][0]
    for later, resumed, steps in found["many"]:
        assert later == pytest.approx(losses, rel=1e-5)
        assert_same_state(resumed, state, 1e-5)
        assert steps == step == 10


def _validates_the_best(rank: int, world_size: int, layout: Any, folder: str) -> Any:
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", mode="max")
    trainer = trainer_for(
        world_size, layout, max_epochs=3, callbacks=[checkpoint], enable_checkpointing=True, precision="32-true"
    )
    module = model()
    trainer.fit(module, loader(), loader(16, seed=1))
    last = float(trainer.callback_metrics["val_loss"])
    (metrics,) = trainer.validate(dataloaders=loader(16, seed=1), ckpt_path="best", verbose=False)
    predictions = trainer.predict(module, loader(16), ckpt_path="best")
    assert predictions is not None
    return last, metrics["val_loss"], torch.cat(predictions)


def test_the_best_checkpoint_is_found(tmp_path: Path) -> None:
    last, best, predictions = launch_ranks(_validates_the_best, 1, None, str(tmp_path / "one"))[0]
    assert abs(best - last) > 1e-3
    for _, value, predicted in launch_ranks(_validates_the_best, 2, PIPELINE, str(tmp_path / "many")):
        assert value == pytest.approx(best, rel=1e-5)
        torch.testing.assert_close(predicted, predictions, rtol=1e-4, atol=1e-5)


def _averages(rank: int, world_size: int, layout: Any) -> Any:
    callback = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)
    trainer = trainer_for(world_size, layout, max_epochs=5, callbacks=[callback])
    module = model()
    trainer.fit(module, loader())
    return module.losses, full_state(trainer)


def test_stochastic_weight_averaging() -> None:
    (losses, state), many = one_and_many(_averages)
    for found, values in many:
        assert found == pytest.approx(losses, rel=1e-9)
        assert_same_state(values, state, 1e-9)


# ------------------------------------------------------------------------------------------------ manual optimization


class Manual(Model):
    """Accumulates, clips and changes its rate by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        x, y = batch
        loss = F.cross_entropy(self(x), y) / 2
        self.manual_backward(loss)
        self.log("train_loss", loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("layout", [PIPELINE, {"data_parallel_size": 2, "microbatches": 1}], ids=str)
def test_manual_optimization(layout: dict[str, Any]) -> None:
    expected, many = one_and_many(_fits, Manual, {"max_epochs": 2}, [], layout=layout)
    assert len(set(expected[1])) == 5, "a new rate every other step"
    for losses, rates, metrics, state, _ in many:
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert rates == pytest.approx(expected[1], rel=1e-12)
        assert metrics == pytest.approx(expected[2], rel=1e-7)
        assert_same_state(state, expected[3], 1e-9)


# ------------------------------------------------------------------------------------------------ precision


def _precision(rank: int, world_size: int, layout: Any, name: str) -> Any:
    options: dict[str, Any] = {"precision": name}
    if name == "16-mixed":
        options = {"precision": None, "plugins": [MeshMixedPrecision("16-mixed", "cpu")]}
    trainer = trainer_for(world_size, layout, **options, gradient_clip_val=0.5)
    module = model()
    trainer.fit(module, loader())
    dtypes = {p.dtype for p in module.parameters()}
    states = {value.dtype for state in trainer.optimizers[0].state.values() for value in state.values() if value.dim()}
    return module.losses, full_state(trainer), dtypes, states


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("32-true", torch.float32, 1e-5),
        ("bf16-mixed", torch.float32, 3e-2),
        ("bf16-true", torch.bfloat16, 6e-2),
        ("16-mixed", torch.float32, 5e-3),
    ],
)
def test_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    (losses, state, dtypes, moments), many = one_and_many(_precision, name)
    assert dtypes == moments == {dtype}
    for found, values, own_dtypes, own_moments in many:
        assert own_dtypes == own_moments == {dtype}
        assert found == pytest.approx(losses, rel=tolerance)
        assert {value.dtype for value in values.values()} == {dtype}
        assert_same_state(values, state, tolerance)


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


class OverflowingBlock(Block):
    """Its weight's gradient overflows when it is told to."""

    overflows = False

    def forward(self, x: Tensor) -> Tensor:
        weight = _Overflow.apply(self.fc.weight) if self.overflows else self.fc.weight
        return x + torch.tanh(F.linear(self.norm(x), weight, self.fc.bias))


class OverflowsOnce(Model):
    """In the third batch the gradient of one block's weight overflows, and of nothing else."""

    def __init__(self, where: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OverflowingBlock() for _ in range(4)])
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[self.where].overflows = batch_idx == 2
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())
        held = [p for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
        self.rates.append(sum(float(p.detach().double().abs().sum()) for p in held))


def _overflows(rank: int, world_size: int, layout: Any, where: int) -> Any:
    plugin = MeshMixedPrecision("16-mixed", "cpu")
    trainer = trainer_for(world_size, layout, precision=None, plugins=[plugin])
    module = model(OverflowsOnce, where=where)
    trainer.fit(module, loader())
    return module.losses, module.rates


@pytest.mark.parametrize("where", [0, 3])
def test_an_overflow_on_one_stage_skips_the_step_on_both(where: int) -> None:
    (scales, _), many = one_and_many(_overflows, where)
    assert scales == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    for found, held in many:
        assert found == scales
        assert held[1] == held[2], "the step is skipped"
        assert len(set(held)) == 4, "and no other"


# ------------------------------------------------------------------------------------------------ predictions


def _by_name(rank: int, world_size: int, layout: Any) -> Any:
    trainer = quiet_trainer("ptdp" if layout is not None else "auto", world_size, precision="64-true", max_epochs=2)
    module = model()
    trainer.fit(module, loader(), loader(16, seed=1))
    return module.losses, full_state(trainer), type(trainer.strategy).__name__


def test_on_one_process_by_name() -> None:
    losses, state, _ = launch_ranks(_by_name, 1, None)[0]
    found, values, name = launch_ranks(_by_name, 1, {})[0]
    assert name == "PTDPStrategy"
    assert found == pytest.approx(losses, rel=1e-12)
    assert_same_state(values, state, 1e-12)


def _predicts(rank: int, world_size: int, layout: Any, count: int) -> Any:
    trainer = trainer_for(world_size, layout, use_distributed_sampler=True)
    x = torch.stack([row for row, _ in samples(count)]).double()
    predictions = trainer.predict(model(), DataLoader(x, batch_size=3))  # type: ignore[arg-type]
    assert predictions is not None
    return torch.cat(predictions)


def check_predictions(layout: dict[str, Any], world_size: int, count: int) -> None:
    plain = model().double().eval()
    x = torch.stack([row for row, _ in samples(count)]).double()
    for predictions in launch_ranks(_predicts, world_size, layout, count):
        assert predictions.shape == (count, CLASSES), "each sample once"
        torch.testing.assert_close(predictions, plain(x).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [12, 13])
@pytest.mark.parametrize("layout", [PIPELINE, DATA], ids=str)
def test_predictions_in_the_order_of_the_data(layout: dict[str, Any], count: int) -> None:
    check_predictions(layout, 2, count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, 13])
def test_predictions_on_a_mesh_of_four(count: int) -> None:
    check_predictions(BOTH, 4, count)


# ------------------------------------------------------------------------------------------------ launching


def _under_slurm(rank: int, world_size: int) -> Any:
    port = os.environ["MASTER_PORT"]
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_"))]:
        del os.environ[name]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(
        SLURM_NTASKS=str(world_size),
        SLURM_NTASKS_PER_NODE=str(world_size),
        SLURM_NNODES="1",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        SLURM_JOB_ID="1234",
        SLURM_JOB_NAME="train",
        SLURM_NODELIST="localhost",
        MASTER_PORT=port,
    )
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    trainer = trainer_for(world_size, PIPELINE)
    module = model()
    trainer.fit(module, loader())
    environment = trainer.strategy.cluster_environment
    return isinstance(environment, SLURMEnvironment), trainer.global_rank, trainer.world_size, module.losses


def test_under_slurm() -> None:
    expected = launch_ranks(_from_one_process, 1, None, 1, "", "")[0][0]
    for rank, found in enumerate(launch_ranks(_under_slurm, 2)):
        assert found[:3] == (True, rank, 2)
        assert found[3] == pytest.approx(expected, rel=1e-9)


SCRIPT = """
    import sys
    from pathlib import Path

    from tests.strategies.test_ptdp import PIPELINE, Model, loader, model, trainer_for


    class Fails(Model):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2 and self.global_rank == int(sys.argv[1]):
                raise ValueError("this rank does not want to go on")


    if __name__ == "__main__":
        trainer = trainer_for(2, PIPELINE, max_epochs=3)
        module = model(Fails)
        trainer.fit(module, loader())
        Path(sys.argv[2], f"done-{trainer.global_rank}").write_text(f"{trainer.global_step} {module.losses[-1]:.6f}")
"""


def start(folder: Path, failing: int) -> tuple[int, dict[str, str], str, float]:
    """`python train.py`: the exit code, what the ranks wrote, the errors, and the seconds it took."""
    for old in folder.glob("done-*"):
        old.unlink()
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "SLURM_"))}
    environment = {**inherited, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, str(script), str(failing), str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    begin = time.monotonic()
    try:
        _, err = job.communicate(timeout=150)
    finally:
        job.kill()
    written = {path.name: path.read_text() for path in folder.glob("done-*")}
    return job.returncode, written, err, time.monotonic() - begin


@pytest.mark.slow
def test_started_by_the_trainer(tmp_path: Path) -> None:
    """Without torchrun: the Trainer starts the other process."""
    code, written, err, _ = start(tmp_path, -1)
    assert code == 0, err
    losses = launch_ranks(_from_one_process, 1, None, 3, "", "")[0][0]
    assert written == {f"done-{rank}": f"15 {losses[-1]:.6f}" for rank in range(2)}
    assert "[lnn_lightning, rank" not in err  # no alarm


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_started_by_the_trainer_and_one_rank_fails(failing: int, tmp_path: Path) -> None:
    """Starting takes what it takes here; the end must come soon after the failure."""
    _, _, _, usual = start(tmp_path, -1)
    code, written, err, seconds = start(tmp_path, failing)
    assert code != 0
    assert "this rank does not want to go on" in err
    assert f"LostRankError: rank {failing} (pipeline stage {failing}, data rank 0, tensor rank 0; host " in err
    assert written == {}
    assert seconds < usual + 30


def _fit_again_after_an_error(rank: int, world_size: int, layout: dict[str, Any]) -> int:
    module, broken = model(), [True]

    def breaks(gradient: Tensor) -> Tensor:
        if broken:
            raise ValueError("broken on purpose")
        return gradient

    module.embed.weight.register_hook(breaks)
    trainer = trainer_for(world_size, layout, max_epochs=1)
    with pytest.raises(ValueError, match="broken on purpose"):
        trainer.fit(module, loader())
    broken.clear()
    trainer.fit(module, loader())
    return trainer.global_step


def test_a_fit_that_failed_in_backward_can_be_begun_again() -> None:
    """What the forwards of the failed step left for its backwards is gone."""
    assert launch_ranks(_fit_again_after_an_error, 1, ONE) == [5]
