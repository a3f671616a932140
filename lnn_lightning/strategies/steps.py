"""The Trainer's steps, run by the pipeline engine: what every rank gets back, logs and sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.exchange import TreeChannel, check_same_batch
from lnn_lightning.parallel.layout import DATA, PIPELINE, TENSOR, Mesh
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.pipeline.train_step import StepResult
from lnn_lightning.parallel.step.batch import batch_size_of
from lnn_lightning.parallel.step.handover import GradientHandover
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.tree import tree_flatten
from lnn_lightning.parallel.watch import doing
from lnn_lightning.strategies.effects import EffectWatch
from lnn_lightning.strategies.logging import StepRecorder, merge, replay
from lnn_lightning.strategies.manual import computing_step, replaced

Step = Callable[[Any], Any]
_ONE_BACKWARD = (
    "training_step called `manual_backward` twice; under a pipeline it can be called once a step. Add up the losses "
    "and call it once."
)


class LightningObserver(StepObserver):
    """Catches what a step logs and leaves on the module.

    Args:
        module: the user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.recorder = StepRecorder(module)
        self.effects = EffectWatch(module)

    @override
    @contextmanager
    def recording(self, micro_batch: int) -> Iterator[None]:
        with self.recorder.recording(micro_batch):
            yield
        self.effects.mark()

    @override
    @contextmanager
    def passing(self, undo: bool) -> Iterator[None]:
        with self.effects.preserved() if undo else nullcontext(), self.recorder.muted():
            yield

    @override
    @contextmanager
    def muted(self, on_value: Callable[[Any], None] | None = None) -> Iterator[None]:
        with self.effects.preserved(), self.recorder.muted(on_value):
            yield


