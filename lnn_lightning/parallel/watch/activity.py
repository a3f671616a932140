"""What this process is doing: cheap to say, looked at by another thread when somebody asks."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

_now: tuple[float, str, tuple[Any, ...]] = (monotonic(), "starting", ())


def doing(what: str, *values: Any) -> None:
    """Says what begins now.

    Args:
        what: a short text; ``%`` places in it are filled when somebody asks, not here.
        values: for these places.
    """
    global _now
    _now = (monotonic(), what, values)


@contextmanager
def while_doing(what: str, *values: Any) -> Iterator[None]:
    """As :func:`doing`; behind it, what was done before goes on."""
    before = _now
    doing(what, *values)
    try:
        yield
    finally:
        doing(before[1], *before[2])


def activity() -> tuple[str, float]:
    """What this process is doing, and for how many seconds."""
    since, what, values = _now
    try:
        text = what % values if values else what
    except (TypeError, ValueError):
        text = what
    return text, monotonic() - since


def describe() -> str:
    """What this process is doing, for how long, and the line of the main thread that it is in."""
    what, seconds = activity()
    return f"{what} for {seconds:.1f} s, at {main_thread_line()}"


def main_thread_line() -> str:
    """Where the main thread is: the innermost line of all, and the innermost one of the user's own code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "an unknown line"
    innermost, place = _line(frame), frame
    while place is not None and _is_library(place):
        place = place.f_back  # type: ignore[assignment]
    if place is None or place is frame:
        return innermost
    return f"{innermost}, called from {_line(place)}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _library_folders() -> tuple[str, ...]:
    own = str(Path(__file__).parents[2])
    paths = sysconfig.get_paths()
    packages = {str(Path(paths[key], name)) for key in ("purelib", "platlib") for name in ("torch", "lightning")}
    packages |= {f"{folder}_" for folder in packages if folder.endswith("lightning")}
    standard = str(Path(paths["stdlib"]))
    return (own, "<", *packages, *(f"{standard}/{name}" for name in _standard_modules(standard)))


def _standard_modules(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if path.name not in ("site-packages", "dist-packages"))


_LIBRARIES = _library_folders()
