"""Predicted memory is the measured one, by rank."""

from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from examples.gpt import ByteGPT
from lnn_lightning import Hierarchical
from lnn_lightning.commands.memory import table
from lnn_lightning.communication import Cast, PowerSGD
from tests.communication.test_hierarchical import on_host
from tests.helpers.ranks import launch_ranks
from tests.planning.measured import measure, predicted

PIPELINE = {"pipeline_parallel_size": 2, "microbatches": 4}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": (PIPELINE, {}),
    "gpipe, bf16": ({**PIPELINE, "schedule": "gpipe"}, {"precision": "bf16-true"}),
    "interleaved": ({**PIPELINE, "schedule": "interleaved", "stages_per_rank": 2}, {}),
    "zero bubble": ({**PIPELINE, "schedule": "zero_bubble"}, {}),
    "tensor": ({"tensor_parallel_size": 2}, {}),
    "tensor, sequence, mixed": ({"tensor_parallel_size": 2, "sequence_parallel": True}, {"precision": "bf16-mixed"}),
    "zero 1": ({"zero_stage": 1}, {}),
    "zero 1, master weights": ({"zero_stage": 1}, {"masters": True}),
    "zero 2": ({"zero_stage": 2, "microbatches": 2}, {"accumulate_grad_batches": 2}),
    "zero 3": ({"zero_stage": 3}, {}),
    "recompute full": ({**PIPELINE, "recompute": "full"}, {}),
    "recompute selective": ({"recompute": "selective", "zero_stage": 3}, {}),
    "recompute auto": ({**PIPELINE, "recompute": "auto", "schedule": "zero_bubble"}, {}),
}
LLAMA = ["1f1b", "tensor", "zero 1", "zero 3", "recompute full"]


@cache
def measured(name: str) -> list[list[dict[str, Any]]]:
    """By rank, in the order of the runs."""
    names = LLAMA if name == "llama" else list(RUNS)
    return launch_ranks(measure, 2, name, [RUNS[each] for each in names])


@pytest.mark.parametrize(
    ("name", "run"), [*(("gpt", run) for run in RUNS), *(("llama", run) for run in LLAMA)], ids=lambda value: value
)
def test_predicted_is_measured(name: str, run: str) -> None:
    prediction = predicted(name, 2, *RUNS[run])
    assert not prediction.notes
    for found in (each[(LLAMA if name == "llama" else list(RUNS)).index(run)] for each in measured(name)):
        expected = next(
            rank for rank in prediction.ranks if (rank.pipeline, rank.data) == (found["pipeline"], found["data"])
        )
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(expected, kind) == found[kind], f"{kind} of {expected}, measured {found}"
        assert expected.activations == pytest.approx(found["activations"], rel=0.1), f"{expected}, measured {found}"
        assert found["activations"] > 0


COMPRESSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gradient_compression": PowerSGD(2), "pipeline_parallel_size": 2, "microbatches": 2}, {"precision": "bf16-true"}),
    ({"gradient_compression": PowerSGD(2), "zero_stage": 2, "data_parallel_size": (2, 2)}, {}),
    ({"gradient_compression": Hierarchical(Cast(), PowerSGD(2))}, {}),
]


def _on_two_hosts(rank: int, ranks: int) -> list[dict[str, Any]]:
    with on_host("aabb"[rank]):
        return measure(rank, ranks, "gpt", COMPRESSED)


def test_what_compression_keeps() -> None:
    """Errors and factors of a rank's parameters, its stage, its shards, or its rows of a host's mean."""
    measured = launch_ranks(_on_two_hosts, 4)
    for index, (layout, options) in enumerate(COMPRESSED):
        nodes = 2 if index == len(COMPRESSED) - 1 else 1
        prediction = predicted("gpt", 4 // nodes, layout, options | {"num_nodes": nodes})
        for found in (each[index] for each in measured):
            place = found["pipeline"], found["data"]
            expected = next(rank for rank in prediction.ranks if (rank.pipeline, rank.data) == place)
            assert expected.compression == found["compression"] > 0, f"{expected}, measured {found}"
        assert "compression" in table(prediction)


def test_torchs_tracker_agrees() -> None:
    """Torch's own tracker, on the whole model without data. It knows nothing of stages and parts."""
    expected = predicted("gpt", 1, {}, {}).ranks[0]
    with FakeTensorMode():
        module = ByteGPT(n_layer=4, n_head=4, n_embd=64, block_size=32)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        tokens, targets = torch.randint(128, (8, 32)), torch.randint(128, (8, 32))
        tracker = MemTracker()
        tracker.track_external(module, optimizer, tokens, targets)
        with tracker:
            for step in range(2):  # the first makes the optimizer's state
                module.loss((tokens, targets)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
    peak = {
        kind.name: size
        for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()
        if kind != "Total"
    }
    assert expected.parameters == peak["PARAM"]
    assert expected.optimizer == peak["OPT"]
    assert expected.activations == peak["ACT"] - 4  # the loss
