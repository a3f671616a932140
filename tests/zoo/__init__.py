"""Unmodified models of many kinds: the proof that any of them can be run in a pipeline."""

from tests.zoo import (
    huggingface,
    language,
    losses,
    odd,
    reported,
    tensor,
    tensor_found,
    tensor_heads,
    tensor_huggingface,
    tensor_odd,
    vision,
)
from tests.zoo.base import Case

ZOO: dict[str, Case] = {
    case.name: case
    for cases in (
        odd.CASES,
        losses.CASES,
        reported.CASES,
        language.CASES,
        vision.CASES,
        huggingface.CASES,
        tensor.CASES,
        tensor_found.CASES,
        tensor_heads.CASES,
        tensor_odd.CASES,
        tensor_huggingface.CASES,
    )
    for case in cases
}

__all__ = ["ZOO", "Case"]
