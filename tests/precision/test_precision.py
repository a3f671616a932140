"""Precision plugins that agree over the mesh."""

import copy
import math
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lnn_lightning.parallel.step.standin import is_stand_in, stand_in_for
from lnn_lightning.precision import (
    MeshAgreement,
    MeshDoublePrecision,
    MeshGradScaler,
    MeshHalfPrecision,
    MeshMixedPrecision,
    MeshPrecision,
    loss_scale,
    mesh_precision,
)
from tests.helpers.ranks import launch_ranks, run_ranks

CPU = torch.device("cpu")


def lightnings(name: str) -> Precision:
    """The plugin Lightning's connector makes (fp16 on CPU apart, which it turns into bf16)."""
    if name == "32-true":
        return Precision()
    if name == "64-true":
        return DoublePrecision()
    return HalfPrecision(name) if name.endswith("true") else MixedPrecision(name, "cpu")


KINDS = {
    "32-true": MeshPrecision,
    "64-true": MeshDoublePrecision,
    "bf16-true": MeshHalfPrecision,
    "16-true": MeshHalfPrecision,
    "bf16-mixed": MeshMixedPrecision,
    "16-mixed": MeshMixedPrecision,
}
QUIET: dict[str, Any] = dict(
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu"
)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0])
        self.seen.append((batch[0].dtype, out.dtype, torch.ones(1).dtype))
        return nn.functional.mse_loss(out.float(), batch[1].float())

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        before = [p.grad.clone() for p in self.parameters()]
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.clipped = (before, [p.grad.clone() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 2, generator=generator))
    return DataLoader(data, batch_size=4)


def trainer(plugin: Precision, **settings: Any) -> pl.Trainer:
    return pl.Trainer(devices=1, max_epochs=1, plugins=[plugin], **QUIET, **settings)


# ---------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(("name", "kind"), list(KINDS.items()))
def test_what_lightning_made_becomes_ours(name: str, kind: type) -> None:
    plugin, agreement = lightnings(name), MeshAgreement(counted=lambda p: True)
    ours = mesh_precision(plugin, agreement)
    assert type(ours) is kind and ours.precision == name and ours.agreement is agreement
    assert type(plugin) is type(lightnings(name)), "the one given stays as it is"
    assert mesh_precision(ours, other := MeshAgreement()) is ours and ours.agreement is other
    if name == "16-mixed":
        assert isinstance(ours.scaler, MeshGradScaler) and ours.scaler.agreement is other
        assert not isinstance(plugin.scaler, MeshGradScaler)


@pytest.mark.parametrize("name", KINDS)
def test_on_one_process_it_trains_as_lightnings(name: str) -> None:
    trained = []
    clip = None if name in ("bf16-true", "16-true") else 0.5  # Lightning sums the norm in half precision, we in single
    for plugin in (lightnings(name), mesh_precision(lightnings(name), MeshAgreement())):
        model = Model()
        fitted = trainer(plugin, gradient_clip_val=clip)
        fitted.fit(model, loader())
        assert fitted.precision_plugin is plugin and fitted.global_step == 8
        trained.append(model)
    reference, ours = trained
    assert reference.seen == ours.seen, "inputs and contexts are Lightning's"
    assert not torch.equal(next(ours.parameters()), next(Model().parameters()).to(next(ours.parameters()).dtype))
    for (key, value), other in zip(reference.state_dict().items(), ours.state_dict().values(), strict=True):
        assert value.dtype == other.dtype, key
        torch.testing.assert_close(other, value)


