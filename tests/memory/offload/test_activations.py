"""Saved tensors in a file between forward and backward."""

import gc
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lnn_lightning.memory.offload import activations
from lnn_lightning.memory.offload.activations import ActivationKeeper
from lnn_lightning.memory.offload.settings import OffloadError
from lnn_lightning.memory.offload.store import FileStore, Region
from lnn_lightning.memory.saved_tensors import SavedTensors


class Watched(FileStore):
    """A store that notes what is read, and may fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2)
        self.reads: list[int] = []
        self.broken = False

    def read(self, region: Region, out: Tensor, start: int = 0) -> "Future[None]":
        self.reads.append(region.offset)
        return super().read(region, out, start)

    def write(self, region: Region, value: Tensor, start: int = 0) -> "Future[None]":
        if self.broken:
            raise OffloadError("the disk is broken")
        return super().write(region, value, start)


def test_what_is_away_takes_no_memory_and_comes_back_in_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "IN_FLIGHT", 2 * 40_000)
    store = Watched(tmp_path)
    keeper = ActivationKeeper(store, pin=False)
    values = [torch.randn(10_000).to(torch.bfloat16 if index == 3 else torch.float32) for index in range(6)]
    expected = [value.clone() for value in values]
    memories = [StorageWeakRef(value.untyped_storage()) for value in values]
    tokens = [keeper.put(values.pop(0), (0, 1)) for _ in expected]
    assert sum(not memory.expired() for memory in memories) <= 2, "no more than may be on their way"
    with keeper.backward(0, 1):
        for token, value in zip(reversed(tokens), reversed(expected), strict=True):
            assert torch.equal(keeper.get(token), value) and torch.equal(keeper.get(token), value)
    offsets = [token.region.offset for token in tokens if token.region is not None]
    read = [offset for offset in reversed(offsets) if offset in store.reads]
    assert [*dict.fromkeys(store.reads)] == read and len(store.reads) == len(read) >= 4, "each once, the last first"
    with keeper.backward(0, 1):  # a weight backward
        assert torch.equal(keeper.get(tokens[0]), expected[0])
    del tokens, token
    gc.collect()
    assert keeper.put(torch.randn(10_000), (0, 0)).region.offset in offsets  # type: ignore[union-attr]


def test_gradients_are_the_same_and_in_place_changes_are_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 64), nn.LayerNorm(64))
    keeper = ActivationKeeper(FileStore(tmp_path), pin=False)
    saved = SavedTensors(keeper=keeper)
    found = []
    for offloaded in (False, True):
        torch.manual_seed(1)
        module.zero_grad()
        losses = []
        for index in range(3):
            with saved.forward(0, index) if offloaded else torch.enable_grad():
                q, k = module(torch.randn(32, 64)).chunk(2, 1)
                losses.append((q.t() @ k).square().sum())
        for index in (0, 2, 1):
            with keeper.backward(0, index):
                losses[index].backward()
        found.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert keeper.moved_bytes > 3 * 32 * 256 * 4
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with saved.forward(0, 0):
        out = module(torch.randn(32, 64)).exp()
        loss = out.sum()
    out.data_ptr()
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_that_fails_is_an_error_of_the_step(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    keeper = ActivationKeeper(store, pin=False)
    store.broken = True
    kept = []
    with pytest.raises(OffloadError, match="the disk is broken"):
        for _ in range(1000):
            kept.append(keeper.put(torch.randn(100_000), (0, 0)))
    keeper.finish()
