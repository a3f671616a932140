"""fp32 master weights and stochastic rounding through a Trainer, in every layout."""

import math
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import PTDPStrategy
from lnn_lightning.optim.masters import masters_of
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.precision import MeshGradScaler, MeshHalfPrecision, MeshPrecision
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer, share

BATCH, WIDTH, CLASSES = 8, 16, 4
ONE: dict[str, Any] = {"microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data_parallel_size": 2, "microbatches": 1},
    "zero1": {"data_parallel_size": 2, "microbatches": 1, "zero_stage": 1},
    "zero3": {"data_parallel_size": 2, "microbatches": 1, "zero_stage": 3},
    "pipeline": {"pipeline_parallel_size": 2, "microbatches": 2},
    "tensor": {"tensor_parallel_size": 2, "microbatches": 2},
}
MASTERS: dict[str, Any] = {"precision": "bf16-true", "master_weights": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scales: list[float] = []
        self.save: Path | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        if (scaler := getattr(self.trainer.precision_plugin, "scaler", None)) is not None:
            self.scales.append(scaler.get_scale())
        if self.save is not None and self.trainer.global_step == 3:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int) -> list[Any]:
    """One batch again and again: a run that goes on may begin anywhere."""
    rng = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH, WIDTH, generator=rng), torch.randint(0, CLASSES, (BATCH,), generator=rng))] * count


class Shares(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        strategy: Any = self.trainer.strategy
        rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
        return DataLoader([share(batch, rank, size, BATCH) for batch in batches(12)], batch_size=None)  # type: ignore[arg-type]


def fit(
    rank: int,
    world_size: int,
    layout: dict[str, Any],
    plugin: dict[str, Any],
    steps: int = 6,
    options: dict[str, Any] | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    kind: type[Net] = Net,
) -> dict[str, Any]:
    module = kind()
    module.save = save
    arguments = {**plugin, "scaler": MeshGradScaler("cpu", **plugin["scaler"])} if "scaler" in plugin else plugin
    settings = {"plugins": [MeshHalfPrecision(**arguments)], "max_steps": steps, **(options or {})}
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Shares(), ckpt_path=resume)
    strategy: Any = trainer.strategy
    names = strategy.engine.residence.names_by_id()
    masters = masters_of(strategy.optimizers[0])
    copies = masters.copies if masters is not None and masters.kept else []
    return {
        "state": {name: value.clone() for name, value in strategy.full_state_dict().items()},
        "masters": {names[id(copy)]: copy.detach().clone() for _, copy in copies},
        "dtypes": {p.dtype for group in strategy.optimizers[0].param_groups for p in group["params"]},
        "scales": module.scales,
        "said": [str(warning.message) for warning in caught],
    }