def test_fp16_on_cpu_scales_skips_and_resumes() -> None:
    plugin = MeshMixedPrecision(
        "16-mixed", device="cpu", scaler=MeshGradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    )
    assert loss_scale(plugin) == 2.0**18
    scales = []

    class Watched(Model):
        def on_train_batch_end(self, *args: Any) -> None:
            scales.append(loss_scale(plugin))

    fitted = trainer(plugin)
    fitted.fit(Watched(), loader())
    assert scales[0] < 2.0**18, "the first steps overflow in fp16"
    assert any(b == 2 * a for a, b in zip(scales, scales[1:], strict=False)), "and then it grows"
    assert set(fitted.model.seen) == {(torch.float32, torch.float16, torch.float32)}
    fresh = MeshMixedPrecision("16-mixed", device="cpu")
    fresh.load_state_dict(plugin.state_dict())
    assert loss_scale(fresh) == scales[-1] and fresh.state_dict() == plugin.state_dict()


def test_loss_scale_is_what_pre_backward_multiplies_by() -> None:
    for name in KINDS:
        model, plugin = Model(), mesh_precision(lightnings(name), MeshAgreement())
        model.trainer = trainer(plugin)
        model.trainer.strategy.connect(model)
        assert plugin.pre_backward(torch.tensor(2.0), model).item() == 2.0 * loss_scale(plugin), name
        assert (loss_scale(plugin) > 1) == (name == "16-mixed")
    disabled = MeshMixedPrecision("16-mixed", "cpu", MeshGradScaler("cpu", enabled=False))
    assert loss_scale(disabled) == 1.0


@pytest.mark.parametrize("name", ["64-true", "bf16-true", "16-true"])
def test_conversion_keeps_stand_ins_without_memory(name: str) -> None:
    net = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
    net[0].weight = stand_in_for(net[0].weight)
    plugin = mesh_precision(lightnings(name), MeshAgreement())
    plugin.convert_module(net)
    dtype = plugin.convert_input(torch.ones(1)).dtype
    assert is_stand_in(net[0].weight) and net[0].weight.untyped_storage().nbytes() == dtype.itemsize
    assert net[0].weight.shape == (20, 30)
    assert {t.dtype for t in net.state_dict().values()} == {dtype, torch.int64}


def test_an_ordinary_scaler_keeps_its_settings() -> None:
    given = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)
    for plugin in (
        mesh_precision(MixedPrecision("16-mixed", "cpu", given), MeshAgreement()),
        MeshMixedPrecision("16-mixed", "cpu", given),
    ):
        assert isinstance(plugin.scaler, MeshGradScaler) and plugin.scaler.state_dict() == given.state_dict()

    class Odd(torch.amp.GradScaler):
        pass

    with pytest.raises(MisconfigurationException, match="MeshGradScaler"):
        mesh_precision(MixedPrecision("16-mixed", "cpu", Odd("cpu")), MeshAgreement())


def test_a_harmless_subclass_is_kept() -> None:
    class Noting(MixedPrecision):
        notes = 0

        def forward_context(self) -> Any:
            self.notes += 1
            return super().forward_context()

    given = Noting("16-mixed", "cpu")
    plugin = mesh_precision(given, MeshAgreement())
    assert isinstance(plugin, Noting) and isinstance(plugin, MeshMixedPrecision) and type(given) is Noting
    with plugin.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    assert plugin.notes == 1 and isinstance(plugin.scaler, MeshGradScaler)


@pytest.mark.parametrize("method", ["clip_grad_by_norm", "backward", "optimizer_step", "convert_module"])
def test_a_subclass_with_its_own_ways_is_refused(method: str) -> None:
    base = HalfPrecision if method == "convert_module" else Precision
    middle = type("Middle", (base,), {method: lambda self, *args, **kwargs: None})
    plugin = type("Mine", (middle,), {})()
    with pytest.raises(MisconfigurationException, match=f"`Mine` has its own `{method}`.*Mesh{base.__name__}"):
        mesh_precision(plugin, MeshAgreement())


def test_a_scaler_travels_without_its_groups() -> None:
    scaler = MeshGradScaler("cpu", init_scale=4.0)
    scaler.agreement = MeshAgreement(counted=lambda p: False)
    for moved in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert moved.get_scale() == 4.0 and moved.agreement == MeshAgreement()


