"""One process on the global batches, and the same training through a Trainer on many."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors
from tests.zoo import ZOO, Case

SEED = 7


@dataclass(frozen=True)
class Run:
    """How to train: the same for the reference and the strategy under test."""

    n_steps: int = 5
    batch_size: int = 8
    accumulate: int = 1
    clip: float | None = None
    dtype: torch.dtype = torch.float64


DEFAULT_RUN = Run()


@dataclass
class Result:
    """What a rank (or the reference) has seen."""

    losses: list[float]
    """One a batch, before the division by the accumulation; over data ranks their mean."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """The whole model at the end (on rank 0)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`trainer.callback_metrics`."""
    divided: float = 0.0
    """Share of the parameters that the tensor ranks have a part of each."""
    spread: float = 0.0
    """Share of the experts' elements that is here; 0 if there is a block whose experts are not spread."""


def build(case: Case) -> pl.LightningModule:
    torch.manual_seed(SEED)
    return case.build()


def global_batches(case: Case, run: Run) -> list[Any]:
    return case.batches(run.n_steps * run.accumulate, run.batch_size, run.dtype)


def share(batch: Any, part: int, parts: int, batch_size: int) -> Any:
    """Part `part` of a batch: tensors by their first dimension, lists with one entry a sample by entries."""
    if parts == 1:
        return batch
    step = batch_size // parts
    start = part * step
    if isinstance(batch, Tensor):
        return batch[start : start + step] if batch.dim() else batch
    if isinstance(batch, list) and len(batch) == batch_size and not isinstance(batch[0], Tensor):
        return batch[start : start + step]
    if isinstance(batch, dict):
        return {key: share(value, part, parts, batch_size) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(share(value, part, parts, batch_size) for value in batch)
    return batch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_reference(
    case: Case,
    run: Run = DEFAULT_RUN,
    micro: int = 1,
    batches: list[Any] | None = None,
    autocast: torch.dtype | None = None,
) -> Result:
    """Plain PyTorch on the global batches (or those given); each in `micro` parts whose losses count equally."""
    module = build(case).to(run.dtype)
    module.train()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    losses = []
    batches = batches or global_batches(case, run)
    with default_dtype(run.dtype):
        for index, batch in enumerate(batches):
            total = 0.0
            for part in range(micro):
                with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                    output = module.training_step(share(batch, part, micro, run.batch_size), index)
                loss = output["loss"] if isinstance(output, dict) else output
                (loss / (micro * run.accumulate)).backward()
                total += loss.item() / micro
            losses.append(total)
            if (index + 1) % run.accumulate:
                continue
            if run.clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), run.clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return Result(losses, {name: value.detach().clone() for name, value in module.state_dict().items()})


class Data(pl.LightningDataModule):
    """Gives each data-parallel rank its share of every global batch."""

    def __init__(self, batches: list[Any], batch_size: int) -> None:
        super().__init__()
        self.batches, self.batch_size = batches, batch_size

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
        shares = [share(batch, rank, size, self.batch_size) for batch in self.batches]
        return DataLoader(shares, batch_size=None, collate_fn=_as_is)  # type: ignore[arg-type]


def _as_is(batch: Any) -> Any:
    return batch


