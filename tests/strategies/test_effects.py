"""What a step leaves on the module, taken as data and applied elsewhere."""

import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import Running

from lnn_lightning.parallel.exchange import TreeChannel
from lnn_lightning.strategies.effects import (
    EffectWatch,
    apply_effects,
    find_metrics,
    merge_micro_batches,
    set_metric_group,
)
from tests.helpers.ranks import run_ranks


@dataclass
class Result:
    loss: torch.Tensor
    text: str


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)
        self.register_buffer("average", torch.zeros(2))
        self.outputs: list[Any] = [torch.tensor(9.0)]
        self.by_loader: list[list[Any]] = [[], []]
        self.history: dict[str, Any] = {"loss": [], "best": math.inf}
        self.groups: defaultdict[str, list[Any]] = defaultdict(list)
        self.window: deque[Any] = deque(maxlen=3)
        self.names: set[str] = {"a"}
        self.count, self.total, self.text, self.nothing = 0, 0.0, "start", None
        self.pair = (1, 2)
        self.state = torch.zeros(3)
        self.own = object()
        self._hidden = 0
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.curve = BinaryAUROC()
        self.loose = {"max": MaxMetric()}
        self.recent = Running(SumMetric(), window=2)
        self.many = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])
        self.lists = MetricCollection({"a": BinaryAUROC(), "b": BinaryAUROC(max_fpr=0.5)}, compute_groups=False)

    def step(self, number: float) -> None:
        """Leaves something behind in every way."""
        value = torch.tensor(number, requires_grad=True) * 2
        self.outputs.append(value)
        self.by_loader[1].append({"loss": value, "n": 3, "preds": torch.full((2,), number)})
        self.history["loss"].append(value.item())
        self.history["best"] = min(self.history["best"], value.item())
        self.history[f"step {number}"] = [Result(value, "x")]
        self.groups[f"loader {int(number)}"].append(OrderedDict(a=value))
        self.window.append(number)
        self.names.add(f"name {number}")
        self.count += 1
        self.total += number
        self.text += "!"
        self.nothing = (number, None)
        self.pair = (3, *self.pair)
        self.state[0] += number
        self.average = self.average * 0.9 + number
        self.latest = value
        self.own = object()
        self._hidden += 1
        logits = torch.eye(4)[:3].roll(int(number), 0)
        self.accuracy.update(logits, torch.arange(3))
        self.curve.update(torch.tensor([0.1 * number, 0.8]), torch.tensor([0, 1]))
        self.loose["max"].update(number)
        self.recent.update(number)
        self.many.update(logits, torch.arange(3))
        self.lists.update(torch.tensor([0.2, 0.1 * number]), torch.tensor([0, 1]))


