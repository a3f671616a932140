"""Runs that start from a file of weights, under layouts that divide the module in every way."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint import hub
from lnn_lightning.checkpoint.export import export
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors
from tests.checkpoint import folders
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import Data, Losses, quiet_trainer
from tests.zoo import ZOO
from tests.zoo.huggingface import HuggingFace, llama

STEPS, BATCH = 3, 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor_parallel_size": 2, "microbatches": 2}),
    "pipeline": (2, {"pipeline_parallel_size": 2, "microbatches": 2}),
    "zero3": (2, {"data_parallel_size": 2, "zero_stage": 3, "microbatches": 2}),
    "both": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "microbatches": 2}),
}


class Start(pl.Callback):
    """The module before the first step, and how much of it this rank holds."""

    state: dict[str, Tensor]
    held = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        residence = trainer.strategy.engine.residence  # type: ignore[attr-defined]
        self.held = sum(
            piece.value.numel()
            for name, tensor in named_tensors(module)
            if not is_stand_in(tensor) and name in residence.name_of_key()
            for piece in residence.pieces(name, tensor).pieces
        )


def count_reading(read: list[int]) -> None:
    """Adds up how many elements are read from safetensors files from now on."""
    fill = hub.fill

    def counted(pieces: Any, region: Any) -> None:
        def part(where: tuple[slice, ...]) -> Tensor:
            found = region(where)
            read.append(found.numel())
            return found

        fill(pieces, part)

    hub.fill = counted


class Llama(HuggingFace):
    def __init__(self, tied: bool) -> None:
        super().__init__(llama(tied))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def _starts_llama(
    rank: int, world_size: int, layout: dict[str, Any], folder: str, saved: str, tied: bool, meta: bool
) -> dict[str, Any]:
    read: list[int] = []
    count_reading(read)
    torch.manual_seed(100 + rank)
    start, losses = Start(), Losses()
    strategy = PTDPStrategy(**layout, initial_weights=folder)
    trainer = quiet_trainer(strategy, world_size, callbacks=[start, losses], max_steps=STEPS)
    with trainer.init_module(empty_init=meta):
        module = Llama(tied)
    batches = ZOO["hf_llama"].batches(STEPS, BATCH, torch.float32)
    trainer.fit(module, datamodule=Data(batches, BATCH))
    trainer.save_checkpoint(saved)
    return {
        "start": start.state,
        "losses": [float(loss) for loss in losses.losses],
        "end": strategy.full_state_dict(),
        "read": sum(read),
        "held": start.held,
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, dict[str, Tensor], list[float]]]:
    """Sharded folders as transformers writes them, tied and not, and training from them on one process."""
    found = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("hub") / "llama"
        torch.manual_seed(3)
        model = llama(tied)
        model.save_pretrained(folder, max_shard_size="10KB")
        assert len(list(folder.glob("*.safetensors"))) > 3
        state = {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
        saved = str(folder.parent / "one.ckpt")
        result = launch_ranks(_starts_llama, 1, {}, str(folder), saved, tied, False)[0]
        found[tied] = folder, state, result["losses"]
    return found


@pytest.mark.parametrize(
    ("layout", "tied", "meta"),
    [
        ("tensor", False, False),
        ("pipeline", True, False),
        ("zero3", False, True),
        pytest.param("both", False, True, marks=pytest.mark.slow),
    ],
)
def test_a_hub_folder_starts_a_divided_run_and_comes_back(
    one_process: Any, layout: str, tied: bool, meta: bool, tmp_path: Path
) -> None:
    folder, state, losses = one_process[tied]
    world_size, settings = LAYOUTS[layout]
    saved = tmp_path / "end.ckpt"
    found = launch_ranks(_starts_llama, world_size, settings, str(folder), str(saved), tied, meta)
    for each in found:
        assert each["start"].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(each["start"][key], value), key
        assert each["read"] <= each["held"]
    mean = [sum(each["losses"][step] for each in found) / world_size for step in range(STEPS)]
    assert mean == pytest.approx(losses, rel=1e-5)
    total = sum(value.numel() for value in {id(v): v for v in state.values()}.values())
    reads = [each["read"] for each in found]
    assert max(reads) < 1.25 * total / world_size, (reads, total)
    out = tmp_path / "again"
    export(saved, out, prefix="model.", max_shard_size="10KB", config=folder / "config.json")
    model = LlamaForCausalLM.from_pretrained(out)
    for key, value in model.state_dict().items():
        assert torch.equal(value, found[0]["end"][f"model.{key}"]), key


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))  # nothing initialises it on the meta device
        self.register_buffer("offset", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x + self.offset))


class Module(pl.LightningModule):
    def __init__(self, width: int = 8, classes: int = 5, extra: bool = False, strict: bool = True) -> None:
        super().__init__()
        self.strict_loading = strict
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, classes)
        self.more = nn.Parameter(torch.full((3,), 7.0)) if extra else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), batch["y"])
        return loss if self.more is None else loss + self.more.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batches() -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, 8, generator=rng), "y": torch.arange(8) % 5} for _ in range(STEPS)]


def _starts(
    rank: int, world_size: int, layout: dict[str, Any], path: str, meta: bool, options: dict[str, Any]
) -> dict[str, Tensor]:
    torch.manual_seed(200)
    start = Start()
    trainer = quiet_trainer(PTDPStrategy(**layout, initial_weights=path), world_size, callbacks=[start], max_steps=1)
    with trainer.init_module(empty_init=meta):
        module = Module(**options)
    trainer.fit(module, datamodule=Data(_batches(), 8))
    return start.state


def _file(path: Path, kind: type[Module] = Module, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = kind(**options)
    for buffer in module.buffers():
        buffer.normal_()
    if path.suffix == ".safetensors":
        save_file(module.state_dict(), path)
    elif not path.suffix:
        folders.write(path, module.state_dict())
    else:
        trainer = quiet_trainer("auto", 1)
        trainer.strategy.connect(module)
        trainer.save_checkpoint(path, weights_only=True)
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize(("layout", "name"), [("tensor", "w.safetensors"), ("pipeline", "w.ckpt"), ("zero3", "folder")])
def test_what_nothing_initialises_comes_from_the_file(layout: str, name: str, tmp_path: Path) -> None:
    """A model on the meta device with parameters and buffers that have no initialiser."""
    state = _file(tmp_path / name)
    for found in launch_ranks(_starts, *LAYOUTS[layout], str(tmp_path / name), True, {}):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())


def _starts_again(rank: int, world_size: int, layout: dict[str, Any], path: str, saved: str) -> bool:
    ends = []
    for steps, ckpt_path in ((1, None), (2, saved)):
        start = Start()
        strategy = PTDPStrategy(**layout, initial_weights=path)
        trainer = quiet_trainer(strategy, world_size, callbacks=[start], max_steps=steps, max_epochs=-1)
        trainer.fit(Module(), datamodule=Data(_batches(), 8), ckpt_path=ckpt_path)
        ends.append((start.state, strategy.full_state_dict()))
        if ckpt_path is None:
            trainer.save_checkpoint(saved)
    after, again = ends[0][1], ends[1][0]
    return all(torch.equal(again[key], value) for key, value in after.items())


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    _file(tmp_path / "w.safetensors")
    files = str(tmp_path / "w.safetensors"), str(tmp_path / "one.ckpt")
    assert launch_ranks(_starts_again, *LAYOUTS["zero3"], *files) == [True, True]


def test_what_does_not_fit_is_named_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    state = _file(path)
    for options, meta, said in (
        ({"classes": 6}, False, "'head.weight' with the shape (5, 8); 'head.weight' needs (6, 8)"),
        ({"extra": True}, False, "missing 'more'"),
        ({"extra": True, "strict": False}, True, "'more' was built on the meta device"),
    ):
        with pytest.raises(RanksFailed) as caught:
            launch_ranks(_starts, *LAYOUTS["pipeline"], str(path), meta, options)
        assert len(caught.value.tracebacks) == 2
        assert all(said in text for text in caught.value.tracebacks.values()), caught.value
    del state["head.weight"], state["head.bias"]
    save_file(state, path)
    found = launch_ranks(_starts, *LAYOUTS["pipeline"], str(path), False, {"extra": True, "strict": False})[0]
    assert torch.equal(found["more"], torch.full((3,), 7.0))
    assert torch.equal(found["blocks.3.linear.weight"], state["blocks.3.linear.weight"])