# ---------------------------------------------------------------------------------------------- several ranks


def _overflow(rank: int, world_size: int, fused: bool) -> list[Any]:
    """Rank 0 has gradients, rank 1 none, rank 2 no parameters; rank 3 is asked about in a second group."""
    first, second = dist.new_group([0, 1, 2]), dist.new_group([2, 3])
    scaler = MeshGradScaler("cpu", init_scale=64.0, growth_interval=2)
    scaler.agreement = MeshAgreement(
        groups={0: (first,), 1: (first,), 2: (first, second), 3: (second,)}[rank], device=CPU
    )
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [] if rank == 2 else [weight]}], lr=0.5, fused=fused)
    history = []
    for gradient in (1.0, math.inf, 1.0, math.nan, 1.0, 1.0):
        optimizer.zero_grad()
        before = weight.detach().clone()
        scaler.scale(torch.zeros(()))
        if rank in (0, 3):
            weight.grad = torch.tensor([1.0, gradient if rank == 0 else 1.0]) * scaler.get_scale()
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), torch.equal(weight, before)))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(fused: bool) -> None:
    histories = run_ranks(_overflow, 4, fused)
    scales = [[scale for scale, _ in history] for history in histories]
    assert scales[0] == scales[1] == scales[2] == [64.0, 32.0, 32.0, 16.0, 16.0, 32.0]
    assert [skipped for _, skipped in histories[0]] == [False, True, False, True, False, False]
    # Rank 3 asks rank 2 only, which has asked the others before.
    assert scales[3] == scales[0] and histories[3] == histories[0]


class _Meshed(DDPStrategy):
    """Data parallelism whose precision plugin agrees over the world, as a strategy of this package sets it up."""

    def setup(self, fitted: pl.Trainer) -> None:
        super().setup(fitted)
        shared = {id(p) for p in list(self.lightning_module.parameters())[:2]}
        counted = lambda p: id(p) not in shared or self.global_rank == 0  # noqa: E731
        agreement = MeshAgreement((dist.group.WORLD,), counted, self.root_device)
        self.precision_plugin = mesh_precision(self.precision_plugin, agreement)


class _Overflowing(Model):
    """Gradients of rank 1 overflow in the second step, after they were reduced."""

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 1 and not hasattr(self, "done"):
            self.done = True
            next(self.parameters()).grad.fill_(math.inf)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((loss_scale(self.trainer.precision_plugin), next(self.parameters()).detach().clone()))


def _fit(rank: int, world_size: int, name: str) -> list[Any]:
    model = _Overflowing() if name == "16-mixed" else Model()
    settings = dict(devices=2, max_epochs=1, plugins=[lightnings(name)], strategy=_Meshed(), gradient_clip_val=0.25)
    pl.Trainer(**settings, **QUIET).fit(model, loader())
    return model.seen if name == "16-mixed" else model.clipped


def test_through_the_trainer_on_two_ranks() -> None:
    first, second = ([entry for entry in seen if len(entry) == 2] for seen in launch_ranks(_fit, 2, "16-mixed"))
    assert [scale for scale, _ in first] == [scale for scale, _ in second] == [65536.0, 32768.0, 32768.0, 32768.0]
    weights = [weight for _, weight in first]
    for mine, other in zip(weights, (weight for _, weight in second), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_clipping_through_the_trainer_counts_as_told() -> None:
    for before, after in launch_ranks(_fit, 2, "32-true"):
        squares = [float(grad.pow(2).sum()) for grad in before]  # equal on both ranks; two count once, the others twice
        norm = math.sqrt(sum(squares[:2]) + 2 * sum(squares[2:]))
        assert norm > 0.25, "or nothing is clipped"
        for grad, clipped in zip(before, after, strict=True):
            torch.testing.assert_close(clipped, grad * 0.25 / norm)