def distance(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far from each other two runs have ended, as a share of the way that the second has gone."""
    start = Net().state_dict()
    apart = sum((state[key].double() - value.double()).pow(2).sum() for key, value in expected.items())
    gone = sum((start[key].double() - value.double()).pow(2).sum() for key, value in expected.items())
    return math.sqrt(apart / gone)


def run(layout: dict[str, Any], *arguments: Any) -> list[dict[str, Any]]:
    size = math.prod(value for key, value in layout.items() if key.endswith("_size"))
    return launch_ranks(fit, size, layout, *arguments)


@cache
def one_process() -> dict[str, Any]:
    return run(ONE, MASTERS, 6, {"gradient_clip_val": 0.5})[0]


# ---------------------------------------------------------------------------------------------- the same numbers


def test_on_one_process_bit_equal_to_master_weights_by_hand() -> None:
    found = run({"microbatches": 1}, MASTERS, 4)[0]
    module = Net().bfloat16()
    module.train()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in module.named_parameters()}
    real, module.parameters = module.parameters, masters.values  # type: ignore[method-assign, assignment]
    configured = module.configure_optimizers()
    module.parameters = real  # type: ignore[method-assign]
    torch.set_default_dtype(torch.bfloat16)
    for batch in batches(4):
        module.zero_grad()
        module.training_step((batch[0].bfloat16(), batch[1]), 0).backward()
        for name, parameter in module.named_parameters():
            masters[name].grad = parameter.grad.float()  # type: ignore[union-attr]
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
        for name, parameter in module.named_parameters():
            parameter.data.copy_(masters[name])
    torch.set_default_dtype(torch.float32)
    assert found["dtypes"] == {torch.float32}
    for name, parameter in module.named_parameters():
        assert found["state"][name].dtype == torch.bfloat16
        assert torch.equal(found["state"][name], parameter), name
        assert torch.equal(found["masters"][name], masters[name]), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_one_process(name: str) -> None:
    """Sums are rounded to bf16 in other places; wrong gradients would end a whole way apart."""
    expected = one_process()["state"]
    for found in run(LAYOUTS[name], MASTERS, 6, {"gradient_clip_val": 0.5}):
        assert found["dtypes"] == {torch.float32} and not any("keeps its moments" in text for text in found["said"])
        assert distance(found["state"], expected) <= 0.1


@pytest.mark.parametrize("name", ["zero1", "tensor"])
def test_areal1292_small_updates_are_not_lost(name: str) -> None:
    """AdamW at a learning rate that bf16 rounds away: with masters the parameters move as in fp32."""
    moved = {}
    for how, plugin in (("masters", MASTERS), ("rounded", {"precision": "bf16-true"})):
        found = run(LAYOUTS[name], plugin, 6, None, None, None, Slow)[0]
        start = Net().bfloat16().state_dict()
        moved[how] = sum(not torch.equal(found["state"][key], value) for key, value in start.items() if "weight" in key)
        assert any("master_weights=True" in text for text in found["said"]) == (how == "rounded")
    assert moved["masters"] > moved["rounded"]


class Slow(Net):
    def configure_optimizers(self) -> Any:
        # norms are about one, where bf16 has steps of 1/128; six updates of 1/1000 are one step together
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


# ---------------------------------------------------------------------------------------------- fp16


SCALED: dict[str, Any] = {"precision": "16-true", "master_weights": True}


class Overflowing(Net):
    def on_after_backward(self) -> None:
        strategy: Any = self.trainer.strategy
        here = strategy.data_parallel_rank == strategy.data_parallel_size - 1
        if len(self.scales) == 1 and here and strategy.pipeline_parallel_rank == 0:
            for parameter in [*self.embed.parameters(), *self.blocks[0].parameters()]:
                assert parameter.grad is not None and parameter.grad.dtype == torch.float16
                getattr(parameter.grad, "_local_tensor", parameter.grad).fill_(math.inf)


@pytest.mark.parametrize("name", ["zero1", "zero3", "pipeline"])
def test_fs180_an_overflow_on_one_rank_skips_the_step_on_all(name: str) -> None:
    plugin = {**SCALED, "scaler": {"init_scale": 2.0**8, "growth_interval": 3}}
    results = run(LAYOUTS[name], plugin, 4, None, None, None, Overflowing)
    for found in results:
        # a skipped step counts for Lightning too: its progress follows the batches
        assert found["scales"][:4] == [2.0**8, 2.0**7, 2.0**7, 2.0**7]
        for key, value in found["state"].items():
            assert value.dtype == torch.float16 and value.isfinite().all()
            assert torch.equal(value, results[0]["state"][key]), key


class Tiny(Net):
    """Gradients that fp16 has not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 2.0**-22

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0**15)


