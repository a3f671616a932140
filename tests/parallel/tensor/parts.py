"""Any function on parts against the same function on wholes: values, shapes, gradients. Runs on every rank alike."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.tensor import layers as layers  # registers all rules
from lnn_lightning.parallel.tensor import sharded
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, scatter
from lnn_lightning.parallel.tensor.region import Region, in_region
from lnn_lightning.parallel.tensor.sharded import RULES, ShardingError, is_sharded, whole, wrap

KINDS: dict[str, tuple[tuple[int, ...], Spec]] = {
    "heads": ((2, 6, 4, 5), Spec(1, (6,))),
    "last": ((2, 4, 12), Spec(2, (12,))),
    "first": ((6, 4, 3), Spec(0, (6,))),
    "thirds": ((2, 4, 18), Spec(2, (6, 6, 6))),
    "unequal": ((2, 4, 24), Spec(2, (12, 6, 6))),
    "sequence": ((2, 6, 5), Spec(1, (6,), sequence=True)),
    "padded": ((2, 4, 11), Spec(2, (11,))),
}
"""Kind of part -> shape of the whole and how two or three ranks have it."""


class Ledger:
    """What an operation did besides computing."""

    def __init__(self) -> None:
        self.partials: list[int] = []
        self.wholly_used: set[int] = set()
        self.gathers: list[str] = []

    def sent(self, what: str, forward: int, backward: int) -> None:
        pass

    def partial(self, parameter: Tensor) -> None:
        self.partials.append(id(parameter))

    def mark(self) -> Any:
        return len(self.partials)

    def take_back(self, mark: Any) -> None:
        del self.partials[mark:]

    def used_on_whole(self, parameter: Tensor) -> None:
        self.wholly_used.add(id(parameter))

    def gathered(self, operation: str, origins: frozenset[str], sections: tuple[int, ...] | None) -> None:
        self.gathers.append(operation)


class Seen(dict):
    """The rules, and which of them were asked for."""

    def __init__(self, rules: dict[Any, Any]) -> None:
        super().__init__(rules)
        self.keys_seen: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.keys_seen.add(key)
        return super().get(key, default)


class Comparison:
    """Runs functions both ways and collects what differs."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.found: list[str] = []
        self.count = self.refused = self.skipped = self.asked = 0
        self.every = 1 if size == 2 else 8
        """Two ranks try all; more ranks one in so many, for what depends on their number."""
        self.misspelt = False
        """Whether the function that was compared last cannot be called so, whatever it is given."""
        self.seen = Seen(RULES)
        sharded.RULES = self.seen

    def untested(self) -> list[int]:
        """Numbers of the rules that no function asked for."""
        return [number for number, key in enumerate(RULES) if key not in self.seen.keys_seen]

    def check(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        specs: Sequence[Spec | None],
        local: bool | None = None,
        parameters: bool = False,
        inside: bool = True,
    ) -> bool:
        """Compares ``function(*inputs)``.

        Args:
            name: for the report.
            function: of tensors; may return any structure of tensors and plain values.
            inputs: wholes, equal on all ranks.
            specs: how each input is divided; None: it is whole.
            local: True: nothing may be gathered. False: something must be. None: both are right.
            parameters: whole inputs are parameters (whose gradients may stay partial), else activations.
            inside: of a unit; elsewhere parameters' gradients are complete.

        Returns:
            Whether the function can be called so on wholes.
        """
        self.asked += 1
        self.misspelt = False
        if self.asked % self.every:
            return True
        try:
            expected, expected_gradients, _ = self._run(function, inputs, [None] * len(inputs), None)
        except Exception as error:  # noqa: BLE001 - no way to call it
            self.skipped += 1
            self.misspelt = isinstance(error, TypeError)
            return False
        if any(each is NotImplemented for each in expected):  # of an operator with operands that it does not take
            self.skipped += 1
            return False
        self.count += 1
        ledger = Ledger()
        kept = ledger if parameters or local is not None else None  # without one, as in training
        axis = TensorAxis(self.size, self.rank, dist.group.WORLD, inside=inside, ledger=kept)
        made_parameters = [parameters and spec is None for spec in specs]
        try:
            found, gradients, leaves = self._run(function, inputs, specs, axis, made_parameters)
        except ShardingError:
            self.refused += 1
            if local is not None:
                self.found.append(f"{name}: refused")
            return True
        except Exception as error:  # noqa: BLE001 - reported
            self.found.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            return True
        problem = _difference(found, expected)
        for number, (leaf, ours, theirs) in enumerate(zip(leaves, gradients, expected_gradients, strict=True)):
            if id(leaf) in ledger.wholly_used.intersection(ledger.partials):
                continue  # a planner refuses it
            if id(leaf) in ledger.partials:
                ours = torch.zeros_like(leaf) if ours is None else ours.clone()
                dist.all_reduce(ours)
            if theirs is None and (ours is None or not ours.any()):
                continue
            ours = torch.zeros_like(theirs) if ours is None else ours
            theirs = torch.zeros_like(ours) if theirs is None else theirs
            problem = problem or _tensors(f"gradient of input {number}", ours, theirs, _loosest(expected))
        if local is not None and local == bool(ledger.gathers):
            problem = problem or f"gathered: {ledger.gathers}"
        if problem:
            self.found.append(f"{name}: {problem}")
        return True

    def _run(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        specs: Sequence[Spec | None],
        axis: TensorAxis | None,
        parameters: Sequence[bool] = (),
    ) -> tuple[list[Any], list[Tensor | None], list[Tensor]]:
        leaves, given = [], []
        for number, (value, spec) in enumerate(zip(inputs, specs, strict=True)):
            differentiable = value.is_floating_point() or value.is_complex()
            leaf = value.detach().clone().requires_grad_(differentiable)
            if parameters and parameters[number] and differentiable:
                leaf = nn.Parameter(leaf.detach())
            leaves.append(leaf)
            here = leaf
            if spec is not None:
                assert axis is not None
                outside = TensorAxis(axis.size, axis.rank, axis.group)
                here = wrap(scatter(leaf, outside, spec) if differentiable else _part(leaf, outside, spec), spec, axis)
            given.append(here)
        torch.manual_seed(5)
        with in_region(Region()):
            out = function(*given)
            flat, shapes = _flat(out), []
            for each in flat:
                shapes.append((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each)
            values = [whole(each) if is_sharded(each) else each for each in flat]
        rng = torch.Generator().manual_seed(3)
        pairs = []
        for each in values:
            if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
                weight = torch.randn(each.shape, dtype=each.dtype, generator=rng)
                if each.requires_grad:
                    pairs.append((each, weight))
        if pairs:
            torch.autograd.backward([each for each, _ in pairs], [weight for _, weight in pairs])
        return [*shapes, *values], [leaf.grad for leaf in leaves], leaves


def _part(value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
    from lnn_lightning.parallel.tensor.axis import take_part

    return take_part(value, spec, axis.size, axis.rank).clone()


def _flat(out: Any) -> list[Any]:
    if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
        return [each for item in out for each in _flat(item)]
    return [out]


def _difference(found: list[Any], expected: list[Any]) -> str:
    if len(found) != len(expected):
        return f"{len(found) // 2} results, not {len(expected) // 2}"
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            if not isinstance(ours, Tensor):
                return f"{ours}, not a tensor"
            if problem := _tensors("result", ours.detach(), theirs.detach()):
                return problem
        elif ours != theirs and not (ours != ours and theirs != theirs):
            if not (isinstance(theirs, float) and abs(ours - theirs) <= 1e-9 * abs(theirs)):
                return f"{ours}, not {theirs}"
    return ""


TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}


def _loosest(results: list[Any]) -> float:
    """Gradients are as exact as the least exact result."""
    found = [each for each in results if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())]
    return max((TOLERANCES.get(each.dtype, 2e-2) for each in found), default=1e-10)


def _tensors(what: str, ours: Tensor, theirs: Tensor, tolerance: float = 0.0) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{what}: {tuple(ours.shape)} {ours.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
    if not theirs.is_floating_point() and not theirs.is_complex():
        return "" if torch.equal(ours, theirs) else f"{what} differs in {int((ours != theirs).sum())} elements"
    tolerance = max(tolerance, TOLERANCES.get(theirs.dtype, 2e-2))
    close = torch.isclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if bool(close.all()) else f"{what} differs by {float((ours - theirs).abs().nan_to_num().max()):.1e}"
