"""Auxiliary losses of layers of experts in the gradients: as if they had been added to the loss."""

from typing import Any

import pytest
import torch

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.expert.account import Account, balance_biases
from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.expert.settings import ExpertParallel, Upcycle
from lnn_lightning.parallel.expert.upcycle import upcycle
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, quiet_trainer
from tests.parallel.expert.upcycled import BATCH, Tokens, batches, build, train_plainly

STEPS = 3
HEAVY = Upcycle("*.mlp", experts=4, every=1, aux_loss=0.7, z_loss=0.2, router_std=0.5)


def _train(
    rank: int, world_size: int, layout: dict[str, Any], settings: Upcycle, accumulate: int, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    layout = dict(layout)
    expert = ExpertParallel(size=layout.pop("expert", 1), upcycle=settings)
    strategy = PTDPStrategy(expert=expert, **layout)
    trainer = quiet_trainer(
        strategy, world_size, max_steps=STEPS, accumulate_grad_batches=accumulate, log_every_n_steps=1
    )
    trainer.fit(build(**options), datamodule=Data(batches(STEPS * accumulate), BATCH))
    return strategy.full_state_dict(), {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("world_size", "layout", "ranks", "accumulate", "options"),
    [
        pytest.param(
            *(2, {"expert": 2, "microbatches": 2, "recompute": "full"}, 2, 2, {}), id="ep2-recomputed-accumulated"
        ),
        pytest.param(2, {"expert": 2, "microbatches": 2}, 2, 1, {"manual": True, "reduction": "sum"}, id="manual-sum"),
        pytest.param(4, {"expert": 2, "microbatches": 2}, 4, 1, {}, id="ep2-dp2", marks=pytest.mark.slow),
        pytest.param(
            *(4, {"expert": 2, "pipeline_parallel_size": 2, "microbatches": 2}, 2, 1, {"reduction": "sum"}),
            id="ep2-pp2-sum",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(2, {"tensor_parallel_size": 2, "sequence_parallel": True, "microbatches": 2}, 1, 1, {}),
            id="tp2-sequence",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(4, {"expert": 4, "tensor_parallel_size": 2, "microbatches": 1}, 2, 1, {}),
            id="ep4-tp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(2, {"expert": 2, "zero_stage": 3, "microbatches": 2}, 2, 1, {}), id="ep2-zero3", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_those_of_loss_plus_losses(
    world_size: int, layout: dict[str, Any], ranks: int, accumulate: int, options: dict[str, Any]
) -> None:
    state, metrics = launch_ranks(_train, world_size, layout, HEAVY, accumulate, options)[0]
    seed = 5  # what `build` sets
    wanted, added = train_plainly(HEAVY, STEPS, ranks, layout["microbatches"], accumulate, seed, **options)
    assert set(state) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert metrics["moe/aux_loss"] == pytest.approx(added[-1], rel=1e-6)
    without, _ = train_plainly(
        Upcycle("*.mlp", experts=4, aux_loss=0.0, router_std=0.5),
        STEPS,
        ranks,
        layout["microbatches"],
        accumulate,
        seed,
        **options,
    )
    router = "blocks.0.mlp.router.weight"
    assert (without[router] - wanted[router]).abs().max() > 1e-3, "the losses must matter for the test to say anything"


def test_factor_is_that_of_a_micro_batch_and_nothing_is_added_elsewhere() -> None:
    model = build()
    upcycle(model, HEAVY)
    tokens, batch = Tokens(model), batches(1)[0]
    account = Account(moe_layers(model), lambda: 6.0)

    def gradients(in_step: bool, copies: int = 0) -> list[torch.Tensor]:
        model.zero_grad()
        if in_step:
            account.begin(2, training=True)
        try:
            loss = model.training_step(batch, 0)
        finally:
            account.finish()
        (loss + copies * tokens.losses(model, HEAVY)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch.testing.assert_close(gradients(in_step=True), gradients(in_step=False, copies=3), rtol=0, atol=1e-12)
    account.begin(1, training=False)
    torch.testing.assert_close(gradients(in_step=False), gradients(in_step=False, copies=0), rtol=0, atol=0)
    account.finish()
    tallies, parts = account.read()
    assert parts == 2 and set(tallies) == {f"blocks.{index}.mlp" for index in range(3)}
    assert all(int(tally.load.sum()) == batch.numel() * 2 for tally in tallies.values())
    assert account.read() == ({}, 0)


def test_bias_moves_once_a_step_towards_even_loads() -> None:
    model = build()
    upcycle(model, Upcycle("*.mlp", experts=4, gate="bias", router_std=0.5))
    account = Account(moe_layers(model), lambda: 1.0)
    for batch in batches(2):
        account.begin(1, training=True)
        model.training_step(batch, 0).backward()
        account.finish()
    loads = {name: load.clone() for name, load in account.unbalanced.items()}
    balance_biases(account, None)
    balance_biases(account, None)
    for name, layer in moe_layers(model).items():
        load = loads[name].double()
        assert load.sum() == 2 * 2 * batch.numel()
        torch.testing.assert_close(layer.router.bias, 0.001 * (load.mean() - load).sign().float())
