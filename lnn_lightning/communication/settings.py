"""What settings may be: from YAML or a slip of the hand come strings and fractions."""

from __future__ import annotations

from typing import Any


def is_number(value: Any, whole: bool = False) -> bool:
    """Whether a value is a number, or a whole one; a bool is none."""
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
