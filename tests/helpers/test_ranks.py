"""The tests' own way of running several ranks."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.ranks import RanksFailed, launch_ranks, run_ranks


def _sum(rank: int, world_size: int, value: float) -> torch.Tensor:
    tensor = torch.full((3,), value * (rank + 1))
    dist.all_reduce(tensor)
    return tensor


def _environment(rank: int, world_size: int) -> tuple[str, str, bool]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized()


def _soil(rank: int, world_size: int) -> None:
    os.environ["SOILED"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)


def _soiled(rank: int, world_size: int) -> tuple[bool, torch.dtype, int]:
    return "SOILED" in os.environ, torch.get_default_dtype(), torch.get_num_threads()


def _fail_on(rank: int, world_size: int, failing: int) -> int:
    if rank == failing:
        raise ValueError(f"rank {rank} does not like it")
    return rank


def _fail_before_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("not me")
    dist.barrier()


def _stubborn(rank: int, world_size: int) -> None:
    dist.barrier()  # both have begun
    if rank == 0:
        time.sleep(0.5)
        raise ValueError("gone")
    time.sleep(60)


def _sleep(rank: int, world_size: int, seconds: float) -> None:
    time.sleep(seconds)


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def _exit(rank: int, world_size: int) -> None:
    raise SystemExit(3)


def _print(rank: int, world_size: int) -> None:
    print(f"hello from {rank}")
    os.system("echo and from a child")


def _train(rank: int, world_size: int) -> float:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    torch.manual_seed(0)
    model = BoringModel()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(model)
    assert trainer.world_size == world_size
    return float(next(model.parameters()).detach().double().sum())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_by_rank(world_size: int) -> None:
    results = run_ranks(_sum, world_size, 2.0)
    expected = torch.full((3,), 2.0 * sum(range(1, world_size + 1)))
    assert len(results) == world_size
    assert all(torch.equal(result, expected) for result in results)


def test_launch_leaves_torch_distributed_alone() -> None:
    assert launch_ranks(_environment, 2) == [("0", "2", False), ("1", "2", False)]
    assert run_ranks(_environment, 2) == [("0", "2", True), ("1", "2", True)]


def test_jobs_leave_nothing_behind() -> None:
    run_ranks(_soil, 2)
    assert run_ranks(_soiled, 2) == [(False, torch.float32, 1)] * 2


def test_environment_of_the_test_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOILED", "1")
    assert [result[0] for result in run_ranks(_soiled, 2)] == [True, True]


def test_failure_carries_the_traceback() -> None:
    with pytest.raises(RanksFailed, match="rank 1 does not like it") as caught:
        run_ranks(_fail_on, 2, 1)
    assert list(caught.value.tracebacks) == [1]
    assert "in _fail_on" in caught.value.tracebacks[1]
    assert run_ranks(_fail_on, 2, None) == [0, 1]


def test_system_exit_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 3"):
        run_ranks(_exit, 1)


def test_others_notice_a_failed_rank() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fail_before_collective, 3)
    assert next(iter(caught.value.tracebacks)) == 0
    assert "not me" in caught.value.tracebacks[0]
    assert set(caught.value.tracebacks) == {0, 1, 2}
    assert time.monotonic() - start < ranks.GRACE + 10


def test_ranks_that_hang_after_a_failure_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 1.0)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_stubborn, 2)
    assert "gone" in caught.value.tracebacks[0]
    assert "in _stubborn" in caught.value.tracebacks[1], caught.value.tracebacks[1]
    assert time.monotonic() - start < 20


def test_timeout() -> None:
    with pytest.raises(RanksFailed, match="no answer within 2 s") as caught:
        run_ranks(_sleep, 2, 60.0, timeout=2.0)
    assert "in _sleep" in caught.value.tracebacks[0]
    run_ranks(_sleep, 2, 0.0)


def test_dead_process() -> None:
    with pytest.raises(RanksFailed, match=r"died without a word \(exit code 7\)") as caught:
        run_ranks(_die, 2)
    assert 1 in caught.value.tracebacks


def test_output_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_print, 2)
    text = capsys.readouterr().out
    assert "hello from 0" in text
    assert "hello from 1" in text
    assert text.count("and from a child") == 2


def test_lightning_takes_the_environment() -> None:
    first, second = launch_ranks(_train, 2)
    assert first == second


def test_starting_ranks_is_cheap() -> None:
    run_ranks(_sleep, 2, 0.0)  # the fork server is there now
    start = time.monotonic()
    run_ranks(_sleep, 2, 0.0)
    assert time.monotonic() - start < 3.0


def test_random_state_of_the_parent_is_left_alone() -> None:
    random.seed(0)
    torch.manual_seed(0)
    expected = random.random(), torch.rand(())
    random.seed(0)
    torch.manual_seed(0)
    run_ranks(_soil, 2)
    assert (random.random(), torch.rand(())) == expected
