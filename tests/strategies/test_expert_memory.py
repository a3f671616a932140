"""Experts that are shared out: what each rank holds, what is predicted, and memory features around them."""

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lnn_lightning.memory.offload.optimizer as offloaded
from lnn_lightning import Adafactor, ExpertParallel, Gist, Offload, PTDPStrategy
from lnn_lightning.commands.measuring import MeasureMemory
from lnn_lightning.commands.unlaunched import predict_memory
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.precision import MeshHalfPrecision
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Losses, quiet_trainer, relative_error
from tests.zoo.experts import SkippingMoE, mixtral
from tests.zoo.language import LENGTH, VOCABULARY, WIDTH

STEPS, BATCH = 2, 8


class Model(pl.LightningModule):
    """Transformers' Mixtral (stacked experts), or blocks around a list of experts."""

    def __init__(self, kind: str, optimizer: str) -> None:
        super().__init__()
        self.kind, self.optimizer = kind, optimizer
        if kind == "loop":
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = torch.nn.ModuleList(SkippingMoE() for _ in range(2))
            self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        else:
            self.model = mixtral()
            self.model.config.use_cache = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.kind != "loop":
            return self.model(input_ids=batch, labels=batch).loss
        x = self.embed(batch)
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.roll(-1, 1).flatten())

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adafactor":
            return Adafactor(self.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def fit_of(devices: int, layout: dict[str, Any], options: dict[str, Any]) -> tuple[pl.Trainer, Model, Any]:
    options = dict(options)
    torch.manual_seed(0)
    module = Model(options.pop("kind", "fused"), options.pop("optimizer", "adamw"))
    if plugin := options.pop("half", None):
        options["plugins"] = [MeshHalfPrecision("bf16-true", **plugin)]
    trainer = quiet_trainer(PTDPStrategy(**layout), devices, max_steps=STEPS, **options)
    data = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH))
    return trainer, module, data