class Losses(pl.Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(loss.detach().clone().double() * trainer.accumulate_grad_batches)


def quiet_trainer(strategy: Any, devices: int, **options: Any) -> pl.Trainer:
    """A Trainer that writes nothing to disk or to the screen."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        "max_epochs": 1,
    }
    return pl.Trainer(**{**defaults, **options})


def train_with_trainer(
    rank: int,
    world_size: int,
    case_name: str,
    layout: dict[str, Any],
    run: Run = DEFAULT_RUN,
    batches: list[Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Result:
    """Runs in `launch_ranks`: train a zoo model under `PTDPStrategy(**layout)`, with further Trainer options."""
    from lnn_lightning import PTDPStrategy

    case = ZOO[case_name]
    module = build(case)
    losses = Losses()
    settings: dict[str, Any] = {
        "max_steps": run.n_steps,
        "accumulate_grad_batches": run.accumulate,
        "gradient_clip_val": run.clip,
        "precision": "64-true" if run.dtype == torch.float64 else "32-true",
        "callbacks": [losses],
    }
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, **{**settings, **(options or {})})
    trainer.fit(module, datamodule=Data(batches or global_batches(case, run), run.batch_size))
    strategy = trainer.strategy
    state = strategy.full_state_dict()
    return Result(
        losses=[float(loss) for loss in losses.losses],
        state={name: value.detach().cpu().clone() for name, value in state.items()} if rank == 0 else {},
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        divided=divided_share(strategy.engine.residence.tensor, module),
        spread=_spread_share(strategy.engine.residence.expert, module),
    )


def train_all(rank: int, world_size: int, jobs: list[tuple[str, dict[str, Any], Run]]) -> list[Result]:
    """Runs in `launch_ranks`: several trainings one after the other, each of (case, layout, run)."""
    return [train_with_trainer(rank, world_size, name, layout, run) for name, layout, run in jobs]


def _spread_share(expert: Any, module: pl.LightningModule) -> float:
    if expert is None or expert.left or not expert.names:
        return 0.0
    tensors = dict(named_tensors(module))
    here = [tensors[name] for name in expert.names if not is_stand_in(tensors[name])]
    held = sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel() for tensor in here)
    return held / sum(expert.whole_shape(name).numel() for name in expert.names)


def divided_share(tensor: Any, module: pl.LightningModule) -> float:
    """Share of the parameters of which each tensor rank has a part only; the parts have the shapes of parts."""
    if tensor is None:
        return 0.0
    plan, divided, whole = tensor.plan, 0, 0
    for name, parameter in module.named_parameters():
        if name not in plan.specs:
            whole += parameter.numel()
            continue
        divided += math.prod(plan.shapes[name])
        assert is_stand_in(parameter) or parameter.shape == tensor.local_shape(name), name
        assert is_stand_in(parameter) or parameter.numel() < math.prod(plan.shapes[name]), name
    return divided / (divided + whole)


def differences(
    result: list[Result], expected: Result, tolerance: float, loss_tolerance: float | None = None
) -> list[str]:
    """What the ranks' results differ in from the reference's, in words; empty if in nothing."""
    loss_tolerance = tolerance if loss_tolerance is None else loss_tolerance
    found = []
    count = len(expected.losses)
    for rank, one in enumerate(result):
        if len(one.losses) != count:
            found.append(f"rank {rank} saw {len(one.losses)} losses, not {count}")
    if found:
        return found
    for index, reference in enumerate(expected.losses):
        mean = sum(one.losses[index] for one in result) / len(result)
        error = abs(mean - reference) / abs(reference)
        if not error <= loss_tolerance:
            found.append(f"loss {index}: {mean:.12g}, reference {reference:.12g} (relative error {error:.1e})")
    state = result[0].state
    if missing := expected.state.keys() - state.keys():
        found.append(f"not in the full state: {sorted(missing)}")
    if extra := state.keys() - expected.state.keys():
        found.append(f"only in the full state: {sorted(extra)}")
    for name, reference in expected.state.items():
        if name not in state:
            continue
        error = relative_error(state[name], reference)
        if not error <= tolerance:
            found.append(f"{name}: relative error {error:.1e}")
    return found


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the largest absolute value.

    Parameters whose gradient is zero in theory (key biases) and that start at zero hold nothing but noise: hence a
    least scale.
    """
    if value.shape != reference.shape:
        return float("inf")
    if value.numel() == 0:
        return 0.0
    value, reference = value.double(), reference.double()
    return float((value - reference).abs().max() / reference.abs().max().clamp(min=1e-3))
