"""Schedules by name: which torch class runs them, where stages sit, how many micro-batches they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.step.batch import microbatch_count


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for.

    Attributes:
        single: class name in ``torch.distributed.pipelining.schedules`` for one stage a rank; None: needs more.
        multi: the same for several stages a rank; None: takes one only.
        v_shape: stages go down the ranks and up again (ZB-V); else they go round and round.
        one_microbatch: the batch is not cut.
        splits_backward: backward by inputs and by weights are two actions.
        even_rounds: the number of micro-batches must divide into rounds of about one micro-batch a rank.
    """

    single: str | None
    multi: str | None
    v_shape: bool = False
    one_microbatch: bool = False
    splits_backward: bool = False
    even_rounds: bool = False


SCHEDULES = {
    "naive": Schedule("ScheduleGPipe", None, one_microbatch=True),
    "gpipe": Schedule("ScheduleGPipe", "ScheduleLoopedBFS"),
    "1f1b": Schedule("Schedule1F1B", "ScheduleInterleaved1F1B", even_rounds=True),
    "interleaved": Schedule(None, "ScheduleInterleaved1F1B", even_rounds=True),
    "zero_bubble": Schedule(
        "ScheduleInterleavedZeroBubble", "ScheduleInterleavedZeroBubble", even_rounds=True, splits_backward=True
    ),
    "zbv": Schedule(None, "ScheduleZBVZeroBubble", v_shape=True, splits_backward=True),
}
"""GPipe: Huang et al. 2019. 1F1B, interleaved: PTD-P, Narayanan et al. 2021. Zero bubble: Qi et al. 2023."""


@dataclass(frozen=True)
class Placement:
    """A schedule on a number of ranks.

    Attributes:
        name: name of the schedule.
        ranks: places along the pipeline axis.
        stages_per_rank: stages on each of them.
    """

    name: str
    ranks: int
    stages_per_rank: int

    @property
    def kind(self) -> Schedule:
        """What the schedule asks for."""
        return SCHEDULES[self.name]

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Rank that runs a stage."""
        if self.kind.v_shape:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages a rank runs."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def cuts(self, wanted: int | str) -> bool:
        """Whether batches are cut at all."""
        return not (self.kind.one_microbatch or wanted == 1 or (self.num_stages == 1 and wanted == "auto"))

    def microbatches(self, batch_size: int | None, wanted: int | str) -> int:
        """How many micro-batches a batch is cut into: the largest divisor of it that the schedule takes.

        ``"auto"`` asks for four a rank (GPipe, section 2.3: the bubble is negligible from there on).
        """
        if not self.cuts(wanted):
            return 1
        count = 4 * self.ranks if wanted == "auto" else int(wanted)
        if batch_size is None:
            raise StepError(
                "The batch has no batch dimension (no tensor with at least one dimension), so it cannot be cut into "
                "micro-batches. Return tensors whose first dimension is the batch, or set `microbatches=1`."
            )
        while True:
            count = microbatch_count(batch_size, count)
            if self._takes(count):
                return count
            count -= 1

    def _takes(self, count: int) -> bool:
        if not self.kind.even_rounds or (self.stages_per_rank == 1 and self.name == "1f1b"):
            return True
        return count % max(1, count // self.ranks) == 0

    def build(self, stages: Sequence[Any], microbatches: int) -> Any:
        """The torch schedule object for this rank's stages."""
        class_name = self.kind.single if self.stages_per_rank == 1 else self.kind.multi
        if class_name == "Schedule1F1B" and microbatches < self.num_stages:
            class_name = "ScheduleGPipe"  # the same order of work; torch's 1F1B refuses so few
        assert class_name is not None
        schedule_class = getattr(torch_schedules, class_name)
        loss_function: Callable[[Any, Any], Any] = lambda output, target: output  # noqa: E731
        single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
        return schedule_class(
            stages[0] if single else list(stages), microbatches, loss_fn=loss_function, scale_grads=False
        )


def place(name: str, ranks: int, stages_per_rank: int) -> Placement:
    """Checks a schedule against a number of ranks.

    Raises:
        LayoutError: no such schedule, or not with this many stages a rank.
    """
    if name not in SCHEDULES:
        raise LayoutError(f"`schedule={name!r}` is unknown; use one of {', '.join(map(repr, SCHEDULES))}.")
    if not isinstance(stages_per_rank, int) or stages_per_rank < 1:
        raise LayoutError(f"`stages_per_rank` must be a whole number of at least 1, got {stages_per_rank!r}.")
    kind = SCHEDULES[name]
    if ranks == 1:  # one stage is one stage, whatever it is called
        return Placement("naive" if kind.one_microbatch else "1f1b", 1, 1)
    if kind.v_shape and stages_per_rank not in (1, 2):
        raise LayoutError(f"`schedule={name!r}` has exactly two stages a rank; leave `stages_per_rank` out.")
    if kind.single is None and stages_per_rank == 1:
        stages_per_rank = 2
    if kind.multi is None and stages_per_rank > 1:
        raise LayoutError(
            f"`schedule={name!r}` has one stage a rank; `stages_per_rank={stages_per_rank}` needs another."
        )
    return Placement(name, ranks, stages_per_rank)
