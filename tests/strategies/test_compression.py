"""Compression of gradients on the mesh: exact where nothing is lost, ranks that stay equal, resumed bit for bit."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lnn_lightning import ExpertParallel, PowerSGD, PTDPStrategy
from lnn_lightning.checkpoint import tensor_names
from lnn_lightning.checkpoint.export import export
from lnn_lightning.communication import Compression
from lnn_lightning.optim.block_scales import BlockScaling
from lnn_lightning.parallel.layout import DATA, PIPELINE, TENSOR
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.precision import MeshGradScaler, MeshMixedPrecision
from tests.helpers import compression
from tests.helpers.compression import Masked, Scattering
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import (
    Data,
    Losses,
    Result,
    Run,
    build,
    differences,
    global_batches,
    quiet_trainer,
    train_reference,
)
from tests.strategies.test_ptdp import (
    Manual,
    Model,
    OverflowingBlock,
    OverflowsOnce,
    assert_same_state,
    full_state,
    loader,
    model,
    trainer_for,
)
from tests.zoo import ZOO

LOSSLESS, LOSSY = Masked(), Masked(0.3)
RUN = Run(n_steps=2, accumulate=2, clip=0.1)
PIPELINE_DATA: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2}
TENSOR_DATA: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2}
SEQUENCE: dict[str, Any] = {**TENSOR_DATA, "sequence_parallel": True}
HYBRID: dict[str, Any] = {"data_parallel_size": (2, 2), "microbatches": 2}
EXPERTS: dict[str, Any] = {"expert": ExpertParallel(2), "microbatches": 1}
Job = tuple[str, dict[str, Any]]


@cache
def reference(name: str, micro: int, run: Run = RUN) -> Result:
    return train_reference(ZOO[name], run, micro)


def _trains(rank: int, world_size: int, jobs: list[Job]) -> list[tuple[Result, dict[str, Any], dict[str, Tensor]]]:
    """What was trained, and of each compressor: its ranks, steps, names and error; and the parameters of this rank."""
    found = []
    for name, layout in jobs:
        compression.CALLS.clear()
        module, losses = build(ZOO[name]), Losses()
        options: dict[str, Any] = {
            "max_steps": RUN.n_steps,
            "accumulate_grad_batches": RUN.accumulate,
            "gradient_clip_val": RUN.clip,
            "precision": "64-true",
            "callbacks": [losses],
        }
        trainer = quiet_trainer(PTDPStrategy(**layout), world_size, **options)
        trainer.fit(module, datamodule=Data(global_batches(ZOO[name], RUN), RUN.batch_size))
        strategy: Any = trainer.strategy
        places = {
            place: {"ranks": each.wire.size, "step": each.step, "error": float(each.error_norm() or 0)}
            for place, each in strategy.engine.reduction.by_place.items()
        }
        residence = strategy.engine.residence
        mine = {
            f"{'divided' if residence.is_divided(name) or residence.is_expert(name) else 'whole'} {name}": (
                getattr(p, "_local_tensor", p).detach().clone()
            )
            for name, p in module.named_parameters()
            if not is_stand_in(p)
        }
        at = {axis: strategy.mesh.rank(axis) for axis in (PIPELINE, DATA, TENSOR)}
        names = {name for call in compression.CALLS for name in call}
        state = strategy.full_state_dict()
        result = Result([float(loss) for loss in losses.losses], state if rank == 0 else {})
        found.append((result, {"places": places, "at": at, "names": names}, mine))
    return found


def check_exact(
    world_size: int,
    jobs: list[tuple[str, dict[str, Any], dict[str, int]]],
    tolerance: float,
    way: Compression = LOSSLESS,
) -> None:
    """A way of compression that loses nothing gives the numbers of one process; by place, over so many ranks."""
    compressed = [(name, {**layout, "gradient_compression": way}) for name, layout, _ in jobs]
    results = launch_ranks(_trains, world_size, compressed)
    for index, (name, layout, expected) in enumerate(jobs):
        data = world_size // layout.get("pipeline_parallel_size", 1) // layout.get("tensor_parallel_size", 1)
        micro = 1 if ZOO[name].per_sample else layout["microbatches"] * (data if "expert" in layout else 1)
        problems = differences([each[index][0] for each in results], reference(name, micro), tolerance)
        assert not problems, f"{name} under {layout}:\n" + "\n".join(problems)
        for each in results:
            places = each[index][1]["places"]
            assert {place: found["ranks"] for place, found in places.items()} == expected, (name, layout)
            assert all(found["step"] == RUN.n_steps for found in places.values()), (layout, places)
            assert len(each[index][1]["names"]) > 3


def test_without_loss_nothing_changes() -> None:
    """Accumulation and clipping; every gradient is averaged by the compressor of its place, once a step."""
    over_data, hybrid = {"data_parallel": 2}, {"data_replicate": 2}
    jobs: list[tuple[str, dict[str, Any], dict[str, int]]] = [
        ("gpt_tied", PIPELINE_DATA, over_data),
        ("gpt_tied", SEQUENCE, over_data),
        ("gpt_tied", {**HYBRID, "zero_stage": 3}, hybrid),
        ("shared_bias", {**HYBRID, "zero_stage": 2}, {**hybrid, "data_parallel": 4}),
        ("token_experts", {**HYBRID, "zero_stage": 2, "microbatches": 1}, hybrid),
    ]
    check_exact(4, jobs, 1e-9)


def test_experts_have_a_compressor_of_their_own() -> None:
    over = {"data_parallel": 4, "expert_data": 2}
    check_exact(4, [("moe_skipping", EXPERTS, over)], 1e-9)


def test_a_reduce_scatter_is_compressed() -> None:
    """ZeRO 2 and 3 over one axis, with parameters that stay whole, and some that are not used."""
    jobs: list[tuple[str, dict[str, Any], dict[str, int]]] = [
        (
            "shared_bias",
            {"data_parallel_size": 2, "microbatches": 2, "zero_stage": 3},
            {"data_shard": 2, "data_parallel": 2},
        ),
        ("token_experts", {"data_parallel_size": 2, "microbatches": 1, "zero_stage": 2}, {"data_shard": 2}),
    ]
    check_exact(2, jobs, 1e-9, Scattering())


@pytest.mark.slow
def test_experts_that_are_sharded() -> None:
    """In hybrid sharding too they are reduced and scattered over one axis, if need be without compression."""
    over = {"data_shard": 4, "expert_shard": 2, "data_parallel": 4}
    check_exact(4, [("moe_skipping", {**EXPERTS, "zero_stage": 3}, over)], 1e-9, Scattering())
    over = {"data_replicate": 2, "data_parallel": 4}
    check_exact(
        4,
        [("moe_skipping", {**EXPERTS, "data_parallel_size": (2, 2), "zero_stage": 2}, over)],
        1e-9,
    )


@pytest.mark.slow
def test_without_loss_nothing_changes_in_more_layouts() -> None:
    over_data, hybrid = {"data_parallel": 2}, {"data_replicate": 2}
    jobs: list[tuple[str, dict[str, Any], dict[str, int]]] = [
        ("gpt_tied", TENSOR_DATA, over_data),
        ("gpt_tied", {**HYBRID, "zero_stage": 1}, {"data_parallel": 4}),
        ("frozen_embedding", {**HYBRID, "zero_stage": 3, "reshard_between_microbatches": True}, hybrid),
        ("gpt_tied", {**PIPELINE_DATA, "schedule": "zbv", "stages_per_rank": 2}, over_data),
        ("unet", {**HYBRID, "zero_stage": 3}, hybrid),
        ("hf_t5", {**HYBRID, "zero_stage": 2}, hybrid),
        ("gpt_two_groups", {**PIPELINE_DATA, "zero_stage": 1}, over_data),
        ("token_experts", {**PIPELINE_DATA, "microbatches": 1}, over_data),
    ]
    check_exact(4, jobs, 1e-6)


def test_what_loses_much_leaves_ranks_equal() -> None:
    """Random numbers differ between data ranks alone: what several ranks hold stays the same on them, bit by bit."""
    layouts = [
        {**PIPELINE_DATA, "check_replicas": True},
        {**SEQUENCE, "check_replicas": True},
        {**HYBRID, "zero_stage": 3},
    ]
    results = launch_ranks(_trains, 4, [("gpt_tied", {**each, "gradient_compression": LOSSY}) for each in layouts])
    for index, layout in enumerate(layouts):
        exact = reference("gpt_tied", layout["microbatches"] if not ZOO["gpt_tied"].per_sample else 1)
        assert differences([each[index][0] for each in results], exact, 1e-6), "it has lost nothing"
        assert all(found["error"] > 0 for each in results for found in each[index][1]["places"].values())
        held: dict[Any, Tensor] = {}
        for each in results:
            _, about, mine = each[index]
            at = about["at"]
            for name, value in mine.items():
                shard = at[DATA] % 2 if "zero_stage" in layout else 0
                key = (name, at[TENSOR] if name.startswith("divided") else 0, shard)
                assert torch.equal(held.setdefault(key, value), value), (layout, name, at)


# ------------------------------------------------------------------------------------------------ checkpoints


def _fit(layout: dict[str, Any], world_size: int, epochs: int, resume: str = "", **options: Any) -> tuple[Any, Any]:
    trainer = trainer_for(world_size, layout, max_epochs=epochs, **options)
    module = model(dropout=0.2)
    trainer.fit(module, loader(), ckpt_path=resume or None)
    return trainer, module


def _state(trainer: pl.Trainer) -> dict[str, Any]:
    reduction = trainer.strategy.engine.reduction  # type: ignore[attr-defined]
    return {} if reduction is None else reduction.state_dict()


def _resumes(rank: int, world_size: int, jobs: list[dict[str, Any]], folder: str) -> None:
    for index, layout in enumerate(jobs):
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        path = f"{folder}/{index}.ckpt"
        whole, expected = _fit(layout, world_size, 4, **options)
        half, first = _fit(layout, world_size, 2, **options)
        half.save_checkpoint(path)
        kept = _state(half)
        torch.manual_seed(1234)
        again = trainer_for(world_size, layout, max_epochs=4, **options)
        module = model(dropout=0.2)
        seen: list[Any] = []
        again.callbacks.append(_AtStart(lambda each, seen=seen: seen.append(_copied(_state(each)))))  # type: ignore[misc, attr-defined]
        again.fit(module, loader(), ckpt_path=path)
        assert_same(seen[0], kept)
        assert [*first.losses, *module.losses] == expected.losses, layout
        assert_same_state(full_state(again), full_state(whole))
        assert_same(_state(again), _state(whole))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        place: {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
        for place, values in state.items()
    }


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys() != set()
    for place, values in expected.items():
        assert got[place].keys() == values.keys()
        for key, value in values.items():
            same = torch.equal(got[place][key], value) if isinstance(value, Tensor) else got[place][key] == value
            assert same, (place, key)
        assert sum(float(value.abs().sum()) for value in values.values() if isinstance(value, Tensor)) > 0


class _AtStart(pl.Callback):
    def __init__(self, act: Callable[[pl.Trainer], Any]) -> None:
        self._act = act

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._act(trainer)


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    """Errors, Q matrices, random numbers and counts of all ranks; saved in the background, too."""
    power = PowerSGD(rank=1, min_compression=1)
    jobs = [{**PIPELINE_DATA, "gradient_compression": LOSSY}]
    jobs += [{**HYBRID, "zero_stage": 3, "gradient_compression": power, "async_save": True}]
    launch_ranks(_resumes, 4, jobs, str(tmp_path))


def _resumes_another(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """What is said on the first rank about a resumed run that differs; what it has kept of the errors is compared."""
    layout: dict[str, Any] = {"data_parallel_size": 2, "microbatches": 2}
    other = {**layout, "data_parallel_size": (2, 1), "zero_stage": 3}
    said: dict[str, list[str]] = {}
    with_errors, without = f"{folder}/with.ckpt", f"{folder}/without.ckpt"
    trainer, _ = _fit({**layout, "gradient_compression": LOSSY}, 2, 1)
    trainer.save_checkpoint(with_errors)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    trainer, _ = _fit(layout, 2, 1)
    trainer.save_checkpoint(without)
    runs: dict[str, tuple[dict[str, Any], str]] = {
        "same": ({**layout, "gradient_compression": LOSSY}, with_errors),
        "settings": ({**layout, "gradient_compression": Masked(0.5)}, with_errors),
        "layout": ({**other, "gradient_compression": LOSSY}, with_errors),
        "off": (layout, with_errors),
        "on": ({**layout, "gradient_compression": LOSSY}, without),
        "pipeline": ({"pipeline_parallel_size": 2, "microbatches": 2, "gradient_compression": LOSSY}, with_errors),
    }
    for name, (each, path) in runs.items():
        steps: list[Any] = []
        look = _AtStart(
            lambda trainer, steps=steps: steps.append({p: s["step"] for p, s in _state(trainer).items()})  # type: ignore[misc]
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _fit(each, 2, 2, path, callbacks=[look])
        said[name] = [str(each.message) for each in caught if "ompression" in str(each.message)]
        assert steps == [{} if name in ("off", "pipeline") else {"data_parallel": 5 if name == "same" else 0}], name
    return said


def test_resumed_with_something_else(tmp_path: Path) -> None:
    """One warning that names what has changed, where there was something to lose; the rest goes on."""
    said, _ = launch_ranks(_resumes_another, 2, str(tmp_path))
    assert said["same"] == said["off"] == said["on"] == []
    (settings,), (layout,) = said["settings"], said["layout"]
    assert "gradient_compression (was Masked(density=0.3), is Masked(density=0.5)) changed" in settings
    assert "layout (was {" in layout and "'data_replicas': 1" in layout and "dropped" in layout
    assert len(said["pipeline"]) == 1 and "there is one data rank" in said["pipeline"][0]
    kept = {name.split(".")[1] for name in tensor_names(tmp_path / "with.ckpt") if name.startswith("compression.")}
    assert kept == {"0", "1"}
    assert not [name for name in tensor_names(tmp_path / "weights.ckpt") if not name.startswith("state_dict.")]
    export(tmp_path / "with.ckpt", tmp_path / "one.ckpt")
    content = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert not [key for key in content if "compression" in key] and len(content["optimizer_states"]) == 1
    for path in ("with.ckpt", "one.ckpt"):
        losses = launch_ranks(_goes_on_alone, 1, str(tmp_path / path))[0]
        assert len(losses) == 5


def _goes_on_alone(rank: int, world_size: int, path: str) -> list[float]:
    _, module = _fit({"microbatches": 2}, 1, 2, path)
    return module.losses


# ------------------------------------------------------------------------------------------------ precision


def _overflows_on_one(rank: int, world_size: int, layout: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    trainer = trainer_for(world_size, layout, precision=None, plugins=[MeshMixedPrecision("16-mixed", "cpu")])
    module = model(OverflowsOnRankOne)
    trainer.fit(module, loader())
    return module.losses, module.rates, module.history


class OverflowsOnRankOne(OverflowsOnce):
    """In the third batch the gradient of one block's weight overflows on the second data rank, and of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        on_this = self.trainer.strategy.data_parallel_rank == 1  # type: ignore[attr-defined]
        for block in self.blocks:
            assert isinstance(block, OverflowingBlock)
        self.blocks[self.where].overflows = batch_idx == 2 and on_this
        return Model.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.history.append(_copied(_state(self.trainer)))


