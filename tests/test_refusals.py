"""What cannot be right is refused: on all ranks, with the reason, in bounded time."""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.errors import LayoutError
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import quiet_trainer

FEATURES, WIDTH, CLASSES, SIZE = 6, 8, 4, 8
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "microbatches": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Model(pl.LightningModule):
    """What the refused ones are made from."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(count: int = 4, size: int = SIZE, seed: int = 0) -> DataLoader:
    rng = torch.Generator().manual_seed(seed)
    batches = [
        (torch.randn(size, FEATURES, generator=rng), torch.randint(0, CLASSES, (size,), generator=rng))
        for _ in range(count)
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(rank: int, world_size: int, kind: Callable[[], pl.LightningModule], layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    quiet_trainer(PTDPStrategy(**layout), world_size).fit(kind(), data())


def said_by(fn: Callable[..., Any], *args: Any) -> dict[int, str]:
    """What each of two ranks says in the end; all of them, by themselves, in time."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(fn, 2, *args, timeout=60)
    tracebacks = caught.value.tracebacks
    assert set(tracebacks) == {0, 1}, str(caught.value)
    assert not any("killed. It was here" in text for text in tracebacks.values()), str(caught.value)
    assert time.monotonic() - start < 30
    return tracebacks


def check(words: list[str], fn: Callable[..., Any], *args: Any, ranks: tuple[int, ...] = (0, 1)) -> dict[int, str]:
    """The ranks say all of the words in their last exception."""
    tracebacks = said_by(fn, *args)
    for rank in ranks:
        last = tracebacks[rank].split("\nTraceback (most recent call last)")[-1].splitlines()
        message = "\n".join(last[_end_of_stack(last) :])
        for word in words:
            assert word in message, f"rank {rank}: {word!r} is not in\n{tracebacks[rank]}"
    return tracebacks