def run_all(rank: int, world_size: int, jobs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs in `launch_ranks`: what this rank held, and what came out."""
    offloaded.SMALL = 1  # models of tests have nothing but small parameters
    results = []
    for layout, options in jobs:
        trainer, module, data = fit_of(world_size, layout, options)
        losses, measure = Losses(), MeasureMemory()
        trainer.callbacks += [losses, measure]  # type: ignore[attr-defined]
        place, size = (rank, world_size) if "pipeline_parallel_size" not in layout else (rank % 2, 2)
        shares = data.view(STEPS, size, BATCH // size, LENGTH)[:, place]
        trainer.fit(module, DataLoader(list(shares), batch_size=None))  # type: ignore[arg-type]
        here = [p for name, p in module.named_parameters() if ".experts" in name and not is_stand_in(p)]
        state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        results.append(
            {
                **measure.measured,
                "experts": sum(p.numel() for p in here),
                "losses": [float(loss) for loss in losses.losses],
                "state": {name: value.clone() for name, value in state.items()} if rank == 0 else {},
            }
        )
    return results


EP2: dict[str, Any] = {"expert": ExpertParallel(2)}
HELD: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "alone": (2, {}, {}),
    "ep2": (2, EP2, {}),
    "ep2, masters": (2, {**EP2, "zero_stage": 1}, {"half": {"master_weights": True}}),
    "ep2, loop": (2, EP2, {"kind": "loop"}),
    "ep4": (4, {"expert": ExpertParallel(4), "recompute": "full"}, {}),
    "ep2 x dp2, zero 1": (4, {**EP2, "zero_stage": 1}, {}),
    "ep2 x pp2": (4, {**EP2, "pipeline_parallel_size": 2, "microbatches": 2}, {}),
    "ep2 x dp2, loop, zero 1": (4, {**EP2, "zero_stage": 1}, {"kind": "loop"}),
}
CPU = Offload("cpu", chunk_size=4096)
ACTIVATIONS = Offload("cpu", what="activations")
MASTERS: dict[str, Any] = {"half": {"master_weights": True}}
ROUNDED: dict[str, Any] = {"half": {"stochastic_rounding": True}}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gist": ({"activation_compression": Gist()}, {}),
    "gist, recompute": ({"activation_compression": Gist(), "recompute": "auto"}, {}),
    "gist, loop": ({"activation_compression": Gist()}, {"kind": "loop"}),
    "offloaded activations": ({"offload": ACTIVATIONS}, {}),
    "offloaded activations, recompute": ({"offload": ACTIVATIONS, "recompute": "full"}, {}),
    "offloaded optimizer": ({"offload": CPU}, {}),
    "offloaded optimizer, masters": ({"offload": CPU}, MASTERS),
    "stochastic rounding, recompute": ({"recompute": "full"}, ROUNDED),
}
"""Features next to expert parallelism, and options; compared with the same options without the features."""


@cache
def outcomes(ranks: int) -> dict[Any, list[dict[str, Any]]]:
    """By job, then by rank; all jobs of so many ranks in one launch."""
    jobs: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {
        name: (layout, options) for name, (count, layout, options) in HELD.items() if count == ranks
    }
    if ranks == 2:
        for name, (feature, options) in PAIRS.items():
            jobs[name] = ({**EP2, **feature}, options)
            jobs.setdefault(f"without {options}", (EP2, options))
        for name, layout in (("data", {}), ("experts", EP2)):
            jobs[f"adafactor, {name}"] = (layout, {"optimizer": "adafactor", "precision": "64-true"})
    results = launch_ranks(run_all, ranks, list(jobs.values()), timeout=240)
    return {name: [each[index] for each in results] for index, name in enumerate(jobs)}


@pytest.mark.parametrize("name", [name for name in HELD if name != "alone"])
def test_memory_of_a_rank_is_experts_over_expert_ranks(name: str) -> None:
    """Parameters, gradients and AdamW's states; and that is what the planner predicts."""
    ranks, layout, options = HELD[name]
    trainer, module, data = fit_of(ranks, layout, options)
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts" in name)
    prediction = predict_memory(trainer, module, train_dataloaders=DataLoader(list(data), batch_size=BATCH // ranks))
    size, stages = layout["expert"].size, layout.get("pipeline_parallel_size", 1)
    for found in outcomes(ranks)[name]:
        assert found["experts"] == experts // size // stages
        expected = next(
            rank for rank in prediction.ranks if (rank.pipeline, rank.data) == (found["pipeline"], found["data"])
        )
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(expected, kind) == found[kind], f"{kind} of {expected}, measured {found}"
    if name == "ep2":  # everything that half the experts take up is saved
        alone = outcomes(2)["alone"][0]
        for found in outcomes(2)[name]:
            for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
                assert alone[kind] - found[kind] == copies * experts // 2 * 4


@pytest.mark.parametrize("name", list(PAIRS))
def test_memory_features_change_no_number(name: str) -> None:
    got, expected = outcomes(2)[name], outcomes(2)[f"without {PAIRS[name][1]}"]
    assert got[0]["losses"][0] != got[0]["losses"][-1]
    if name == "offloaded optimizer":  # its fused kernel rounds otherwise than torch's loop over tensors
        pairs = [(got[0]["state"][key], value) for key, value in expected[0]["state"].items()]
        assert all(relative_error(value, reference) < 1e-5 for value, reference in pairs)
        return
    assert [each["losses"] for each in got] == [each["losses"] for each in expected]
    for key, value in expected[0]["state"].items():
        assert torch.equal(got[0]["state"][key], value), key


def test_adafactor_on_experts() -> None:
    """Its factors and clipping are those of whole stacked weights."""
    got, expected = outcomes(2)["adafactor, experts"][0], outcomes(2)["adafactor, data"][0]
    for key, value in expected["state"].items():
        assert relative_error(got["state"][key], value) < 1e-6, key  # the router's softmax is in fp32
