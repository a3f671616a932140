"""Adafactor equals torch's and transformers' where their options agree, and parts of parameters move as the whole."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.optimization
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lnn_lightning import Adafactor
from lnn_lightning.optim.cuts import Cut
from tests.helpers.ranks import run_ranks

SHAPES: list[tuple[int, ...]] = [(), (5,), (7, 5), (1, 5), (4, 3, 3), (4, 3, 2, 2), (2, 3, 2, 2, 2)]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def descend(optimizer: torch.optim.Optimizer, steps: int = 30) -> list[Tensor]:
    """Steps along gradients of growing and shrinking size that depend on the parameters; every third is missing."""
    found = [p for group in optimizer.param_groups for p in group["params"]]
    random = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, p in enumerate(found):
            noise = torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)
            grad = (p.detach() * 0.1 + noise) * 10.0 ** (step % 5 - 2)
            p.grad = None if index % 3 == 2 and step % 4 == 1 else grad
        optimizer.step()
    return [p.detach() for p in found]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape
        assert float((mine - other).abs().max()) <= tolerance * float(other.abs().max().clamp(min=1.0)), mine.shape


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_init": True},
        {"beta1": 0.9, "weight_decay": 0.1},
        {"lr": 0.03, "relative_step": False, "eps": (1e-8, 0.5), "decay_rate": -0.5},
        {"lr": 0.03, "relative_step": False, "scale_parameter": False, "clip_threshold": 0.3, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_equals_transformers(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    found, expected = parameters(dtype), parameters(dtype)
    theirs = transformers.optimization.Adafactor(expected, **options)
    assert_close(descend(Adafactor(found, **options)), descend(theirs), tolerance)
    assert not torch.equal(found[2], parameters(dtype)[2])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.3}, {"clip": 2.0, "decay": -0.5, "eps2": 0.4}, {"maximize": True}], ids=str
)
def test_equals_torch(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Its epsilon bounds the estimates, ours is added to squared gradients: both are tiny here."""
    given = {"lr": 1e-2, "clip": 1.0, "decay": -0.8, "eps2": 1e-3, "maximize": False, **options}
    lr, maximize, eps = given["lr"], given["maximize"], (1e-30, given["eps2"])
    ours = Adafactor(
        parameters(dtype), lr, eps, clip_threshold=given["clip"], decay_rate=given["decay"], maximize=maximize
    )
    theirs = torch.optim.Adafactor(parameters(dtype), lr, given["decay"], eps, d=given["clip"], maximize=maximize)
    assert_close(descend(ours), descend(theirs), tolerance)


def test_weight_decay_is_that_of_torch_where_steps_are_not_relative_to_anything() -> None:
    """With parameters whose root mean square is one in the first step, so that the step that is taken is `lr`."""
    found, expected = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    ours = Adafactor([found], lr=0.01, weight_decay=0.5)
    theirs = torch.optim.Adafactor([expected], lr=0.01, weight_decay=0.5, eps=(1e-30, 1e-3))
    found.grad = expected.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours.step()
    theirs.step()
    assert_close([found.detach()], [expected.detach()], 1e-7)
    assert float(found.detach().mean()) < 0.999


