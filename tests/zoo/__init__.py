"""Unmodified models of many kinds: the proof that any of them can be run in a pipeline."""

from tests.zoo import (
    experts,
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
        experts.CASES,
    )
    for case in cases
}

EXPERTS = frozenset(case.name for case in experts.CASES)
"""Names of the mixtures of experts, which have layouts of their own."""

__all__ = ["EXPERTS", "ZOO", "Case"]
