"""Expert parallelism under its own name."""

from __future__ import annotations

from typing import Any, Literal

from lnn_lightning.parallel.expert.settings import ExpertParallel, Upcycle
from lnn_lightning.strategies.ptdp import PTDPStrategy


class ExpertParallelStrategy(PTDPStrategy):
    """:class:`~lnn_lightning.strategies.ptdp.PTDPStrategy` with ``expert=ExpertParallel(...)``.

    Args:
        expert_parallel_size: see :class:`~lnn_lightning.parallel.expert.settings.ExpertParallel` (``size``), as the
            following.
        divide_experts: each expert is divided over the tensor ranks.
        capacity_factor: tokens that an expert takes; None: nothing is dropped.
        two_step: send within hosts first.
        upcycle: make experts of a dense model.
        ptdp: arguments of ``PTDPStrategy``.

    Raises:
        LayoutError: settings that make no sense.
    """

    def __init__(
        self,
        expert_parallel_size: int = 1,
        divide_experts: bool = False,
        capacity_factor: float | None = None,
        two_step: bool | Literal["auto"] = "auto",
        upcycle: Upcycle | None = None,
        **ptdp: Any,
    ) -> None:
        settings = ExpertParallel(expert_parallel_size, divide_experts, capacity_factor, two_step, upcycle)
        super().__init__(expert=settings, **ptdp)
