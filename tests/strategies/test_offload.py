"""Offloaded optimizers in a Trainer: the same numbers in every layout, and nobody sees what goes on meanwhile."""

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lnn_lightning.memory.offload.optimizer as offloaded
from lnn_lightning import Offload, OffloadStrategy, PTDPStrategy
from lnn_lightning.memory.offload.overlap import UpdateWaits
from lnn_lightning.memory.offload.store import FileStore
from lnn_lightning.memory.offload.updates import PartUpdate
from lnn_lightning.precision import MeshMixedPrecision
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import Run, differences, train_reference, train_with_trainer
from tests.zoo import ZOO


def train(rank: int, world_size: int, name: str, layout: dict[str, Any], run: Run, folder: str) -> Any:
    offloaded.SMALL = 1  # models of tests have nothing but small parameters
    return train_with_trainer(rank, world_size, name, {**layout, "offload": Offload(folder, chunk_size=4096)}, run)


@pytest.mark.parametrize(
    ("name", "world_size", "layout", "run"),
    [
        ("unet", 1, {"microbatches": 2}, Run(accumulate=2, clip=0.1)),
        ("gpt_two_groups", 2, {"data_parallel_size": 2, "microbatches": 2, "zero_stage": 1}, Run(clip=0.1)),
        ("frozen_embedding", 2, {"data_parallel_size": 2, "microbatches": 2, "zero_stage": 3}, Run(accumulate=2)),
        ("hf_t5", 2, {"pipeline_parallel_size": 2, "microbatches": 2, "schedule": "zero_bubble"}, Run()),
        ("hf_llama", 2, {"tensor_parallel_size": 2, "microbatches": 1}, Run(clip=0.1)),
    ],
)
def test_same_numbers(tmp_path, name, world_size, layout, run) -> None:
    results = launch_ranks(train, world_size, name, layout, run, str(tmp_path))
    case = ZOO[name]
    expected = train_reference(case, run, 1 if case.per_sample else layout.get("microbatches", 1))
    tolerance = 1e-6 if "tensor_parallel_size" in layout else case.tolerance  # the rotary embedding is in fp32
    found = differences(results, expected, tolerance, case.loss_tolerance)
    assert not found, "\n".join(found)
    assert not list(tmp_path.iterdir())


class Small(pl.LightningModule):
    """Four blocks and a parameter of its own, with a step in which glue looks at a block now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(40))
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch * self.scale
        if batch_idx % 3 == 2:  # not when it was traced
            x = x + self.blocks[3].weight.norm() * 0.1
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        self.seen.append(float(x.sum()))

    def configure_optimizers(self) -> Any:
        fused = True if self.trainer.strategy._offload is None else None
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Detached(nn.Linear):
    """Uses its weight once more, where autograd does not know of it and sees it last."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.data) * 0.1 + super().forward(x)


class WithDetached(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Detached(40, 40) for _ in range(4))


class LooksAfterTheStep(Small):
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.blocks[2].weight.sum()))


class LooksBeforeTheStep(Small):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(self.blocks[2].weight.sum()))


class StepsByItself(Small):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.seen.append(float(self.blocks[0].weight.sum()))


class Manual(Small):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, 0)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()