def test_fp16_gradients_that_underflow_are_scaled() -> None:
    start = Net().half().state_dict()
    plugin = {**SCALED, "scaler": {"init_scale": 2.0**22}}
    for scaled, arguments in ((True, plugin), (False, {"precision": "16-true"})):
        found = run(ONE, arguments, 2, {"accumulate_grad_batches": 2}, None, None, Tiny)[0]
        grown = sum(not torch.equal(value, start[key]) for key, value in found["state"].items() if "up" in key)
        assert (grown > 0) == scaled


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_resumed_is_uninterrupted_bit_for_bit(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    whole = run(layout, MASTERS, 5, None, None, tmp_path / "half")
    for found, expected in zip(run(layout, MASTERS, 5, None, tmp_path / "half"), whole, strict=True):
        assert found["masters"] and found["masters"].keys() == expected["masters"].keys()
        for kind in ("state", "masters"):
            for key, value in expected[kind].items():
                assert torch.equal(found[kind][key], value), (kind, key)
        assert not any("master" in text for text in found["said"])


def test_any_layout_resumes_the_masters_of_another(tmp_path: Path) -> None:
    saved = run(LAYOUTS["zero1"], MASTERS, 3, None, None, tmp_path / "saved")
    expected = {**saved[0]["masters"], **saved[1]["masters"]}
    assert not any(torch.equal(value, value.bfloat16().float()) for key, value in expected.items() if "weight" in key)
    for target in (LAYOUTS["pipeline"], ONE):
        found: dict[str, Tensor] = {}
        for rank in run(target, MASTERS, 3, None, tmp_path / "saved"):  # no step is left
            found |= rank["masters"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    without = run(ONE, {"precision": "bf16-true"}, 3, None, tmp_path / "saved")[0]
    assert sum("has fp32 master weights, which this run does not keep" in text for text in without["said"]) == 1
    without = run(ONE, {"precision": "bf16-true"}, 3, None, None, tmp_path / "without")[0]
    back = run(ONE, MASTERS, 3, None, tmp_path / "without")[0]
    assert sum("has no master weights of 28 parameter(s)" in text for text in back["said"]) == 1
    for key, value in back["masters"].items():
        assert torch.equal(value, without["state"][key].float()), key


# ---------------------------------------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("name", ["data", "tensor"])
def test_stochastic_rounding_is_equal_on_replicas(name: str) -> None:
    layout = {**LAYOUTS[name], **({"check_replicas": True} if name == "tensor" else {})}
    results = run(layout, {"precision": "bf16-true", "stochastic_rounding": True}, 3)
    nearest = run(layout, MASTERS, 3)[0]["state"]
    for found in results:
        assert found["dtypes"] == {torch.float32} and not any("keeps its moments" in text for text in found["said"])
        assert all(torch.equal(value, results[0]["state"][key]) for key, value in found["state"].items())
    assert 0 < distance(results[0]["state"], nearest) < 0.5


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "16-true", "stochastic_rounding": True}, "is for `bf16-true`"),
        ({**MASTERS, "stochastic_rounding": True}, "without `master_weights`"),
        ({**MASTERS, "scaler": MeshGradScaler("cpu")}, "bf16 needs no scaling"),
        ({"precision": "16-true", "scaler": MeshGradScaler("cpu")}, "master_weights=True"),
        ({"reduce_dtype": "int8"}, "'fp32', 'bf16', 'fp16'"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        MeshHalfPrecision(**settings)
    with pytest.raises(MisconfigurationException, match="'fp32', 'bf16', 'fp16'"):
        MeshPrecision(reduce_dtype="fp64")  # type: ignore[arg-type]


def test_another_strategy_or_a_finetuning_callback_is_refused() -> None:
    module = Net()
    data = DataLoader(batches(2), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="need `PTDPStrategy`, got `SingleDeviceStrategy`"):
        quiet_trainer("auto", 1, plugins=[MeshHalfPrecision(**MASTERS)]).fit(module, data)


def _finetuning(rank: int, world_size: int) -> str:
    class Named(Net):
        @property
        def backbone(self) -> nn.Module:
            return self.blocks

    options = {"plugins": [MeshHalfPrecision(**MASTERS)], "callbacks": [BackboneFinetuning(1, verbose=False)]}
    with pytest.raises(StepError) as caught:
        quiet_trainer(PTDPStrategy(), 1, **options).fit(Named(), datamodule=Shares())
    return str(caught.value)


def test_finetuning_is_refused() -> None:
    assert "BackboneFinetuning looks for the module's parameters" in launch_ranks(_finetuning, 1)[0]


def test_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """
trainer:
  accelerator: cpu
  logger: false
  plugins:
    - class_path: lnn_lightning.precision.MeshHalfPrecision
      init_args: {precision: bf16-true, master_weights: true, reduce_dtype: bf16}
"""
    )
    cli = LightningCLI(
        Net, Shares, run=False, save_config_callback=None, args=["--config", str(tmp_path / "config.yaml")]
    )
    plugin = cli.trainer.precision_plugin
    assert isinstance(plugin, MeshHalfPrecision) and plugin.master_weights and plugin.reduce_dtype == "bf16"
