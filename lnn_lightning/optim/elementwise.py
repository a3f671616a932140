"""Whether an optimizer may step on parts of parameters.

SGD, Adam and most others update every element by itself: cut parameters along any dimension and the parts move as the
whole does. Optimizers that look at a whole parameter (LARS, LAMB, Adafactor, Muon, LBFGS, those that clip by tensor)
give other numbers on parts, silently. Which kind one is follows from no name or attribute, so it is tried: a copy of
the optimizer steps on small parameters, whole and cut.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lnn_lightning.parallel.step.randomness import preserved_rng, reseed

SHAPE = (4, 6, 2, 2, 2)
"""A parameter of n dimensions is tried with the first n of these, and for one dimension with the second."""

SCALES = (1.0, 100.0, 0.01, 1.0, 1.0, 10.0, 1.0, 0.1)
"""Of the gradients, step by step: a clipping threshold is above some and below others."""

TOLERANCE = 1e-6
"""Of the movement; everything is in float64."""

LEARNING_RATE = 0.1
"""In place of the user's, which a warm-up may have set to zero."""

LARGE = 1_000_000
"""Elements of a tensor in an optimizer's attribute that is not worth copying."""

_ON_CPU: dict[str, Any] = {"fused": False, "foreach": False, "capturable": False, "differentiable": False}

_Groups = list[list[Tensor]]
_Make = Callable[[_Groups], Optimizer]


def not_elementwise(optimizer: Optimizer) -> str | None:
    """Finds out whether an optimizer updates each element by itself.

    A copy of it (same class, attributes and options of each group, a learning rate of 0.1, no hooks) steps on small
    float64 parameters on the CPU, whole and as two halves with an optimizer each. Neither the optimizer nor any global
    random state changes. It communicates nothing, and its answer is the same on every rank whose groups have parameters
    of the same numbers of dimensions.

    Args:
        optimizer: any optimizer, before or after steps. Groups without parameters count as holding matrices.

    Returns:
        None if it is elementwise; else what is wrong, naming its class: that parts of parameters move differently, or
        that it could not be tried.
    """
    name = type(optimizer).__name__
    failures: list[str] = []
    with preserved_rng(torch.device("cpu")), _no_global_hooks(), torch.enable_grad(), torch.inference_mode(False):
        # a copy has all attributes; a new one has the state that some constructors make
        for make in (_copy_maker(optimizer), _constructor(optimizer)):
            for sparse in (False, True):
                try:
                    return _verdict(name, make, _shapes(optimizer), sparse)
                except Exception as error:  # whatever the user's code raises on parameters it was not made for
                    failures.append(f"{type(error).__name__}: {error}".strip().rstrip("."))
    reasons = "; ".join(dict.fromkeys(failures))
    return (
        f"Whether {name} updates each element by itself could not be found out, because a copy of it did not step on "
        f"small parameters ({reasons}). An optimizer that looks at whole parameters would silently give other numbers "
        "on parts of them."
    )


def _verdict(name: str, make: _Make, shapes: list[list[tuple[int, ...]]], sparse: bool) -> str | None:
    random = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        # growing along each dimension, so that the norms of the halves differ
        growth = torch.ones((), dtype=torch.float64)
        for size in shape:
            growth = growth.unsqueeze(-1) * torch.linspace(0.5, 2.0, size, dtype=torch.float64)
        return torch.randn(shape, generator=random, dtype=torch.float64) * growth

    values = [[draw(shape) for shape in group] for group in shapes]
    slopes = [[torch.rand(shape, generator=random, dtype=torch.float64) for shape in group] for group in shapes]
    noises = [[[scale * draw(shape) for shape in group] for group in shapes] for scale in SCALES]
    whole = _trained(make, values, slopes, noises, sparse)
    moved = max(
        float((w - v).abs().max()) for ws, vs in zip(whole, values, strict=True) for w, v in zip(ws, vs, strict=True)
    )
    if not math.isfinite(moved) or moved == 0.0:
        raise RuntimeError("it did not move" if moved == 0.0 else "it diverged")
    for dim in (0, 1):
        if all(len(shape) <= dim for group in shapes for shape in group):
            continue
        for half in (0, 1):

            def cut(groups: _Groups, dim: int = dim, half: int = half) -> _Groups:
                return [[x.chunk(2, dim)[half] if x.dim() > dim else x for x in group] for group in groups]

            part = _trained(make, cut(values), cut(slopes), [cut(noise) for noise in noises], sparse)
            for mine, expected in zip(part, cut(whole), strict=True):
                for x, y in zip(mine, expected, strict=True):
                    if not float((x - y).abs().max()) <= TOLERANCE * moved:
                        return (
                            f"{name} does not update each element by itself: on half of a parameter (cut along "
                            f"dimension {dim}) it gives other numbers than on the whole."
                        )
    return None