class Looks(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.seen.append(float(module.blocks[1].bias.sum()))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.seen.append(float(module.blocks[3].weight.sum()))


class FromTheModel(IterableDataset):
    """Makes batches with the module that is trained."""

    def __init__(self, module: Small) -> None:
        self.module = module

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        while True:
            with torch.no_grad():
                yield self.module.blocks[3](torch.randn(8, 40, generator=generator))


def fit(kind: type[Small], folder: Any, offload: Offload | None, steps: int = 7, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = kind()
    batches = torch.randn(steps, 8, 40)
    data = DataLoader(FromTheModel(module) if options.pop("own_data", False) else batches, batch_size=None)
    layout, path = options.pop("layout", {}), options.pop("ckpt_path", None)
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": steps}
    settings |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    trainer = pl.Trainer(strategy=PTDPStrategy(offload=offload, **layout), **{**settings, **options})
    trainer.fit(module, data, DataLoader(batches[:2], batch_size=None), ckpt_path=path)
    return module, trainer


SCENARIOS: dict[str, tuple[type[Small], dict[str, Any], bool, bool]] = {
    # module, options, whether work goes on behind a step, whether parameters are updated in backward
    "plain": (Small, {"limit_val_batches": 0}, True, True),
    "micro-batches": (Small, {"limit_val_batches": 0, "layout": {"microbatches": 2}}, True, True),
    "detached": (WithDetached, {"limit_val_batches": 0}, True, True),
    "recomputed": (Small, {"limit_val_batches": 0, "layout": {"recompute": "full"}}, True, True),
    "validation": (Small, {"val_check_interval": 3}, True, True),
    "clipping": (Small, {"gradient_clip_val": 0.01}, True, False),
    "accumulation": (Small, {"accumulate_grad_batches": 2}, True, False),
    "data of the model": (Small, {"own_data": True, "limit_val_batches": 0}, True, True),
    "looks after": (LooksAfterTheStep, {}, True, True),
    "looks before": (LooksBeforeTheStep, {}, True, False),
    "steps by itself": (StepsByItself, {}, False, False),
    "callback": (Small, {"callbacks": [Looks()]}, True, True),
    "manual": (Manual, {}, False, False),
}


def compare(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Every scenario with state in memory and in a file."""
    offloaded.SMALL = 1
    real_update, real_now = PartUpdate.update, offloaded.OffloadedOptimizer.update_now
    real_watch = UpdateWaits.watch
    events: list[str] = []

    def slow(self: Any, slot: Any) -> None:
        time.sleep(0.002)  # long enough to be seen half-done
        real_update(self, slot)

    def now(self: Any, parameter: Any) -> None:
        events.append("early")
        real_now(self, parameter)

    def watch(self: Any) -> None:
        events.append("pending" if self.pending else "done")
        real_watch(self)

    PartUpdate.update, offloaded.OffloadedOptimizer.update_now, UpdateWaits.watch = slow, now, watch  # type: ignore
    found = {}
    for name, (kind, options, *_) in SCENARIOS.items():
        expected, _ = fit(kind, folder, None, **dict(options))
        events.clear()
        module, trainer = fit(kind, folder, Offload(folder, chunk_size=4096), **dict(options))
        same = all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))
        left = [type(each).__name__ for each in trainer.callbacks]
        found[name] = (same, expected.seen == module.seen, "pending" in events, "early" in events, left)
    return found


def test_nobody_sees_parameters_that_are_not_updated_yet(tmp_path) -> None:
    [found] = launch_ranks(compare, 1, str(tmp_path), timeout=200)
    expected = {
        name: (True, True, behind, early, [type(each).__name__ for each in options.get("callbacks", [])])
        for name, (_, options, behind, early) in SCENARIOS.items()
    }
    assert found == expected
    assert not list(tmp_path.iterdir())


class Pure(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, 0)


def resume(rank: int, world_size: int, folder: str, layout: dict[str, Any]) -> list[bool]:
    """Two epochs at once, in memory and in a file, and the second one from the checkpoint of the first."""
    offloaded.SMALL = 1
    settings = Offload(folder, chunk_size=4096)
    common: dict[str, Any] = {"devices": world_size, "limit_val_batches": 0, "layout": layout}
    common |= {"max_epochs": 2, "max_steps": -1, "use_distributed_sampler": False}
    every = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    saving = {"enable_checkpointing": True, "callbacks": [every]}
    states = []
    for offload, more in (
        (None, {}),
        (settings, saving),
        (settings, {"ckpt_path": f"{folder}/epoch=0.ckpt"}),
        (None, {"ckpt_path": f"{folder}/epoch=0.ckpt"}),
    ):
        _, trainer = fit(Pure, folder, offload, 4, **common, **more)
        states.append(trainer.strategy.full_state_dict())
    errors = [max(float((states[0][name] - x).abs().max()) for name, x in state.items()) for state in states[1:]]
    # in memory the optimizer goes on as the checkpoint's groups say, which is not fused
    return [errors[0] == 0, errors[1] == 0, errors[2] < 1e-6]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, {}), (2, {"data_parallel_size": 2, "zero_stage": 2}), (2, {"pipeline_parallel_size": 2, "microbatches": 2})],
)
def test_resumed_is_uninterrupted_and_checkpoints_are_read_from_the_file(tmp_path, world_size, layout) -> None:
    assert launch_ranks(resume, world_size, str(tmp_path), layout) == [[True] * 3] * world_size


def overflow(rank: int, world_size: int, folder: str) -> bool:
    """fp16 with a scale that is too high at first: steps are skipped, with state read ahead or not."""
    offloaded.SMALL = 1
    results = []
    for offload in (None, Offload(folder, chunk_size=4096)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        plugin = MeshMixedPrecision("16-mixed", device="cpu", scaler=scaler)
        module, _ = fit(Small, folder, offload, 12, plugins=[plugin], limit_val_batches=0)
        results.append([p.detach() for p in module.parameters()])
    moved = not torch.equal(results[0][0], torch.ones(40))
    return moved and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_overflow_skips_the_step(tmp_path) -> None:
    assert launch_ranks(overflow, 1, str(tmp_path)) == [True]


class WithLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(rank: int, world_size: int, folder: str, kind: type[Small], offload: Offload, full_on: int) -> None:
    offloaded.SMALL = 1
    if rank == full_on:
        FileStore.room = lambda self: 0  # type: ignore[method-assign]
    fit(kind, folder, offload, devices=world_size)


@pytest.mark.parametrize(
    ("kind", "target", "bandwidth", "full_on", "says"),
    [
        (WithLBFGS, "", None, -1, "LBFGS"),
        (Small, "missing", None, -1, "missing' failed: it does not exist on this host"),
        (Small, "", 1e9, -1, r"writes \d+ MB/s"),
        (Small, "", None, 1, "its disk is full"),
    ],
)
def test_refused_on_all_ranks(tmp_path, kind, target, bandwidth, full_on, says) -> None:
    offload = Offload(tmp_path / target, minimum_bandwidth=bandwidth)
    with pytest.raises(RanksFailed, match=says) as caught:
        launch_ranks(refused, 2, str(tmp_path), kind, offload, full_on)
    assert len(caught.value.tracebacks) == 2


def test_from_yaml() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(pl.strategies.Strategy, "strategy")
    whats = ["optimizer", "activations"]
    arguments = {"target": "cpu", "what": whats, "zero_stage": 1}
    config = {"class_path": "lnn_lightning.OffloadStrategy", "init_args": arguments}
    made = parser.instantiate_classes(parser.parse_object({"strategy": config})).strategy
    inner = {"class_path": "lnn_lightning.Offload", "init_args": {"target": "cpu", "what": whats}}
    config = {"class_path": "lnn_lightning.PTDPStrategy", "init_args": {"offload": inner, "zero_stage": 1}}
    same = parser.instantiate_classes(parser.parse_object({"strategy": config})).strategy
    assert isinstance(made, OffloadStrategy) and made._offload == same._offload == Offload(what=set(whats))
