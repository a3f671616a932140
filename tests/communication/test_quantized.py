"""Blocks of small numbers, exchanged and gathered, against the paper's scheme in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lnn_lightning.communication import Cast, Quantized
from lnn_lightning.communication.blocks import Eight, Whole
from lnn_lightning.communication.compression import Ranks
from lnn_lightning.parallel.errors import LayoutError
from tests.communication.given import SHAPES, Plan, Simulation, check, gradient, send
from tests.helpers.ranks import run_ranks


def quantised(values: Tensor, bits: int, block: int) -> Tensor:
    """To whole numbers and back, block by block."""
    flat = values.reshape(-1).clone()
    largest = 2 ** (bits - 1) - 1
    for start in range(0, flat.numel(), block):
        part = flat[start : start + block]
        scale = part.abs().max() / largest
        flat[start : start + block] = (part / scale).round() * scale if scale > 0 else 0
    return flat.view_as(values)


def scheme(settings: Quantized, ranks: int) -> Simulation:
    """qgZ of ZeRO++: code, add up, code again."""

    def step(_: int, own: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        result = {}
        for name, each in own.items():
            small = each[0].numel() < settings.block
            mean = sum(g if small else quantised(g, settings.bits, settings.block) for g in each) / ranks
            result[name] = mean if small else quantised(mean, settings.bits, settings.block)
        return result

    return step


EIGHT, FOUR, CHANCE = Quantized(8, block=32), Quantized(4, block=16), Quantized(4, block=64, stochastic=True)
PLANS = [
    Plan(EIGHT),
    Plan(FOUR),
    Plan(Quantized(), dtype=torch.float32),
    Plan(EIGHT, unused_here=(4, 1, "matrix")),
    Plan(EIGHT, steps=4, spoilt=(2, 1, "matrix")),
    Plan(CHANCE),
    Plan(CHANCE, begin_anew=3),
    Plan(Cast("fp8")),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_scheme(ranks: int) -> None:
    results = run_ranks(send, ranks, PLANS)
    for index in (0, 1, 3):
        check(results, index, PLANS[index], scheme(PLANS[index].compression, ranks))  # type: ignore[arg-type]
    for arrived, plan in ((results[0][2].arrived, PLANS[2]), (results[0][7].arrived, PLANS[7])):
        for step, each in enumerate(arrived):
            for name, value in each.items():
                own = [gradient(step, rank, name, torch.float64) for rank in range(ranks)]
                # half a step of the code for each rounding: 127 steps of eight bits, three bits of mantissa
                limit = (0.5 / 127 if plan is PLANS[2] else 1 / 16) * 2.01 * max(float(g.abs().max()) for g in own)
                assert float((value - sum(own) / ranks).abs().max()) <= limit
                assert value.numel() < 256 or not torch.equal(value.double(), sum(own) / ranks)
    for result in results:
        assert [bool(each["matrix"].isfinite().all()) for each in result[4].arrived] == [True, True, False, True]
        for index in (5, 6, 7):
            assert result[index].bytes == result[index].counted
            for step in range(10):
                for name in SHAPES:
                    assert torch.equal(result[index].arrived[step][name], results[0][index].arrived[step][name])
        # other buckets, and a new start: the same numbers by chance
        for a, b in zip(result[6].arrived, result[5].arrived, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    blocks = sum(-(-size // 32) for size in sizes if size >= 32)
    once = 10 * blocks * (32 + 8) * (1 + 1 / ranks)  # bytes and a scale in fp64
    whole = 10 * 8 * sum(size for size in sizes if size < 32)
    assert once + whole <= results[0][0].counted <= once + whole + 10 * len(SHAPES) * 2 * ranks * 40


def _scattered(rank: int, world_size: int, settings: Any) -> tuple[Tensor, Tensor, int]:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    compressor = settings.compressor(Ranks(dist.group.WORLD))
    chunks = torch.randn(world_size, 100, generator=torch.Generator().manual_seed(rank))
    return chunks, compressor.scatter_mean(chunks, "unit"), compressor.traffic.payload


@pytest.mark.parametrize("settings", [Quantized(8, block=32), Cast("bf16"), Cast("fp8")])
def test_each_rank_gets_its_part(settings: Any) -> None:
    results = run_ranks(_scattered, 3, settings)
    for rank, (_, mean, payload) in enumerate(results):
        own = [chunks[rank] for chunks, _, _ in results]
        if isinstance(settings, Quantized):
            expected = sum(quantised(each, 8, 32) for each in own) / 3
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
            assert payload == 3 * 4 * (32 + 4)
        assert float((mean - sum(own) / 3).abs().max()) < max(float(each.abs().max()) for each in own) / 32


def test_rounding_by_chance_loses_nothing_on_average() -> None:
    code = Whole(4)
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.stack(
        [code.decode(*code.encode(values, torch.rand(4, 32, generator=generator).double())) for _ in range(4000)]
    )
    step = values.abs().amax(1, keepdim=True) / 7
    assert ((drawn.mean(0) - values).abs() < 4 * step * 0.5 / 4000**0.5).all()
    assert ((drawn - values).abs() <= step * (1 + 1e-9)).all() and drawn.std(0).max() > 0.1 * step.min()
    nearest = code.decode(*code.encode(values))
    assert ((nearest - values).abs() <= step / 2 * (1 + 1e-9)).all()


@pytest.mark.parametrize("code", [Whole(8), Whole(4), Eight()])
def test_blocks_of_zeros_and_of_what_is_not_finite(code: Any) -> None:
    blocks = torch.stack([torch.zeros(8), torch.full((8,), torch.nan), torch.ones(8), torch.arange(8.0)])
    blocks[2, 3] = torch.inf
    back = code.decode(*code.encode(blocks))
    assert torch.equal(back[0], blocks[0]) and not back[1].isfinite().any() and not back[2].isfinite().any()
    torch.testing.assert_close(back[3], blocks[3], rtol=0.07, atol=0.5)
    assert len(code.encode(blocks)[0][0]) == (4 if code == Whole(4) else 8)


@pytest.mark.parametrize("settings", [{"bits": 2}, {"block": 0}, {"block": 33}])
def test_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=next(iter(settings))):
        Quantized(**settings)
