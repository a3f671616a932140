"""What data ranks see and give back: samplers, worker seeds, numbers of batches, predictions."""

from __future__ import annotations

import os
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.layout import DATA
from lnn_lightning.parallel.step.tree import tree_flatten
from lnn_lightning.strategies.mesh import MeshStrategy
from lnn_lightning.strategies.positions import first_epoch

_LIMITS = {"validate": "val", "test": "test", "predict": "predict"}
_EVALUATION = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class DataHooks(MeshStrategy):
    """Data part of a strategy whose pipeline ranks must load the same batches."""

    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers by the data rank, and evaluates each sample once (``DistributedSampler`` pads).

        Tells the sampler its epoch: workers are given their first batches before Lightning does.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stage = trainer.state.stage
        if stage == RunningStage.TRAINING:
            _set_sampler_epoch(dataloader, first_epoch(trainer.fit_loop))
        if not isinstance(dataloader, DataLoader):
            return dataloader
        sampler = dataloader.sampler
        if (
            stage in _EVALUATION
            and type(sampler) is DistributedSampler
            and not sampler.shuffle
            and not sampler.drop_last
            and len(sampler.dataset) >= self.data_parallel_size > 1  # type: ignore[arg-type]
            and self.mesh.experts is None  # all ranks must send tokens as often as the others
        ):
            once = UnrepeatedDistributedSamplerWrapper(
                SequentialSampler(sampler.dataset),  # type: ignore[arg-type]
                num_replicas=self.data_parallel_size,
                rank=self.data_parallel_rank,
                shuffle=False,
            )
            dataloader = _update_dataloader(dataloader, once, mode=stage)
        if (
            dataloader.num_workers > 0
            and dataloader.worker_init_fn is None
            and int(os.environ.get("PL_SEED_WORKERS", 0))
        ):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_parallel_rank)
        return dataloader

    def on_train_start(self) -> None:
        """Stops every data rank behind as many batches as the one with the fewest has."""
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        own = torch.tensor(float(loop.max_batches), device=self.root_device)
        fewest, most = own.clone(), own.clone()
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=self.mesh.group(DATA))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.group(DATA))
        if fewest < most:
            rank_zero_warn(
                f"The data ranks have different numbers of training batches, from {float(fewest):g} to "
                f"{float(most):g}: all "
                f"stop after {float(fewest):g}. Divide the samples evenly to use all of them."
            )
            loop.max_batches = int(fewest)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._check_equal_numbers("validate", self._trainer.validate_loop, self._trainer.fit_loop.epoch_loop.val_loop)

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._check_equal_numbers("test", self._trainer.test_loop)

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._check_equal_numbers("predict", self._trainer.predict_loop)

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _check_equal_numbers(self, doing: str, *loops: Any) -> None:
        """Where experts are spread over data ranks, a rank that has a batch more would wait for the others."""
        if self.mesh.experts is None or self.data_parallel_size == 1:
            return
        numbers = [list(loop.max_batches) for loop in loops if loop._combined_loader is not None]
        everyones: list[Any] = [None] * self.data_parallel_size
        dist.all_gather_object(everyones, numbers, group=self.mesh.group(DATA))
        if any(each != everyones[0] for each in everyones):
            counts = ", ".join(str(sum(map(sum, each))) for each in everyones)
            raise StepError(
                f"The data ranks have different numbers of batches to {doing} ({counts}), but experts are spread over "
                "them: a rank with a batch more would wait for the others. Use a number of samples that the ranks and "
                f"the batch size divide, or `Trainer(limit_{_LIMITS[doing]}_batches=...)`."
            )

    def on_predict_end(self) -> None:
        """Puts the predictions of all data ranks in the order of the dataset, on every rank."""
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.predict_loop
        loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
        if self.data_parallel_size == 1 or not loop.return_predictions:
            return
        for loader, predictions in zip(loaders, loop._predictions, strict=False):
            if isinstance(_sampler_of(loader), UnrepeatedDistributedSamplerWrapper):
                parts: list[Any] = [None] * self.data_parallel_size
                dist.all_gather_object(parts, predictions, group=self.mesh.group(DATA))
                predictions[:] = interleave_predictions(parts)


def interleave_predictions(parts: list[list[Any]]) -> list[Any]:
    """Batches in dataset order from those of the data ranks, where rank ``r`` of ``n`` had samples ``r, r + n, ...``.

    Batch ``k`` of the result holds the samples of every rank's batch ``k``. Predictions that are not tensors with a
    batch dimension are not joined: the ranks' batches follow each other.
    """
    merged: list[Any] = []
    missing = object()
    for column in zip_longest(*parts, fillvalue=missing):
        present = [batch for batch in column if batch is not missing]
        flat = [tree_flatten(batch) for batch in present]
        tensors = all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaves, _ in flat for leaf in leaves)
        if not tensors or len({len(leaves) for leaves, _ in flat}) > 1:
            merged += present
            continue
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        merged.append(flat[0][1]([_interleave(leaves) for leaves in columns]))
    return merged


def _interleave(parts: tuple[Tensor, ...]) -> Tensor:
    total = sum(part.shape[0] for part in parts)
    result = parts[0].new_empty((total, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        result[rank :: len(parts)] = part.to(result.device)
    return result


def _sampler_of(loader: Any) -> Any:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if sampler is not None else getattr(loader, "sampler", None)