def described(value: Any) -> Any:
    """A value that can be compared."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.detach().tolist())
    if isinstance(value, Result):
        return ("result", described(vars(value)))
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return (type(value), [described(item) for item in value])
    return value


def state_of(module: Module) -> dict[str, Any]:
    names = (
        "outputs",
        "by_loader",
        "history",
        "groups",
        "window",
        "names",
        "count",
        "total",
        "text",
        "nothing",
        "pair",
    )
    state = {name: described(getattr(module, name)) for name in (*names, "state", "average")}
    state["latest"] = described(getattr(module, "latest", "missing"))
    for name, metric in find_metrics(module).items():
        if not isinstance(metric, MetricCollection):
            state[name] = described({key: getattr(metric, key) for key in (*metric._defaults, "_update_count")})
    return state


def computed(module: Module) -> dict[str, Any]:
    return {name: described(metric.compute()) for name, metric in find_metrics(module).items()}


def test_a_difference_makes_another_module_equal() -> None:
    here, there = Module(), Module()
    for number in (1.0, 2.0, 3.0):
        watch = EffectWatch(here)
        here.step(number)
        before = state_of(there)
        other = EffectWatch(there)
        own, hidden, lists = there.own, there._hidden, (there.outputs, there.history["loss"], there.groups)
        delta = watch.delta()
        assert set(delta) >= {"", "accuracy", "curve", "loose.max", "recent", "many.MulticlassF1Score"}
        other.apply(delta)
        assert state_of(there) == state_of(here) != before
        assert there.own is own and there._hidden == hidden, "what is not plain, or hidden, stays a matter of the rank"
        assert (there.outputs, there.history["loss"], there.groups) == lists and there.outputs is lists[0]
        assert not there.outputs[-1].requires_grad and here.outputs[-1].requires_grad
        there.step(number)  # whatever happens there in between
        there.outputs.clear()
        there.by_loader.append([5])
        there.groups["extra"].append(1)
        other.apply(delta)
        assert state_of(there) == state_of(here)
        assert computed(there) == computed(here)
    apply_effects(there, _appended(there, 4.0))
    assert there.outputs[-1].item() == 4.0 and there.outputs[-2].item() == 6.0
    assert EffectWatch(here).delta() == {}


def _appended(module: Module, number: float) -> Any:
    watch = EffectWatch(module)
    module.outputs.append(torch.tensor(number))
    delta = watch.delta()
    watch.rollback()
    return delta


def test_removals_and_replacements() -> None:
    here, there = Module(), Module()
    for module in (here, there):
        module.step(1.0)
        module.gone = 3
    watch, other = EffectWatch(here), EffectWatch(there)
    del here.gone
    here.history.pop("best")
    here.outputs.pop(0)
    here.by_loader = here.by_loader + [[1]]
    here.names = None
    here.state = torch.ones(5)
    here.history["loss"][0] = 7.0
    here.curve.reset()
    here.groups = {"plain": 1}
    other.apply(watch.delta())
    assert state_of(here) == state_of(there) and not hasattr(there, "gone")


def test_rollback_puts_everything_back() -> None:
    module = Module()
    for number in (1.0, 2.0):
        module.step(number)
        module.state = torch.arange(3.0)
        before, objects = state_of(module), [module.outputs, module.history, module.window, module.curve.preds]
        watch = EffectWatch(module)
        module.step(5.0)
        module.state.mul_(3)
        module.outputs[0].fill_(0)
        module.by_loader.clear()
        module.history.clear()
        del module.text
        module.new = 3
        module.curve.reset()
        module.accuracy.tp += 100
        watch.rollback()
        assert state_of(module) == before and not hasattr(module, "new")
        assert all(a is b for a, b in zip(objects, (module.outputs, module.history, module.window), strict=False))
        watch.rollback()
        assert state_of(module) == before, "again"
        with pytest.raises(KeyboardInterrupt), watch.preserved():
            module.step(7.0)
            raise KeyboardInterrupt
        assert state_of(module) == before
    reference = Module()
    reference.step(1.0)
    reference.step(2.0)
    assert computed(module) == computed(reference)


def test_preserved_within_a_step_keeps_the_step() -> None:
    module, reference = Module(), Module()
    watch = EffectWatch(module)
    module.step(1.0)
    with watch.preserved():
        module.step(9.0)
    watch.mark()
    module.step(2.0)
    watch.mark()
    for number in (1.0, 2.0):
        reference.step(number)
    assert state_of(module) == state_of(reference)
    watch.rollback()
    assert state_of(module) == state_of(Module())


def test_inference_mode_and_large_tensors() -> None:
    module, other = Module(), Module()
    for each in (module, other):
        each.large = torch.zeros(1 << 17)
    with torch.inference_mode():
        module.state = torch.zeros(2)
        watch, elsewhere = EffectWatch(module), EffectWatch(other)
        module.state += 1
        module.outputs.append(torch.ones(2))
        module.large[5] = 1
        delta = watch.delta()
        assert set(delta[""]) == {"state", "outputs", "large"}
        elsewhere.apply(delta)
    assert state_of(other)["state"] == state_of(module)["state"] and other.large[5] == 1
    watch.rollback()
    assert module.state.tolist() == [0, 0] and len(module.outputs) == 1


def test_long_lists_are_not_searched_but_grow() -> None:
    here, there = Module(), Module()
    for module in (here, there):
        module.outputs.extend(torch.tensor(float(i)) for i in range(1000))
    watch, other = EffectWatch(here), EffectWatch(there)
    here.outputs.append(torch.tensor(3.0))
    delta = watch.delta()
    assert delta[""]["outputs"][:3] == ("list", 1001, {}) and len(delta[""]["outputs"][3]) == 1
    other.apply(delta)
    assert state_of(here) == state_of(there)
    watch.begin()
    here.outputs[4] = torch.tensor(-1.0)
    assert watch.delta()[""]["outputs"][0] == "set"
    watch.rollback()
    assert here.outputs[4].item() == 3.0


# ---------------------------------------------------------------------------------------------- micro-batches


def merged_outputs(per_part: list[list[Any]], weights: list[float], sizes: list[int] | None = None) -> list[Any]:
    """What is in `outputs` after one step whose parts appended these."""
    module = Module()
    module.outputs.clear()
    watch = EffectWatch(module)
    for items in per_part:
        for item in items:
            module.outputs.append(item)
        watch.mark()
    watch.apply(watch.merged(weights, sizes))
    return module.outputs


def test_appended_items_merge_by_position() -> None:
    first = [torch.tensor(1.0), torch.ones(2, 3), 0.5, "a", {"l": torch.tensor(2.0), "n": 2}, None]
    second = [torch.tensor(3.0), torch.zeros(1, 3), 2.0, "b", {"l": torch.tensor(8.0), "n": 1}, None]
    loss, preds, number, text, inner, nothing = merged_outputs([first, second], [2.0, 1.0], [2, 1])
    assert loss.item() == pytest.approx(5 / 3) and preds.tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert number == pytest.approx(1.0) and text == "b" and nothing is None
    assert inner["l"].item() == pytest.approx(4.0) and inner["n"] == 3


def test_kinds_of_items() -> None:
    def one(first: Any, second: Any, sizes: list[int] | None = None) -> Any:
        (item,) = merged_outputs([[first], [second]], [1.0, 3.0], sizes)
        return item

    tensor = torch.tensor
    assert one(tensor(1.0, dtype=torch.bfloat16), tensor(2.0, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert one(tensor(3), tensor(4)).item() == 7, "counts of right answers"
    assert one(tensor(True), tensor(False)).item() is False
    assert one(5, 5) == 5 and one(2, 1, [2, 1]) == 3, "numbers of samples, when they are"
    assert one(True, False) is False
    assert one(tensor([1.0, 2.0, 3.0]), tensor([3.0, 2.0, 1.0]), [4, 4]).tolist() == [2.5, 2.0, 1.5], "a value a class"
    assert one(tensor([1, 2, 3]), tensor([4, 5, 6]), [4, 4]).tolist() == [4, 5, 6]
    assert one(tensor([1, 2]), tensor([3]), [2, 1]).tolist() == [1, 2, 3]
    assert one(torch.ones(2, 3), torch.ones(2, 4)).shape == (2, 4)
    assert one([1, 2], [3], [2, 1]) == [1, 2, 3], "a list with an entry a sample"
    assert one((tensor(1.0), "a"), (tensor(5.0), "b")) == (tensor(4.0), "b")
    assert one({"a": 1}, {"b": 1}) == {"b": 1} and one("a", 1) == 1
    assert one(Result(tensor(1.0), "x"), Result(tensor(5.0), "y")) == Result(tensor(4.0), "y")


def test_extended_lists_keep_all_samples() -> None:
    assert merged_outputs([[0.1, 0.2], [0.3, 0.4]], [1, 1], [2, 2]) == [0.1, 0.2, 0.3, 0.4]
    assert merged_outputs([[0.1, 0.2], [0.3]], [1, 1]) == [0.1, 0.2, 0.3]
    assert merged_outputs([[1.0], []], [1, 1]) == [1.0] and merged_outputs([[], [2.0]], [1, 1]) == [2.0]


def test_a_part_without_weight_does_not_count() -> None:
    assert merged_outputs([[1.0], [math.nan]], [1, 0]) == [1.0]
    assert merged_outputs([[torch.tensor(math.nan)], [torch.tensor(2.0)]], [0, 3])[0].item() == 2.0
    assert merged_outputs([[1.0], [2.0]], [0, 0]) == [1.5]


def test_the_rest_is_taken_one_after_the_other() -> None:
    parts, whole = Module(), Module()
    watch = EffectWatch(parts)
    for number in (1.0, 2.0, 3.0):
        parts.step(number)
        watch.mark()
        whole.step(number)
    merged = watch.merged([1, 1, 1])
    watch.apply(merged)
    before, after = state_of(whole), state_of(parts)
    for name in ("outputs", "by_loader", "history"):
        assert before.pop(name) != after.pop(name)
    assert before == after and computed(parts) == computed(whole)
    assert [t.item() for t in parts.outputs] == [9.0, 4.0] and parts.history["loss"] == [4.0]
    assert parts.history["best"] == 2.0 and "step 2.0" in parts.history
    assert parts.by_loader[0] == [] and parts.by_loader[1][0]["preds"].tolist() == [1, 1, 2, 2, 3, 3]
    assert merge_micro_batches([], []) == {}


def test_a_list_made_in_the_step() -> None:
    module = Module()
    watch = EffectWatch(module)
    for number in (1.0, 2.0):
        if not hasattr(module, "fresh"):
            module.fresh = {"x": []}
        module.fresh["x"].append(number)
        watch.mark()
    watch.apply(watch.merged([1, 1]))
    assert module.fresh == {"x": [1.0, 2.0]}


def test_later_parts_change_what_earlier_ones_appended() -> None:
    module = Module()
    module.outputs.clear()
    watch = EffectWatch(module)
    module.outputs.append([1])
    watch.mark()
    module.outputs[0].append(2)
    module.outputs.append([3])
    watch.mark()
    watch.apply(watch.merged([1, 1]))
    assert module.outputs == [[1, 2], [3]]


# ---------------------------------------------------------------------------------------------- metrics


def test_compute_groups_stay_right() -> None:
    """Metrics of one compute group share their lists once they were updated."""

    def collection() -> pl.LightningModule:
        module = Module()
        module.lists = MetricCollection({"a": BinaryAUROC(), "b": BinaryAUROC(max_fpr=0.5)})
        return module

    here, there, reference = collection(), collection(), collection()
    for number in (1.0, 2.0, 5.0):
        for part in (0.0, 0.25):
            reference.lists.update(torch.tensor([0.4, 0.1 * number + part]), torch.tensor([0, 1]))
        watch, other = EffectWatch(here), EffectWatch(there)
        for part in (0.0, 0.25):
            here.lists.update(torch.tensor([0.4, 0.1 * number + part]), torch.tensor([0, 1]))
            watch.mark()
        merged = watch.merged([1, 1])
        watch.apply(merged)
        other.apply(merged)
    lists = [[len(metric.preds) for metric in m.lists.values(copy_state=False)] for m in (here, there, reference)]
    assert lists == [[6, 6]] * 3
    assert here.lists.compute() == there.lists.compute() == reference.lists.compute()
    here.lists.update(torch.tensor([0.4]), torch.tensor([0]))
    assert here.lists._modules["a"].preds is here.lists._modules["b"].preds
    watch = EffectWatch(here)
    here.lists.update(torch.tensor([0.3]), torch.tensor([1]))
    delta = watch.delta()
    for _ in range(2):
        watch.apply(delta)
        assert [len(metric.preds) for metric in here.lists.values(copy_state=False)] == [8, 8]
    for module in (here, there):
        module.lists.reset()
        assert module.lists["b"].preds == []


def test_find_metrics_and_their_group() -> None:
    module = Module()
    found = find_metrics(module)
    assert {"accuracy", "recent", "recent.base_metric", "many", "many.MulticlassF1Score", "loose.max"} <= set(found)
    mine, data = object(), object()
    module.accuracy.process_group = mine
    set_metric_group(module, data)  # type: ignore[arg-type]
    assert module.accuracy.process_group is mine and module.loose["max"].process_group is data
    assert module.many["MulticlassF1Score"].process_group is data


def _stage_and_data(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks 0 and 1 are the first stage, 2 and 3 the last; columns are data ranks."""
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    datas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, data = divmod(rank, 2)
    channel = TreeChannel(pipelines[data], torch.device("cpu"))
    module = Module()
    module.mean, module.cat = MeanMetric(), CatMetric()
    set_metric_group(module, datas[stage])
    watch = EffectWatch(module)
    for batch in range(3):
        watch.begin()
        module.count += 10  # before the first block: on every stage, and on the last stage too
        if stage == 1:
            for part in range(2):
                module.step(float(1 + data + batch + part))
                module.mean.update(torch.tensor([1.0 + data, batch * 1.0]))
                module.cat.update(torch.full((1 + data,), float(batch)))
                watch.mark()
        merged = watch.merged([1.0, 1.0], [2, 2]) if stage == 1 else None
        watch.apply(channel.broadcast(merged, source=1))
    stacked = torch.stack(module.outputs)  # the idiom of an epoch end hook
    return {"state": state_of(module), "computed": computed(module), "mean": stacked.mean().item()}


@pytest.mark.slow
def test_every_rank_sees_one_process() -> None:
    rows = run_ranks(_stage_and_data, 4)
    for data in (0, 1):
        first, last = rows[data], rows[2 + data]
        assert first["state"] == last["state"] and first["mean"] == last["mean"]
        assert first["state"]["count"] == 36 and len(first["state"]["outputs"][1]) == 4
    assert rows[0]["state"] != rows[1]["state"]
    for row in rows[1:]:
        assert row["computed"] == rows[0]["computed"], "metrics agree over all ranks"
    whole = MeanMetric()
    for data in (0, 1):
        for batch in range(3):
            for _ in range(2):
                whole.update(torch.tensor([1.0 + data, batch * 1.0]))
    assert rows[0]["computed"]["mean"] == described(whole.compute())
    assert len(rows[0]["computed"]["cat"][2]) == 3 * 2 * (1 + 2)
