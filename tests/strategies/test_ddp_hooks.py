"""Compression in Lightning's own DDPStrategy: called on every device, right with all it can do, and in checkpoints."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import Cast, PowerSGD
from lnn_lightning.communication import Compression, Compressor, Compressors
from lnn_lightning.communication.compression import Ranks
from lnn_lightning.parallel.errors import ParallelError
from lnn_lightning.strategies.ddp_hooks import KEY, CarriedCompression
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

COARSE = torch.float8_e5m2
FEATURES, BATCH = 6, 8


@dataclass(frozen=True)
class Coarse(Compression):
    """Two bits of mantissa, with error feedback: as simple as a compression with state can be."""

    def compressor(self, ranks: Ranks) -> Compressor:
        return _Coarse(ranks)


class _Coarse(Compressor):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.calls: list[list[str]] = []

    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        self.calls.append(list(gradients))
        for name, gradient in gradients.items():
            wanted = self.errors.wanted(name, gradient, self.scale)
            sent = wanted.to(COARSE).to(wanted.dtype)
            gradient.copy_(self.wire.sum(sent.clone()) / self.wire.size)
            self.errors.keep(name, wanted, sent, gradient, self.scale)


class Model(pl.LightningModule):
    """Layers, of which one is used in every second batch and one never."""

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(FEATURES, 10), nn.Linear(10, 3)
        if sometimes:
            self.sometimes, self.never = nn.Linear(10, 10), nn.Linear(10, 10)

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.first(batch))
        if hasattr(self, "sometimes") and batch_idx % 2:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden).square().mean() * 3

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()


class Rivals(Model):
    """Two optimizers, each with a backward a step, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            optimizer.zero_grad()
            self.manual_backward(sign * self.loss(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (self.first, self.last)]


def batches(rank: int, count: int = 8) -> list[Tensor]:
    return [torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(count)]


def fit(rank: int, world_size: int, model: Model, hook: Any = None, ddp: Any = None, **options: Any) -> pl.Trainer:
    """Trains on this rank's batches."""
    path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(DDPStrategy(ddp_comm_hook=hook, **(ddp or {})), world_size, **options)
    loader = DataLoader(batches(rank), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, loader, ckpt_path=path, weights_only=True)
    return trainer


def carried(trainer: pl.Trainer) -> Compressors:
    (callback,) = [each for each in trainer.callbacks if isinstance(each, CarriedCompression)]  # type: ignore[attr-defined]
    assert trainer.callbacks[0] is callback  # type: ignore[attr-defined]
    return callback.compressors


def simulated(model: Model, accumulate: int = 1, clip: float | None = None, coarse: bool = True) -> dict[str, Tensor]:
    """Parameters after a training on two ranks with error feedback, on one process."""
    named = dict(model.named_parameters())
    errors = [{name: torch.zeros_like(p) for name, p in named.items()} for _ in range(2)]
    optimizer = model.configure_optimizers()
    both = [batches(0), batches(1)]
    for start in range(0, len(both[0]), accumulate):
        arrived: dict[str, Tensor] = {}
        for rank in range(2):
            window = range(start, start + accumulate)
            loss = sum((model.loss(both[rank][i].to(model.dtype), i) for i in window), torch.zeros(())) / accumulate
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            for (name, _), gradient in zip(named.items(), gradients, strict=True):
                if gradient is None:
                    continue
                wanted = gradient + errors[rank][name]
                sent = wanted.to(COARSE).to(wanted.dtype) if coarse else wanted
                errors[rank][name] = wanted - sent
                arrived[name] = arrived.get(name, torch.zeros_like(sent)) + sent / 2
        for name, parameter in named.items():
            parameter.grad = arrived.get(name)
        if clip is not None:
            nn.utils.clip_grad_norm_(named.values(), clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, False),
    "small buckets": ({"bucket_cap_mb": 0.0001}, {}, False),
    "accumulated": ({}, {"accumulate_grad_batches": 2}, False),
    "clipped": ({}, {"gradient_clip_val": 0.3}, False),
    "unused": ({"find_unused_parameters": True}, {}, True),
    "unused in windows": ({"find_unused_parameters": True}, {"accumulate_grad_batches": 2}, True),
    "static": ({"static_graph": True}, {}, False),
    "views": ({"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 4}, False),
}


def _forms(rank: int, world_size: int) -> dict[str, tuple[dict[str, Tensor], list[list[str]], int, int]]:
    results = {}
    for form, (ddp, options, sometimes) in FORMS.items():
        model = Model(sometimes).double()
        trainer = fit(rank, world_size, model, Coarse(), ddp, precision="64-true", **options)
        compressors = carried(trainer)
        (compressor,) = compressors.by_place.values()
        assert isinstance(compressor, _Coarse)
        results[form] = (model.state_dict(), compressor.calls, compressor.step, compressors.traffic.payload)
    model = Manual().double()
    carried(fit(rank, world_size, model, Coarse(), {"static_graph": True}, precision="64-true"))
    results["manual"] = (model.state_dict(), [], 0, 0)
    model = Rivals().double()
    assert carried(fit(rank, world_size, model, Cast("fp16"), precision="64-true")).traffic.payload
    results["rivals"] = (model.state_dict(), [], 0, 0)
    return results


def test_all_that_ddp_can_do() -> None:
    first, second = launch_ranks(_forms, 2)
    for form, (ddp, options, sometimes) in FORMS.items():
        windows = options.get("accumulate_grad_batches", 1)
        model = Model(sometimes).double()
        expected = simulated(model, windows, options.get("gradient_clip_val"))
        assert largest_difference(first[form][0], expected) < 1e-12, form
        assert largest_difference(first[form][0], simulated(Model(sometimes).double(), windows, coarse=False)) > 1e-4
        assert largest_difference(first[form][0], second[form][0]) == 0, form
        calls, steps, payload = first[form][1:]
        assert steps == 8 // windows
        assert sorted(name for call in calls for name in call) == sorted([*expected] * steps), form
        assert payload == steps * sum(8 * parameter.numel() for parameter in expected.values())
        assert (len(calls) > steps) == ("bucket_cap_mb" in ddp)
    assert largest_difference(first["manual"][0], simulated(Model().double())) < 1e-12
    assert largest_difference(first["rivals"][0], second["rivals"][0]) == 0


# ---------------------------------------------------------------- loss scaling


class Overflows(Model):
    """On one rank the loss is infinite in one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        return loss * torch.inf if batch_idx == self.at and self.trainer.global_rank == 1 else loss


def _scaled(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, settings, at in (
        ("constant", {"init_scale": 2.0**4, "growth_interval": 100}, -1),
        ("growing", {"init_scale": 2.0**2, "growth_interval": 1}, -1),
        ("overflow", {"init_scale": 2.0**8, "growth_interval": 100}, 3),
    ):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **settings))  # type: ignore[arg-type]
        model = Overflows(at)
        steps = carried(fit(rank, world_size, model, Coarse(), plugins=[plugin]))
        assert plugin.scaler is not None
        (compressor,) = steps.by_place.values()
        errors = {key: value for key, value in compressor.state_dict().items() if key.startswith("error.")}
        results[name] = (model.state_dict(), plugin.scaler.get_scale(), errors)
    return results


def test_loss_scale() -> None:
    first, second = launch_ranks(_scaled, 2)
    for name, (state, scale, errors) in first.items():
        assert largest_difference(state, second[name][0]) == 0 and scale == second[name][1]
        assert all(bool(error.isfinite().all()) and bool(error.any()) for error in errors.values())
    assert first["growing"][1] == 2**10 and first["overflow"][1] == 2**7
    # what is kept is without the scale: powers of two change nothing but what underflows
    assert largest_difference(first["growing"][0], first["constant"][0]) < 1e-3
    assert largest_difference(first["growing"][2], first["constant"][2]) < 1e-2


# ---------------------------------------------------------------- checkpoints


def _resumes(rank: int, world_size: int, folder: str) -> list[Any]:
    """Trains through with a checkpoint on the way, and again from there."""
    for hook in (PowerSGD(rank=1, start_step=2, min_compression=1.5), Coarse()):
        saving = ModelCheckpoint(f"{folder}/{type(hook).__name__}", filename="{epoch}", save_top_k=-1)
        options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True}
        through, again = Model(), Model()
        errors = carried(fit(rank, world_size, through, hook, max_epochs=2, **options))
        path = f"{folder}/{type(hook).__name__}/epoch=0.ckpt"
        trainer = fit(rank, world_size, again, hook, max_epochs=2, ckpt_path=path)
        assert trainer.global_step == 16
        assert (errors.by_place["data_parallel"].error_norm() or 0) > 0
        for key, value in errors.state_dict()["data_parallel"].items():
            same = carried(trainer).state_dict()["data_parallel"][key]
            assert torch.equal(value, same) if isinstance(value, Tensor) else value == same
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in through.state_dict().items())
    trainer.fit_loop.max_epochs = 3  # another fit of the same Trainer goes on with what was not sent
    trainer.fit(again, DataLoader(batches(rank), batch_size=None))  # type: ignore[arg-type]
    (compressor,) = carried(trainer).by_place.values()
    assert compressor.step == 24
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    plain = fit(rank, world_size, Model(), max_steps=10, max_epochs=2, ckpt_path=path)
    plain.save_checkpoint(f"{folder}/plain.ckpt")
    return [float(errors.by_place["data_parallel"].error_norm() or 0)]


def _changed(rank: int, world_size: int, folder: str) -> list[tuple[int, list[str]]]:
    """Goes on from checkpoints of other runs; what was said, and the steps counted."""
    results = []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    for hook, file in ((Coarse(), "Coarse/epoch=0.ckpt"), (Cast(), "Coarse/epoch=0.ckpt"), (Coarse(), "plain.ckpt")):
        said.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = fit(rank, world_size, Model(), hook, ckpt_path=f"{folder}/{file}", max_steps=12, max_epochs=-1)
        texts = [*said, *(str(each.message) for each in caught)]
        (compressor,) = carried(trainer).by_place.values()
        results.append((compressor.step, [text for text in texts if "compression" in text]))
    return results


def test_checkpoints(tmp_path: Path) -> None:
    """State of every rank is in the checkpoint, without pickled classes; resumed is uninterrupted bit for bit."""
    (first,), (second,) = launch_ranks(_resumes, 2, str(tmp_path))
    assert first > 0 and second > 0 and first != second
    saved = torch.load(tmp_path / "Coarse/epoch=0.ckpt", weights_only=True)[KEY]
    one, two = (state["data_parallel"] for state in saved["states"])
    assert (
        one.keys() == two.keys()
        and one["step"] == 8
        and not torch.equal(one["error.first.bias"], two["error.first.bias"])
    )
    assert KEY not in torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    ((more, other, without),) = launch_ranks(_changed, 1, str(tmp_path))
    assert more[0] == 12 and len(more[1]) == 1 and "Coarse() on 2 ranks, this run has Coarse() on 1" in more[1][0]
    assert other[0] == 12 and len(other[1]) == 1 and "Coarse() on 2 ranks, this run has Cast" in other[1][0]
    before = torch.load(tmp_path / "plain.ckpt", weights_only=True)["global_step"]
    assert without[0] == 12 - before and len(without[1]) == 1 and "without gradient compression" in without[1][0]


# ---------------------------------------------------------------- refusals


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)


class Complex(Model):
    """Ranks would silently come to hold different values of the complex parameter under a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.cfloat))