class StepDriver:
    """Runs the user's steps for a strategy.

    Args:
        module: the user's module.
        engine: runs them as stages.
        observer: the engine's observer.
        mesh: this process's place.
        device: device of the values.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        engine: PipelineEngine,
        observer: LightningObserver,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.module, self.engine, self.observer, self.device = module, engine, observer, device
        self._pipeline_group = mesh.group(PIPELINE)
        self._model_groups = [mesh.group(axis) for axis in (PIPELINE, TENSOR) if mesh.size(axis) > 1]
        self._channel = TreeChannel(self._pipeline_group, device)
        self._reduces = max(mesh.size(DATA), mesh.size(TENSOR)) > 1 or any(
            len(engine.residence.ranks_of(name)) > 1 for name, _ in module.named_parameters()
        )
        self._checked: set[str] = set()

    def check_batch(self, kind: str, batch: Any) -> None:
        """In the first step of a kind: all ranks but data ranks must have been fed the same batch."""
        if kind not in self._checked:
            self._checked.add(kind)
            for group in self._model_groups:
                check_same_batch(batch, group, self.device)

    # ---------------------------------------------------------------- training

    def train(self, step: Step, batch: Any, scale: float, sync: bool, continues: bool, drop_old: bool) -> Any:
        """One ``training_step`` in automatic optimization.

        Args:
            step: the user's step on a micro-batch.
            batch: the local batch.
            scale: what Lightning will multiply the loss with before its backward.
            sync: reduce gradients behind this step.
            continues: an accumulation window is under way; its gradients are kept.
            drop_old: ``parameter.grad`` is stale and about to be zeroed.

        Returns:
            What Lightning expects of a ``training_step``: a loss, or a dict with it.
        """
        self.check_batch("training_step", batch)
        loss, shared = self._forward_backward(step, batch, scale, sync, continues, drop_old)
        self._tell(shared)
        doing("optimizer step")
        return {**shared["outputs"], "loss": loss} if isinstance(shared["outputs"], dict) else loss

    def train_manually(self, step: Step, batch: Any, scale: float) -> Any:
        """One ``training_step`` that optimizes by itself.

        The user's step runs once with every unit absent: it drives the optimizers and schedulers, and its one
        ``manual_backward`` runs the pipeline on steps whose optimizers are idle.

        Raises:
            StepError: there is no, or more than one, ``manual_backward``, or the step reads values that are not there.
        """
        self.check_batch("training_step", batch)
        module, engine = self.module, self.engine
        compute = computing_step(module, step)
        done: list[tuple[Tensor, Any]] = []
        real_backward = module.manual_backward

        def backward(_: Any, *args: Any, **kwargs: Any) -> None:
            if done:
                raise StepError(_ONE_BACKWARD)
            silence.close()
            with engine.suspended(), replaced(module, manual_backward=real_backward):
                done.append(self._forward_backward(compute, batch, scale, True, False, False))
            silence.enter_context(recorder.muted())
            real_backward(done[0][0], *args, **kwargs)

        recorder = self.observer.recorder
        with engine.absent_step("training_step", compute, batch, self.device) as part, ExitStack() as silence:
            silence.enter_context(recorder.muted())
            with replaced(module, manual_backward=backward):
                step(part)
        if not done:
            raise StepError(
                "training_step (manual optimization) returned without calling `self.manual_backward(loss)`."
            )
        loss, shared = done[0]
        self._tell(shared)
        return {"loss": loss.detach()}

    def _forward_backward(
        self, step: Step, batch: Any, scale: float, sync: bool, continues: bool, drop_old: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        engine = self.engine
        onto_old = continues and sync and self._reduces
        handover = self._handover(scale, onto_old, drop_old, window=continues or not sync)
        if engine.sharding is not None and not continues:
            engine.sharding.forget()
        self.observer.effects.begin()
        result = engine.train_step("training_step", step, batch, self.device, scale, sync)
        handover.collect()
        shared = self._share(result, batch)
        loss = shared["loss"].to(self.device)
        if scale != 1.0 and loss.dtype == torch.float16:
            loss = loss.float()  # the scaler's factor may be larger than what fp16 has
        return handover.loss(loss), shared

    def _handover(self, scale: float, onto_old: bool, drop_old: bool, window: bool) -> GradientHandover:
        parameters, sharding = self.engine.residence.parameters(), self.engine.sharding
        if sharding is None:
            return GradientHandover(parameters, scale, onto_old=onto_old, drop_old=drop_old)
        return GradientHandover(
            parameters,
            scale,
            onto_old=onto_old,
            drop_old=drop_old,
            seen=sharding.local,
            delivered=sharding.link,
            fixed_scale=window,
        )

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, kind: str, step: Step, batch: Any) -> Any:
        """One validation, test or prediction step; every rank gets what it returned."""
        self.check_batch(kind, batch)
        self.observer.effects.begin()
        result = self.engine.forward_step(kind, step, batch, self.device)
        shared = self._share(result, batch)
        self._tell(shared)
        return shared["outputs"]

    # ---------------------------------------------------------------- what only the last stage knows

    def _share(self, result: StepResult, batch: Any) -> dict[str, Any]:
        doing("sharing what the step gave")
        payload = None
        if self.engine.is_last:
            sizes = [len_of // len(result.weights)] * len(result.weights) if (len_of := batch_size_of(batch)) else None
            payload = {
                "loss": result.loss,
                "logs": self._logs(result),
                "outputs": merge_outputs(result.outputs, result.weights, sizes),
                "effects": self.observer.effects.merged(result.weights, sizes),
            }
        return self._channel.broadcast(payload, source=self.engine.last_rank)

    def _logs(self, result: StepResult) -> list[dict[str, Any]]:
        """What the micro-batches logged, merged; where that was their loss (it may be a sum), the whole batch's."""
        entries = self.observer.recorder.take()
        merged = merge(entries, result.weights)
        for log in merged if result.loss is not None else ():
            values = [entry.value for entry in entries if entry.name == log["name"]]
            if len(values) == len(result.losses) and all(
                isinstance(value, Tensor) and value.shape == loss.shape and bool(value == loss)
                for value, loss in zip(values, result.losses, strict=True)
            ):
                log["value"] = result.loss
        return merged

    def _tell(self, shared: dict[str, Any]) -> None:
        self.observer.effects.apply(shared["effects"])
        replay(self.module, shared["logs"])


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int] | None) -> Any:
    """What a step on the whole batch would have returned, from what it returned for the micro-batches.

    Scalars are averaged, tensors with a batch dimension and lists with an entry a sample joined; of others the last
    stays.
    """
    if len(outputs) == 1:
        return outputs[0]
    if any(output is None for output in outputs):
        return None
    flat = [tree_flatten(output) for output in outputs]
    if len({len(leaves) for leaves, _ in flat}) > 1:
        return outputs[-1]
    return flat[-1][1](
        [_merge_leaves(column, weights, sizes) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    )


def _merge_leaves(column: Sequence[Any], weights: Sequence[float], sizes: Sequence[int] | None) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return column[-1]
    if first.dim() == 0 and first.is_floating_point():
        total = sum(weight * value.double() for weight, value in zip(weights, column, strict=True))
        return total.to(first.dtype)
    if first.dim() > 0 and (sizes is None or [value.shape[0] for value in column] == list(sizes)):
        return torch.cat(list(column))
    return column[-1]
