"""Parameters that are here in name and shape only."""

import copy

import pytest
import torch
from torch import nn

from lnn_lightning.parallel.step.standin import (
    convert_module,
    has_stand_ins,
    is_stand_in,
    named_tensors,
    replace_tensors,
    stand_in_for,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.fc = nn.Linear(64, 64)
        self.fc.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight


def stand_in(module: nn.Module, *prefixes: str) -> nn.Module:
    """Everything under the prefixes becomes a stand-in."""
    replace_tensors(module, lambda name, t: stand_in_for(t) if name.startswith(prefixes) else t)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_shape_without_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(100, 30, dtype=dtype)
    standing = stand_in_for(tensor)
    assert standing.shape == (100, 30)
    assert standing.dtype == dtype
    assert standing.untyped_storage().nbytes() == tensor.element_size()
    assert is_stand_in(standing)
    assert not is_stand_in(tensor)
    assert not is_stand_in(None)
    if dtype.is_floating_point:
        assert standing.isnan().all()


def test_a_parameter_stays_one_and_keeps_whether_it_learns() -> None:
    for requires_grad in (True, False):
        standing = stand_in_for(nn.Parameter(torch.zeros(4, 4), requires_grad))
        assert isinstance(standing, nn.Parameter)
        assert standing.requires_grad is requires_grad
        assert standing.is_leaf
    assert stand_in_for(torch.zeros(2, device="meta"), torch.device("cpu")).device.type == "cpu"


def test_replacing_keeps_names_and_ties() -> None:
    model = stand_in(Model(), "embed", "norm")
    assert model.embed.weight is model.head.weight
    assert is_stand_in(model.head.weight)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Model().named_parameters()]
    assert list(model.state_dict()) == list(Model().state_dict())
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in Model().named_buffers()]
    assert is_stand_in(model.norm.running_mean)
    assert is_stand_in(model.norm.num_batches_tracked)
    assert not is_stand_in(model.fc.weight)
    assert [has_stand_ins(child) for child in model.children()] == [True, False, True, True]
    assert [name for name, tensor in named_tensors(model) if is_stand_in(tensor)] == [
        *("embed.weight", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    ]


def test_a_tied_tensor_is_asked_about_once() -> None:
    asked: list[str] = []
    replace_tensors(Model(), lambda name, tensor: (asked.append(name), tensor)[1])
    assert asked == [
        *("embed.weight", "fc.weight", "fc.bias", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    ]


def test_a_use_by_mistake_shows() -> None:
    model = stand_in(Model(), "fc")
    assert model.fc(torch.ones(2, 64)).isnan().all()


def test_writes_go_nowhere() -> None:
    """Code that changes all parameters works on those that are here."""
    model = stand_in(Model(), "fc")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(torch.ones_like(parameter))
            parameter.data.clamp_(-1, 1)
            parameter.detach().copy_(torch.zeros(parameter.shape))
            parameter[...] = 2.0
            parameter *= 2
            nn.init.normal_(parameter)
            nn.init.constant_(parameter, 3.0)
    assert model.fc.weight.isnan().all()
    assert is_stand_in(model.fc.weight)
    assert model.fc.weight.untyped_storage().nbytes() == 4
    assert torch.equal(model.embed.weight, torch.full((1000, 64), 3.0))


def storage_bytes(module: nn.Module) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in named_tensors(module)}
    return sum(storages.values())


def test_conversion_keeps_them_without_memory() -> None:
    model = Model()
    names = dict(named_tensors(model))
    stand_in(model, "embed", "norm.running")
    optimizer_sees = list(model.parameters())
    assert convert_module(model, device=torch.device("cpu"), dtype=torch.float64) is model
    for name, tensor in named_tensors(model):
        assert tensor.dtype == (torch.float64 if names[name].is_floating_point() else names[name].dtype), name
        assert tensor.shape == names[name].shape
        assert is_stand_in(tensor) == name.startswith(("embed", "norm.running"))
        if is_stand_in(tensor):
            assert tensor.untyped_storage().nbytes() == 8
            assert tensor.isnan().all()
        assert tensor.requires_grad == names[name].requires_grad
    assert model.head.weight is model.embed.weight, "tied parameters stay tied"
    assert is_stand_in(model.head.weight)
    assert torch.equal(model.fc.weight, names["fc.weight"].double())
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer_sees], "parameters are changed in place"


def test_conversion_of_a_real_module_is_to() -> None:
    model, expected = Model(), Model()
    expected.load_state_dict(model.state_dict())
    convert_module(model, dtype=torch.bfloat16)
    expected.to(dtype=torch.bfloat16)
    for key, value in model.state_dict().items():
        assert value.dtype == expected.state_dict()[key].dtype
        assert torch.equal(value, expected.state_dict()[key])


def test_to_a_device_alone_changes_no_dtype() -> None:
    model = stand_in(Model().bfloat16(), "fc")
    convert_module(model, device=torch.device("cpu"))
    assert model.fc.weight.dtype == torch.bfloat16
    assert is_stand_in(model.fc.weight)
    assert not model.fc.bias.requires_grad


def test_memory_of_a_whole_module() -> None:
    model = stand_in(Model(), "")
    assert storage_bytes(model) == 4 * 7 + 8
    convert_module(model, dtype=torch.float64)
    assert storage_bytes(model) == 8 * 8


def test_a_copy_of_the_module_knows_its_stand_ins() -> None:
    model = copy.deepcopy(stand_in(Model(), "fc"))
    assert is_stand_in(model.fc.weight)
    assert not is_stand_in(model.embed.weight)
