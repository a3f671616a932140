"""One training step of the pipeline: its micro-batches, their weights, and what the last stage gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.layout import DATA
from lnn_lightning.parallel.pipeline.weights import Weights, weigh
from lnn_lightning.parallel.step.batch import own_copy
from lnn_lightning.parallel.step.losses import counted_losses, whole_batch_losses
from lnn_lightning.parallel.step.randomness import preserved_generators

if TYPE_CHECKING:
    from lnn_lightning.parallel.pipeline.engine import PipelineEngine

Step = Callable[[Any], Any]
TRAINING, EVALUATION = 0, 1
"""Phases, for the seeds of their steps."""


@dataclass(frozen=True)
class StepResult:
    """What a step gave on this rank.

    Attributes:
        loss: loss of the whole batch; None but on the last stage's rank.
        outputs: what the step returned for each micro-batch, in order; empty but on the last stage's rank.
        weights: weight of each micro-batch in what it logs and returns.
        losses: loss of each micro-batch; empty but in training on the last stage's rank.
    """

    loss: Tensor | None
    outputs: list[Any]
    weights: list[float]
    losses: Sequence[Tensor] = ()


class TrainStep:
    """The step in progress: micro-batches, their plans and weights, and what the last stage gave."""

    def __init__(
        self, engine: PipelineEngine, kind: str, step: Step, batch: Any, device: torch.device, scale: float
    ) -> None:
        self.engine, self.kind, self.step = engine, kind, step
        self.batch, self.device, self.scale = batch, device, scale
        self.parts = engine.split(batch, training=True)
        self.plans = [engine.book.plan(kind, step, part, device) for part in self.parts]
        self.weights = Weights(1.0)
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.counts: list[list[Tensor]] = []

    def weigh(self) -> None:
        """Finds the weights of the micro-batches; on the last stage's ranks only."""
        engine = self.engine
        if engine.is_last:
            group = engine.mesh.group(DATA)
            form = engine.loss_form or "mean"
            self.weights = weigh(self.batch, self.parts, self.plans, self._dry_run, form, group, self.device)

    @contextmanager
    def _dry_run(self, index: int) -> Iterator[Callable[[], Any]]:
        engine = self.engine
        with engine.observer.muted(), preserved_generators(engine.root):
            with engine.runner.all_absent(self.plans[index], engine.seed_for(TRAINING, index)):
                yield lambda: self.step(self._part(index, copy=True))

    def _part(self, index: int, copy: bool) -> Any:
        return own_copy(self.parts[index]) if copy and self.plans[index].trace.mutates_batch else self.parts[index]

    def run(self, stage: int, received: Sequence[Tensor], index: int) -> Any:
        """Runs a stage on a micro-batch: what it sends, or on the last stage the weighted and scaled loss."""
        engine, plan = self.engine, self.plans[index]
        last = stage == plan.num_stages - 1
        part = self._part(index, copy=True)
        with ExitStack() as stack:
            observer = engine.observer
            stack.enter_context(observer.recording(index) if last else observer.passing(undo=engine.is_last))
            if last:
                stack.enter_context(self._losses(index))
            seed = engine.seed_for(TRAINING, index)
            sent, result = engine.runner.run_stage(plan, stage, received, lambda: self.step(part), seed, index)
        if not last:
            # torch detaches the outputs in place after the input backward, also where their own node saved them
            return tuple(value.clone() for value in sent) if engine.placement.kind.splits_backward else sent
        loss = self._loss_of(result, index)
        self.losses[index] = loss.detach()
        self.outputs[index] = {k: v for k, v in result.items() if k != "loss"} if isinstance(result, dict) else None
        return (loss * (self.weights.microbatch * self.scale)).clone()

    def _losses(self, index: int) -> Any:
        if self.weights.losses is not None:
            return whole_batch_losses(self.weights.losses)
        if self.plans[index].trace.tail_error is not None and len(self.parts) * self.engine.mesh.size(DATA) > 1:
            self.counts.append([])
            return counted_losses(self.counts[-1])
        return nullcontext()

    def _loss_of(self, result: Any, index: int) -> Tensor:
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise StepError(
                f"{self.kind} returned {'None' if loss is None else repr(type(loss).__name__)} for micro-batch "
                f"{index} of {len(self.parts)}; under a pipeline it must return a loss tensor (or a dict with "
                "'loss') for every micro-batch. Return a loss of zero that depends on the outputs instead of "
                "skipping."
            )
        if isinstance(loss, torch._subclasses.FakeTensor):
            raise StepError(f"The loss of {self.kind} was computed from values that are not on the last stage.")
        return loss

    def result(self) -> StepResult:
        """What the step gave, once the schedule is through."""
        count = len(self.parts)
        if not self.engine.is_last:
            return StepResult(None, [], [1 / count] * count)
        if self.counts and any(not torch.equal(torch.stack(c), torch.stack(self.counts[0])) for c in self.counts if c):
            raise StepError(
                f"{self.kind} uses a mean loss with different numbers of valid targets in its micro-batches, and "
                f"could not be followed to count them beforehand ({self.plans[0].trace.tail_error}). Set "
                "`microbatches=1`."
            )
        losses = [self.losses[index] for index in range(count)]
        total = torch.stack([loss.double() for loss in losses]).sum() * self.weights.microbatch
        return StepResult(
            total.to(losses[0].dtype), [self.outputs[i] for i in range(count)], [1 / count] * count, losses
        )
