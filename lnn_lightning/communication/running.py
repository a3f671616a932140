"""The compressors of a rank: one for each group of ranks that its gradients are averaged over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from lnn_lightning.communication.compression import Compression, Compressor, Ranks
from lnn_lightning.communication.wire import Traffic


class Compressors:
    """Made once for a model, whatever parameters come and go.

    Args:
        compression: the user's settings.
        seed: the same on all ranks.
        reduce_dtype: in which what is not compressed is added up; None: by the gradients.
    """

    def __init__(self, compression: Compression, seed: int = 0, reduce_dtype: torch.dtype | None = None) -> None:
        self.compression, self._seed, self._reduce_dtype = compression, seed, reduce_dtype
        self.by_place: dict[str, Compressor] = {}
        self._waiting: dict[str, Mapping[str, Any]] = {}

    @property
    def seed(self) -> int:
        """Of random numbers that ranks agree on; to set another one, of a run that is resumed, is collective."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        if seed != self._seed:
            self._seed = seed
            for place, old in self.by_place.items():
                self.by_place[place] = self.compression.compressor(replace(old.ranks, seed=seed))

    def over(self, place: str, group: dist.ProcessGroup) -> Compressor:
        """The compressor of a group, the same one each time. Collective over the group when it is made.

        Args:
            place: the group's name on this rank; part of the keys of the state.
            group: the ranks.
        """
        if place not in self.by_place:
            made = self.compression.compressor(Ranks(group, self._seed, self._reduce_dtype))
            if place in self._waiting:
                made.load_state_dict(self._waiting.pop(place))
            self.by_place[place] = made
        return self.by_place[place]

    def hook(self, place: str, group: dist.ProcessGroup, names: Mapping[int, str]) -> BucketHook:
        """A hook for a reducer of torch's DDP.

        Args:
            place: as in :meth:`over`.
            group: the ranks.
            names: of the parameters by identity.
        """
        self.over(place, group)
        return BucketHook(lambda: self.by_place[place], names)

    def scaled(self, scale: float) -> None:
        """Before a step: the factor in its gradients."""
        for compressor in self.by_place.values():
            compressor.scale = scale

    @property
    def traffic(self) -> Traffic:
        """Bytes of all of them since they were made."""
        each = [compressor.traffic for compressor in self.by_place.values()]
        return Traffic(sum(t.plain for t in each), sum(t.payload for t in each), sum(t.sent for t in each))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State by place."""
        made = {place: compressor.state_dict() for place, compressor in self.by_place.items()}
        return made | {place: dict(values) for place, values in self._waiting.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over the state; that of a place without a compressor waits until there is one."""
        self._waiting = {place: values for place, values in state.items() if place not in self.by_place}
        for place, compressor in self.by_place.items():
            if place in state:
                compressor.load_state_dict(state[place])


class BucketHook:
    """Reduces buckets of a reducer of torch's DDP.

    On an accelerator the work goes to a stream of its own, so that backward goes on; elsewhere it is done when the
    future is returned. Collectives are issued on the calling thread, so that ranks have them in the same order
    (from callbacks of futures they would not: torch's PowerSGD hook hangs on gloo).

    Args:
        compressor: gives what does the work.
        names: of the parameters by identity.
    """

    def __init__(self, compressor: Callable[[], Compressor], names: Mapping[int, str]) -> None:
        self._compressor, self._names = compressor, dict(names)
        self._stream: torch.Stream | None = None

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages a bucket in its place; the future is of its buffer."""
        buffer = bucket.buffer()
        gradients = {
            self._names[id(parameter)]: _in_order(gradient, parameter)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        if buffer.device.type == "cpu":
            self._reduce(bucket, gradients)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        if self._stream is None:
            self._stream = torch.Stream(buffer.device)
        self._stream.wait_stream(torch.accelerator.current_stream(buffer.device))
        future = torch.futures.Future(devices=[buffer.device])
        with self._stream:
            self._reduce(bucket, gradients)
            future.set_result(buffer)  # records where the stream is, for who waits
        return future

    def _reduce(self, bucket: dist.GradBucket, gradients: Mapping[str, Tensor]) -> None:
        compressor = self._compressor()
        rows = {name: gradient.contiguous() for name, gradient in gradients.items()}
        compressor.reduce(rows)
        for name, gradient in gradients.items():
            if rows[name] is not gradient:
                gradient.copy_(rows[name])
        if bucket.is_last():
            compressor.finish_step()


def _in_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of a bucket with its elements where they belong: DDP's buckets keep the parameter's order in memory.

    ``GradBucket.gradients()`` knows its shape alone, which mixes rows and columns of one in channels_last.
    """
    if parameter.is_contiguous() or not is_non_overlapping_and_dense_or_false(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
