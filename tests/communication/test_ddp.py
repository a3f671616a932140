"""Compression in torch's own DistributedDataParallel."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lnn_lightning.communication import Cast, PowerSGD, attach
from lnn_lightning.parallel.errors import LayoutError
from tests.helpers.ranks import run_ranks


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(4, 4, sparse=True)


def _refused(rank: int, world_size: int) -> None:
    for module, named in ((_Spectral(), "'filter' is complex"), (_Sparse(), "'words' is an embedding")):
        with pytest.raises(LayoutError, match=named):
            attach(DistributedDataParallel(module), Cast())


def test_gradients_that_are_not_dense_and_real_are_refused() -> None:
    run_ranks(_refused, 2)


def test_settings_are_no_hook() -> None:
    with pytest.raises(RuntimeError, match="attach"):
        PowerSGD(rank=4)(None, None)  # type: ignore[arg-type]
