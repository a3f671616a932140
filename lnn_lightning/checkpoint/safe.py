"""What is loaded besides tensors and plain values: a few classes of Python and NumPy that only hold values."""

from __future__ import annotations

import argparse
import datetime
import pathlib
from typing import Any

import numpy as np
import torch

_VALUES: list[Any] = [
    pathlib.Path,
    pathlib.PosixPath,
    pathlib.PurePath,
    pathlib.PurePosixPath,
    datetime.timedelta,
    datetime.date,
    datetime.datetime,
    argparse.Namespace,
    range,
    frozenset,
    np.dtype,
    np.ndarray,
    *(
        type(np.dtype(kind))
        for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16")
    ),
]


def values_allowed() -> Any:
    """A context in which ``torch.load(weights_only=True)`` brings back these classes, too."""
    return torch.serialization.safe_globals([*_VALUES, *_numpy_functions()])


def _numpy_functions() -> list[Any]:
    """What NumPy's own pickles call to make numbers and arrays."""
    return [type(np.float32(0)).__reduce__(np.float32(0))[0], np.zeros(1).__reduce__()[0]]