def _end_of_stack(lines: list[str]) -> int:
    """The exception's own lines stand behind the last one of the stack."""
    return max(index for index, line in enumerate(lines) if line.startswith("    ") or line.startswith("  File")) + 1


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel_size": 2, "schedule": "1f2b"}, ["`schedule='1f2b'` is unknown", "'1f1b'", "'zbv'"]),
        ({"pipeline_parallel_size": 2, "schedule": "zbv", "stages_per_rank": 3}, ["exactly two stages a rank"]),
        ({"pipeline_parallel_size": 2, "schedule": "naive", "stages_per_rank": 2}, ["one stage a rank"]),
        ({"pipeline_parallel_size": 2, "stages_per_rank": 0}, ["`stages_per_rank`", "got 0"]),
        ({"microbatches": 0}, ["`microbatches` must be 'auto' or a whole number of at least 1, got 0"]),
        ({"microbatches": "many"}, ["`microbatches`", "got 'many'"]),
        ({"microbatches": True}, ["`microbatches`", "got True"]),
        ({"evaluation_microbatches": -1}, ["`evaluation_microbatches`", "got -1"]),
        ({"pipeline_parallel_size": 0}, ["`pipeline_parallel_size` must be a whole number of at least 1, got 0"]),
        ({"pipeline_parallel_size": "2"}, ["`pipeline_parallel_size`", "got '2'"]),
        ({"data_parallel_size": 0}, ["`data_parallel_size`", "got 0"]),
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any], words: list[str]) -> None:
    """When the strategy is made, before any process starts."""
    with pytest.raises(LayoutError) as caught:
        PTDPStrategy(**settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pipeline_parallel_size": 3}, ["2 processes cannot be divided", "2 is no multiple of 3", "devices="]),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, ["needs 4 processes, but 2 run"]),
        ({"data_parallel_size": 1}, ["needs 1 processes, but 2 run"]),
        ({"tensor_parallel_size": 4}, ["2 processes cannot be divided", "tensor_parallel_size=4"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_the_processes(layout: dict[str, Any], words: list[str]) -> None:
    check(["LayoutError", *words], fit, Model, layout)


# ------------------------------------------------------------------------------------------------ models


def test_more_stages_than_units() -> None:
    layout = {**PIPELINE, "schedule": "interleaved", "stages_per_rank": 4}
    check(["calls 6 units", "too few for 8", "at most 6 stages", "split_points"], fit, Model, layout)


class OneUnit(Model):
    """Everything in one sub-module without a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.blocks, self.head
        self.net = nn.Module()
        self.net.first, self.net.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.net.forward = lambda x: self.net.second(self.net.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_one_unit() -> None:
    check(["calls 1 units (net)", "too few for 2", "split_points"], fit, OneUnit, PIPELINE)


class NoModules(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.blocks, self.head
        self.weight = nn.Parameter(torch.zeros(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_no_unit() -> None:
    check(["NoModules", "no sub-module with parameters"], fit, NoModules, PIPELINE)


class TwoPasses(Model):
    """Contrastive: two views, each through the whole model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        return (self(x) - self(x.flip(1))).pow(2).mean()


def test_two_passes_through_the_blocks() -> None:
    check(["through its blocks more than once", "one pass", "pipeline_parallel_size=1"], fit, TwoPasses, PIPELINE)


class TellingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = out.pow(2).mean()
        return out


class ReadsAnAttribute(Model):
    block = TellingBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.blocks[0].kept


def test_a_value_that_does_not_reach_its_reader() -> None:
    layout = {**PIPELINE, "split_points": ["blocks.2"]}
    check(["'blocks.0'", "another way than its return value", "Return the value"], fit, ReadsAnAttribute, layout)


def test_an_unknown_split_point() -> None:
    check(["'blocks.7'", "no sub-module of Model"], fit, Model, {**PIPELINE, "split_points": ["blocks.7"]})


def test_split_points_in_the_wrong_order() -> None:
    layout = {**PIPELINE, "schedule": "interleaved", "split_points": ["blocks.3", "blocks.2", "blocks.1"]}
    check(["each beginning later"], fit, Model, layout)


class TakesAnIterator(Model):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


def test_a_step_that_takes_the_iterator() -> None:
    check(["training_step(dataloader_iter) is not supported"], fit, TakesAnIterator, PIPELINE)


# ------------------------------------------------------------------------------------------------ optimization


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoBackwards(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x, y = batch
        logits = self(x)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(logits, y), retain_graph=True)
        self.manual_backward(logits.pow(2).mean())
        optimizer.step()


class NoBackward(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        F.cross_entropy(self(x), y)
        self.optimizers().step()


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        self.manual_backward(F.cross_entropy(self(x), y))
        first.step()
        second.step()


class WithLBFGS(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TwoBackwards, ["`manual_backward`", "once", "Add up the losses"]),
        (NoBackward, ["`manual_backward`"]),
        (TwoOptimizers, ["several optimizers", "Use one optimizer with several parameter groups"]),
        (WithLBFGS, ["LBFGS", "all parameters in one place"]),
    ],
)
def test_optimization(kind: type, words: list[str]) -> None:
    check(["StepError", *words], fit, kind, PIPELINE)


# ------------------------------------------------------------------------------------------------ data


def _fit_on(rank: int, world_size: int, batches: list[Any], same: bool = True) -> None:
    torch.manual_seed(0)
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    if not same:
        loader = data(seed=rank)

    class Any_(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if isinstance(batch, dict):
                return self(batch["x"].expand(4, FEATURES)).sum()
            return F.cross_entropy(self(batch[0]), batch[1]) * (batch[2].sum() if len(batch) > 2 else 1.0)

    quiet_trainer(PTDPStrategy(**PIPELINE), world_size).fit(Any_(), loader)


def test_a_batch_without_batch_dimension() -> None:
    check(["no batch dimension", "`microbatches=1`"], _fit_on, [{"x": torch.tensor(1.0)}] * 4)


def test_a_tensor_without_the_batch_dimension() -> None:
    batch = (torch.ones(SIZE, FEATURES), torch.zeros(SIZE, dtype=torch.long), torch.ones(3, 2))
    check(["shape (3, 2)", "8 samples", "`microbatches=1`"], _fit_on, [batch] * 4)


def test_no_data() -> None:
    check(["no batch to trace the step with", "dataloader is empty", "example_batch"], _fit_on, [])


def test_different_data_on_the_ranks_of_one_pipeline() -> None:
    tracebacks = check(["2 different batches", "rank 0; rank 1", "distributed_sampler_kwargs"], _fit_on, [], False)
    assert all("UnequalBatchError" in text for text in tracebacks.values())


class Empty(pl.LightningDataModule):
    """Samples for the first rank only."""

    def train_dataloader(self) -> DataLoader:
        return data() if self.trainer.global_rank == 0 else DataLoader([], batch_size=None)  # type: ignore[arg-type]


def _fit_on_an_empty_rank(rank: int, world_size: int) -> None:
    quiet_trainer(PTDPStrategy(**PIPELINE), world_size).fit(Model(), datamodule=Empty())


def test_no_data_on_one_rank() -> None:
    tracebacks = check(["dataloader is empty"], _fit_on_an_empty_rank)
    assert "rank 1: StepError" in tracebacks[0]


# ------------------------------------------------------------------------------------------------ while training


class LayerDrop(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if not self.training or random.random() < 0.5:
                x = block(x)
        return self.head(x)


class SkipsBatches(Model):
    """As Lightning allows on one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 or batch[0][0, 0] > 0 else None


class SkipsBatchesFirst(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx > 0 and batch[0][0, 0] > 0:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "words", "rank"),
    [
        (LayerDrop, ["order of calls in the step changed", "layer drop"], None),
        (SkipsBatches, ["training_step returned None for micro-batch", "of 4", "loss of zero"], 1),
        (SkipsBatchesFirst, ["The step ended after 0 unit calls", "'embed'"], None),
    ],
)
def test_steps_that_change(kind: type, words: list[str], rank: int | None) -> None:
    """The rank that sees it says so; the others do not wait for ever."""
    tracebacks = said_by(fit, kind, PIPELINE)
    telling = [each for each, text in tracebacks.items() if all(word in text for word in words)]
    assert telling, "\n".join(tracebacks.values())
    assert rank is None or rank in telling


class LeavesOneOut(Model):
    """Every rank another block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index != int(os.environ["RANK"]):
                x = block(x)
        return self.head(x)


def _drops_by_itself(rank: int, world_size: int) -> None:
    quiet_trainer(PTDPStrategy(**PIPELINE), world_size).fit(LeavesOneOut(), data())


def test_steps_that_differ_between_ranks() -> None:
    check(["The step calls", "on rank 1 and", "on rank 0", "the same step"], _drops_by_itself)


class UserError(Exception):
    """The user's own."""


class RaisingBlock(Block):
    number, fails = -1, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise UserError(f"in block {self.number}")
        return super().forward(x)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        raise UserError("in backward")


class Raises(Model):
    """In the second batch, on one rank."""

    block = RaisingBlock

    def __init__(self, place: str, failing: int) -> None:
        super().__init__()
        self.place, self.failing = place, failing
        for number, block in enumerate(self.blocks):
            block.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = batch_idx == 2 and self.global_rank == self.failing
        if fails and self.place == "glue":
            raise UserError("in glue")
        for block in self.blocks:
            block.fails = fails and self.place == "block"
        x, y = batch
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            if fails and self.place == "backward":
                h = FailsInBackward.apply(h)
        return F.cross_entropy(self.head(h), y)


def _raises(rank: int, world_size: int, place: str, failing: int, layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    quiet_trainer(PTDPStrategy(**layout), world_size).fit(Raises(place, failing), data(6))


@pytest.mark.parametrize("layout", [PIPELINE, {**PIPELINE, "schedule": "zbv"}, {"data_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("place", ["glue", "block", "backward"])
def test_an_exception_of_the_user_on_one_rank(place: str, failing: int, layout: dict[str, Any]) -> None:
    """It comes out as it is, and the job ends."""
    text = said_by(_raises, place, failing, layout)[failing]
    last = text.strip().splitlines()[-1]
    assert last.endswith(f"UserError: in {place}") or (place == "block" and "UserError: in block" in last), text
    assert last.startswith("tests.test_refusals.UserError"), f"a wrapper: {last}"


# ------------------------------------------------------------------------------------------------ afterwards


def _used_after_fit(rank: int, world_size: int) -> Any:
    model = Model()
    trainer = quiet_trainer(PTDPStrategy(**PIPELINE), world_size, max_steps=2)
    trainer.fit(model, data())
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, FEATURES))


def test_a_module_is_used_where_a_part_of_it_lives_elsewhere() -> None:
    tracebacks = check(["is not on this process", "strategy.full_state_dict()"], _used_after_fit)
    assert "it lives on pipeline stage 1 and this is pipeline rank 0" in tracebacks[0]
    assert "'embed' (Linear)" in tracebacks[1]
    assert "it lives on pipeline stage 0 and this is pipeline rank 1" in tracebacks[1]


def _sync_batchnorm(rank: int, world_size: int) -> None:
    quiet_trainer(PTDPStrategy(**PIPELINE), world_size, sync_batchnorm=True).fit(Model(), data())


def test_synchronised_batch_norm() -> None:
    check(["`Trainer(sync_batchnorm=True)` is not supported"], _sync_batchnorm)


def _storage_options(rank: int, world_size: int, folder: str) -> None:
    trainer = quiet_trainer(PTDPStrategy(**PIPELINE), world_size, max_steps=1)
    trainer.fit(Model(), data())
    trainer.save_checkpoint(folder + "/x.ckpt", storage_options={"a": 1})


def test_storage_options(tmp_path: Any) -> None:
    check(["storage_options", "not supported"], _storage_options, str(tmp_path))


def test_the_mesh_before_the_start() -> None:
    strategy = PTDPStrategy(pipeline_parallel_size=2)
    for read in (lambda: strategy.mesh, lambda: strategy.device_mesh, lambda: strategy.engine):
        with pytest.raises(RuntimeError, match="does not exist yet"):
            read()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_stage": 4}, ["`zero_stage` must be 0, 1, 2 or 3, got 4"]),
        ({"zero_stage": "3"}, ["`zero_stage`", "got '3'"]),
        ({"zero_stage": True}, ["`zero_stage`", "got True"]),
        ({"zero_stage": 2, "reshard_between_microbatches": True}, ["needs `zero_stage=3`, got 2"]),
        ({"data_parallel_size": (2, 2)}, ["shards nothing with `zero_stage=0`", "`data_parallel_size=4`"]),
        ({"data_parallel_size": (2, 2.5), "zero_stage": 3}, ["a pair (replicate, shard)", "got (2, 2.5)"]),
    ],
    ids=str,
)
def test_settings_of_zero(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        PTDPStrategy(**settings)
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------------ tensor parallelism


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Divisible(Model):
    block = Mlp


class Compiled(Divisible):
    def configure_model(self) -> None:
        self.blocks[1].compile(backend="eager")


class Renormalised(Divisible):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, FEATURES, max_norm=1.0)


def test_an_embedding_that_renormalises_its_rows() -> None:
    words = ["'table'", "`max_norm`", "data_parallel_size=1"]
    check(words, fit, Renormalised, {"data_parallel_size": 2, "microbatches": 1})


class WholeMatrices(Divisible):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.1)


TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (Divisible, {"tensor_parallel_plan": {"*.q_proj": "colwise"}}, ["'*.q_proj'", "fits no layer", "'embed'"]),
        (
            Divisible,
            {"tensor_parallel_plan": {"*.up": "column"}},
            ["'*.up'", "'column'", "'colwise', 'rowwise', 'replicate'"],
        ),
        (Divisible, {"tensor_parallel_plan": {"embed.x": "rowwise"}}, ["'embed.x'", "fits no layer"]),
        (Compiled, {}, ["'blocks.1' is compiled", "tensor_parallel_size=1"]),
        (WholeMatrices, {}, ["Adafactor cannot update parts of parameters", "`lnn_lightning.Adafactor` can"]),
    ],
    ids=str,
)
def test_tensor_parallelism(kind: type, layout: dict[str, Any], words: list[str]) -> None:
    check(words, fit, kind, {**TENSOR, **layout})
