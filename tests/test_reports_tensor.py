"""What went wrong for users of other systems with tensor parallelism, tried on this one (CASES.md has the reports)."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.tensor.axis import take_part
from lnn_lightning.parallel.tensor.sharded import plain
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import Data, Run, build, global_batches, quiet_trainer, relative_error
from tests.test_tensor_equality import check
from tests.zoo import ZOO
from tests.zoo.base import Lit, tokens

TWO: dict[str, Any] = {"tensor_parallel_size": 2, "microbatches": 2}


def fit(
    rank: int, world_size: int, name: str, layout: dict[str, Any], run: Run | None = None, *callbacks: pl.Callback
) -> tuple[pl.Trainer, Any]:
    """Trains a model of the zoo; the trainer and the module as training leaves them."""
    run = run or Run(n_steps=2)
    module = build(ZOO[name])
    trainer = quiet_trainer(
        PTDPStrategy(**layout),
        world_size,
        max_steps=run.n_steps,
        precision="64-true" if run.dtype == torch.float64 else "32-true",
        callbacks=list(callbacks),
        gradient_clip_val=run.clip,
    )
    trainer.fit(module, datamodule=Data(global_batches(ZOO[name], run), run.batch_size))
    return trainer, module


# ----------------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize("name", ["hf_qwen3", "hf_phi"])
def test_hugging_face_model_as_it_is(name: str) -> None:
    """PL#20831: nobody writes a plan."""
    assert check(name, TWO) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_llama", "titan_llama", "litgpt_groups"])
def test_fewer_key_heads_than_ranks(name: str) -> None:
    """HF#48307, TT#2574: two heads of keys and values on four ranks."""
    assert check(name, {"tensor_parallel_size": 4}) > 0.5


@pytest.mark.parametrize("name", ["odd_vocabulary", "odd_vocabulary_tied"])
def test_vocabulary_that_does_not_divide(name: str) -> None:
    """MLM#1754, CAI#6167, HF#37051: padded within, and stored as the user wrote it (`check` compares shapes, too)."""
    check(name, TWO)
    for shape, stored in launch_ranks(rows_of_embedding, 2, name):
        assert shape[0] == 17 and stored[0] == 33


def rows_of_embedding(rank: int, world_size: int, name: str) -> Any:
    trainer, module = fit(rank, world_size, name, TWO)
    return tuple(module.embed.weight.shape), tuple(trainer.strategy.full_state_dict()["embed.weight"].shape)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt_tied", "olmo"])
def test_clipping_of_parts_and_wholes(name: str, sequence: bool) -> None:
    """Torchtune#2420, Automodel#577: parts and wholes in one norm, wholes counted once (it is far above the bound)."""
    check(name, {**TWO, "sequence_parallel": sequence}, Run(clip=0.01))
    norms = launch_ranks(gradient_norm, 2, name, sequence)
    assert norms[0] == norms[1] == pytest.approx(expected_norm(name), rel=1e-9)


def gradient_norm(rank: int, world_size: int, name: str, sequence: bool) -> float:
    """The norm of all gradients, from those of one norm's weight before and behind clipping."""
    ratios = []
    for clip in (None, 1e-3):
        observed = Observed()
        fit(rank, world_size, name, {**TWO, "sequence_parallel": sequence}, Run(n_steps=1, clip=clip), observed)
        ratios.append(observed.size)
    return 1e-3 * ratios[0] / ratios[1] - 1e-6  # what torch adds to it


class Observed(pl.Callback):
    """The size of one gradient as the optimizer gets it."""

    def __init__(self) -> None:
        self.size = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
        self.size = next(
            float(p.grad.double().norm()) for n, p in module.named_parameters() if "norm" in n or "ln_" in n
        )


def expected_norm(name: str) -> float:
    module: Any = build(ZOO[name]).double()
    module.log = lambda *args, **kwargs: None
    module.training_step(global_batches(ZOO[name], Run(n_steps=1))[0], 0).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


class OneRankOnly(pl.Callback):
    """Changes what all ranks hold on the second one: its gradient as it is made, or the parameter itself."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.what == "gradient" and trainer.global_rank == 1:
            _norm_weight(module).register_hook(lambda gradient: gradient * 1.001)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
        if self.what == "parameter" and trainer.global_rank == 1:
            _norm_weight(module).data.mul_(1 + 1e-12)


def _norm_weight(module: Any) -> nn.Parameter:
    return module.layers[1].norm_1.weight


def drift(rank: int, world_size: int, what: str, checked: bool) -> list[Tensor]:
    layout = {**TWO, "check_replicas": checked}
    _, module = fit(rank, world_size, "litgpt_groups", layout, Run(n_steps=3), OneRankOnly(what))
    return [module.layers[1].norm_1.weight.detach(), module.norm.weight.detach()]


def test_replicas_do_not_drift() -> None:
    """PT#160169: gradients that differ between ranks are made equal before the step."""
    first, second = launch_ranks(drift, 2, "gradient", True)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("checked", [True, False])
def test_replicas_that_drift_are_found(checked: bool) -> None:
    """PT#160169: on all ranks, by name; also without the option, in the first steps."""
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(drift, 2, "parameter", checked)
    assert len(caught.value.tracebacks) == 2
    for text in caught.value.tracebacks.values():
        assert "no longer equal" in text and "layers.1.norm_1.weight" in text


