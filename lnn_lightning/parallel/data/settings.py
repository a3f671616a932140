"""Which part of the training state the data ranks share out."""

from __future__ import annotations

from dataclasses import dataclass

from lnn_lightning.parallel.errors import LayoutError


@dataclass(frozen=True)
class ZeroSettings:
    """ZeRO over the data axis (Rajbhandari et al. 2020, arXiv 1910.02054).

    Attributes:
        stage: 0: every data rank holds everything; 1: each updates a part of the parameters and holds the optimizer
            state of that part; 2: gradients are sharded too; 3: the parameters too, and whole ones are made when a
            block runs. Stages 2 and 3 both keep parameters sharded between steps; 2 gathers them once a step.
        reshard_between_microbatches: stage 3 frees the whole parameters behind every micro-batch's forward. Otherwise
            a step of several micro-batches gathers them once and holds them until its last backward.

    Raises:
        LayoutError: the stage is not 0 to 3, or the other setting does not fit it.
    """

    stage: int = 0
    reshard_between_microbatches: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise LayoutError(f"`zero_stage` must be 0, 1, 2 or 3, got {self.stage!r}.")
        if not isinstance(self.reshard_between_microbatches, bool):
            raise LayoutError(
                f"`reshard_between_microbatches` must be True or False, got {self.reshard_between_microbatches!r}."
            )
        if self.reshard_between_microbatches and self.stage != 3:
            raise LayoutError(
                f"`reshard_between_microbatches=True` needs `zero_stage=3`, got {self.stage}: the other stages keep "
                "whole parameters through a step."
            )

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters and gradients are sharded."""
        return self.stage >= 2
