"""The zoo's models by themselves: they train, and the reference is what it says."""

import pytest
import torch

from tests.helpers.reference import Run, differences, global_batches, share, train_reference
from tests.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_trains(name: str) -> None:
    result = train_reference(ZOO[name], Run(n_steps=12))
    assert all(loss == loss for loss in result.losses)
    assert sum(result.losses[-3:]) < 0.98 * sum(result.losses[:3]), result.losses


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.deterministic])
def test_reference_is_reproducible(name: str) -> None:
    run = Run(n_steps=2)
    expected = train_reference(ZOO[name], run)
    assert not differences([train_reference(ZOO[name], run)], expected, 1e-12)


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.deterministic and case.equal_shares])
def test_micro_batches_give_the_whole_batch(name: str) -> None:
    case, run = ZOO[name], Run(n_steps=3)
    whole, micro = train_reference(case, run), train_reference(case, run, micro=4)
    found = differences([micro], whole, case.tolerance, case.loss_tolerance)
    assert (not found) == case.per_sample, found


def test_shares_make_the_batch() -> None:
    batch = global_batches(ZOO["nested_batch"], Run())[0]
    parts = [share(batch, i, 2, 8) for i in range(2)]
    assert parts[0]["names"] + parts[1]["names"] == batch["names"]
    assert torch.equal(torch.cat([part["target"][0] for part in parts]), batch["target"][0])
    assert parts[0]["factor"] == batch["factor"]
