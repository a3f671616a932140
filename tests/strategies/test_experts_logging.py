"""What is logged about the load of experts, and the picture of it."""

import base64
import re
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.expert import loads
from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.expert.picture import LoadHistory
from lnn_lightning.parallel.expert.settings import ExpertParallel, Upcycle
from lnn_lightning.strategies.experts import show_loads
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Data, quiet_trainer
from tests.parallel.expert.upcycled import BATCH, batches, build
from tests.zoo import ZOO

SWITCH = Upcycle("*.mlp", experts=4, top_k=1, gate="switch", capacity_factor=0.75, router_std=0.5)


class Seen(pl.Callback):
    """What the routers of this rank chose in each step, as they say it themselves, and the metrics behind it."""

    def __init__(self) -> None:
        self.load: list[dict[str, tuple[Tensor, int]]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, layer in moe_layers(module).items():
            layer.router.register_forward_hook(lambda _, args, routing, name=name: self._note(name, routing))

    def _note(self, name: str, routing: Any) -> None:
        load, dropped = self.load[-1].get(name, (0, 0))
        self.load[-1][name] = load + routing.load, dropped + int(routing.dropped)

    def on_train_batch_start(self, *_: Any) -> None:
        self.load.append({})

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("moe/")})


def _train(
    rank: int, world_size: int, folder: str, layout: dict[str, Any], upcycle: Upcycle | None
) -> tuple[list[Any], list[Any], int]:
    sums = 0
    summed = loads.summed_loads

    def counted(*args: Any) -> Any:
        nonlocal sums
        sums += 1
        return summed(*args)

    import lnn_lightning.strategies.experts as experts

    experts.summed_loads = counted
    seen, layout = Seen(), dict(layout)
    expert = ExpertParallel(size=layout.pop("expert"), upcycle=upcycle)
    trainer = quiet_trainer(
        *(PTDPStrategy(expert=expert, **layout), world_size),
        **{"max_steps": 4, "log_every_n_steps": 2, "callbacks": [seen], "logger": CSVLogger(folder, version=0)},
    )
    if upcycle is not None:
        trainer.fit(build(), datamodule=Data(batches(4), BATCH))
    else:
        torch.manual_seed(1)
        case = ZOO["moe_mixtral"]
        trainer.fit(case.build().double(), datamodule=Data(case.batches(4, 8, torch.float64), 8))
    return seen.load, seen.metrics, sums


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, {"expert": 2, "microbatches": 2, "recompute": "full"}, id="ep2"),
        pytest.param(
            *(4, {"expert": 2, "pipeline_parallel_size": 2, "microbatches": 2}), id="ep2-pp2", marks=pytest.mark.slow
        ),
        pytest.param(2, {"expert": 1, "tensor_parallel_size": 2}, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_logged_every_n_steps_on_every_rank(world_size: int, layout: dict[str, Any], tmp_path: Path) -> None:
    results = launch_ranks(_train, world_size, str(tmp_path), layout, SWITCH)
    one = results[0][1]
    assert one[0] == {} and one[1] == one[2] and one[3] != one[1], "steps 2 and 4 log, the others keep silent"
    copies = layout.get("tensor_parallel_size", 1)
    for first in (0, 2):  # what is logged in a step is of the steps since the last time
        load: dict[str, Tensor] = {}
        dropped = 0
        for chosen, _, _ in results[::copies]:
            for step in chosen[first : first + 2]:
                for name, (each, gone) in step.items():
                    load[name] = load.get(name, 0) + each
                    dropped += gone
        assert set(load) == {f"blocks.{index}.mlp" for index in range(3)}
        logged = one[first + 1]
        even = next(iter(load.values())).sum() / 4
        assert logged["moe/load_max"] == pytest.approx(float(max(each.max() for each in load.values()) / even))
        assert logged["moe/dropped"] == pytest.approx(dropped / float(sum(each.sum() for each in load.values())))
        assert 0 < logged["moe/dropped"] < 1 and logged["moe/aux_loss"] > 0
    for _, metrics, sums in results:
        assert metrics == one and sums == 2
    table = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "moe/aux_loss" in table and "moe/load_max" in table
    picture = (tmp_path / "lightning_logs" / "version_0" / "moe_load.svg").read_text()
    assert "blocks.2.mlp (4)" in picture and ElementTree.fromstring(picture).tag.endswith("svg")


def test_experts_that_a_model_brings_along(tmp_path: Path) -> None:
    results = launch_ranks(_train, 2, str(tmp_path), {"expert": 2}, None)
    logged = results[0][1][-1]
    assert set(logged) == {"moe/load_max", "moe/dropped"}, "their losses are in the model's own"
    assert logged["moe/dropped"] == 0 and 1 <= logged["moe/load_max"] <= 4
    assert results[1][1] == results[0][1]
    assert (tmp_path / "lightning_logs" / "version_0" / "moe_load.svg").exists()


class Board:
    """Looks like TensorBoard's writer."""

    def __init__(self, broken: bool = False) -> None:
        self.images: list[tuple[str, Tensor, int]] = []
        self._broken = broken

    def add_image(self, name: str, image: Tensor, step: int) -> None:
        if self._broken:
            raise ModuleNotFoundError("No module named 'PIL'")
        self.images.append((name, image, step))


class BoardLogger(CSVLogger):
    board = Board()

    @property
    def experiment(self) -> Any:
        return self.board


class ImageLogger(BoardLogger):
    def log_image(self, key: str, images: list[Any], step: int) -> None:
        self.logged = key, images, step


def history(columns: int) -> LoadHistory:
    made = LoadHistory()
    for step in range(columns):
        made.add(step, {"a": torch.tensor([4, 0, 4, 8]), "b": torch.tensor([step, 1])})
    return made


def test_picture_goes_where_the_logger_takes_it(tmp_path: Path) -> None:
    made = history(3)
    logger, other = BoardLogger(tmp_path), ImageLogger(tmp_path)
    show_loads(logger, made, 7)
    ((name, image, step),) = logger.board.images
    assert (name, step) == ("moe/load", 7) and image.dtype == torch.uint8 and image.shape[0] == 3
    assert torch.equal(image[:, 0, 0], torch.tensor([247, 247, 247], dtype=torch.uint8)), "an even share is white"
    assert image[2, 20, 0] > image[0, 20, 0] and image[0, 50, 0] > image[2, 50, 0], "none is blue, twice is red"
    show_loads(other, made, 8)
    assert other.logged[0] == "moe/load" and other.logged[1][0].shape == (*image.shape[1:], 3)
    logger.board = Board(broken=True)
    show_loads(logger, made, 9)
    (file,) = tmp_path.rglob("moe_load.svg")
    data = base64.b64decode(re.search(r"base64,([^\"]+)", file.read_text())[1])  # type: ignore[index]
    assert data.startswith(b"\x89PNG")
    start = data.index(b"IDAT") + 4
    lines = zlib.decompress(data[start : data.index(b"IEND") - 8])
    assert len(lines) == image.shape[1] * (1 + 3 * image.shape[2])


@pytest.mark.parametrize("columns", [5, 256, 257, 1000, 1001])
def test_history_stays_small_and_keeps_the_mean(columns: int) -> None:
    made = history(columns)
    shares = made.shares()
    assert shares["a"].shape[1] == shares["b"].shape[1] == len(made.steps) <= 257
    torch.testing.assert_close(shares["a"][:, -1], torch.tensor([1.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    each = made.steps[1] - made.steps[0]
    assert made.steps == list(range(0, columns, each))
    steps = torch.arange(each, dtype=torch.float64)
    torch.testing.assert_close(shares["b"][0, 0], (2 * steps / (steps + 1)).mean())
