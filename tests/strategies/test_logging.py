"""What a step logs: recorded, muted, merged, logged once."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MinMaxMetric

from lnn_lightning.strategies.logging import LogEntry, StepRecorder, merge, replay

QUIET: dict[str, Any] = dict(
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1
)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)
        self.accuracy = MulticlassAccuracy(4)
        self.highest = MinMaxMetric(MeanMetric())
        self.many = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)], prefix="val/")
        self.loose = [MaxMetric()]


class Stop(BaseException):
    pass


def everything_of(module: pl.LightningModule) -> dict[str, Any]:
    """Attributes of all submodules, by identity, in their order."""
    return {
        f"{name}.{key}": id(value)
        for name, child in [*module.named_modules(), ("loose", module.loose[0])]
        for key, value in vars(child).items()
    }


# ---------------------------------------------------------------------------------------------- recording


def test_recording_keeps_what_was_said() -> None:
    module = Module()
    recorder = StepRecorder(module)
    before = everything_of(module)
    loss = torch.tensor(2.0, requires_grad=True) * 1
    for index in range(2):
        with recorder.recording(index):
            module.log("loss", loss, True, on_epoch=True)
            module.log_dict({"a": 1, "b": torch.tensor([3.0])}, sync_dist=True, batch_size=4)
            module.accuracy(torch.eye(4), torch.arange(4))
            module.log("acc", module.accuracy, on_step=True)
    assert everything_of(module).keys() == before.keys() and "log" not in vars(module)
    entries = recorder.take()
    assert recorder.take() == [] and [e.micro_batch for e in entries] == [0] * 4 + [1] * 4
    assert [e.name for e in entries[:4]] == ["loss", "a", "b", "acc"]
    assert entries[0].kwargs == {"prog_bar": True, "on_epoch": True} and not entries[0].value.requires_grad
    assert entries[1].kwargs["sync_dist"] is True and entries[1].kwargs["batch_size"] == 4
    assert entries[3].metric == "accuracy" and entries[3].value.item() == 1.0
    loss.detach().fill_(5.0)
    assert entries[0].value.item() == 2.0, "what it was when it was logged"


def test_recording_ends_with_the_step_however_it_ends() -> None:
    module = Module()
    recorder = StepRecorder(module)
    mine: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    module.__dict__["log"] = mine
    with pytest.raises(Stop):
        with recorder.recording(0):
            module.log("x", 1.0)
            raise Stop
    assert vars(module)["log"] is mine and len(recorder.take()) == 1


def test_an_override_of_any_shape() -> None:
    class Own(Module):
        def log(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("not while recording")

    module = Own()
    recorder = StepRecorder(module)
    with recorder.recording(0):
        module.log("x", 1.0, True, on_step=True)
    (entry,) = recorder.take()
    assert (entry.name, entry.value, entry.kwargs) == ("x", 1.0, {"prog_bar": True, "on_step": True})


def test_a_metric_without_a_name_is_refused() -> None:
    module = Module()
    recorder = StepRecorder(module)
    with recorder.recording(0):
        module.log("loose", module.loose[0])
        with pytest.raises(MisconfigurationException, match="MeanMetric.*set it as an attribute"):
            module.log("x", MeanMetric())
    assert recorder.take()[0].metric == "loose.0"


# ---------------------------------------------------------------------------------------------- muting


class Noisy(Logger):
    """A logger that must not be written to."""

    name, version, save_dir = "noisy", 3, "/somewhere"

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Any] = []

    @property
    def experiment(self) -> Any:
        raise AssertionError("made for nothing")

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.writes.append(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.writes.append(params)


def test_muted_step_says_and_leaves_nothing(capsys: pytest.CaptureFixture) -> None:
    module, logger = Module(), Noisy()
    module.trainer = trainer = pl.Trainer(logger=logger, **QUIET)
    recorder, shown = StepRecorder(module), []
    module.accuracy(torch.eye(4), torch.tensor([0, 1, 2, 2]))
    states = {n: [id(getattr(m, s)) for s in m._defaults] for n, m in module.named_modules() if hasattr(m, "_defaults")}
    before, loggers = everything_of(module), trainer._loggers
    logits, target = torch.randn(5, 4), torch.arange(5) % 4

    def step() -> None:
        module.log("loss", logged := torch.tensor(1.0))
        module.log_dict({"x": 2.5, "acc": module.accuracy})
        module.log_dict(module.many)
        assert module.accuracy(logits, target).shape == () and module.accuracy.compute() == 0
        assert module.accuracy.update(logits, target) is None and module.accuracy.reset() is None
        assert module.many(logits, target) == {"val/MulticlassAccuracy": 0, "val/MulticlassF1Score": 0}
        module.many.update(logits, target)
        assert set(module.many.compute()) == {"val/MulticlassAccuracy", "val/MulticlassF1Score"}
        module.highest(logits.mean())
        module.loose[0].update(3.0)
        module.print("hush")
        assert isinstance(module.logger, Noisy) and module.logger.name == "noisy" and module.logger.version == 3
        module.logger.log_metrics({"m": logits})
        with module.logger.experiment.run("x") as run:
            run["series"].append(target)
            run.step = 3
        assert module.trainer.logger.save_dir == "/somewhere" and list(module.logger.experiment.runs) == []
        assert any(value is logged for value in shown)

    with recorder.muted(shown.append):
        step()
    assert recorder.take() == [] and logger.writes == [] and capsys.readouterr().out == ""
    assert everything_of(module) == before and trainer._loggers is loggers
    assert module.accuracy._update_count == 1 and not module.many._groups_checked and len(module.many._groups) == 2
    assert states == {
        n: [id(getattr(m, s)) for s in m._defaults] for n, m in module.named_modules() if hasattr(m, "_defaults")
    }
    assert 2.5 in [value for value in shown if isinstance(value, float)]
    assert any(value is logits for value in shown) and any(value is target for value in shown)

    with pytest.raises(Stop):
        with recorder.muted():
            raise Stop
    assert everything_of(module) == before and trainer._loggers is loggers


def test_audible_within_muted() -> None:
    module, logger = Module(), Noisy()
    module.trainer = pl.Trainer(logger=logger, **QUIET)
    recorder = StepRecorder(module)
    before = everything_of(module)
    with recorder.muted(), recorder.muted():
        silent = everything_of(module)
        with recorder.audible():
            assert everything_of(module) == before and module.logger is logger
            with recorder.recording(0):
                module.log("heard", 1.0)
            with recorder.muted():
                module.log("unheard", 1.0)
                module.accuracy.update(torch.eye(4), torch.arange(4))
            module.accuracy.update(torch.eye(4), torch.arange(4))
        assert everything_of(module).keys() == silent.keys()
        module.log("unheard", 1.0)
        module.accuracy.update(torch.eye(4), torch.arange(4))
    assert [entry.name for entry in recorder.take()] == ["heard"] and module.accuracy._update_count == 1
    assert everything_of(module).keys() == before.keys() and module.logger is logger


# ---------------------------------------------------------------------------------------------- merging


def entries(values: list[Any], **kwargs: Any) -> list[LogEntry]:
    return [LogEntry("x", value, kwargs, index) for index, value in enumerate(values)]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        *[("mean", 3.5), ("MEAN", 3.5), ("avg", 3.5), (torch.mean, 3.5), ("sum", 7.0), (torch.sum, 7.0), (sum, 7.0)],
        *[("max", 4.0), (max, 4.0), ("min", 1.0), (torch.min, 1.0), (lambda values: values.prod(), 8.0)],
    ],
)
def test_reductions(reduce_fx: Any, expected: float) -> None:
    values = [torch.tensor(1.0), torch.tensor([2.0]), torch.tensor(4.0)]
    (merged,) = merge(entries(values, reduce_fx=reduce_fx), [1.0, 0.0, 5.0])
    assert merged["value"].shape == () and merged["value"].item() == expected
    assert merged["name"] == "x" and merged["kwargs"] == {"reduce_fx": reduce_fx}


def test_weights() -> None:
    assert merge(entries([1.0, 2.0]), [0.25, 0.75])[0]["value"].item() == 1.75
    assert merge(entries([1.0, 2.0])[1:], [0.25, 0.75])[0]["value"].item() == 2.0, "over those that logged it"
    assert merge(entries([1.0, math.nan]), [3.0, 0.0])[0]["value"].item() == 1.0, "nothing counted in the second"
    assert merge(entries([1.0, 2.0]), [0.0, 0.0])[0]["value"].item() == 1.5
    own = [LogEntry("x", 1.0, {"batch_size": 3}, 0), LogEntry("x", 5.0, {"batch_size": 1}, 1)]
    (merged,) = merge(own, [0.5, 0.5])
    assert merged["value"].item() == 2.0 and merged["kwargs"] == {"batch_size": 4}


def test_dtypes_stay() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        (merged,) = merge(entries([torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)]), [1, 1])
        assert merged["value"].dtype == dtype and merged["value"].item() == 1.5
    whole = [torch.tensor(3), torch.tensor(4)]
    assert merge(entries(whole, reduce_fx="sum"), [1, 1])[0]["value"].dtype == torch.int64
    assert merge(entries(whole), [1, 1])[0]["value"].item() == 3.5
    assert merge(entries([7]), [1])[0]["value"].dtype == torch.float32
    exact = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 7, dtype=torch.float64)]
    assert merge(entries(exact), [1, 3])[0]["value"].item() == pytest.approx(1 / 12 + 3 / 28, rel=1e-15)


def test_order_and_repetition() -> None:
    said = [("b", 1.0, 0), ("a", 2.0, 0), ("b", 3.0, 0), ("b", 5.0, 1), ("c", 6.0, 1), ("b", 7.0, 1)]
    merged = merge([LogEntry(name, value, {}, index) for name, value, index in said], [1, 1])
    assert [(m["name"], m["value"].item()) for m in merged] == [("b", 3.0), ("a", 2.0), ("b", 5.0), ("c", 6.0)]


def test_a_group_of_the_user_is_left_out_with_a_word() -> None:
    with pytest.warns(UserWarning, match="sync_dist_group"):
        assert merge(entries([1.0], sync_dist_group=object()), [1.0])[0]["kwargs"] == {}
    assert merge(entries([1.0], sync_dist_group=None), [1.0])[0]["kwargs"] == {}


# ---------------------------------------------------------------------------------------------- through the Trainer


class Prefixed(Module):
    """Logs in all ways; `log` itself is overridden."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(3, 4)
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.micro_batches = micro_batches
        self.recorder = StepRecorder(self)
        self.seen: list[dict[str, float]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"my/{name}", value, *args, **kwargs)

    def shared(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=self.trainer.training, on_epoch=True, prog_bar=True)
        self.log("count", float(len(x)), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("largest", logits.max(), reduce_fx="max", on_epoch=True, on_step=False)
        self.log("sized", loss, batch_size=len(x), on_epoch=True, on_step=False)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def in_parts(self, batch: Any) -> torch.Tensor:
        if self.micro_batches == 1:
            return self.shared(batch)
        parts = list(zip(*(t.split([3, 1]) for t in batch), strict=True))
        losses = []
        for index, part in enumerate(parts):
            with self.recorder.recording(index):
                losses.append(self.shared(part))
        weights = [3.0, 1.0]
        replay(self, merge(self.recorder.take(), weights))
        return (losses[0] * 3 + losses[1]) / 4

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.in_parts(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.in_parts(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def on_validation_epoch_end(self) -> None:
        self.seen.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_through_the_trainer_the_numbers_are_those_of_whole_batches(tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 3, generator=generator), torch.randint(4, (12,), generator=generator))
    histories, files = [], []
    for micro_batches in (1, 2):
        logger = CSVLogger(tmp_path, name=str(micro_batches), flush_logs_every_n_steps=1)
        trainer = pl.Trainer(max_epochs=2, logger=logger, log_every_n_steps=1, **QUIET)
        model = Prefixed(micro_batches)
        trainer.fit(model, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
        histories.append([*model.seen, {name: value.item() for name, value in trainer.callback_metrics.items()}])
        files.append((tmp_path / str(micro_batches) / "version_0" / "metrics.csv").read_text().splitlines())
    whole, parts = histories
    assert len(whole) == len(parts) > 6
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys() and one == pytest.approx(other, rel=1e-5)
    assert {"my/loss_step", "my/loss_epoch", "my/accuracy_step", "my/count", "my/largest", "my/sized"} <= set(whole[-1])
    assert files[0][0] == files[1][0] and len(files[0]) == len(files[1])


def test_replay_finds_metrics_by_name() -> None:
    logged: list[Any] = []
    module = Module()
    module.__dict__["log"] = lambda **kwargs: logged.append(kwargs)
    value = {"metric": "many.MulticlassF1Score", "forward": torch.tensor(0.5)}
    replay(module, [{"name": "f1", "value": value, "kwargs": {"on_step": True}}])
    assert logged == [{"name": "f1", "value": module.many["MulticlassF1Score"], "on_step": True}]
    assert module.many["MulticlassF1Score"]._forward_cache.item() == 0.5
