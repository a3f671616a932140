"""What went wrong for users of other systems with experts, tried on this one (CASES.md has the reports)."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lnn_lightning import ExpertParallel, PTDPStrategy
from lnn_lightning.optim.clipping import mesh_grad_norm
from lnn_lightning.parallel.data.shards import is_sharded, whole_of
from lnn_lightning.parallel.step.standin import is_stand_in
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, Run, build, default_dtype, global_batches, quiet_trainer, relative_error
from tests.strategies.test_resharding import contents
from tests.zoo import ZOO

EP2: dict[str, Any] = {"expert": ExpertParallel(2)}
DIVIDED: dict[str, Any] = {"expert": ExpertParallel(2, divide_experts=True), "tensor_parallel_size": 2}
ONE = Run(n_steps=1)


class Gradients(pl.Callback):
    """What a rank has of every parameter's gradient, put together, and the norm that clipping would take."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        residence, agreement = engine.residence, trainer.strategy.precision_plugin.agreement  # type: ignore[attr-defined]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.norm = float(mesh_grad_norm(parameters, agreement.groups, agreement.counted))
        self.whole: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            grad = (
                torch.zeros_like(parameter) if parameter.grad is None and not is_stand_in(parameter) else parameter.grad
            )
            if is_stand_in(parameter):
                grad = torch.empty(parameter.shape, dtype=parameter.dtype)
            held = whole_of(grad) if is_sharded(grad) else grad
            self.whole[name] = residence.whole(name, held).clone()


def _gradients(
    rank: int, world_size: int, jobs: list[tuple[str, dict[str, Any]]]
) -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for name, layout in jobs:
        callback, case = Gradients(), ZOO[name]
        options = {"max_steps": 1, "precision": "64-true", "callbacks": [callback]}
        trainer = quiet_trainer(PTDPStrategy(**layout), world_size, **options)
        trainer.fit(build(case), datamodule=Data(global_batches(case, ONE), ONE.batch_size))
        found.append((callback.norm, callback.whole if rank == 0 else {}))
    return found


def _alone(name: str) -> tuple[float, dict[str, Tensor]]:
    module = build(ZOO[name]).to(torch.float64)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with default_dtype(torch.float64):
        module.training_step(global_batches(ZOO[name], ONE)[0], 0).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    return float(torch.stack([grad.norm() for grad in grads.values()]).norm()), grads


NAMES = ["moe_mixtral", "moe_skipping"]


def _compare(world_size: int, layouts: list[dict[str, Any]]) -> None:
    jobs = [(name, layout) for name in NAMES for layout in layouts]
    results = launch_ranks(_gradients, world_size, jobs, timeout=240)
    problems = []
    for index, (name, layout) in enumerate(jobs):
        norm, grads = _alone(name)
        for rank, each in enumerate(results):
            if abs(each[index][0] / norm - 1) > 1e-6:
                problems.append(f"{name} {layout} rank {rank}: norm {each[index][0]:.9g}, not {norm:.9g}")
        for parameter, grad in results[0][index][1].items():
            if (error := relative_error(grad, grads[parameter])) > 1e-5:
                problems.append(f"{name} {layout}: gradient of {parameter} off by {error:.1e}")
    assert not problems, "\n".join(problems[:12])


def test_pt_160285_ds_6545_gradients_of_experts_count_once() -> None:
    """As on one process, not twice, whoever holds the experts; so is their norm."""
    _compare(2, [EP2, {**EP2, "zero_stage": 1}, {**EP2, "microbatches": 2, "zero_stage": 3}])


@pytest.mark.slow
def test_mlm_5916_the_norm_counts_each_expert_once() -> None:
    """With tensor ranks, with copies of experts, dealt out or sharded, in hybrid groups, in a pipeline."""
    hybrid = {**EP2, "data_parallel_size": (2, 2)}
    layouts = [EP2, {**EP2, "tensor_parallel_size": 2}, DIVIDED, *({**hybrid, "zero_stage": n} for n in (1, 3))]
    _compare(4, [*layouts, {**EP2, "zero_stage": 2}, {"expert": ExpertParallel(4)}])


# ---------------------------------------------------------------- DS#6589

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, EP2),
    "one": (1, {}),
    "ep4": (4, {"expert": ExpertParallel(4), "zero_stage": 1}),
    "ep2-dp2": (4, {**EP2, "zero_stage": 3}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "ep2-tp2": (4, DIVIDED),
}
CASES = ["moe_mixtral", "moe_skipping"]


