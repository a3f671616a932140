"""A gradient scale for each block, in a model for which one loss scale is not enough."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.data.shards import whole_of
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.expert.upcycle import upcycle
from lnn_lightning.precision import BlockScaling, MeshGradScaler, MeshMixedPrecision
from lnn_lightning.strategies.scaling import scale_blocks
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer, relative_error
from tests.precision.test_masters import CLASSES, LAYOUTS, WIDTH, Shares

DEPTH, SHRINKS = 10, 0.02
QUICK = BlockScaling(growth_factor=2.0**8, backoff_factor=2.0**-8, growth_interval=8)
STEPS = 72
ONE: dict[str, Any] = {"microbatches": 2}


class Shrinking(nn.Module):
    """Forward a residual block; its gradient is a fiftieth of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + SHRINKS * (x - x.detach() + self.down(F.gelu(self.up(x))).float())


class Deep(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Shrinking() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.gradients: dict[str, Tensor] = {}
        self.history: list[Any] = []
        self.save: Path | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0]).float()
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None or scaler.blocks is None or not any(scaler.blocks._agreed):  # the last step not skipped
            grads = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
            self.gradients = {name: whole_of(grad).clone() for name, grad in grads.items()}

    def on_train_batch_end(self, *_: Any) -> None:
        if (scaler := getattr(self.trainer.precision_plugin, "scaler", None)) is not None:
            self.history.append((scaler.get_scale(), dict(scaler.blocks.scales) if scaler.blocks else None))
        if self.save is not None and self.trainer.global_step == STEPS:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-30)


def fit(
    rank: int,
    size: int,
    layout: dict[str, Any],
    scales: Any,
    single: bool = False,
    resume: Any = None,
    save: Any = None,
) -> Any:
    module = Deep()
    module.save = save
    scaler = MeshGradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    plugin = MeshMixedPrecision("16-mixed", "cpu", scaler, gradient_scales=scales)
    options: dict[str, Any] = {"precision": "32-true"} if single else {"plugins": [plugin]}
    trainer = quiet_trainer(PTDPStrategy(**layout), size, max_steps=STEPS, max_epochs=-1, **options)
    trainer.fit(module, datamodule=Shares(), ckpt_path=resume)
    return module.gradients, module.history, plugin.state_dict()


@cache
def exact() -> dict[str, Tensor]:
    """Without the embedding: what it returns is fp16, and so is the gradient that comes to it."""
    gradients = launch_ranks(fit, 1, ONE, None, True)[0][0]
    return {name: value for name, value in gradients.items() if not name.startswith("embed")}


def test_one_scale_underflows_where_scales_of_blocks_do_not() -> None:
    expected = exact()
    early = [name for name in expected if name.startswith(("blocks.0.", "blocks.1."))]
    one, _, _ = launch_ranks(fit, 1, ONE, None)[0]
    assert all(0 < expected[name].abs().max() < 1e-12 for name in early)
    assert all(one[name].abs().max() == 0 for name in early if name.endswith("up.weight"))
    mine, history, _ = launch_ranks(fit, 1, ONE, QUICK)[0]
    for name, value in expected.items():
        assert relative_error(mine[name] / value.abs().max(), value / value.abs().max()) < 0.02, name
    scales = history[-1][1]
    assert scales["blocks.0"] > 2.0**30 > scales["head"], "the head has overflowed on the way"
    assert {scale for scale, _ in history} == {2.0**10}, "and the loss scale was not to blame"


@pytest.mark.parametrize("name", ["data", "pipeline", "tensor", "zero3"])
def test_ranks_agree(name: str) -> None:
    expected = exact()
    results = launch_ranks(fit, 2, LAYOUTS[name], QUICK)
    for gradients, history, _ in results:
        assert history == results[0][1]
        for key, value in gradients.items():
            if key in expected and value.shape == expected[key].shape:
                scale = expected[key].abs().max()
                assert relative_error(value / scale, expected[key] / scale) < 0.02, key


def test_scales_are_in_checkpoints(tmp_path: Path) -> None:
    _, history, state = launch_ranks(fit, 1, ONE, QUICK, False, None, tmp_path / "saved")[0]
    assert {name: scale for name, (scale, _) in state["blocks"].items()} == history[-1][1]
    for _, none, loaded in launch_ranks(fit, 2, LAYOUTS["pipeline"], QUICK, False, tmp_path / "saved"):
        assert not none and loaded == state


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(MisconfigurationException, match="is for `16-mixed`"):
        MeshMixedPrecision("bf16-mixed", "cpu", gradient_scales="per_block")
    with pytest.raises(MisconfigurationException, match="'per_block' or a `BlockScaling`"):
        MeshMixedPrecision("16-mixed", "cpu", gradient_scales="per_stage")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="growth_factor"):
        BlockScaling(growth_factor=1.0)
    assert MeshMixedPrecision("16-mixed", "cpu", gradient_scales="per_block").gradient_scales == BlockScaling()


def _refused(rank: int, size: int, layout: dict[str, Any]) -> str:
    with pytest.raises(StepError) as caught:
        fit(rank, size, layout, QUICK)
    return str(caught.value)


def test_a_schedule_that_is_refused() -> None:
    for text in launch_ranks(_refused, 2, {"pipeline_parallel_size": 2, "schedule": "zero_bubble"}):
        assert "1f1b" in text


class Aside(nn.Module):
    """Computes with what another block has left on a list, out of its arguments."""

    def __init__(self, left: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.ones(WIDTH)), (lambda: left)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.left()[-1]


class Closure(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = []
        self.blocks = nn.ModuleList([Aside(self.seen) for _ in range(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0]).float()
        self.seen.clear()
        self.seen.append(x)
        for block in self.blocks:
            x = block(x)
        self.seen.clear()
        return F.cross_entropy(self.head(x).float(), batch[1])


def _closure(rank: int, size: int) -> str:
    plugin = MeshMixedPrecision("16-mixed", "cpu", MeshGradScaler("cpu"), gradient_scales="per_block")
    trainer = quiet_trainer(PTDPStrategy(microbatches=2), size, max_steps=1, plugins=[plugin])
    with pytest.raises(StepError) as caught:
        trainer.fit(Closure(), datamodule=Shares())
    return str(caught.value)


def test_a_value_that_comes_in_by_another_way_is_refused() -> None:
    assert "'blocks.0' computes with a value with gradients" in launch_ranks(_closure, 1)[0]


def test_losses_of_experts_are_refused() -> None:
    """They get into the gradients within a block, where its scale is in force, without it."""
    plugin = MeshMixedPrecision("16-mixed", "cpu", MeshGradScaler("cpu"), gradient_scales="per_block")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    upcycle(model, Upcycle("1", experts=2))
    engine: Any = SimpleNamespace(root=model, extensions=[])
    with pytest.raises(LayoutError, match="`gradient_scales` of blocks and the balancing losses .* in '1'"):
        scale_blocks(engine, plugin, torch.device("cpu"))
