"""Tries on made-up values whether a module is what its structure looks like; random states and buffers stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.step.leftovers import nothing_left_behind

_TOKENS = 7
_CHOICES = 2
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}  # some modules compute a part in fp32 whatever they are given
_NARROW_TOLERANCE = 5e-2


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Random states, buffers, attributes and training flags are afterwards as before; there is no dropout inside."""
    devices = {each.device.index for each in module.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=[each for each in devices if each is not None]), nothing_left_behind(module):
        flags = [(each, each.training) for each in module.modules()]
        try:
            for each, _ in flags:
                each.training = False
            yield
        finally:
            for each, flag in flags:
                each.training = flag


def made_up(shape: Sequence[int], like: Tensor, seed: int = 0, positive: bool = False) -> Tensor:
    """Values that are the same wherever they are made; no random state is touched."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(*shape, generator=generator) if positive else torch.randn(*shape, generator=generator)
    return values.to(device=like.device, dtype=like.dtype if like.is_floating_point() else torch.get_default_dtype())


def made_up_choices(tokens: int, choices: int, experts: int, device: torch.device, seed: int = 0) -> Tensor:
    """Different experts for each token: [tokens, choices]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :choices].contiguous().to(device)


def is_fused(module: nn.Module, experts: int, widths: Sequence[int]) -> bool:
    """Whether ``module(tokens, index, weights)`` is, for each token, its experts' results times their weights."""
    like = next(module.parameters())
    choices = min(_CHOICES, experts)
    for width in widths:
        tokens = made_up((_TOKENS, width), like)
        index = made_up_choices(_TOKENS, choices, experts, like.device)
        weights = made_up((_TOKENS, choices), like, 1, positive=True)
        with undisturbed(module), torch.no_grad():
            try:
                found = _is_weighted_sum(module, tokens, index, weights, experts)
            except Exception:  # noqa: BLE001 - it is something else, or wants tokens of another size
                continue
        if found:
            return True
    return False


def _is_weighted_sum(module: nn.Module, tokens: Tensor, index: Tensor, weights: Tensor, experts: int) -> bool:
    def run(index: Tensor, weights: Tensor) -> Tensor:
        return module.forward(tokens.clone(), index.clone(), weights.clone())

    out = run(index, weights)
    if not isinstance(out, Tensor) or out.shape != tokens.shape:
        return False
    if not out.isfinite().all():
        return True  # weights that are not set yet: nothing can be told
    each = [run(index[:, n : n + 1], torch.ones_like(weights[:, :1])) for n in range(index.shape[1])]
    wanted = torch.stack([part.double() * weights[:, n : n + 1].double() for n, part in enumerate(each)]).sum(0)
    other = run((index + 1) % experts, weights)
    equal = all(torch.equal(each[0], each[1]) for each in module.parameters(recurse=False))  # copies of one, say
    return (equal or bool(other.ne(out).any())) and close(out.double(), wanted, out.dtype)


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether values agree as well as sums in another order do, by the size of the largest."""
    if got.shape != wanted.shape:
        return False
    if not got.numel():
        return True
    bound = _TOLERANCE.get(dtype, _NARROW_TOLERANCE) * max(float(wanted.abs().max()), 1e-30)
    return bool((got - wanted).abs().max() <= bound)


def calls_its_experts(module: nn.Module, members: Sequence[nn.Module], widths: Sequence[int], named: bool) -> bool:
    """Whether a module, given tokens, calls members on some of them each, none on what another one made.

    Members that are called ``experts`` (``named``) may be given all of them.
    """
    like = next(module.parameters())
    for width in widths:
        for shape in ((2, _TOKENS, width), (2 * _TOKENS, width)):
            with undisturbed(module), torch.no_grad(), _watched(members) as calls:
                try:
                    module.forward(made_up(shape, like))
                except Exception:  # noqa: BLE001 - it wants something else
                    continue
            if calls and not any(chained for _, chained in calls):
                return named or any(rows < 2 * _TOKENS for rows, _ in calls)
    return False


def normalises_batches(module: nn.Module) -> bool:
    """Whether there is BatchNorm inside: what it makes of a token depends on the others that a rank has."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())


def mixes_tokens(module: nn.Module, width: int) -> bool:
    """Whether what a module makes of a token depends on the tokens beside it; it has values."""
    if normalises_batches(module):
        return True
    like = next(module.parameters())
    for shape in ((_TOKENS, width), (1, _TOKENS, width), (1, 1, _TOKENS, width)):
        tokens = made_up(shape, like)
        with undisturbed(module), torch.no_grad():
            try:
                together, alone = module.forward(tokens.clone()), module.forward(tokens[..., -1:, :].clone())
            except Exception:  # noqa: BLE001 - it takes tokens of another shape
                continue
        if together.isfinite().all():
            return not close(together[..., -1:, :].double(), alone.double(), alone.dtype)
    return False


@contextmanager
def _watched(members: Sequence[nn.Module]) -> Iterator[list[tuple[int, bool]]]:
    """Members answer with NaN; what each is called with: rows, and whether there is a NaN in them."""
    calls: list[tuple[int, bool]] = []

    def answer(member: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
        for each in given[:1]:
            calls.append((each.numel() // max(each.shape[-1], 1), bool(each.isnan().any())))
        return torch.full_like(out, float("nan")) if isinstance(out, Tensor) else out

    handles = [each.register_forward_hook(answer, with_kwargs=True) for each in members]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
