"""Experts that are modules of their own, called in a loop: calls are recorded, run where experts live, and replayed.

The user's ``forward`` runs twice. In the first run what experts are called with is written down, and answered with
zeros; then all of it goes to the ranks that hold the experts, in one exchange. The second run is answered with the
results. What the first one changed (random states, buffers, attributes) is put back in between.

Gradients of what experts were given go through the graph of the first run, those of what they gave through that of the
second; nothing else of the first one can be reached, so nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.dispatch import run_experts
from lnn_lightning.parallel.expert.recording import Given, Recorder, Unsuited, autocast_on, loop_state
from lnn_lightning.parallel.step.patching import patched_calls
from lnn_lightning.parallel.step.randomness import generators_as_now, random_as_now
from lnn_lightning.parallel.step.remember import remembered
from lnn_lightning.parallel.step.tree import tree_flatten, tree_tensors


@torch.compiler.disable
def run_loop(
    module: nn.Module,
    forward: Callable[..., Any],
    experts: Sequence[nn.Module],
    axis: ExpertAxis,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    note: Callable[[Tensor], None] | None = None,
    guard: list[str] | None = None,
) -> Any:
    """What a block returns whose experts are shared out. Collective over the expert ranks.

    Args:
        module: the block.
        forward: its own, which calls some of the experts.
        experts: all of them in order; those of other ranks are never run, here they count by name only.
        axis: who holds which.
        args: of the call.
        kwargs: of the call.
        name: of the block, for people.
        note: told of the expert of every row.
        guard: the block is being checked: what is wrong with it is added, instead of an error where others would wait.

    Raises:
        Unsuited: the block does with its experts what cannot be recorded and replayed.
        StepError: another rank's block does so, or the second run calls other experts than the first one, or calls
            them with other shapes.
    """
    if axis.size == 1 and axis.tensor is None:
        return forward(*args, **kwargs)
    device = next((each.device for each in tree_tensors((args, kwargs))), None)
    device = device or next(module.parameters()).device
    random, generators = random_as_now(device), generators_as_now(module, experts)
    recorder = Recorder(name, experts, axis.span(len(experts))[0], loop_state(module))
    failure: Exception | None = None
    try:
        recorder.record(module, forward, args, kwargs, strict=guard is not None)
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
        recorder.problem = recorder.problem or f"{name!r} fails ({type(error).__name__}: {error})"
    try:
        results = _run_recorded(recorder, axis, (args, kwargs), device, note)
    except StepError as error:
        raise (failure or error) from None
    behind = random_as_now(device)  # experts may have drawn numbers too
    random()
    generators()
    replay = _Replay(recorder, _parts(results, [each.shape[:-1] for each in recorder.values]), guard)
    with patched_calls({str(place): expert for place, expert in enumerate(experts)}, replay.enter):
        out = forward(*args, **kwargs)
    replay.finish()
    behind()
    return out if len(results) else _tied(out, results)


def _run_recorded(
    recorder: Recorder,
    axis: ExpertAxis,
    given: Any,
    device: torch.device,
    note: Callable[[Tensor], None] | None,
) -> Tensor:
    """What the experts make of the rows of all calls; all ranks raise the problem that one has."""
    calls = torch.tensor([recorder.places, recorder.rows], dtype=torch.int64).view(2, -1)
    each, result = Given(), (1, torch.float32)
    with suppress(Unsuited):  # it is the recorder's problem
        if recorder.problem is None:
            each = recorder.given(given, device)
            result = recorder.result_of(each, device)
    if recorder.problem is None and not torch.equal(calls, remembered(lambda: calls)):
        recorder.problem = (
            f"{recorder.name!r} runs again in backward (recomputation), and sends its tokens to other experts than in "
            "its first run: it is not deterministic. Leave it out of recomputation, or let it route by its input alone."
        )
    if recorder.problem is None and recorder.values:
        values = torch.cat([value.reshape(-1, each.width) for value in recorder.values])
        expert = calls[0].repeat_interleave(calls[1]).to(device, non_blocking=True)
    else:
        values = torch.empty((0, each.width), dtype=each.dtype, device=device)
        expert = torch.empty(0, dtype=torch.int64, device=device)
    if note is not None and recorder.problem is None:
        note(expert)
    elsewhere = f"{recorder.name!r} cannot run its experts, for the reason that is said there."
    problem = recorder.problem or elsewhere, torch.full((), recorder.problem is not None, device=device)
    compute = partial(_run_local, recorder, axis, each, result)
    return run_experts(values, expert, len(recorder.experts), axis, compute, problem=problem, anew=True)


def _run_local(
    recorder: Recorder,
    axis: ExpertAxis,
    given: Given,
    result: tuple[int, torch.dtype],
    rows: Tensor,
    counts: list[int],
) -> Tensor:
    """This rank's experts on their rows. Those without any run if this rank's block has called them, as it would."""
    here, called, device = axis.span(len(recorder.experts)), set(recorder.places), rows.device
    same = given.autocast == autocast_on(device)  # a context of its own would not share casts of weights
    with nullcontext() if same else torch.autocast(device.type, given.autocast, given.autocast is not None):
        made = [
            recorder.state.form.call(recorder.experts[place], part)
            for place, part in zip(here, _parts(rows, [(count,) for count in counts]), strict=True)
            if len(part) or place in called
        ]
    if not made:
        return rows.new_empty((0, result[0]), dtype=result[1])
    together = torch.cat(made)
    if (together.shape[1], together.dtype) != result:
        raise StepError(
            f"An expert of {recorder.name!r} gave rows of {together.shape[1]} values ({together.dtype}), on other "
            f"tokens before {result[0]} ({result[1]})."
        )
    return together


class _Replay:
    """Answers the calls of the second run."""

    def __init__(self, recorder: Recorder, answers: Sequence[Tensor], guard: list[str] | None) -> None:
        self.recorder, self.answers, self.guard = recorder, list(answers), guard
        self.shapes = [each.shape for each in recorder.values]
        self.count = 0
        if guard is None:
            recorder.values = []

    def enter(self, place: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        (value,) = tree_tensors((args, kwargs))
        index, self.count = self.count, self.count + 1
        if index >= len(self.shapes) or self.recorder.places[index] != int(place) or self.shapes[index] != value.shape:
            self._differs(f"call {index + 1} of an expert is of number {place}, with shape {list(value.shape)}")
        if self.guard is not None and not torch.equal(value, self.recorder.values[index]):
            self.guard.append("it calls an expert with what another one gave, or computes other values each time")
        answer, self.answers[index] = self.answers[index], value  # the block alone holds the answer
        return answer

    def finish(self) -> None:
        """To be called behind the second run."""
        if self.count < len(self.shapes):
            self._differs("it ends before")

    def _differs(self, what: str) -> None:
        recorder, index = self.recorder, self.count - 1
        before = "it ends before"
        if 0 <= index < len(self.shapes):
            before = f"it is of number {recorder.places[index]}, with shape {list(self.shapes[index])}"
        elif index < 0:
            before = f"it makes {len(self.shapes)} calls"
        raise StepError(
            f"{recorder.name!r} holds experts that are shared out over ranks, so its code runs twice a call, and it "
            f"is not deterministic. In the second run {what}, in the first one {before}. Random numbers must come from "
            "the global generators of torch, numpy and Python or from those that modules keep as attributes, and what "
            "it changes must be attributes or buffers of its modules."
        )


class _Parts(torch.autograd.Function):
    """Rows cut into tensors of their own, which may be written to."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        ctx.width = rows.shape[1]
        found, start = [], 0
        for shape in shapes:
            count = torch.Size(shape).numel()
            found.append(rows.narrow(0, start, count).view(*shape, ctx.width).data)
            start += count
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat([each.reshape(-1, ctx.width) for each in gradients]), None


def _parts(rows: Tensor, shapes: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    return _Parts.apply(rows, shapes) if shapes else ()


def _tied(out: Any, results: Tensor) -> Any:
    """Without rows nothing of the results is in what the block returns; yet the others' backward waits for us."""
    if not results.requires_grad:
        return out
    leaves, unflatten = tree_flatten(out)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[index] = leaf + results.sum().to(leaf.dtype)
            break
    return unflatten(leaves)