class Searches(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def _wrapper(hook: Any) -> Any:
    return hook


REFUSED: list[tuple[type[Model], dict[str, Any], str]] = [
    (Model, {"ddp_comm_wrapper": _wrapper}, "does not go with `ddp_comm_wrapper`"),
    (Model, {"ddp_comm_state": 1}, "does not go with `ddp_comm_state`"),
    (Model, {"model_averaging_period": 2}, "does not go with `model_averaging_period`"),
    (Sparse, {}, "'table' is an embedding with `sparse=True`: Coarse"),
    (Complex, {}, "'phase' is complex: Coarse"),
    (Rivals, {}, "Manual optimization with 2 optimizers"),
    (Searches, {}, "LBFGS runs several backwards"),
]


def _refused(rank: int, world_size: int) -> list[str]:
    said = []
    for kind, ddp, _ in REFUSED:
        try:
            fit(rank, world_size, kind(), Coarse(), ddp)
        except ParallelError as error:
            said.append(str(error))
    return said


def test_refused() -> None:
    for said in launch_ranks(_refused, 2):
        for text, (_, _, expected) in zip(said, REFUSED, strict=True):
            assert expected in text


def _plain(rank: int, world_size: int, hook: Any) -> None:
    fit(rank, world_size, Model(), hook)


def test_hooks_of_others_are_left_alone() -> None:
    launch_ranks(_plain, 1, _not_called)


def _not_called(state: Any, bucket: Any) -> Any:
    raise AssertionError("Lightning registers hooks on CUDA only")
