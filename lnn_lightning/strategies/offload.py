"""Offloading under its own name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lnn_lightning.memory.offload.settings import Offload
from lnn_lightning.strategies.ptdp import PTDPStrategy


class OffloadStrategy(PTDPStrategy):
    """:class:`~lnn_lightning.strategies.ptdp.PTDPStrategy` with ``offload=Offload(...)``.

    Args:
        target: see :class:`~lnn_lightning.memory.offload.settings.Offload`, as the following.
        what: what is offloaded.
        pin_memory: page-locked buffers.
        threads: that read and write.
        chunk_size: elements that are updated at a time.
        prefetch: chunks or units that are read ahead.
        overlap: let work go on beside the steps.
        minimum_bandwidth: MB/s that the disk must do.
        ptdp: arguments of ``PTDPStrategy``.

    Raises:
        LayoutError: settings that make no sense.
    """

    def __init__(
        self,
        target: str | Path = "cpu",
        what: str | Sequence[str] | set[str] = ("optimizer",),
        pin_memory: bool | Literal["auto"] = "auto",
        threads: int = 4,
        chunk_size: int = Offload.chunk_size,
        prefetch: int = 2,
        overlap: bool = True,
        minimum_bandwidth: float | None = None,
        **ptdp: Any,
    ) -> None:
        settings = Offload(target, what, pin_memory, threads, chunk_size, prefetch, overlap, minimum_bandwidth)
        super().__init__(offload=settings, **ptdp)
