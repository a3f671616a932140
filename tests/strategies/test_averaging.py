"""Averages of the weights that callbacks keep: the same as on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint import load_full_state_dict, tensor_names
from lnn_lightning.checkpoint.export import export
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer, relative_error
from tests.test_reports_zero import BOTH, ZERO, Model, Shares

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2, "microbatches": 3, "data_parallel_size": 1},
    "zero1": ZERO["zero1"],
    "zero3": ZERO["zero3"],
    "pipeline-zero3": BOTH,
    "tensor": {"tensor_parallel_size": 2, "microbatches": 3, "data_parallel_size": 1},
    "tensor-zero3": {"tensor_parallel_size": 2, **ZERO["zero3"]},
}
KINDS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.6),
    "mean": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
}


def _train(
    rank: int, world_size: int, layout: dict[str, Any] | None, kind: str, epochs: int, save: str, resume: str
) -> Any:
    torch.manual_seed(1 if not resume else 2)
    module = Model()
    strategy: Any = "auto" if layout is None else PTDPStrategy(**layout)
    trainer = quiet_trainer(strategy, world_size, precision="64-true", max_epochs=epochs, callbacks=[KINDS[kind]()])
    trainer.fit(module, datamodule=Shares(4), ckpt_path=resume or None)
    state = getattr(trainer.strategy, "full_state_dict", module.state_dict)()
    return {name: value.clone() for name, value in state.items()}, float(trainer.callback_metrics["val_loss"])


class Saving(EMAWeightAveraging):
    """Saves a checkpoint while the average still is one."""

    def __init__(self, path: str) -> None:
        super().__init__(decay=0.6)
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
        super().on_train_end(trainer, pl_module)


class SavingSwa(StochasticWeightAveraging):
    """Saves a checkpoint behind the second epoch, from which the average begins."""

    def __init__(self, path: str) -> None:
        super().__init__(swa_lrs=0.05, swa_epoch_start=1)
        self.path = path

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_epoch_end(trainer, *args)
        if self.path and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def _swa(rank: int, world_size: int, layout: dict[str, Any], save: str, resume: str) -> Any:
    KINDS["swa"] = lambda: SavingSwa(save)
    return _train(rank, world_size, layout, "swa", 4, "", resume)


def size_of(layout: dict[str, Any]) -> int:
    model_parallel = layout.get("pipeline_parallel_size", 1) * layout.get("tensor_parallel_size", 1)
    return model_parallel * layout["data_parallel_size"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_as_on_one_process(name: str, kind: str) -> None:
    """Validation uses the average, and the module has it in the end."""
    expected, loss = launch_ranks(_train, 1, None, kind, 3, "", "")[0]
    for state, own_loss in launch_ranks(_train, size_of(LAYOUTS[name]), LAYOUTS[name], kind, 3, "", ""):
        assert own_loss == pytest.approx(loss, rel=1e-9)
        for key, value in expected.items():
            assert relative_error(state[key], value) < 1e-9, key


def _save(rank: int, world_size: int, layout: dict[str, Any] | None, path: str) -> None:
    KINDS["ema"] = lambda: Saving(path)
    _train(rank, world_size, layout, "ema", 1, "", "")


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """They hold the average and what is trained, and training goes on with both, also under another layout."""
    expected, loss = launch_ranks(_train, 1, None, "ema", 3, "", "")[0]
    path = str(tmp_path / "half.ckpt")
    launch_ranks(_save, size_of(LAYOUTS[name]), LAYOUTS[name], path)
    assert {key.partition(".")[0] for key in tensor_names(path)} >= {"state_dict", "current_model_state", "optimizer"}
    assert all(torch.isfinite(value).all() for value in load_full_state_dict(path).values())
    for layout in (LAYOUTS[name], LAYOUTS["zero3"]):
        for state, own_loss in launch_ranks(_train, size_of(layout), layout, "ema", 3, "", path):
            assert own_loss == pytest.approx(loss, rel=1e-9)
            for key, value in expected.items():
                assert relative_error(state[key], value) < 1e-9, key


@pytest.mark.parametrize("name", ["pipeline", "tensor", "tensor-zero3"])
def test_an_average_in_a_callback_goes_on(name: str, tmp_path: Path) -> None:
    """`StochasticWeightAveraging` keeps the average in its own state: each rank has its part of that, too."""
    path, size = str(tmp_path / "half.ckpt"), size_of(LAYOUTS[name])
    expected = launch_ranks(_swa, size, LAYOUTS[name], path, "")
    assert any(key.startswith("callback.") for key in tensor_names(path))
    for (state, _), (whole, _) in zip(launch_ranks(_swa, size, LAYOUTS[name], "", path), expected, strict=True):
        for key, value in whole.items():
            assert torch.equal(state[key], value), key
    export(path, tmp_path / "one.ckpt")
    state, _ = launch_ranks(_swa, 1, {"microbatches": 1}, "", str(tmp_path / "one.ckpt"))[0]
    for key, value in expected[0][0].items():
        assert relative_error(state[key], value) < 1e-9, key
