"""What is offloaded, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lnn_lightning.parallel.errors import LayoutError, ParallelError

PARTS = ("optimizer", "parameters", "gradients", "activations")


class OffloadError(ParallelError):
    """The place that state was to be offloaded to does not take it, or gave an error."""


@dataclass(frozen=True)
class Offload:
    """Training state kept in host memory or in files (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, 2104.07857).

    Attributes:
        target: ``"cpu"``: host memory; or a folder on a fast disk, the same path on every host. Each rank keeps a file
            of its own there that has no name any more once it is open, so that nothing stays behind a run however it
            ends.
        what: any of ``optimizer`` (its state, updated by the CPU), ``parameters``, ``gradients`` and ``activations``.
        pin_memory: page-locked buffers, from which a GPU copies by itself; ``"auto"``: where there is one.
        threads: that read and write a rank's file.
        chunk_size: elements of a parameter that the optimizer updates at a time.
        prefetch: chunks or units that are read ahead of their use.
        overlap: let the optimizer's work run beside backward and the next forward where nobody can see the difference;
            otherwise ``optimizer.step()`` ends when it is done.
        minimum_bandwidth: (a folder) MB/s; a disk that reads or writes slower is refused at the start.

    Raises:
        LayoutError: a value that makes no sense.
    """

    target: str | Path = "cpu"
    what: str | Sequence[str] | set[str] = ("optimizer",)
    pin_memory: bool | Literal["auto"] = "auto"
    threads: int = 4
    chunk_size: int = 4 * 2**20
    prefetch: int = 2
    overlap: bool = True
    minimum_bandwidth: float | None = None

    def __post_init__(self) -> None:
        given: Any = self.what
        what = (given,) if isinstance(given, str) else tuple(given)
        if not what or (unknown := [part for part in what if part not in PARTS]):
            raise LayoutError(
                f"`Offload(what=...)` must name one or more of {', '.join(PARTS)}; "
                + (f"{unknown[0]!r} is none of them." if what else "got none.")
            )
        object.__setattr__(self, "what", tuple(part for part in PARTS if part in what))
        if not str(self.target):
            raise LayoutError("`Offload(target=...)` must be 'cpu' or a folder, got an empty path.")
        if self.pin_memory not in (True, False, "auto"):
            raise LayoutError(f"`Offload(pin_memory=...)` must be True, False or 'auto', got {self.pin_memory!r}.")
        for name, least in (("threads", 1), ("prefetch", 1), ("chunk_size", 2**12)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise LayoutError(f"`Offload({name}=...)` must be a whole number of at least {least}, got {value!r}.")
        if self.chunk_size % 2**12:  # chunks begin where direct input and output, and vector instructions, can
            raise LayoutError(f"`Offload(chunk_size=...)` must be a multiple of 4096, got {self.chunk_size}.")
        if self.minimum_bandwidth is not None and not (self.in_file and self.minimum_bandwidth > 0):
            raise LayoutError(
                "`Offload(minimum_bandwidth=...)` is MB/s of a disk: a positive number, with a folder as `target`."
            )

    @property
    def in_file(self) -> bool:
        """Whether the target is a folder."""
        return str(self.target) != "cpu"

    def has(self, part: str) -> bool:
        """Whether a part of the training state is offloaded."""
        return part in self.what
