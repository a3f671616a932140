"""Adafactor under every layout: the numbers of one process, and checkpoints that go on anywhere."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import Adafactor, PTDPStrategy
from lnn_lightning.checkpoint import tensor_names
from lnn_lightning.checkpoint.export import export
from lnn_lightning.precision import MeshHalfPrecision, MeshMixedPrecision
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Losses, quiet_trainer, relative_error, share
from tests.strategies.test_resharding import LENGTH, VOCABULARY, WIDTH, processes
from tests.strategies.test_resharding import Model as Transformer

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": TENSOR,
    "pp2": {"pipeline_parallel_size": 2},
    **{f"zero{stage}": {"data_parallel_size": 2, "zero_stage": stage} for stage in (1, 2, 3)},
    "zero3-of-3": {"data_parallel_size": 3, "zero_stage": 3},
    "tp2-dp2": {**TENSOR, "data_parallel_size": 2},
    "tp2-zero1": {**TENSOR, "data_parallel_size": 2, "zero_stage": 1},
    "tp2-zero3": {**TENSOR, "data_parallel_size": 2, "zero_stage": 3},
}
BATCH = 12


class Gain(nn.Module):
    """Of one row: data ranks but the first have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Model(Transformer):
    """A tied vocabulary of an odd size, fused queries, keys and values of unequal sizes, a scalar, a frozen bias."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(LENGTH)
        self.blocks.append(Gain())
        self.unused = nn.Parameter(torch.ones(4, LENGTH))
        self.eps = eps

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1, "beta1": 0.5}, {"params": rest, "lr": 0.02}]
        # gradients that are zero but for rounding (of keys' biases) must not be scaled up
        optimizer = Adafactor(groups, lr=0.05, eps=(self.eps, 1e-2))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        rank, size = getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
        random = torch.Generator().manual_seed(1)
        batches = [(torch.randint(VOCABULARY, (BATCH, LENGTH), generator=random),) for _ in range(3)]
        return DataLoader([share(batch, rank, size, BATCH) for batch in batches], batch_size=None)  # type: ignore[arg-type]


def train(
    rank: int,
    world_size: int,
    layout: dict[str, Any] | None,
    epochs: int = 4,
    save: str = "",
    resume: str = "",
    precision: str = "64-true",
    eps: float = 1e-12,
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    module, losses = Model(eps), Losses()
    if layout is None:
        module.double()  # Lightning's own strategies load weights before they convert the module
    strategy: Any = "auto" if layout is None else PTDPStrategy(microbatches=2, **layout)
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "max_epochs": epochs, "callbacks": [losses]}
    if precision == "16-mixed":
        options["plugins"] = [MeshMixedPrecision("16-mixed", device="cpu")]
    elif precision == "masters":
        options["plugins"] = [MeshHalfPrecision("bf16-true", master_weights=True)]
    else:
        options["precision"] = precision
    trainer = quiet_trainer(strategy, world_size, **options)
    trainer.fit(module, datamodule=Data(), ckpt_path=resume or None)
    if save:
        trainer.save_checkpoint(save)
    (optimizer,) = trainer.optimizers
    if precision == "masters" and layout == LAYOUTS["zero3"]:
        pieces = [p for group in optimizer.param_groups for p in group["params"]]
        assert sum(optimizer._describe(p) is not None for p in pieces) > len(pieces) / 2
    states = [leaf for state in optimizer.state.values() for leaf in state.values() if isinstance(leaf, Tensor)]
    assert {leaf.dtype for leaf in states} <= {torch.float64 if precision == "64-true" else torch.float32}
    full = getattr(trainer.strategy, "full_state_dict", module.state_dict)()
    return [float(loss) for loss in losses.losses], {name: value.detach().clone() for name, value in full.items()}


@cache
def reference() -> tuple[list[float], dict[str, Tensor]]:
    return launch_ranks(train, 1, None)[0]


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) <= tolerance, errors


def check(found: list[Any], losses: list[float], state: dict[str, Tensor] | None) -> None:
    means = torch.tensor([losses for losses, _ in found], dtype=torch.float64).mean(0).tolist()
    assert means == pytest.approx(losses, rel=1e-9)
    for _, mine in found if state is not None else ():
        assert_same_state(mine, state, 1e-9)


@pytest.mark.parametrize("name", ["pp2", "zero1", "zero2", "zero3", pytest.param("tp2-zero1", marks=pytest.mark.slow)])
def test_equals_one_process(name: str) -> None:
    check(launch_ranks(train, processes(LAYOUTS[name]), LAYOUTS[name]), *reference())


@pytest.mark.parametrize(
    "layouts", [["tp2", "one", "zero3-of-3", "plain"], ["plain", "tp2-zero3", "tp2-dp2", "one"]], ids=" to ".join
)
def test_goes_on_under_another_layout(layouts: list[str], tmp_path: Path) -> None:
    """An epoch under each; statistics of rows and columns are put together and cut again."""
    losses, state = reference()
    before = ""
    for epoch, name in enumerate(layouts):
        path = str(tmp_path / f"{epoch}.ckpt")
        layout = LAYOUTS.get(name)
        if layout is None and epoch:  # Lightning's own strategies read a file, not a folder
            before, folder = f"{before}.file.ckpt", before
            export(folder, before)
        found = launch_ranks(train, processes(layout or {}), layout, epoch + 1, path, before)
        check(found, losses[3 * epoch : 3 * epoch + 3], state if epoch == 3 else None)
        before = path
    shapes = {name: shape for name, (shape, _) in tensor_names(tmp_path / "1.ckpt").items()}
    assert shapes["optimizer.0.embed.weight.row_var"] == (VOCABULARY, 1)
    assert shapes["optimizer.0.embed.weight.col_var"] == (1, WIDTH)
    assert shapes["optimizer.0.blocks.0.attention.qkv.weight.row_var"] == (2 * WIDTH, 1)
    assert shapes["optimizer.0.blocks.4.gain.exp_avg"] == (1, WIDTH)
    assert "optimizer.0.unused.row_var" not in shapes


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "masters"])
def test_low_precision(precision: str) -> None:
    """ZeRO 3 computes what ZeRO 1 does; with fp16's first scale the first steps overflow, and are skipped by all.

    Master weights are copies of pieces: the optimizer must know how these lie in the whole.
    """
    found, expected = (launch_ranks(train, 2, LAYOUTS[name], 1, "", "", precision, 1e-4) for name in ("zero3", "zero1"))
    for (losses, state), (expected_losses, expected_state) in zip(found, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-2)
        assert_same_state(state, expected_state, 1e-2)
        assert losses[-1] < losses[0]


def test_from_yaml(tmp_path: Path) -> None:
    config = {"class_path": "lnn_lightning.Adafactor", "init_args": {"lr": 0.1, "eps": [1e-30, 0.01], "beta1": 0.9}}
    args = {"optimizer": config, "trainer": {"accelerator": "cpu", "logger": False}}
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None)
    optimizer = cli.model.configure_optimizers()
    assert isinstance(optimizer, Adafactor)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["eps"]), group["beta1"]) == (0.1, (1e-30, 0.01), 0.9)
