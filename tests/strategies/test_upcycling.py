"""A dense module upcycled by the strategy: from a file of dense weights, resumed, and averaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from safetensors.torch import save_file
from torch import Tensor

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.expert.settings import ExpertParallel, Upcycle
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, quiet_trainer
from tests.parallel.expert.upcycled import BATCH, batches, build, train_plainly

UPCYCLE = Upcycle("*.mlp", experts=3, every=2, router_std=0.5)


def _train(
    rank: int, world_size: int, size: int, epochs: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights, save, resume = (options.get(key) for key in ("weights", "save", "resume"))
    strategy = PTDPStrategy(expert=ExpertParallel(size, upcycle=UPCYCLE), microbatches=1, initial_weights=weights)
    callbacks = [WeightAveraging()] if options.get("average") else []
    trainer = quiet_trainer(strategy, world_size, max_epochs=epochs, callbacks=callbacks)
    module = build()
    if weights:
        for parameter in module.parameters():
            parameter.data.zero_()
    torch.manual_seed(5)
    trainer.fit(module, datamodule=Data(batches(2), BATCH), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return strategy.full_state_dict(), {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_dense_weights_fill_all_experts(prefix: str, tmp_path: Path) -> None:
    file = tmp_path / "dense.safetensors"
    save_file({prefix + name: value for name, value in build().state_dict().items()}, file)
    state, _ = launch_ranks(_train, 2, 2, 1, {"weights": str(file)})[0]
    wanted, _ = train_plainly(UPCYCLE, 2, 2, 1, 1, 5)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


def test_resumed_at_another_expert_size(tmp_path: Path) -> None:
    """DS#6589: experts loaded at another expert size are the right ones by their number in the whole."""
    path = str(tmp_path / "half.ckpt")
    launch_ranks(_train, 2, 2, 1, {"save": path})
    state, _ = launch_ranks(_train, 1, 1, 2, {"resume": path})[0]
    wanted, _ = train_plainly(UPCYCLE, 4, 2, 1, 1, 5, given=batches(2) * 2)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


def test_experts_that_are_not_spread() -> None:
    """With one expert rank all data ranks hold all experts, and average their gradients."""
    state, _ = launch_ranks(_train, 2, 1, 1, {})[0]
    wanted, _ = train_plainly(UPCYCLE, 2, 2, 1, 1, 5)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


def test_averages_are_upcycled_too() -> None:
    """Lightning copies the module before the strategy makes experts of it."""
    _, averaged = launch_ranks(_train, 1, 1, 1, {"average": True})[0]
    after = [train_plainly(UPCYCLE, steps, 1, 1, 1, 5)[0] for steps in (1, 2)]
    for name, value in averaged.items():
        mean = torch.stack([state[name] for state in after]).mean(0)
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