def test_a_scheduler_moves_the_bound_of_relative_steps() -> None:
    expected, found = parameters()[2:3], parameters()[2:3]
    optimizer = Adafactor(found, lr=0.04)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    descend(optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.02
    before = found[0].detach().clone()
    found[0].grad = torch.ones_like(found[0])
    optimizer.step()
    descend(reference := Adafactor(expected, lr=0.04), 1)
    reference.param_groups[0].update(lr=0.02, relative_step=False)
    expected[0].grad = torch.ones_like(expected[0])
    reference.step()
    assert_close(found, expected, 1e-12)
    assert not torch.equal(before, found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_is_in_fp32_also_when_loaded(dtype: torch.dtype) -> None:
    optimizer = Adafactor(parameters(dtype), beta1=0.9)
    descend(optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    loaded = Adafactor(parameters(dtype), beta1=0.9)
    loaded.load_state_dict(saved)
    for p, q in zip(optimizer.param_groups[0]["params"], loaded.param_groups[0]["params"], strict=True):
        assert optimizer.state[p].keys() == loaded.state[q].keys()
        for leaf, value in optimizer.state[p].items():
            if isinstance(value, Tensor):
                assert value.dtype == loaded.state[q][leaf].dtype == torch.float32
                assert torch.equal(value, loaded.state[q][leaf])
            else:
                assert value == loaded.state[q][leaf]


def test_bytes_of_a_transformer() -> None:
    """At most one hundredth of Adam's for about 100M parameters; nothing is computed, on `meta`."""

    def state_bytes(make: Any) -> int:
        with torch.device("meta"):
            block = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
            model = nn.ModuleDict({"embed": nn.Embedding(20000, 768), "blocks": nn.TransformerEncoder(block, 12)})
        assert 95e6 < sum(p.numel() for p in model.parameters()) < 105e6
        optimizer = make(model.parameters())
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()
        leaves = [value for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes if isinstance(value, Tensor) else 8 for value in leaves)

    ours, adam = state_bytes(Adafactor), state_bytes(lambda p: torch.optim.Adam(p, foreach=False))
    print(f"Adafactor {ours / 1e6:.2f} MB, Adam {adam / 1e6:.1f} MB, {ours / adam:.2%}")
    assert ours <= 0.01 * adam


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "`lr`"),
        ({"lr": math.nan}, "`lr`"),
        ({"eps": (1e-30,)}, "`eps`"),
        ({"clip_threshold": 0.0}, "`clip_threshold`"),
        ({"decay_rate": 0.8}, "`decay_rate`"),
        ({"beta1": 1.0}, "`beta1`"),
        ({"weight_decay": -0.1}, "`weight_decay`"),
        ({"warmup_init": True, "relative_step": False}, "relative_step"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Adafactor(parameters(), **options)


def test_gradients_it_has_no_rule_for() -> None:
    with pytest.raises(ValueError, match="complex"):
        Adafactor([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=True"):
        Adafactor(table.parameters()).step()


# ---------------------------------------------------------------- parts

_WHOLE: dict[str, tuple[int, ...]] = {
    "rows": (5, 6),
    "few rows": (1, 6),
    "columns": (4, 6),
    "both": (6, 4),
    "padded": (5, 3),
    "convolution": (5, 3, 2, 2),
    "vector": (7,),
    "whole": (3, 2),
    "unused": (4, 4),
}
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "eps": (0.1, 1e-3),
    "beta1": 0.5,
    "weight_decay": 0.1,
}  # epsilon shows if padding counts


def _gradient(name: str, step: int) -> Tensor | None:
    if name == "unused" or (name == "columns" and step == 1):
        return None
    random = torch.Generator().manual_seed(100 * step + list(_WHOLE).index(name))
    return torch.randn(_WHOLE[name], generator=random, dtype=torch.float64) * 10.0 ** (step - 1)


def _start(name: str) -> Tensor:
    random = torch.Generator().manual_seed(list(_WHOLE).index(name))
    return torch.randn(_WHOLE[name], generator=random, dtype=torch.float64)


def _part(name: str, whole: Tensor, data: int, tensor: int) -> Tensor:
    """What a rank of 2 x 2 has: data ranks cut rows, tensor ranks columns, or rows with padding."""
    if name in ("columns", "both"):
        whole = whole.chunk(2, 1)[tensor]
    if name == "padded":  # 5 rows to 6, over tensor ranks; then over data ranks 2 and 1 of each 3
        whole = torch.cat([whole, whole.new_zeros(1, 3)]).chunk(2)[tensor]
    if name in ("columns", "whole"):
        return whole
    pieces = whole.chunk(2)
    return pieces[data] if data < len(pieces) else whole[:0]


def _cut(name: str, part: Tensor, data: int, tensor: int, groups: tuple[ProcessGroup, ProcessGroup]) -> Cut | None:
    by_data, by_tensor = groups
    if name == "whole":
        return None
    divided = {"columns": [(by_tensor, 1)], "both": [(by_tensor, 1), (by_data, 0)]}
    divided["padded"] = [(by_tensor, 0), (by_data, 0)]
    real = list(part.shape)
    if name == "padded" and (data, tensor) == (1, 1):
        real[0] = 0
    return Cut(_WHOLE[name], tuple(real), tuple(divided.get(name, [(by_data, 0)])))


def _steps_on_parts(rank: int, world_size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    groups = (mesh.get_group("data"), mesh.get_group("tensor"))
    whole = {name: nn.Parameter(_start(name)) for name in _WHOLE}
    parts = {name: nn.Parameter(_part(name, _start(name), data, tensor).clone()) for name in _WHOLE}
    cuts = {id(p): _cut(name, p, data, tensor, groups) for name, p in parts.items()}
    expected = Adafactor([{"params": [p]} for p in whole.values()], **OPTIONS)
    found = Adafactor([{"params": [p]} for p in parts.values()], **OPTIONS)
    found.bind_cuts(lambda p: cuts[id(p)], groups)
    for step in range(4):
        for name, p in whole.items():
            p.grad = _gradient(name, step)
            parts[name].grad = None if p.grad is None else _part(name, p.grad, data, tensor).clone()
        if parts["few rows"].numel() == 0:
            parts["few rows"].grad = None  # some do not even have an empty one
        expected.step()
        found.step()
    for name, p in whole.items():
        difference = (parts[name].detach() - _part(name, p.detach(), data, tensor)).abs()
        assert difference.numel() == 0 or float(difference.max()) <= 1e-12, name
        assert (p in expected.state) == (parts[name] in found.state) == (name != "unused"), name
        for leaf, value in expected.state[p].items():
            if name in ("rows", "both") and leaf == "row_var":
                part = _part("rows", value, data, tensor)
                torch.testing.assert_close(found.state[parts[name]][leaf], part, rtol=1e-12, atol=0.0)


def test_parts_move_as_the_whole() -> None:
    """Rows, columns and both cut, unevenly, with padding and with nothing on some ranks."""
    run_ranks(_steps_on_parts, 4)
