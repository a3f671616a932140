from __future__ import annotations

from contextlib import contextmanager


@contextmanager
def forked_rng(device, rank):
    yield
