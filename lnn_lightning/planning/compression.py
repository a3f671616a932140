"""What gradient compression keeps on a rank of a layout from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lnn_lightning.communication import Compression
from lnn_lightning.communication.compression import Seat
from lnn_lightning.parallel.hosts import Host
from lnn_lightning.parallel.layout import Layout
from lnn_lightning.planning.states import Held


@dataclass(frozen=True)
class PlannedCompression:
    """A way of compression on ranks that lie host by host.

    Attributes:
        settings: the user's.
        layout: sizes of the axes.
        hosts: equally many ranks run on each.
    """

    settings: Compression
    layout: Layout
    hosts: int = 1

    def state_bytes(self, reduced: Iterable[Held], pipeline: int, data: int) -> int:
        """Bytes on a rank (the first of its tensor ranks).

        Args:
            reduced: what it holds of the parameters whose gradients are averaged.
            pipeline: its place along the pipeline.
            data: its place along the data axis.
        """
        seats = {apart: self._seat(self._copies(data, apart), pipeline, data) for apart in (False, True)}
        replicas = self._seat(
            [(one, 0) for one in range(data % self._shards, self._size, self._shards)], pipeline, data
        )
        total = 0
        for held in reduced:
            if held.sharded and held.apart:
                continue  # a reduce-scatter alone, which keeps nothing
            seat = replicas if held.sharded else seats[held.apart]
            if len(seat.hosts) > 1:
                total += self.settings.state_bytes(held.shape, held.dtype, seat)
        return total

    @property
    def _size(self) -> int:
        return self.layout.data_parallel_size

    @property
    def _shards(self) -> int:
        return self.layout.shard_size

    def _copies(self, data: int, apart: bool) -> list[tuple[int, int]]:
        """Places on the data and tensor axes that hold the same as a data rank's first tensor rank."""
        if not apart:
            return [(one, 0) for one in range(self._size)]
        layout = self.layout
        tensors = 1 if layout.divides_experts else layout.tensor_parallel_size
        places = [(one, tensor) for one in range(self._size) for tensor in range(tensors)]
        return [place for place in places if layout.expert_place(*place)[1] == layout.expert_place(data, 0)[1]]

    def _seat(self, copies: list[tuple[int, int]], pipeline: int, data: int) -> Seat:
        each = self.layout.world_size // self.hosts
        numbers = [self.layout.rank_of(pipeline, *place) // each for place in copies]
        return Seat(copies.index((data, 0)), tuple(Host(f"host {number}", str(number), 0) for number in numbers))
