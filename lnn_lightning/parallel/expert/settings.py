"""The settings of expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lnn_lightning.parallel.errors import LayoutError

Gate = Literal["top_k", "switch", "gshard", "noisy_top_k", "expert_choice", "bias"]
"""How tokens choose experts; :mod:`lnn_lightning.parallel.expert.gates` has the formulas."""
GATES: tuple[Gate, ...] = ("top_k", "switch", "gshard", "noisy_top_k", "expert_choice", "bias")


@dataclass(frozen=True)
class Upcycle:
    """Turns feed-forward modules of a dense model into experts (sparse upcycling, Komatsuzaki et al. 2023, 2212.05055).

    Each expert starts as a copy of the dense module; a new router chooses among them.

    Attributes:
        blocks: glob of the names of the modules that become experts (``"*.mlp"``).
        experts: experts of each.
        top_k: experts a token goes to; the gates ``switch`` (1) and ``gshard`` (2) fix it.
        every: of the modules that match, every n-th becomes one (2: the second, fourth, ...).
        gate: how tokens choose.
        capacity_factor: an expert takes at most so many times its even share of a rank's tokens, others are dropped
            (they go round the block on the residual path); None: nothing is dropped.
        aux_loss: weight of the gate's balancing loss in the gradients (Switch, section 2.2: 0.01).
        z_loss: weight of the router's z-loss (ST-MoE, arXiv 2202.08906: 0.001).
        router_std: standard deviation of the router's first weights.

    Raises:
        LayoutError: a value makes no sense.
    """

    blocks: str
    experts: int
    top_k: int = 2
    every: int = 1
    gate: Gate = "top_k"
    capacity_factor: float | None = None
    aux_loss: float = 0.01
    z_loss: float = 0.0
    router_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "every"):
            _check_count(f"upcycle.{name}", getattr(self, name))
        if not isinstance(self.blocks, str) or not self.blocks:
            raise LayoutError(f"`upcycle.blocks` must be a glob of module names such as '*.mlp', got {self.blocks!r}.")
        if self.gate not in GATES:
            raise LayoutError(f"`upcycle.gate` must be one of {', '.join(GATES)}, got {self.gate!r}.")
        fixed = {"switch": 1, "gshard": 2}.get(self.gate)
        if fixed is not None and self.top_k != fixed:
            raise LayoutError(f"`upcycle.gate={self.gate!r}` sends a token to {fixed}; set `top_k={fixed}`.")
        if self.top_k > self.experts:
            raise LayoutError(f"`upcycle.top_k={self.top_k}` is more than the {self.experts} experts there are.")
        check_capacity("upcycle.capacity_factor", self.capacity_factor)
        for name in ("aux_loss", "z_loss", "router_std"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise LayoutError(f"`upcycle.{name}` must be a number of at least 0, got {value!r}.")


@dataclass(frozen=True)
class ExpertParallel:
    """Experts are spread over ranks, and tokens are sent to them (GShard, Lepikhin et al. 2021, arXiv 2006.16668).

    Attributes:
        size: ranks that share out the experts of a block. Expert ranks are data ranks (and tensor ranks) too: each has
            its own tokens. It must divide data ranks x tensor ranks, or the data ranks alone with ``divide_experts``.
        divide_experts: with tensor ranks: each expert is divided over them, for wide experts. Otherwise experts stay
            whole, tensor ranks hold different ones, and each sends its share of the tokens.
        capacity_factor: for the model's own blocks whose experts are one module with stacked weights: an expert takes
            at most ``capacity_factor * top_k * tokens / experts`` of a rank's tokens, others are dropped; None:
            nothing is dropped.
        two_step: send within each host first, then between hosts; ``"auto"``: if the expert ranks span several.
        upcycle: makes experts of a dense model's feed-forward modules first: an :class:`Upcycle` or its values.

    Raises:
        LayoutError: a value makes no sense.
    """

    size: int = 1
    divide_experts: bool = False
    capacity_factor: float | None = None
    two_step: bool | Literal["auto"] = "auto"
    upcycle: Upcycle | None = None

    def __post_init__(self) -> None:
        _check_count("expert_parallel_size", self.size)
        check_capacity("capacity_factor", self.capacity_factor)
        if self.two_step not in (True, False, "auto"):
            raise LayoutError(f"`two_step` must be True, False or 'auto', got {self.two_step!r}.")
        given: Any = self.upcycle
        if isinstance(given, Mapping):
            try:
                object.__setattr__(self, "upcycle", Upcycle(**given))
            except TypeError as error:
                raise LayoutError(f"`upcycle` takes the values of `Upcycle`, got {dict(given)!r}: {error}.") from error
        elif given is not None and not isinstance(given, Upcycle):
            raise LayoutError(f"`upcycle` must be None or the values of `Upcycle`, got {given!r}.")


def check_capacity(name: str, factor: float | None) -> None:
    """Checks a capacity factor.

    Raises:
        LayoutError: it is neither None nor a positive number.
    """
    if factor is None:
        return
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise LayoutError(
            f"`{name}` must be a positive number (1.25: an expert takes 1.25 times its even share of tokens) or None "
            f"(nothing is dropped), got {factor!r}."
        )


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
