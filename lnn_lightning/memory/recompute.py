"""Recomputation: what autograd keeps of the blocks is computed again in backward.

Which blocks, and how much of them: :data:`Recompute`. The blocks are those of the trunks (repeated blocks); in a module
without any they are all of its units that have sub-modules. A block that is a single layer is never one of them: it
keeps what it is given and nothing else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lnn_lightning.memory.recompute_blocks import Segment
from lnn_lightning.memory.recompute_core import CoreWatch
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.step.extension import Body, StepExtension, UnitRun
from lnn_lightning.parallel.step.shapes import own_object
from lnn_lightning.parallel.step.trace import Call
from lnn_lightning.parallel.step.tree import tree_leaves
from lnn_lightning.parallel.step.units import Units

log = logging.getLogger(__name__)

Recompute = Literal["selective", "full", "auto"] | int | None
"""``"full"``: every block; a number n: the first of every n blocks of a stage; ``"selective"``: of every block the core
of attention alone; ``"auto"``: as many checkpoints a stage as keep the least; None: nothing."""


def check_recompute(value: Recompute) -> None:
    """Checks the setting.

    Raises:
        LayoutError: it is none of those that there are.
    """
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not number and (isinstance(value, bool) or value not in ("selective", "full", "auto")):
        raise LayoutError(
            "`recompute` must be None, 'selective', 'full', 'auto' or a whole number n of at least 1 (every n-th "
            f"block), got {value!r}."
        )


def recomputed_blocks(root: nn.Module, units: Units) -> list[str]:
    """Names of the units that recomputation is about, in registration order."""
    large = [name for name in units.names if next(root.get_submodule(name).children(), None) is not None]
    return [name for name in large if name in units.blocks] or large


def recompute_extension(
    value: Recompute, root: nn.Module, units: Units, stages: Mapping[int, Sequence[str]], sharded: bool
) -> StepExtension | None:
    """What recomputes in the steps of an engine.

    Args:
        value: the setting.
        root: the module.
        units: its units.
        stages: stage of this rank -> names of the units in it.
        sharded: parameters are gathered unit by unit.
    """
    if value is None:
        return None
    blocks = recomputed_blocks(root, units)
    own = {stage: [name for name in blocks if name in names] for stage, names in stages.items()}
    expected = not blocks or any(own.values())  # a stage may hold an embedding or a head alone
    if value == "selective":
        return CoreRecomputation({name for names in own.values() for name in names}, expected)
    every = value if isinstance(value, int) else 1
    chosen = {name for names in own.values() for name in names[::every]}
    lengths = {stage: len(names) for stage, names in own.items()} if value == "auto" and not sharded else {}
    return BlockRecomputation(chosen, lengths, expected)


def segment_length(blocks: int, given: int, within: int) -> int:
    """Blocks between two checkpoints of a stage that keep the least in all (PTD-P, arXiv 2104.04473, section 3.5).

    With c checkpoints ``c * given + blocks / c * within`` bytes are held; c = sqrt(blocks * within / given) holds the
    least, and there are no more than blocks.

    Args:
        blocks: blocks of the stage.
        given: bytes that a block is given.
        within: bytes that autograd keeps within one; 0: not known.
    """
    if not given or not within:
        return 1
    return max(1, round(blocks / min(blocks, math.sqrt(blocks * within / given))))


class _Recomputation(StepExtension):
    """Applies to the blocks of training steps that the user does not recompute already.

    Args:
        blocks: names of the blocks.
        expected: there should be some here.
    """

    def __init__(self, blocks: set[str], expected: bool) -> None:
        self._blocks, self._expected = blocks, expected
        self._training, self._used, self._told = False, False, set[str]()

    @override
    def begin(self, parts: int, training: bool) -> None:
        self._training = training

    @override
    def finish(self) -> None:
        if self._training and not self._used and self._expected:
            self._tell("unused", self._unused())
        self._training = False

    def _applies(self, run: UnitRun) -> bool:
        call = run.call
        if not self._training or call.group not in self._blocks or not torch.is_grad_enabled():
            return False
        if call.region is not None or call.checkpoints:
            self._tell(
                "twice",
                f"The model recomputes {call.unit!r} itself (`torch.utils.checkpoint`, or `gradient_checkpointing`): "
                "`recompute` leaves such blocks alone.",
            )
            self._used = True
            return False
        return True

    def _tell(self, what: str, text: str) -> None:
        """Says something once."""
        if what not in self._told:
            self._told.add(what)
            log.warning(text)

    def _unused(self) -> str:
        return (
            "`recompute` has nothing to recompute: the step calls no block with sub-modules that it could be followed "
            "to."
        )


class BlockRecomputation(_Recomputation):
    """Blocks run again in backward.

    Args:
        blocks: names of the blocks.
        lengths: stage -> number of its blocks, where checkpoints may lie more than one block apart.
        expected: there should be some here.
    """

    may_split = False
    """The two parts would both need what is recomputed, and recompute it each."""

    def __init__(self, blocks: set[str], lengths: Mapping[int, int], expected: bool = True) -> None:
        super().__init__(blocks, expected)
        self._lengths = lengths
        self._open: Segment | None = None

    @override
    @contextmanager
    def forward(self, stage: int, index: int) -> Iterator[None]:
        self._open = None
        try:
            yield
        finally:
            self._open = None

    @override
    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        if not self._applies(run) or not _needs_graph(run.unit, args, kwargs):
            self._open = None
            return body(*args, **kwargs)
        if run.call.in_place:
            self._tell(
                "in place",
                f"{run.call.unit!r} changes a tensor that it is given in place: `recompute` leaves it alone, it would "
                "not find it as it was.",
            )
            self._open = None
            return body(*args, **kwargs)
        self._used = True
        self._mention_caches(run, args, kwargs)
        length = segment_length(self._lengths.get(run.stage, 1), run.call.given_bytes, run.call.saved_bytes)
        if self._open is None or len(self._open) >= length or not self._open.continues(args, kwargs):
            self._open = Segment()
        return self._open.run(run, body, args, kwargs)

    def _mention_caches(self, run: UnitRun, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)) if "caches" not in self._told else ():
            if not isinstance(leaf, Tensor) and _holds_tensors(leaf):
                self._tell(
                    "caches",
                    f"{run.call.unit!r} is given a {type(leaf).__name__} that holds values of other blocks: they stay "
                    "in memory for the recomputation. If it is a cache of keys and values, switch it off for training "
                    "(`use_cache=False`).",
                )


class CoreRecomputation(_Recomputation):
    """The core of attention in blocks runs again in backward.

    Args:
        blocks: names of the blocks.
        expected: there should be some here.
    """

    def __init__(self, blocks: set[str], expected: bool = True) -> None:
        super().__init__(blocks, expected)
        self._without: dict[int, Call] = {}

    @override
    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        if not self._applies(run) or id(run.call) in self._without or run.unit._compiled_call_impl is not None:
            return body(*args, **kwargs)
        watch = CoreWatch()
        with watch.following():
            out = body(*args, **kwargs)
        if watch.found:
            self._used = True
        else:
            self._without[id(run.call)] = run.call
        return out

    @override
    def _unused(self) -> str:
        return (
            "`recompute='selective'` found no attention that keeps its scores (two batched products with a softmax "
            "between them) in the blocks: the fused kernels of `scaled_dot_product_attention` keep none. Use 'full', "
            "'auto' or every n-th block to keep less."
        )


def _holds_tensors(value: Any) -> bool:
    held: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    own_object(value, note)
    return bool(held)


def _needs_graph(unit: nn.Module, args: Any, kwargs: Any) -> bool:
    given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return any(tensor.requires_grad for tensor in (*given, *unit.parameters()))
