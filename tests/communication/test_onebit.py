"""Signs with error feedback, and votes, against the papers' algorithms in one process."""

import pytest
import torch
from torch import Tensor

from lnn_lightning.communication import OneBit, SignSGD
from lnn_lightning.parallel.errors import LayoutError
from tests.communication.given import SHAPES, Plan, Simulation, check, gradient, send
from tests.helpers.ranks import run_ranks

NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def signs(settings: OneBit, ranks: int) -> Simulation:
    """Algorithm 1 of Karimireddy et al., for every rank in turn; what arrives is the mean of what they send."""
    errors = {
        (name, rank): torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items() for rank in range(ranks)
    }

    def step(number: int, own: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        result = {}
        for name, gradients in own.items():
            if number < settings.start_step:
                result[name] = sum(gradients) / ranks
                continue
            result[name] = torch.zeros_like(gradients[0], dtype=torch.float64)
            for rank, g in enumerate(gradients):
                if not g.any():
                    continue
                p = g.double() + errors[name, rank]
                sent = torch.where(p >= 0, 1.0, -1.0).double() * p.abs().sum() / p.numel()
                if settings.error_feedback:
                    errors[name, rank] = p - sent
                result[name] += sent / ranks
        return result  # type: ignore[return-value]

    return step


def votes(ranks: int) -> Simulation:
    """Majority vote of Bernstein et al.; sign(0) is 0."""
    return lambda _, own: {name: torch.stack(each).sign().sum(0).sign() for name, each in own.items()}


FEEDBACK, START, WITHOUT = OneBit(), OneBit(start_step=2), OneBit(error_feedback=False)
SCALES = tuple(2.0 ** (step % 5) for step in range(11))
PLANS = [
    Plan(FEEDBACK, steps=11),
    Plan(START, steps=11, scales=SCALES),
    Plan(FEEDBACK, steps=11, begin_anew=6),
    Plan(WITHOUT, steps=10),
    Plan(FEEDBACK, steps=11, unused_here=(4, 1, "matrix")),
    Plan(SignSGD(), steps=10),
    Plan(SignSGD(), steps=10, dtype=torch.float32, scales=SCALES),
    Plan(FEEDBACK, steps=6, spoilt=(2, 1, "matrix")),
    Plan(SignSGD(), steps=6, spoilt=(2, 1, "matrix")),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_algorithms(ranks: int) -> None:
    results = run_ranks(send, ranks, PLANS)
    for index, plan in enumerate(PLANS[:7]):
        simulate = signs(plan.compression, ranks) if isinstance(plan.compression, OneBit) else votes(ranks)
        check(results, index, plan, simulate)
    for result in results:
        for a, b in zip(result[2].arrived, result[0].arrived, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
        assert result[0].error_norm and result[3].error_norm is None
        for index in (7, 8):
            for step, arrived in enumerate(result[index].arrived):
                assert bool(arrived["matrix"].isfinite().all()) == (step != 2)
    spoilt = FEEDBACK, signs(FEEDBACK, ranks)
    for step in range(6):
        own = {name: [gradient(step, rank, name, torch.float64) for rank in range(ranks)] for name in SHAPES}
        if step == 2:
            own["matrix"] = [torch.zeros(SHAPES["matrix"], dtype=torch.float64)] * ranks  # the step is skipped
        expected = spoilt[1](step, own)
        if step != 2:
            torch.testing.assert_close(results[0][7].arrived[step], expected, rtol=1e-9, atol=1e-12)
    # one bit an element (whole bytes in a bucket) and a scale in fp64 a parameter
    bits = results[0][0].counted - 11 * 8 * len(SHAPES)
    assert 11 * NUMBERS / 8 <= bits <= 11 * (NUMBERS / 8 + len(SHAPES))
    # two bits to those who count, two bits back; the second one is of a rank's share
    padded = 10 * 2 * (NUMBERS + len(SHAPES) * 8 * ranks) / 8
    assert 10 * 2 * NUMBERS / 8 * (1 + 1 / ranks) <= results[0][5].counted <= padded * (1 + 1 / ranks)


def test_refused() -> None:
    for wrong in (-1, 0.5, "1"):
        with pytest.raises(LayoutError, match="start_step"):
            OneBit(start_step=wrong)  # type: ignore[arg-type]
