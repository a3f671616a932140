"""What this process is doing: cheap to say, looked at by another thread when somebody asks."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

_now: tuple[float, str, tuple[Any, ...]] = (monotonic(), "starting", ())
_raised_at: str | None = None


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
    if _raised_at is not None:
        return _raised_at
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _lines([*walk_stack(frame)]) if frame is not None else "an unknown line"


@contextmanager
def raised_at(error: BaseException) -> Iterator[None]:
    """Inside, the main thread counts as being where the error was raised."""
    global _raised_at
    _raised_at = _lines([*walk_tb(error.__traceback__)][::-1])
    try:
        yield
    finally:
        _raised_at = None


def _lines(stack: Sequence[tuple[FrameType, int]]) -> str:
    """The innermost line of a stack, and the innermost one that is in no library."""
    if not stack:
        return "an unknown line"
    own = next((index for index, (frame, _) in enumerate(stack) if not _is_library(frame)), 0)
    innermost, caller = (f"{f.f_code.co_filename}:{line} ({f.f_code.co_name})" for f, line in (stack[0], stack[own]))
    return f"{innermost}, called from {caller}" if own else innermost


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