def _trained(make: _Make, values: _Groups, slopes: _Groups, noises: list[_Groups], sparse: bool) -> _Groups:
    """Where the values move to, along gradients that depend on nothing but the element."""
    reseed(0, torch.device("cpu"))
    groups: _Groups = [[nn.Parameter(value.clone()) for value in group] for group in values]
    optimizer = make(groups)
    for noise in noises:

        def closure(noise: _Groups = noise) -> Tensor:
            loss = torch.zeros((), dtype=torch.float64)
            for parameters, slope, shift in zip(groups, slopes, noise, strict=True):
                for p, a, b in zip(parameters, slope, shift, strict=True):
                    x = p.detach()
                    grad = a * x + b
                    p.grad = grad.to_sparse(1) if sparse else grad
                    loss = loss + (0.5 * a * x * x + b * x).sum()
            return loss

        closure()
        if _takes_closure(optimizer):
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            optimizer.step()
    return [[p.detach() for p in group] for group in groups]


def _takes_closure(optimizer: Optimizer) -> bool:
    try:
        inspect.signature(optimizer.step).bind(lambda: None)
    except TypeError:
        return False
    return True


def _shapes(optimizer: Optimizer) -> list[list[tuple[int, ...]]]:
    return [[_shape(dims) for dims in _dims(group)] for group in optimizer.param_groups]


def _dims(group: dict[str, Any]) -> list[int]:
    """The numbers of dimensions of a group's parameters."""
    return sorted({_dims_of(p) for p in group["params"]}) or [2]


def _dims_of(parameter: Tensor) -> int:
    return min(max(parameter.dim(), 1), len(SHAPE))


def _shape(dims: int) -> tuple[int, ...]:
    return SHAPE[1:2] if dims == 1 else SHAPE[:dims]


def _options(group: dict[str, Any], parameters: list[Tensor], memo: dict[int, Any]) -> dict[str, Any]:
    """A group's options for small parameters on the CPU."""
    options = {k: copy.deepcopy(v, memo) for k, v in group.items() if k not in ("params", "param_names")}
    options = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    options.update({k: v for k, v in _ON_CPU.items() if k in options})
    if isinstance(options.get("lr"), int | float | Tensor):
        options["lr"] = LEARNING_RATE
    return {"params": parameters, **options}


def copies_onto(
    optimizer: Optimizer, pieces: Mapping[int, Tensor], groups: _Groups
) -> tuple[Callable[[], Optimizer], ...]:
    """Two ways to make an optimizer like one, without its hooks, for other parameters.

    The first has all attributes and no state, the second the state that some constructors make.

    Args:
        optimizer: any.
        pieces: ``id`` of each of its parameters -> what stands for it.
        groups: parameters of the new one's groups.
    """

    def copied() -> Optimizer:
        memo: dict[int, Any] = dict(pieces)
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            memo[id(group["params"])] = parameters
            memo[id(group)] = _options(group, parameters, memo)
        return _copied(optimizer, memo)

    return copied, lambda: _constructor(optimizer)(groups)


def _copy_maker(optimizer: Optimizer) -> _Make:
    def make(groups: _Groups) -> Optimizer:
        pieces: dict[int, Tensor] = {}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            by_dims = dict(zip(_dims(group), parameters, strict=True))
            pieces.update({id(p): by_dims[_dims_of(p)] for p in group["params"]})
        return copies_onto(optimizer, pieces, groups)[0]()

    return make


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """The optimizer without hooks and state; what `memo` has a substitute for is replaced by it."""
    if id(optimizer) in memo:
        return memo[id(optimizer)]
    fresh: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = fresh
    memo.setdefault(id(optimizer.state), defaultdict(dict))
    for group in optimizer.param_groups:
        if id(group) not in memo:
            parameters = list({id(memo[id(p)]): memo[id(p)] for p in group["params"]}.values())
            memo[id(group)] = _options(group, parameters, memo)
    attributes = {k: v for k, v in vars(optimizer).items() if k != "step"}  # a scheduler's wrapper of the original's
    for name, value in attributes.items():
        if isinstance(value, Optimizer):
            _copied(value, memo)
        large = [x for x in tree_leaves(value) if isinstance(x, Tensor) and id(x) not in memo and x.numel() > LARGE]
        if large and name not in ("state", "param_groups"):
            raise RuntimeError(f"its attribute `{name}` is too large to copy")
        fresh.__dict__[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    return fresh


def _constructor(optimizer: Optimizer) -> _Make:
    def make(groups: _Groups) -> Optimizer:
        made = [
            _options(group, parameters, {}) for group, parameters in zip(optimizer.param_groups, groups, strict=True)
        ]
        return type(optimizer)(made, **_arguments(optimizer))

    return make


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """What the constructor was called with, as far as the optimizer remembers."""
    defaults = {k: v for k, v in _options(optimizer.defaults, [], {}).items() if k != "params"}
    arguments: dict[str, Any] = {}
    _, *parameters = inspect.signature(type(optimizer)).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(defaults)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in defaults:
            arguments[parameter.name] = defaults[parameter.name]
        else:
            arguments[parameter.name] = copy.deepcopy(_remembered(optimizer, parameter.name))
    return arguments


def _remembered(optimizer: Optimizer, name: str) -> Any:
    for attribute in (name, f"_{name}"):
        if attribute in vars(optimizer):
            return vars(optimizer)[attribute]
    raise RuntimeError(f"what its constructor got as `{name}` is not known")


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    kept: Sequence[tuple[dict[int, Any], dict[int, Any]]] = [
        (hooks, dict(hooks))
        for hooks in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    ]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