class DropoutBlock(nn.Module):
    """Dropout on values that are divided (inside of the MLP) and on whole ones (behind it)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.inside, self.behind = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.behind(self.down(self.inside(F.softplus(self.up(self.norm(x))))))


class DropoutModel(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList([DropoutBlock() for _ in range(2)])
        self.head = nn.Linear(32, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())


def masks(rank: int, world_size: int, sequence: bool) -> dict[str, Tensor]:
    """What was dropped in the last step, by dropout."""
    torch.manual_seed(1)
    module, found = DropoutModel(), {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Dropout):

            def keep(part: nn.Module, args: Any, out: Tensor, name: str = name) -> None:
                if not isinstance(plain(out), FakeTensor) and not out.is_meta:
                    found[name] = plain(out).detach() == 0

            part.register_forward_hook(keep)
    layout = {"tensor_parallel_size": 2, "data_parallel_size": 2, "microbatches": 1, "sequence_parallel": sequence}
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, max_steps=2)
    batches = tokens(32, 12)(2, 8, torch.float32)
    trainer.fit(module, datamodule=Data(batches, 8))
    return found


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_masks(sequence: bool) -> None:
    """Slapo#21: equal where values are whole, different where they are divided, and over data ranks and layers."""
    found = launch_ranks(masks, 4, sequence)
    for data in range(2):
        one, other = found[2 * data], found[2 * data + 1]
        for block in range(2):
            assert one[f"blocks.{block}.inside"].shape == (4, 12, 64)
            assert not torch.equal(one[f"blocks.{block}.inside"], other[f"blocks.{block}.inside"])
            assert torch.equal(one[f"blocks.{block}.behind"], other[f"blocks.{block}.behind"]) != sequence
            assert 0.4 < one[f"blocks.{block}.inside"].double().mean() < 0.6
        assert not torch.equal(one["blocks.0.behind"], one["blocks.1.behind"])
    for name in found[0]:
        assert not torch.equal(found[0][name], found[2][name])


def gradients(rank: int, world_size: int, name: str, layout: dict[str, Any]) -> dict[str, Tensor]:
    """Of the first step in float32: whole ones, by name."""
    trainer, module = fit(rank, world_size, name, layout, Run(n_steps=1, dtype=torch.float32))
    residence = trainer.strategy.engine.residence
    found = {}
    for key, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[key] = residence.whole(key, parameter.grad).detach().clone()
    return found


@pytest.mark.parametrize("name", ["gpt_tied", "olmo", "torch_encoder"])
def test_sequence_parallel_gives_the_same_gradients(name: str) -> None:
    """Megatron-Bridge#5411: on and off, in fp32."""
    off, on = (
        launch_ranks(gradients, 2, name, {**TWO, "sequence_parallel": sequence})[0] for sequence in (False, True)
    )
    assert off.keys() == on.keys() and off
    scale = max(float(gradient.abs().max()) for gradient in off.values())
    for key, gradient in off.items():
        assert gradient.shape == on[key].shape
        assert float((gradient - on[key]).abs().max()) <= 1e-5 * scale, key
        if float(gradient.abs().max()) > 1e-3 * scale:
            assert relative_error(on[key], gradient) < 1e-4, key


def fused_parts(rank: int, world_size: int) -> bool:
    trainer, module = fit(rank, world_size, "fused_swiglu", TWO)
    whole = trainer.strategy.full_state_dict()["layers.0.mlp.w12.weight"]
    gate, up = whole.chunk(2)
    mine = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
    return torch.equal(module.layers[0].mlp.w12.weight.detach(), mine)


def test_fused_gate_and_up() -> None:
    """Each rank has half of the gate and half of the up projection, not one of the two."""
    check("fused_swiglu", TWO)
    assert launch_ranks(fused_parts, 2) == [True, True]


# ----------------------------------------------------------------------------------------------- memory


def held(rank: int, world_size: int, name: str, layout: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes on this rank, and by the formula: all of a parameter that is whole, the part of one that is divided."""
    trainer, module = fit(rank, world_size, name, layout, Run(n_steps=2, dtype=torch.float32))
    residence = trainer.strategy.engine.residence
    plan, size = residence.tensor.plan, layout["tensor_parallel_size"]
    own = {key: p for key, p in module.named_parameters() if residence.lives_here(key)}
    assert all(is_stand_in(p) for key, p in module.named_parameters() if key not in own)
    expected = 0
    reference = dict(build(ZOO[name]).named_parameters())
    for key in own:
        share = 4 * reference[key].numel()
        if key in plan.specs:
            sections = plan.specs[key].sections
            share = share // sum(sections) * sum(-(-section // size) for section in sections)
            assert own[key].numel() == take_part(reference[key], plan.specs[key], size, rank % size).numel()
        expected += share
    states = trainer.optimizers[0].state.values()
    moments = [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim() > 0]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in own.values()}
    return {
        "parameters": (sum(storages.values()), expected),
        "gradients": (sum(_bytes(p.grad) for p in own.values() if p.grad is not None), expected),
        "optimizer": (sum(map(_bytes, moments)), 2 * expected),
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2 tp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1f1b"},
    "tp2 dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "tp2 sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", ["gpt_untied", "litgpt_groups"])
@pytest.mark.parametrize(
    "layout", [key if "4" not in key else pytest.param(key, marks=pytest.mark.slow) for key in LAYOUTS]
)
def test_memory(layout: str, name: str) -> None:
    """Parameters, gradients and AdamW's two moments take what the formula says, to the byte."""
    settings = {"microbatches": 2, **LAYOUTS[layout]}
    world_size = settings["tensor_parallel_size"] * settings.get("pipeline_parallel_size", 1)
    world_size *= settings.get("data_parallel_size", 1)
    results = launch_ranks(held, world_size, name, settings)
    for result in results:
        for what, (found, expected) in result.items():
            assert found == expected, what
    if "pipeline_parallel_size" not in settings:
        whole = 4 * sum(parameter.numel() for parameter in build(ZOO[name]).parameters())
        assert results[0]["parameters"][1] < 1.1 * whole / settings["tensor_parallel_size"]
