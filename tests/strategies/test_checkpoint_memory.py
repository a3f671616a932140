"""No rank ever holds the whole model while a sharded one is saved or loaded (PL#19721), measured."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lnn_lightning import PTDPStrategy
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

WIDTH, BLOCKS = 640, 16
MB = 2**20


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(pl.LightningModule):
    """100 MiB of parameters, 300 MiB with the moments of Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(BLOCKS)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-4)


def peak_during(act: Any) -> float:
    """MiB that the process took at most, above what it had, while something ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    act()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    return int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)).split()[1]
    )


def _saves_and_loads(rank: int, world_size: int, layout: dict[str, Any], path: str) -> dict[str, float]:
    trainer = quiet_trainer(PTDPStrategy(microbatches=2, **layout), world_size, max_steps=1)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=2))
    held = sum(p.numel() * 4 for group in trainer.optimizers[0].param_groups for p in group["params"]) / MB
    found = {"held": 3 * held}
    trainer.save_checkpoint(path + ".warm")
    found["save"] = peak_during(lambda: trainer.save_checkpoint(path))
    trainer._checkpoint_connector.restore(path)
    found["load"] = peak_during(lambda: trainer._checkpoint_connector.restore(path))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_size": 4, "zero_stage": 3},
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_no_rank_holds_the_whole_model(layout: dict[str, Any], tmp_path: Path) -> None:
    whole = 3 * BLOCKS * 4 * WIDTH * WIDTH * 4 / MB
    for found in launch_ranks(_saves_and_loads, 4, layout, str(tmp_path / "x"), timeout=240):
        assert found["held"] == pytest.approx(whole / 4, rel=0.01)
        for what in ("save", "load"):
            assert found[what] < 1.25 * found["held"] + 8, (what, found, whole)
