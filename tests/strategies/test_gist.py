"""Compressed activations under every axis: the same training to the bit."""

from typing import Any

import pytest
import torch

from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import Run, differences, quiet_trainer, train_with_trainer
from tests.zoo import ZOO

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "pipeline_recomputed": ("unet", 2, {"pipeline_parallel_size": 2, "microbatches": 4, "recompute": 2}, {}),
    "zero_bubble": ("unet", 2, {"pipeline_parallel_size": 2, "schedule": "zero_bubble", "stages_per_rank": 2}, {}),
    "tensor": ("hf_t5", 2, {"tensor_parallel_size": 2}, {}),
    "zero3": ("gpt_tied", 2, {"data_parallel_size": 2, "zero_stage": 3, "microbatches": 2}, {}),
    "zero2_autocast": ("unet", 2, {"data_parallel_size": 2, "zero_stage": 2}, {"precision": "bf16-mixed"}),
}


def compressed_and_plain(
    rank: int, world_size: int, name: str, layout: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Runs in `launch_ranks`: what differs, and the encodings that were used."""
    import lnn_lightning.strategies.memory as memory
    from lnn_lightning import Gist
    from lnn_lightning.memory import saved_tensors
    from lnn_lightning.memory.gist import GistOperations

    saved_tensors.SMALLEST = 0  # the zoo's tensors are all small
    made: list[Any] = []

    class Watched(GistOperations):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    memory.GistOperations = Watched  # type: ignore[misc]
    run = Run(n_steps=2, dtype=torch.float32 if options else torch.float64)
    plain = train_with_trainer(rank, world_size, name, layout, run, options=options)
    found = train_with_trainer(
        rank, world_size, name, {**layout, "activation_compression": Gist()}, run, options=options
    )
    (operations,) = made
    return {
        "differences": differences([found], plain, 0.0),
        "encodings": set(operations.report.by_encoding),
        "left": len(operations.saved._kept),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_training(name: str) -> None:
    model, world_size, layout, options = LAYOUTS[name]
    results = launch_ranks(compressed_and_plain, world_size, model, layout, options)
    assert not any(result["differences"] for result in results), results
    assert all(result["left"] == 0 for result in results)
    used = set.union(*(result["encodings"] for result in results))
    assert used & {"made again", "ReLU in bits"}, used
    if model == "unet":
        assert "max-pool places in bytes" in used


def with_hooks(rank: int, world_size: int) -> None:
    from lnn_lightning import Gist, PTDPStrategy
    from tests.helpers.reference import Data, build, global_batches

    case = ZOO["gpt_tied"]
    module = build(case)
    block = next(each for each in module.modules() if isinstance(each, torch.nn.LayerNorm))
    forward = block.forward

    def on_the_cpu(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return forward(x)

    block.forward = on_the_cpu  # type: ignore[method-assign]
    trainer = quiet_trainer(PTDPStrategy(activation_compression=Gist()), world_size, max_steps=1)
    trainer.fit(module, datamodule=Data(global_batches(case, Run(n_steps=1, dtype=torch.float32)), 8))


def test_hooks_of_the_user_are_refused() -> None:
    with pytest.raises(RanksFailed, match="save_on_cpu") as caught:
        launch_ranks(with_hooks, 2)
    assert set(caught.value.tracebacks) == {0, 1}
