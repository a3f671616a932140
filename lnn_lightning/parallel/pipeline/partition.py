"""Cutting the numbered calls of a step into contiguous stages of even cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.trace import HIDDEN, Key, TensorInfo, Trace

_PARAMETER_SHARE = 0.1
"""What a model's whole optimizer step and gradient reduction counts for, relative to its forward and backward."""


def partition(
    trace: Trace, parameter_sizes: Mapping[str, int], num_stages: int, split_points: Sequence[str] | None = None
) -> tuple[int, ...]:
    """Stage of each call.

    Args:
        trace: the followed step.
        parameter_sizes: elements of each parameter by name.
        num_stages: how many stages.
        split_points: names of the sub-modules that begin the second, third, ... stage; None: balance by cost.

    Raises:
        StepError: there are fewer units than stages, or the step does not call the split points in order.
    """
    count = len(trace.calls)
    if num_stages == 1:
        return (0,) * count
    if split_points is not None:
        bounds = _bounds_of_split_points(trace, split_points, num_stages)
    else:
        bounds = _balanced_bounds(trace, call_costs(trace, parameter_sizes), num_stages)
    return tuple(sum(index >= bound for bound in bounds) for index in range(count))


def call_costs(trace: Trace, parameter_sizes: Mapping[str, int]) -> list[float]:
    """Share of each call in the work of a step: floating-point operations, and a tenth of it parameters."""
    flops = [float(call.flops) for call in trace.calls]
    seen: set[str] = set()
    sizes = []
    for call in trace.calls:
        sizes.append(float(sum(parameter_sizes.get(name, 0) for name in call.parameters - seen)))
        seen |= call.parameters
    total_flops, total_size = sum(flops) or 1.0, sum(sizes) or 1.0
    share = _PARAMETER_SHARE if sum(flops) else 1.0
    return [flop / total_flops + share * size / total_size for flop, size in zip(flops, sizes, strict=True)]


def live_values(trace: Trace, stage_of: Sequence[int], num_stages: int) -> tuple[tuple[Key, ...], ...]:
    """The values each cut must carry.

    Raises:
        StepError: a value that left a unit by another way than its result is needed on another stage.
    """
    live: list[tuple[Key, ...]] = []
    for stage in range(num_stages - 1):
        needed = {key for call in trace.calls if stage_of[call.index] > stage for key in call.needs} | trace.tail
        crossing = sorted(key for key in needed if stage_of[key[0]] <= stage)
        if hidden := [key for key in crossing if key[1] == HIDDEN]:
            raise _hidden_value(trace, hidden[0][0])
        live.append(tuple(crossing))
    return tuple(live)


def live_bytes(trace: Trace, keys: Sequence[Key]) -> int:
    """Bytes of the values of one cut, for one micro-batch."""
    return sum(
        bytes_of(info) for index, leaf in keys if isinstance(info := trace.calls[index].outputs[leaf], TensorInfo)
    )


def bytes_of(info: TensorInfo) -> int:
    """Bytes of a tensor."""
    numel = 1
    for size in info.shape:
        numel *= size
    return numel * info.dtype.itemsize


def _hidden_value(trace: Trace, index: int) -> StepError:
    unit = trace.calls[index].unit
    return StepError(
        f"A value made inside {unit!r} is read outside of it by another way than its return value (an attribute it "
        "sets, or an input it changes in place), and the reader is on another pipeline stage. Return the value from "
        f"{unit!r}, or use `split_points` to keep both on one stage."
    )


def _balanced_bounds(trace: Trace, costs: list[float], num_stages: int) -> list[int]:
    count = len(costs)
    prices = [_cut_price(trace, position) for position in range(count)]
    free = [prices[i] is not None and trace.calls[i].group != trace.calls[i - 1].group for i in range(count)]
    if sum(free[1:]) < num_stages - 1:
        free = [price is not None for price in prices]
    if sum(free[1:]) < num_stages - 1:
        hidden = next((i for i in range(1, count) if prices[i] is None), None)
        if hidden is not None and count >= num_stages:
            live_values(trace, [int(i >= hidden) for i in range(count)], 2)
        cause = trace.tail_error
        followed = f"The step could not be followed further than {trace.names[-1]!r} ({cause}). " if cause else ""
        if any(call.region is not None for call in trace.calls):
            followed += "What runs inside one `torch.utils.checkpoint` cannot be divided: checkpoint each block. "
        raise StepError(
            f"{followed}The step calls {count} units ({', '.join(dict.fromkeys(trace.names))}), too few for "
            f"{num_stages} pipeline stages. Use at most {sum(free[1:]) + 1} stages "
            "(pipeline_parallel_size x stages_per_rank), or name finer "
            "cuts with `split_points`."
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = _minimise(sums, free, num_stages, lambda bound: 0.0, limit=inf, by_sum=False)
    heaviest = max(sums[b] - sums[a] for a, b in zip([0, *best], [*best, count], strict=True))
    return _minimise(
        sums, free, num_stages, lambda bound: float(prices[bound] or 0), limit=heaviest * 1.05, by_sum=True
    )


def _cut_price(trace: Trace, position: int) -> int | None:
    """Bytes sent by a cut before call ``position``; None where no cut is possible."""
    region = trace.calls[position].region
    if position == 0 or (region is not None and region == trace.calls[position - 1].region):
        return None
    try:
        (keys,) = live_values(trace, [int(call.index >= position) for call in trace.calls], 2)
    except StepError:
        return None
    return live_bytes(trace, keys)


def _minimise(
    sums: list[float], free: list[bool], num_stages: int, price: Callable[[int], float], limit: float, by_sum: bool
) -> list[int]:
    """Bounds with the least heaviest stage, or the least sum of prices with no stage above ``limit``."""
    count = len(sums) - 1
    table: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for stage in range(num_stages):
        row: dict[int, tuple[float, list[int]]] = {}
        ends = [count] if stage == num_stages - 1 else [end for end in range(1, count) if free[end]]
        for end in ends:
            for start, (value, bounds) in table[-1].items():
                weight = sums[end] - sums[start]
                if start >= end or weight > limit:
                    continue
                candidate = value + price(start) if by_sum else max(value, weight)
                if end not in row or candidate < row[end][0]:
                    row[end] = (candidate, [*bounds, start])
        table.append(row)
    return table[-1][count][1][1:]


def _bounds_of_split_points(trace: Trace, split_points: Sequence[str], num_stages: int) -> list[int]:
    bounds = []
    for point in split_points:
        found = [call.index for call in trace.calls if call.unit == point or call.unit.startswith(point + ".")]
        if not found:
            raise StepError(
                f"`split_points` names {point!r}, which the step never calls. It calls, in order: "
                f"{', '.join(dict.fromkeys(trace.names))}."
            )
        bounds.append(found[0])
    if bounds and bounds[0] == 0:
        bounds = bounds[1:]
    if len(bounds) != num_stages - 1 or sorted(set(bounds)) != bounds:
        raise StepError(
            f"`split_points={list(split_points)}` begins {len(bounds) + 1} stages, in the order of the step's calls "
            f"{bounds}; {num_stages} are needed (pipeline_parallel_size x stages_per_rank), each beginning later than "
            "the one before."
        )
    live_values(trace, [sum(index >= bound for bound in bounds) for index in range(len(trace.calls))], num_stages)
    return bounds
