"""A checkpoint of any layout under any other: parameters, buffers and optimizer state equal to the last bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint import distributed, load_metadata, load_tensors, tensor_names
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "zero1": {"data_parallel_size": 2, "zero_stage": 1},
    "zero2-hybrid": {"data_parallel_size": (2, 2), "zero_stage": 2},
    "zero3-of-3": {"data_parallel_size": 3, "zero_stage": 3},
    "interleaved": {"pipeline_parallel_size": 2, "schedule": "interleaved"},
    "tp2-sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2-tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "tp2-zero3": {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3},
}
VOCABULARY, WIDTH, LENGTH = 37, 24, 6


def processes(layout: dict[str, Any]) -> int:
    data = layout.get("data_parallel_size", 1)
    data = data[0] * data[1] if isinstance(data, tuple) else data
    return data * layout.get("pipeline_parallel_size", 1) * layout.get("tensor_parallel_size", 1)


class Attention(nn.Module):
    """Fused queries, keys and values of unequal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (each.unflatten(-1, (-1, 3)).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(pl.LightningModule):
    """A tied vocabulary that no rank number divides, a buffer, a scalar that learns, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.blocks[0].mlp[1].bias.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * self.scale
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _trained(world_size: int, layout: dict[str, Any], seed: int) -> pl.Trainer:
    torch.manual_seed(seed)
    data = TensorDataset(torch.randint(VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(1)))
    trainer = quiet_trainer(PTDPStrategy(microbatches=2, **layout), world_size, max_steps=2)
    trainer.fit(Model(), DataLoader(data, batch_size=4))
    return trainer


def _save(rank: int, world_size: int, layout: dict[str, Any], path: str, seed: int) -> None:
    _trained(world_size, layout, seed).save_checkpoint(path)


def _load_each(rank: int, world_size: int, layout: dict[str, Any], folder: str, names: list[str]) -> None:
    trainer = _trained(world_size, layout, 999)
    for name in names:
        trainer._checkpoint_connector.restore(f"{folder}/{name}.ckpt")
        trainer.save_checkpoint(f"{folder}/loaded/{name}.ckpt")


def contents(path: Path) -> dict[str, Any]:
    """Everything that training goes on from."""
    metadata = load_metadata(path)
    ours = metadata["lnn_lightning"]
    return {
        **load_tensors(path, tensor_names(path)),
        **ours["values"],
        "groups": ours["optimizer_groups"],
        "schedulers": metadata["lr_schedulers"],
        "steps": (metadata["global_step"], ours["seed"], ours["steps_done"]),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        launch_ranks(_save, processes(layout), layout, f"{folder}/{name}.ckpt", seed)
    return folder, {name: contents(folder / f"{name}.ckpt") for name in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_matrix(name: str, saved: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """What was saved under each layout, loaded under this one and saved again, is what it was."""
    folder, expected = saved
    launch_ranks(_load_each, processes(LAYOUTS[name]), LAYOUTS[name], str(folder), list(LAYOUTS), timeout=240)
    for other in LAYOUTS:
        found = contents(folder / "loaded" / f"{other}.ckpt")
        assert found.keys() == expected[other].keys(), other
        for key, value in expected[other].items():
            if isinstance(value, Tensor):
                assert torch.equal(found[key], value), f"{key} saved under {other}"
            else:
                assert found[key] == value, f"{key} saved under {other}"


def test_a_checkpoint_has_whole_tensors_once(saved: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """Under the user's names and shapes, tied ones once, whatever the layout."""
    folder, found = saved
    state = Model().state_dict()
    for name in LAYOUTS:
        stored = {key.removeprefix("state_dict."): value for key, value in found[name].items() if "state_dict." in key}
        assert stored.keys() == state.keys() - {"head.weight"}, name
        for key, value in stored.items():
            assert value.shape == state[key].shape, (name, key)
        size = sum(value.nbytes for value in found[name].values() if isinstance(value, Tensor))
        path = folder / f"{name}.ckpt"
        records = len(distributed._SafeReader(path).read_metadata().storage_data)
        on_disk = sum(file.stat().st_size for file in path.glob("*.distcp"))
        assert size <= on_disk < size + 2000 * records, (name, size, on_disk)
    assert any(not torch.equal(found["one"][key], found["zero1"][key]) for key in found["one"] if "embed" in key)