@pytest.mark.parametrize(
    "layout", [{"data_parallel_size": 2, "microbatches": 2}, pytest.param(PIPELINE_DATA, marks=pytest.mark.slow)]
)
def test_an_overflow_on_one_rank_skips_the_step_and_poisons_nothing(layout: dict[str, Any]) -> None:
    world_size = 2 * layout.get("pipeline_parallel_size", 1)
    found = launch_ranks(_overflows_on_one, world_size, {**layout, "gradient_compression": LOSSY})
    for scales, held, history in found:
        assert scales == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
        assert held[1] == held[2] and len(set(held)) == 4, "the step is skipped on all ranks, and no other"
        for state in history:
            assert all(torch.isfinite(value).all() for value in state["data_parallel"].values() if _is_error(value))
        name = "error.blocks.0.fc.weight"
        if name in history[1]["data_parallel"]:
            assert torch.equal(history[1]["data_parallel"][name], history[2]["data_parallel"][name])
            assert not torch.equal(history[2]["data_parallel"][name], history[3]["data_parallel"][name])


def _is_error(value: Any) -> bool:
    return isinstance(value, Tensor)


class Unclipped(Manual):
    """Every other step; clipping by hand would clip what is scaled."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        pass


def _scaled(rank: int, world_size: int, kind: type, zero: dict[str, Any]) -> list[dict[str, Any]]:
    """State of the compressors with one loss scale and with another."""
    found = []
    for scale in (2.0**4, 2.0**12):
        plugin = MeshMixedPrecision("16-mixed", "cpu", scaler=MeshGradScaler("cpu", init_scale=scale))
        layout = {"microbatches": 1, "gradient_compression": LOSSY, **zero}
        trainer = trainer_for(world_size, layout, precision=None, plugins=[plugin])
        trainer.fit(model(kind), loader())
        found.append(_copied(_state(trainer)))
    return found


def test_errors_are_kept_without_the_loss_scale() -> None:
    for kind in (Model, Unclipped):
        for low, high in launch_ranks(_scaled, 2, kind, {"data_parallel_size": 2}):
            (first,), (second,) = low.values(), high.values()
            assert first["step"] == second["step"] == 5
            for name, value in first.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-5)
                    assert value.dtype == torch.float32


def _as_dalle(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], set[str]]]:
    """Without and with a gradient scale for each block."""
    found = []
    for scales in (None, BlockScaling(init_scale=16.0)):
        scaler = MeshGradScaler("cpu", init_scale=2.0**10)
        plugin = MeshMixedPrecision("16-mixed", "cpu", scaler=scaler, gradient_scales=scales)
        way = PowerSGD(rank=2, min_compression=1.0, factors="fp16", warm_start=False, resample=False, epsilon=1e-6)
        layout = {**HYBRID, "zero_stage": 2, "gradient_compression": way}
        trainer = trainer_for(world_size, layout, precision=None, plugins=[plugin])
        trainer.fit(model(Model), loader())
        kept = {name for name in _state(trainer)["data_replicate"] if name.startswith("error.blocks")}
        found.append((full_state(trainer), kept))
    return found


@pytest.mark.slow
def test_dalles_form() -> None:
    """Shards of a host averaged over hosts by 16-bit factors, fp16, and a gradient scale a block: the scales cancel."""
    (without, kept), (with_scales, same) = launch_ranks(_as_dalle, 4)[0]
    start = model(Model).state_dict()
    assert kept == same and kept
    for name, value in without.items():
        moved = float((value - start[name]).abs().max())
        assert float((with_scales[name] - value).abs().max()) <= 0.02 * moved and moved > 0, name


def _half(rank: int, world_size: int) -> tuple[set[torch.dtype], list[float]]:
    trainer, module = _fit({**HYBRID, "zero_stage": 3, "gradient_compression": LOSSY}, 4, 4, precision="bf16-true")
    kept = [value for state in _state(trainer).values() for value in state.values() if isinstance(value, Tensor)]
    return {value.dtype for value in kept}, module.losses


@pytest.mark.slow
def test_gradients_of_half_precision_are_kept_in_fp32() -> None:
    for dtypes, losses in launch_ranks(_half, 4):
        assert dtypes == {torch.float32} and sum(losses[-5:]) < 0.9 * sum(losses[:5])


# ------------------------------------------------------------------------------------------------ refused


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.words(x[:, 0].long().clamp(0, 4)).sum(-1, keepdim=True)


def _is_refused(rank: int, world_size: int, kind: type, layout: dict[str, Any]) -> None:
    trainer = trainer_for(world_size, {**layout, "gradient_compression": PowerSGD(rank=1)})
    trainer.fit(model(kind), loader())


def refusals(kind: type, layout: dict[str, Any]) -> list[str]:
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_is_refused, 2, kind, layout)
    assert len(caught.value.tracebacks) == 2
    return [traceback.strip().splitlines()[-1] for traceback in caught.value.tracebacks.values()]


def test_sparse_gradients_are_refused() -> None:
    for message in refusals(Sparse, {"data_parallel_size": 2}):
        assert "LayoutError: 'words' is an embedding with `sparse=True`" in message


def test_PL20067_powersgd_with_sharded_gradients() -> None:
    """Row PL#20067: refused with the reason over one axis; in hybrid sharding it works (resumed above)."""
    for message in refusals(Model, {"data_parallel_size": 2, "zero_stage": 3}):
        assert "LayoutError" in message and "buffers for the error of all gradients" in message
        assert "`data_parallel_size=(replicate, shard)`" in message and "`zero_stage=1`" in message