def _fitted(world_size: int, layout: dict[str, Any], name: str, seed: int, steps: int = 2) -> pl.Trainer:
    run = Run(n_steps=steps)
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, max_steps=steps, precision="64-true")
    torch.manual_seed(seed)
    trainer.fit(ZOO[name].build(), datamodule=Data(global_batches(ZOO[name], run), run.batch_size))
    return trainer


def _save(rank: int, world_size: int, layout: dict[str, Any], folder: str, label: str) -> None:
    for name in CASES:
        _fitted(world_size, layout, name, 3).save_checkpoint(f"{folder}/{label}-{name}.ckpt")


def _load(rank: int, world_size: int, layout: dict[str, Any], folder: str, saved: str, label: str) -> None:
    for name in CASES:
        trainer = _fitted(world_size, layout, name, 999)
        trainer._checkpoint_connector.restore(f"{folder}/{saved}-{name}.ckpt")
        trainer.save_checkpoint(f"{folder}/{label}-{name}.ckpt")


def _resharded(tmp_path: Path, saved: str, others: list[str]) -> None:
    launch_ranks(_save, LAYOUTS[saved][0], LAYOUTS[saved][1], str(tmp_path), saved)
    for other in others:
        world_size, layout = LAYOUTS[other]
        launch_ranks(_load, world_size, layout, str(tmp_path), saved, f"{saved}-{other}")
        for name in CASES:
            expected = contents(tmp_path / f"{saved}-{name}.ckpt")
            found = contents(tmp_path / f"{saved}-{other}-{name}.ckpt")
            assert found.keys() == expected.keys(), (other, name)
            for key, value in expected.items():
                same = torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value
                assert same, f"{key} of {name}, saved under {saved} and loaded under {other}"


def test_ds_6589_experts_under_another_expert_size(tmp_path: Path) -> None:
    """Every expert, and the optimizer's state of it, is found by its number among all; plain torch reads it too."""
    _resharded(tmp_path, "ep2", ["one"])
    for name in CASES:
        module = ZOO[name].build().to(torch.float64)
        stored = contents(tmp_path / f"ep2-{name}.ckpt")
        module.load_state_dict({key: stored[f"state_dict.{key}"] for key in module.state_dict()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "others"), [("ep2", ["ep4", "ep2-dp2", "pp2"]), ("ep2-tp2", ["one", "ep4"]), ("one", ["ep2-dp2"])]
)
def test_ds_6589_matrix(saved: str, others: list[str], tmp_path: Path) -> None:
    _resharded(tmp_path, saved, others)


# ------------------------------------------------------------------------------------------------ recomputation


def _other_experts(module: torch.nn.Module, args: Any, out: Any) -> Any:
    """A router that would choose other experts in a second run (in backward)."""
    if torch._C._current_graph_task_id() == -1:
        return out
    return tuple((each + 1) % 4 if each.dtype == torch.int64 else each for each in out)


def _rerouted(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    states = []
    for recompute, kwargs in ((None, None), ("full", None), (None, {"use_reentrant": False}), (None, {})):
        module = build(ZOO["moe_mixtral"])
        for name, each in module.named_modules():
            if name.endswith("mlp.gate"):
                each.register_forward_hook(_other_experts)
        if kwargs is not None:
            transformer = next(each for each in module.modules() if hasattr(each, "gradient_checkpointing_enable"))
            transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None)
        options = {"max_steps": 2, "precision": "64-true"}
        trainer = quiet_trainer(PTDPStrategy(**EP2, recompute=recompute), world_size, **options)  # type: ignore[arg-type]
        trainer.fit(module, datamodule=Data(global_batches(ZOO["moe_mixtral"], Run(n_steps=2)), ONE.batch_size))
        states.append(trainer.strategy.full_state_dict())  # type: ignore[attr-defined]
    return [{name: value.clone() for name, value in state.items()} for state in states]


def test_tt_1117_automodel_3325_recomputation_does_not_route_again() -> None:
    """Under `recompute`, and under transformers' own gradient checkpointing."""
    expected, *others = launch_ranks(_rerouted, 2)[0]
    for index, state in enumerate(others):
        assert all(torch.equal(state[name], value) for name, value in expected.items()), index
