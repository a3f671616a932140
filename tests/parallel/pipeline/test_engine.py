"""The engine without Lightning: an ordinary module and its step on two processes."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lnn_lightning.parallel.layout import DATA, Mesh, resolve_layout
from lnn_lightning.parallel.pipeline.engine import PipelineEngine, PipelineSettings
from lnn_lightning.parallel.pipeline.schedules import place
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.zoo.language import GPT, LENGTH, VOCABULARY

CPU = torch.device("cpu")
FEATURES, WIDTH, CLASSES = 6, 8, 5


# ------------------------------------------------------------------------------------------------ models and steps


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self, inside: float = 0.0, between: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.between = between
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(inside) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.embed = nn.Linear(FEATURES, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, FEATURES)
            self.out = nn.Linear(FEATURES, CLASSES)
            self.decode = nn.Linear(FEATURES, WIDTH)
            self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(x), self.between, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), self.between, self.training)
        if hasattr(self, "out"):
            return self.out(self.head(x + self.decode(self.head(x))))
        return self.head(x)


def mean_loss(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def sum_loss(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="sum") / 10


def dict_loss(net: Any, batch: Any) -> dict[str, Any]:
    logits = net(batch[0])
    return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach(), "n": len(logits)}


STEPS: dict[str, Callable[[Any, Any], Any]] = {"mean": mean_loss, "sum": sum_loss, "dict": dict_loss}


def batches(sizes: list[int], ignored: bool = False, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    result = []
    for size in sizes:
        y = torch.randint(0, CLASSES, (size,), generator=rng)
        if ignored:
            y[torch.rand(size, generator=rng) < 0.4] = -100
            y[0] = 1
        result.append((torch.randn(size, FEATURES, generator=rng, dtype=torch.float64), y))
    return result


@dataclass(frozen=True)
class Setup:
    """How to cut and run."""

    pipeline: int = 2
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    microbatches: int | str = 4
    split_points: tuple[str, ...] | None = None
    step: str = "mean"
    net: dict[str, Any] = field(default_factory=dict)
    seed: int = 3


def make(setup: Setup, net: nn.Module, batch: Any, step: Callable[[Any], Any], prepare: bool = True) -> PipelineEngine:
    mesh = Mesh.create(resolve_layout(dist.get_world_size(), setup.pipeline), "cpu")
    settings = PipelineSettings(
        place(setup.schedule, setup.pipeline, setup.stages_per_rank),
        setup.microbatches,
        split_points=setup.split_points,
    )
    engine = PipelineEngine(net, settings, mesh, StepObserver(), setup.seed)
    if prepare:
        engine.prepare("step", step, batch, training=True)
        engine.find_loss_form(step, batch)
        engine.setup_training()
    return engine


def build(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def train(
    rank: int, world_size: int, setup: Setup, data: list[list[Any]]
) -> tuple[list[float | None], dict[str, Tensor]]:
    """Trains on `data[data rank]`; the losses (on the last stage's rank) and the whole state."""
    net = build(**setup.net)
    user_step = STEPS[setup.step]
    step = lambda part: user_step(net, part)  # noqa: E731
    mesh_rank = rank % (world_size // setup.pipeline)
    own = data[mesh_rank]
    engine = make(setup, net, own[0], step)
    assert engine.mesh.rank(DATA) == mesh_rank
    optimizer = torch.optim.SGD(engine.residence.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in own:
        optimizer.zero_grad()
        result = engine.train_step("step", step, batch, CPU, 1.0, sync=True)
        optimizer.step()
        losses.append(None if result.loss is None else float(result.loss))
    return losses, engine.residence.full_state_dict()


def reference(setup: Setup, data: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """One process on the global batches."""
    net = build(**setup.net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in data:
        result = STEPS[setup.step](net, batch)
        loss = result["loss"] if isinstance(result, dict) else result
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, net.state_dict()


def joined(data: list[list[Any]]) -> list[Any]:
    """Global batches from those of the data ranks."""
    return [tuple(torch.cat(parts) for parts in zip(*column, strict=True)) for column in zip(*data, strict=True)]


def assert_same_state(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def check(setup: Setup, data: list[list[Any]]) -> None:
    """Trained on two ranks as on one process."""
    results = run_ranks(train, 2, setup, data)
    losses, state = reference(setup, joined(data))
    told = [[loss for loss in found if loss is not None] for found, _ in results]
    if setup.pipeline == 2:
        last = 0 if setup.schedule == "zbv" else 1
        assert told[1 - last] == [], "only the last stage's rank knows the loss"
        assert told[last] == pytest.approx(losses, rel=1e-10)
    else:
        sizes = [[len(batch[1]) for batch in each] for each in data]
        if setup.step != "sum" and sizes[0] == sizes[1]:
            assert [(a + b) / 2 for a, b in zip(*told, strict=True)] == pytest.approx(losses, rel=1e-10)
    for _, found in results:
        assert_same_state(found, state)


# ------------------------------------------------------------------------------------------------ equal to one process


@pytest.mark.parametrize("step", ["mean", "sum", "dict"])
@pytest.mark.parametrize("pipeline", [2, 1])
def test_losses_that_are_means_and_sums(pipeline: int, step: str) -> None:
    data = [batches([8, 8, 8], seed=rank) for rank in range(2 // pipeline)]
    check(Setup(pipeline=pipeline, step=step), data)


@pytest.mark.parametrize("step", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [False, True])
def test_data_ranks_with_batches_of_different_sizes(step: str, ignored: bool) -> None:
    data = [batches([6, 1, 8], ignored, seed=0), batches([2, 7, 8], ignored, seed=1)]
    check(Setup(pipeline=1, step=step), data)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"])
def test_batches_of_several_sizes(schedule: str) -> None:
    check(Setup(schedule=schedule), [batches([8, 6, 1, 7, 12, 8, 2], ignored=True)])


def test_a_tied_parameter() -> None:
    setup = Setup(net={"tied": True})
    check(setup, [batches([8, 8, 8])])


def test_a_stage_with_nothing_to_learn() -> None:
    results = run_ranks(_frozen, 2)
    net = build()
    for parameter in [*net.embed.parameters(), *net.blocks[:2].parameters()]:
        parameter.requires_grad_(False)
    for batch in batches([8, 8]):
        net.zero_grad()
        mean_loss(net, batch).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    for state in results:
        assert_same_state(state, net.state_dict())


def _frozen(rank: int, world_size: int) -> dict[str, Tensor]:
    net = build()
    for parameter in [*net.embed.parameters(), *net.blocks[:2].parameters()]:
        parameter.requires_grad_(False)
    step = lambda part: mean_loss(net, part)  # noqa: E731
    data = batches([8, 8])
    engine = make(Setup(split_points=("blocks.2",)), net, data[0], step)
    for batch in data:
        net.zero_grad()
        engine.train_step("step", step, batch, CPU, 1.0, sync=True)
        with torch.no_grad():
            for parameter in engine.residence.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return engine.residence.full_state_dict()


# ------------------------------------------------------------------------------------------------ gradients


def _gradients(rank: int, world_size: int, pipeline: int) -> Any:
    net = build(tied=True)
    step = lambda part: dict_loss(net, part)  # noqa: E731
    whole = batches([8, 8])
    data_ranks = world_size // pipeline
    own = [tuple(t[rank % data_ranks :: data_ranks] for t in batch) for batch in whole]
    engine = make(Setup(pipeline=pipeline, net={"tied": True}), net, own[0], step)
    names = {id(p): name for name, p in net.named_parameters()}
    found = {}

    def gradients() -> dict[str, Tensor]:
        return {names[id(p)]: p.grad.clone() for p in engine.residence.parameters() if p.grad is not None}

    result = engine.train_step("step", step, own[0], CPU, 1.0, sync=True)
    found["once"] = gradients()
    loss = None if result.loss is None else float(result.loss)
    engine.train_step("step", step, own[0], CPU, 1.0, sync=True)
    found["scaled loss"] = loss
    net.zero_grad()
    scaled = engine.train_step("step", step, own[0], CPU, 64.0, sync=True)
    found["scaled"] = gradients()
    found["same loss"] = scaled.loss is None or float(scaled.loss) == loss
    net.zero_grad()
    engine.train_step("step", step, own[0], CPU, 1.0, sync=False)
    engine.train_step("step", step, own[1], CPU, 1.0, sync=True)
    found["accumulated"] = gradients()
    found["outputs"] = (result.outputs, result.weights)
    return found


@pytest.mark.parametrize("pipeline", [2, 1])
def test_gradients(pipeline: int) -> None:
    first, second = batches([8, 8])

    def expected(*data: Any, factor: float = 1.0) -> dict[str, Tensor]:
        net = build(tied=True)
        for batch in data:
            (mean_loss(net, batch) * factor).backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    results = run_ranks(_gradients, 2, pipeline)
    for name, gradients in (
        ("once", expected(first)),
        ("scaled", expected(first, factor=64.0)),
        ("accumulated", expected(first, second)),
    ):
        seen: set[str] = set()
        for found in results:
            for parameter, gradient in found[name].items():
                torch.testing.assert_close(gradient, gradients[parameter], rtol=1e-9, atol=1e-12)
                seen.add(parameter)
        assert seen == set(gradients), name
    assert all(found["same loss"] for found in results), "the loss given back is without the scale"
    if pipeline == 2:
        assert "embed.weight" in results[0]["once"]
        assert "embed.weight" in results[1]["once"], "the tied parameter is on both, with the whole gradient"
        assert results[0]["outputs"] == ([], [0.25] * 4)
        outputs, weights = results[1]["outputs"]
        assert weights == [0.25] * 4
        assert [set(output) for output in outputs] == [{"logits", "n"}] * 4
        net = build(tied=True)
        torch.testing.assert_close(torch.cat([output["logits"] for output in outputs]), net(first[0]).detach())


# ------------------------------------------------------------------------------------------------ dropout


@pytest.fixture(scope="module")
def one_stage_with_dropout() -> dict[str, dict[str, Tensor]]:
    data = [batches([8, 8, 8])]
    found = {}
    for name, net in DROPOUT.items():
        found[name] = run_ranks(train, 1, Setup(pipeline=1, net=net), data)[0][1]
    return found


DROPOUT: dict[str, dict[str, Any]] = {
    "inside": {"inside": 0.3},
    "between": {"between": 0.3},
    "both": {"inside": 0.2, "between": 0.2},
}


@pytest.mark.parametrize("where", DROPOUT)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_dropout_does_not_depend_on_the_stages(
    schedule: str, where: str, one_stage_with_dropout: dict[str, dict[str, Tensor]]
) -> None:
    results = run_ranks(train, 2, Setup(schedule=schedule, net=DROPOUT[where]), [batches([8, 8, 8])])
    for _, state in results:
        assert_same_state(state, one_stage_with_dropout[where])
    without = reference(Setup(), batches([8, 8, 8]))[1]
    assert (results[0][1]["embed.weight"] - without["embed.weight"]).abs().max() > 1e-3


def _dropout_states(rank: int, world_size: int) -> Any:
    """Losses of the micro-batches of two steps; whether the rank's own random state was left alone."""
    net = build(inside=0.3, between=0.3)

    def step(part: Any) -> dict[str, Tensor]:
        loss = mean_loss(net, part)
        return {"loss": loss, "own": loss.detach()}

    x, y = batches([1])[0]
    batch = (x.repeat(4, 1), y.repeat(4))
    engine = make(Setup(pipeline=1, microbatches=4), net, batch, step)
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    results = [engine.train_step("step", step, batch, CPU, 1.0, sync=True) for _ in range(2)]
    losses = [float(output["own"]) for result in results for output in result.outputs]
    return losses, torch.equal(torch.get_rng_state(), state)


def test_every_micro_batch_of_every_step_and_data_rank_has_its_own_mask() -> None:
    """All of them see the same sample, so that only the masks differ."""
    results = run_ranks(_dropout_states, 2)
    everything = [loss for losses, _ in results for loss in losses]
    assert len(everything) == 2 * 2 * 4
    assert len(set(everything)) == len(everything)
    assert all(same for _, same in results)
    assert run_ranks(_dropout_states, 2) == results, "and they are the same the next time"


# ------------------------------------------------------------------------------------------------ what lives where


def _residents(rank: int, world_size: int, setup: Setup, on_meta: bool) -> Any:
    torch.manual_seed(0)
    net = Net()
    before = {name: weakref.ref(p) for name, p in net.named_parameters()}
    step = lambda part: mean_loss(net, part)  # noqa: E731
    batch = (torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,)))
    engine = make(setup, net, batch, step)
    real = {name: t for name, t in named_tensors(net) if not is_stand_in(t)}
    bytes_here = sum(t.untyped_storage().nbytes() for t in real.values())
    blank = sum(t.untyped_storage().nbytes() for _, t in named_tensors(net) if is_stand_in(t))
    own = [id(p) for p in engine.residence.parameters()]
    return {
        "real": sorted(real),
        "elements": bytes_here // 4,
        "blank": blank // 4,
        "dropped": sorted(name for name, ref in before.items() if ref() is None),
        "optimizer's": own == [id(t) for t in real.values()],
        "names": [name for name, _ in net.named_parameters()],
        "shapes": {name: tuple(p.shape) for name, p in net.named_parameters()},
    }


@pytest.mark.parametrize(
    ("setup", "owned"),
    [
        (Setup(split_points=("blocks.2",)), [["embed", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]),
        (Setup(split_points=("head",)), [["embed", *[f"blocks.{i}" for i in range(4)]], ["head"]]),
        (
            Setup(schedule="zbv", split_points=("blocks.1", "blocks.2", "blocks.3")),
            [["embed", "blocks.0", "blocks.3", "head"], ["blocks.1", "blocks.2"]],
        ),
        (
            Setup(schedule="interleaved", split_points=("blocks.1", "blocks.2", "blocks.3")),
            [["embed", "blocks.0", "blocks.2"], ["blocks.1", "blocks.3", "head"]],
        ),
    ],
)
def test_each_rank_holds_its_stages_and_nothing_else(setup: Setup, owned: list[list[str]]) -> None:
    net = Net()
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    for found, units in zip(run_ranks(_residents, 2, setup, False), owned, strict=True):
        here = {name for name in sizes if any(name.startswith(unit + ".") for unit in units)}
        assert set(found["real"]) == here
        assert found["elements"] == sum(sizes[name] for name in here)
        assert found["blank"] == len(sizes) - len(here), "one element each"
        assert set(found["dropped"]) == set(sizes) - here, "nobody holds the old tensors"
        assert found["optimizer's"]
        assert found["names"] == list(sizes)
        assert found["shapes"] == {name: tuple(p.shape) for name, p in net.named_parameters()}


def _unseeded(rank: int, world_size: int, pipeline: int, on_meta: bool) -> Any:
    torch.manual_seed(100 + rank)
    if on_meta:
        with torch.device("meta"):
            net = Net(tied=True)
    else:
        net = Net(tied=True)
    step = lambda part: mean_loss(net, part)  # noqa: E731
    batch = (torch.ones(8, FEATURES), torch.zeros(8, dtype=torch.long))
    make(Setup(pipeline=pipeline), net, batch, step)
    return {name: p.detach().clone() for name, p in named_tensors(net) if not is_stand_in(p)}


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_ranks_that_were_not_seeded_start_equal(pipeline: int, on_meta: bool) -> None:
    """Data replicas in all, stages in what they share."""
    first, second = run_ranks(_unseeded, 2, pipeline, on_meta)
    shared = set(first) & set(second)
    assert shared == ({"embed.weight"} if pipeline == 2 else {name for name, _ in Net(tied=True).named_parameters()})
    for name in shared:
        assert torch.equal(first[name], second[name]), name
    assert not any(value.isnan().any() for value in [*first.values(), *second.values()])


@pytest.mark.slow
def test_four_unseeded_ranks_start_equal() -> None:
    results = run_ranks(_unseeded, 4, 2, False)
    for stage in range(2):
        left, right = results[2 * stage], results[2 * stage + 1]
        assert set(left) == set(right)
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(torch.equal(results[0]["embed.weight"], found["embed.weight"]) for found in results)


def _modes(rank: int, world_size: int) -> Any:
    net = build(inside=0.5)
    net.blocks[1].eval()
    net.blocks[2].requires_grad_(False)
    step = lambda part: mean_loss(net, part)  # noqa: E731
    engine = make(Setup(), net, batches([8])[0], step)
    engine.train_step("step", step, batches([8])[0], CPU, 1.0, sync=True)
    return {name: module.training for name, module in net.named_modules()}


def test_a_part_in_evaluation_mode_stays_so() -> None:
    """A frozen backbone."""
    for modes in run_ranks(_modes, 2):
        assert [name for name, training in modes.items() if not training] == [
            *("blocks.1", "blocks.1.norm", "blocks.1.fc", "blocks.1.drop"),
        ]


def _state_of_another(rank: int, world_size: int) -> Any:
    net = build()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    step = lambda part: mean_loss(net, part)  # noqa: E731
    engine = make(Setup(), net, batches([8])[0], step)
    full = engine.residence.full_state_dict()
    same = set(full) == set(before) and all(torch.equal(full[name], before[name]) for name in before)
    try:
        net(batches([4])[0][0])
    except Exception as error:  # noqa: BLE001
        return same, engine.residence.own_keys(), type(error).__name__, str(error)
    return same, engine.residence.own_keys(), None, None


def test_the_whole_state_and_a_use_by_mistake() -> None:
    results = run_ranks(_state_of_another, 2)
    keys = list(build().state_dict())
    assert [same for same, *_ in results] == [True, True]
    assert sorted([*results[0][1], *results[1][1]]) == sorted(keys)
    for rank, (_, own, kind, text) in enumerate(results):
        assert own == [key for key in keys if key in set(own)]
        assert kind == "StepError"
        away = "'blocks.2.norm' (LayerNorm)" if rank == 0 else "'embed' (Linear)"
        assert f"{away} is not on this process" in text
        assert f"lives on pipeline stage {1 - rank}" in text
        assert f"this is pipeline rank {rank}" in text
        assert "full_state_dict()" in text


# ------------------------------------------------------------------------------------------------ evaluation


def _evaluation(rank: int, world_size: int, schedule: str) -> Any:
    net = build(inside=0.2, between=0.2)
    data = batches([8, 5])
    training = lambda part: mean_loss(net, part)  # noqa: E731
    predicting = lambda part: dict_loss(net, part)  # noqa: E731
    engine = make(Setup(schedule=schedule, net={"inside": 0.2, "between": 0.2}), net, data[0], training)

    def evaluate() -> list[Any]:
        net.eval()
        with torch.no_grad():
            outputs = [engine.forward_step("evaluation", predicting, batch, CPU).outputs for batch in data]
        net.train()
        return outputs

    before = evaluate()
    optimizer = torch.optim.SGD(engine.residence.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        result = engine.train_step("step", training, data[0], CPU, 1.0, sync=True)
        optimizer.step()
        losses.append(result.loss)
    return before, evaluate(), losses, engine.residence.full_state_dict(), engine.is_last


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_evaluation_before_and_after_training(schedule: str) -> None:
    results = run_ranks(_evaluation, 2, schedule)
    assert [is_last for *_, is_last in results] == ([True, False] if schedule == "zbv" else [False, True])
    for before, after, _, state, is_last in results:
        if not is_last:
            assert before == after == [[], []]
            continue
        for outputs, weights in ((before, build().state_dict()), (after, state)):
            net = build().eval()
            net.load_state_dict(weights)
            for (output,), batch in zip(outputs, batches([8, 5]), strict=True):
                torch.testing.assert_close(output["logits"], net(batch[0]).detach(), rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(output["loss"], mean_loss(net, batch).detach(), rtol=1e-12, atol=1e-12)
        assert not torch.equal(before[0][0]["logits"], after[0][0]["logits"])


# ------------------------------------------------------------------------------------------------ refusals


def failing(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> dict[int, str]:
    """What each rank says; all of them fail in time."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fn, world_size, *args, timeout=60)
    tracebacks = caught.value.tracebacks
    assert set(tracebacks) == set(range(world_size))
    assert not any("killed. It was here" in text for text in tracebacks.values()), str(caught.value)
    return tracebacks


def _changes_order(rank: int, world_size: int, skipped: int) -> None:
    net = build()
    skip: set[int] = set()

    def step(part: Any) -> Tensor:
        x = net.embed(part[0])
        for index, block in enumerate(net.blocks):
            if index not in skip:
                x = block(x)
        return F.cross_entropy(net.head(x), part[1])

    data = batches([8, 8])
    engine = make(Setup(split_points=("blocks.2",)), net, data[0], step)
    engine.train_step("step", step, data[0], CPU, 1.0, sync=True)
    skip.add(skipped)
    engine.train_step("step", step, data[1], CPU, 1.0, sync=True)


@pytest.mark.parametrize("skipped", [0, 2])
def test_an_order_of_calls_that_changes_is_refused(skipped: int) -> None:
    tracebacks = failing(_changes_order, skipped)
    told = [text for text in tracebacks.values() if "The order of calls in the step changed" in text]
    assert told
    assert any(f"was 'blocks.{skipped}' when the step was traced and is 'blocks.{skipped + 1}' now" in t for t in told)


def _ends_early(rank: int, world_size: int) -> None:
    net = build()
    short = False

    def step(part: Any) -> Tensor:
        x = net.embed(part[0])
        for block in net.blocks:
            x = block(x)
        return x.pow(2).mean() if short else F.cross_entropy(net.head(x), part[1])

    data = batches([8, 8])
    engine = make(Setup(), net, data[0], step)
    engine.train_step("step", step, data[0], CPU, 1.0, sync=True)
    short = True
    engine.train_step("step", step, data[1], CPU, 1.0, sync=True)


def test_a_step_that_ends_early_is_refused() -> None:
    tracebacks = failing(_ends_early)
    assert "The step ended after 5 unit calls; it made 6 when it was traced (next would be 'head')" in tracebacks[1]


def _needs_what_is_away(rank: int, world_size: int) -> None:
    net = build()
    more = False

    def step(part: Any) -> Tensor:
        first = net.blocks[0](net.embed(part[0]))
        x = first
        for block in net.blocks[1:]:
            x = block(x)
        return F.cross_entropy(net.head(x + first if more else x), part[1])

    data = batches([8, 8])
    engine = make(Setup(split_points=("blocks.2",)), net, data[0], step)
    engine.train_step("step", step, data[0], CPU, 1.0, sync=True)
    more = True
    engine.train_step("step", step, data[1], CPU, 1.0, sync=True)


def test_a_value_that_was_not_sent_is_refused() -> None:
    text = failing(_needs_what_is_away)[1]
    assert "AbsentValueError" in text
    assert "'head' on stage 1 needs a value of shape (2, 8) that lives on another stage" in text


def _returns_what_is_away(rank: int, world_size: int) -> None:
    net = build()
    more = False

    def step(part: Any) -> Tensor:
        first = net.blocks[0](net.embed(part[0]))
        x = first
        for block in net.blocks[1:]:
            x = block(x)
        loss = F.cross_entropy(net.head(x), part[1])
        return first.mean() if more else loss

    data = batches([8, 8])
    engine = make(Setup(split_points=("blocks.2",)), net, data[0], step)
    engine.train_step("step", step, data[0], CPU, 1.0, sync=True)
    more = True
    engine.train_step("step", step, data[1], CPU, 1.0, sync=True)


def test_a_loss_from_what_is_away_is_refused() -> None:
    assert "computed from values that are not on the last stage" in failing(_returns_what_is_away)[1]


def _other_model(rank: int, world_size: int) -> None:
    net = build()
    if rank == 1:
        del net.blocks[3]
    make(Setup(), net, batches([8])[0], lambda part: mean_loss(net, part))


def test_ranks_with_different_models_are_refused() -> None:
    tracebacks = failing(_other_model)
    assert "all ranks must run the same model and the same step" in tracebacks[1]
    assert "rank 1: StepError" in tracebacks[0]


def _fails_on_one(rank: int, world_size: int, failing_rank: int) -> None:
    net = build()

    def step(part: Any) -> Tensor:
        if rank == failing_rank:
            raise ValueError("the user's own error")
        return mean_loss(net, part)

    make(Setup(), net, batches([8])[0], step)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_while_tracing_on_one_rank_ends_all(failing_rank: int) -> None:
    tracebacks = failing(_fails_on_one, failing_rank)
    assert "ValueError: the user's own error" in tracebacks[failing_rank].splitlines()[-1]
    assert "RemoteError" in tracebacks[1 - failing_rank]
    assert f"rank {failing_rank}: ValueError: the user's own error" in tracebacks[1 - failing_rank]


class Scaled(nn.Linear):
    """Says nowhere how its scale starts."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _nothing_initialises(rank: int, world_size: int, where: str) -> None:
    with torch.device("meta"):
        net = Net(tied=True)
        setattr(net, where, Scaled(*(FEATURES, WIDTH) if where == "embed" else (FEATURES, CLASSES)))
    batch = (torch.ones(8, FEATURES), torch.zeros(8, dtype=torch.long))
    make(Setup(), net, batch, lambda part: mean_loss(net, part))


@pytest.mark.parametrize(("where", "rank"), [("embed", 0), ("out", 1)])
def test_what_nothing_initialises_ends_all_ranks(where: str, rank: int) -> None:
    tracebacks = failing(_nothing_initialises, where)
    assert f"'{where}.scale' was built on the meta device and nothing initialises it" in tracebacks[rank]
    assert f"rank {rank}: StepError: '{where}.scale' was built on the meta device" in tracebacks[1 - rank]


# ------------------------------------------------------------------------------------------------ big models


def _sets_up_fast(rank: int, world_size: int) -> tuple[float, int]:
    torch.manual_seed(0)
    net = GPT(layers=48)
    x = torch.randint(0, VOCABULARY, (8, LENGTH))
    step = lambda part: net(*part)[1]  # noqa: E731
    start = time.monotonic()
    engine = make(Setup(microbatches="auto"), net, (x, x), step)
    seconds = time.monotonic() - start
    engine.train_step("step", step, (x, x), CPU, 1.0, sync=True)
    return seconds, len([name for name in engine.book.units.blocks if 0 in engine.ownership.units[name]])


@pytest.mark.slow
def test_many_layers_are_set_up_in_seconds() -> None:
    for seconds, first_stage in run_ranks(_sets_up_fast, 2):
        assert seconds < 15
        assert 22 <= first_stage <= 26
