"""In which precision ranks add up gradients: what is on the wire."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.precision import MeshHalfPrecision, MeshMixedPrecision, MeshPrecision
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer, relative_error
from tests.precision.test_masters import LAYOUTS, Net, Shares

BF16, FP32 = torch.bfloat16, torch.float32


class Tied(Net):
    """The last stage has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight


def _on_the_wire(
    rank: int, world_size: int, layout: dict[str, Any], kind: str, settings: dict[str, Any], tied: bool
) -> Any:
    """Bytes by dtype that each reduction of a step was given, DDP's own (in C++) apart."""
    sent: dict[torch.dtype, int] = {}
    counting = [False]
    reduce, scatter = dist.all_reduce, _fsdp_param_group.foreach_reduce
    names = list(inspect.signature(scatter).parameters)

    def count(dtype: torch.dtype, elements: int) -> None:
        sent[dtype] = sent.get(dtype, 0) + elements * dtype.itemsize

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and (counting[0] or kwargs.get("async_op")):  # not who has a gradient at all
            count(tensor.dtype, tensor.numel())
        return reduce(tensor, *args, **kwargs)

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        gradients = given["unsharded_grads"]
        count(given["reduce_dtype"] or gradients[0].dtype, sum(each.numel() for each in gradients))
        return scatter(*args, **kwargs)

    def counted(method: Any) -> Any:
        def wrapped(*args: Any) -> None:
            counting[0] = True
            method(*args)
            counting[0] = False

        return wrapped

    dist.all_reduce, _fsdp_param_group.foreach_reduce = all_reduce, foreach_reduce
    for name in ("settle_gradients", "sum_shared_gradients"):
        setattr(Residence, name, counted(getattr(Residence, name)))
    plugin = {"half": lambda **kw: MeshHalfPrecision("bf16-true", **kw), "single": MeshPrecision}.get(kind)
    made = plugin(**settings) if plugin else MeshMixedPrecision("bf16-mixed", "cpu", **settings)
    module = Tied() if tied else Net()
    trainer = quiet_trainer(PTDPStrategy(**layout), world_size, plugins=[made], max_steps=1)
    trainer.fit(module, datamodule=Shares())
    return sent, trainer.strategy.full_state_dict()  # type: ignore[attr-defined]


PARAMETERS = sum(p.numel() for p in Net().parameters())


@pytest.mark.parametrize(
    ("name", "kind", "settings", "dtype"),
    [
        ("data", "half", {}, FP32),
        ("data", "half", {"reduce_dtype": "bf16"}, None),
        ("data", "single", {"reduce_dtype": "bf16"}, BF16),
        ("data", "mixed", {}, None),
        ("zero3", "half", {}, FP32),
        ("zero3", "half", {"reduce_dtype": "bf16"}, BF16),
        ("zero3", "mixed", {"reduce_dtype": "bf16"}, BF16),
    ],
)
def test_bytes_over_data_ranks(name: str, kind: str, settings: dict[str, Any], dtype: Any) -> None:
    results = launch_ranks(_on_the_wire, 2, LAYOUTS[name], kind, settings, False)
    plain = launch_ranks(_on_the_wire, 1, {"microbatches": 2}, kind, {}, False)[0][1]
    for sent, state in results:
        assert sent == ({dtype: PARAMETERS * dtype.itemsize} if dtype is not None else {})
        for key, value in plain.items():
            assert relative_error(state[key], value) < 0.02, key


@pytest.mark.parametrize(("name", "tied"), [("tensor", False), ("pipeline", True)])
def test_bytes_over_tensor_ranks_and_stages(name: str, tied: bool) -> None:
    size = {settings: None for settings in ("fp32", "bf16")}
    for settings in size:
        given = {} if settings == "fp32" else {"reduce_dtype": "bf16"}
        size[settings] = launch_ranks(_on_the_wire, 2, LAYOUTS[name], "half", given, tied)[0][0]
    assert set(size["fp32"]) == {FP32} and set(size["bf16"]) == {BF16}  # type: ignore[arg-type]
    assert size["fp32"][FP32] == 2 * size["bf16"][BF16]  # type: ignore[index]
    assert not tied or size["bf16"][BF16] == 16 * 16 * 2  # type: ignore[index]
