"""What a way of compression is: its settings, and what does the work over a group of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.communication.errors import Errors
from lnn_lightning.communication.grouping import put_back
from lnn_lightning.communication.wire import Traffic, Wire
from lnn_lightning.parallel.hosts import Host
from lnn_lightning.parallel.reduction import reduction_dtype


@dataclass(frozen=True)
class Ranks:
    """Among whom gradients are averaged.

    Attributes:
        group: the ranks.
        seed: the same on all of them: of random numbers that must agree.
        reduce_dtype: in which what is not compressed is added up; None: see :func:`reduction_dtype`.
    """

    group: dist.ProcessGroup
    seed: int = 0
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Seat:
    """A rank's place among those that gradients are averaged over, where none of them runs.

    Attributes:
        rank: counted along the group.
        hosts: of all its ranks.
    """

    rank: int
    hosts: tuple[Host, ...]


class Compression(ABC):
    """How gradients are compressed: settings alone, for ``gradient_compression`` or Lightning's ``ddp_comm_hook``.

    Subclasses are frozen dataclasses that check their values (:class:`LayoutError`).

    Attributes:
        remembers: what is reduced in one step depends on the steps before: each gradient must be reduced once a step,
            and be stepped with.
    """

    remembers: ClassVar[bool] = True

    @abstractmethod
    def compressor(self, ranks: Ranks) -> Compressor:
        """What does the work, with empty state. Collective over the ranks."""

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype, seat: Seat) -> int:
        """Bytes that a rank keeps for a parameter from one step to the next.

        Args:
            shape: of its gradient on the rank.
            dtype: of that.
            seat: of the rank.
        """
        return 0

    def advice(self, optimizer: torch.optim.Optimizer) -> str | None:
        """What to tell a user whose optimizer does not go well with it; None: nothing."""
        return None

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Any:
        """Never called: it makes the settings a value that ``DDPStrategy(ddp_comm_hook=...)`` takes from YAML."""
        raise RuntimeError(
            f"{type(self).__name__} is no hook by itself: its state belongs to a model. Use "
            "`lnn_lightning.communication.attach(ddp_model, ...)`."
        )


class Compressor(ABC):
    """Averages gradients over ranks, and holds the state that takes.

    State is kept by the name of a parameter: buckets are built anew behind the first step, and whenever a parameter
    begins to learn. All ranks call it with the same names in the same order.

    Attributes:
        step: steps that were reduced.
        scale: factor in the gradients (loss scale): what is kept from one step to the next is kept without it.
        errors: what is not sent yet, for those that keep it.
        norms: a list gets the norms of what is reduced (with the scale in it); None: they are not wanted.
        can_scatter: whether it has :meth:`scatter_mean`.
    """

    can_scatter = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.wire = ranks, Wire(ranks.group)
        self.step = 0
        self.scale = 1.0
        self.errors = Errors()
        self.norms: list[Tensor] | None = None

    @property
    def traffic(self) -> Traffic:
        """Bytes since it was made."""
        return self.wire.traffic

    @property
    def levels(self) -> dict[str, Traffic]:
        """The same, apart for what stays on a host and what leaves it, if those are treated apart."""
        return {"": self.traffic}

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Puts the mean over the ranks, as it arrives, in the place of this rank's gradients. Collective.

        Args:
            gradients: by parameter; a part of those of the step (a bucket), each once a step, dense and contiguous.
        """
        self.wire.traffic.plain += sum(each.numel() * each.element_size() for each in gradients.values())
        self._reduce(gradients)
        if self.norms is not None:
            self.norms += [torch.linalg.vector_norm(each.float()) for each in gradients.values()]

    @abstractmethod
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None: ...

    @torch.no_grad()
    def scatter_mean(self, chunks: Tensor, name: str = "") -> Tensor:
        """The mean over the ranks, of which each rank gets its own part (ZeRO); nothing is kept back. Collective.

        Args:
            chunks: (ranks, n): row r is this rank's gradients of the part of rank r.
            name: the same on all ranks, another one for each call of a step: of its random numbers.

        Returns:
            The mean of this rank's part (n), in the dtype of the gradients.
        """
        self.wire.traffic.plain += chunks.numel() * chunks.element_size()
        return self._scatter_mean(chunks, name)

    def _scatter_mean(self, chunks: Tensor, name: str) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} cannot give each rank a part alone (`can_scatter`).")

    def finish_step(self) -> None:
        """Behind the last bucket of a step."""
        self.step += 1

    def average(self, tensors: Sequence[Tensor]) -> None:
        """The mean over the ranks without compression, in place: one all-reduce for each dtype. Collective."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(reduction_dtype(tensor.dtype, self.ranks.reduce_dtype), []).append(tensor)
        for dtype, members in by_dtype.items():
            flat = torch.cat([member.reshape(-1).to(dtype) for member in members]).div_(self.wire.size)
            put_back(self.wire.sum(flat), members)

    def error_norm(self) -> Tensor | None:
        """Norm of what this rank has not sent yet (0 dimensions); None: nothing is kept back."""
        return self.errors.norm()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, flat; keys of what belongs to a parameter end with its name."""
        return {"step": self.step} | self.errors.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` of the same place gave."""
        self.step = int(state["step"])
        self.errors.load_state_dict(state)
