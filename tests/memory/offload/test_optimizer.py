"""An optimizer whose state is in a file: bit by bit what it is in memory."""

import copy
import subprocess
import sys
import time

import pytest
import torch
from torch import nn, optim

from lnn_lightning.memory.offload import FileStore, HostStore, Offload, OffloadError
from lnn_lightning.memory.offload.optimizer import OffloadedOptimizer
from lnn_lightning.memory.offload.store import check_bandwidth

SETTINGS = Offload(target="/", chunk_size=4096)
SHAPES = [(150, 301), (50,), (7, 3, 60, 21), (53457,), (20000,)]
FUSED = {"adamw", "amsgrad", "sgd", "adagrad"}
MAKERS = {
    "adamw": lambda ps: optim.AdamW(ps, 1e-2),
    "amsgrad": lambda ps: optim.Adam(ps, 1e-2, amsgrad=True),
    "sgd": lambda ps: optim.SGD(ps, 0.1, momentum=0.9),
    "adagrad": lambda ps: optim.Adagrad(ps, 0.1, initial_accumulator_value=0.3),  # makes its state at once
    "rmsprop": lambda ps: optim.RMSprop(ps, 0.01, momentum=0.5),
    "adafactor": lambda ps: optim.Adafactor(ps, 0.01),  # whole parameters, and state of other shapes
    "adadelta": lambda ps: optim.Adadelta(ps, foreach=True),
    "counting": lambda ps: Counting(ps, {"lr": 0.1, "k": 0}),
}


class Counting(optim.Optimizer):
    """Keeps a counter in its group and one in an attribute."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad  # a new tensor in every step
                    p.add_(state["sum"], alpha=-group["lr"] / group["k"] / self.calls)


class Coupled(Counting):
    """One step size for all parameters, from all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        scale = sum(p.grad.norm() for p in parameters)
        for p in parameters:
            p.sub_(p.grad / scale)


def parameters():
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES]
    made.append(nn.Parameter((torch.randn(8, 30, 9, 9) * 0.1).to(memory_format=torch.channels_last)))
    return made


def train(optimizer, ps, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for index, p in enumerate(ps):
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * 0.1)
            if step == 1 and index == 3:
                p.grad = None  # left out once
        optimizer.step()


def states_equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first["state"].keys() == second["state"].keys()
    for key, leaves in first["state"].items():
        assert leaves.keys() == second["state"][key].keys()
        for name, value in leaves.items():
            other = second["state"][key][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (key, name)
    drop = {"params", "fused"}
    for mine, theirs in zip(first["param_groups"], second["param_groups"], strict=True):
        assert {k: v for k, v in mine.items() if k not in drop} == {k: v for k, v in theirs.items() if k not in drop}


@pytest.mark.parametrize("name", MAKERS)
def test_bit_equal_to_memory_and_resumed(tmp_path, name):
    make, plain, stored, resumed = MAKERS[name], parameters(), parameters(), parameters()
    expected, given = make(plain), make(stored)
    for group in expected.param_groups if name in FUSED else ():
        group["fused"] = True  # which is what an offloaded one uses by itself
    store = FileStore(tmp_path)
    offloaded = OffloadedOptimizer(given, store, SETTINGS)
    scheduler = optim.lr_scheduler.StepLR(given, 2, 0.5), optim.lr_scheduler.StepLR(expected, 2, 0.5)
    for seed in range(2):
        train(expected, plain, seed=seed)
        train(given, stored, seed=seed)
        for each in scheduler:
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, stored, strict=True))
    states_equal(expected, given)
    kept = [value for state in given.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    window = torch.frombuffer(store._windows[0][1], dtype=torch.uint8)
    begin = window.data_ptr()
    assert any(begin <= value.data_ptr() < begin + len(window) for value in kept)

    with torch.no_grad():
        for p, q in zip(resumed, stored, strict=True):
            p.copy_(q)
    again = make(resumed)
    OffloadedOptimizer(again, FileStore(tmp_path), SETTINGS)
    again.load_state_dict(copy.deepcopy(given.state_dict()))
    if name == "counting":
        again.calls = given.calls
    train(again, resumed, seed=5)
    train(given, stored, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(resumed, stored, strict=True))
    offloaded.close()


def test_state_that_the_user_changes_is_taken(tmp_path):
    plain, stored = parameters(), parameters()
    expected, given = optim.AdamW(plain, 1e-2, fused=True), optim.AdamW(stored, 1e-2)
    OffloadedOptimizer(given, FileStore(tmp_path), SETTINGS)
    for optimizer, ps in ((expected, plain), (given, stored)):
        train(optimizer, ps)
        optimizer.state[ps[0]]["exp_avg"].mul_(3.0)  # in place: in the file
        optimizer.state[ps[2]]["exp_avg"] = torch.ones_like(ps[2])  # another tensor
        optimizer.state[ps[4]]["step"] += 10
        train(optimizer, ps)
    assert all(torch.equal(a, b) for a, b in zip(plain, stored, strict=True))
    states_equal(expected, given)


def test_state_that_the_user_clears_or_changes_when_it_was_read_ahead(tmp_path):
    plain, stored = parameters(), parameters()
    expected, given = optim.AdamW(plain, 0.01, fused=True), optim.AdamW(stored, 0.01)
    offloaded = OffloadedOptimizer(given, FileStore(tmp_path), SETTINGS)
    for seed in range(3):
        train(expected, plain, seed=seed)
        train(given, stored, seed=seed)
        if seed == 0:
            expected.state.clear()
            given.state.clear()
        if seed == 1:
            offloaded.read_ahead()
            time.sleep(0.1)  # until it is there
            for value in (expected.state[plain[0]]["exp_avg"], given.state[stored[0]]["exp_avg"]):
                value.mul_(0.5)
            del expected.state[plain[1]], given.state[stored[1]]
    assert all(torch.equal(a, b) for a, b in zip(plain, stored, strict=True))
    states_equal(expected, given)


def test_values_can_be_kept_in_the_store_too(tmp_path):
    plain, stored = parameters(), parameters()
    expected, given = optim.AdamW(plain, 1e-2, fused=True), optim.AdamW(stored, 1e-2)
    offloaded = OffloadedOptimizer(given, FileStore(tmp_path), SETTINGS)
    seen = []
    assert [offloaded.keep_values(p, lambda start, stop, part: seen.append(stop - start)) for p in stored] == [
        p.numel() >= 1 << 14 for p in stored
    ]
    train(expected, plain)
    train(given, stored)
    assert all(torch.equal(a, b) for a, b in zip(plain, stored, strict=True))
    assert max(seen) == 4096


def test_sparse_gradients_and_parameters_that_learn_later(tmp_path):
    trained = []
    for offload in (False, True):
        torch.manual_seed(0)
        table, late = nn.Embedding(300, 60, sparse=True), nn.Parameter(torch.randn(20000), requires_grad=False)
        optimizer = optim.SGD([table.weight, late], 0.1)
        if offload:
            OffloadedOptimizer(optimizer, FileStore(tmp_path), SETTINGS)
        for step in range(4):
            late.requires_grad_(step > 1)
            optimizer.zero_grad()
            (table(torch.tensor([step, 5, 5])).square().sum() + late.square().sum()).backward()
            optimizer.step()
        trained.append((table.weight, late))
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*trained, strict=True))


def test_host_memory_is_no_copy():
    ps = parameters()
    optimizer = optim.AdamW(ps, 1e-2)
    OffloadedOptimizer(optimizer, HostStore(), SETTINGS)
    train(optimizer, ps)
    addresses = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    train(optimizer, ps)
    assert addresses == [state["exp_avg"].data_ptr() for state in optimizer.state.values()]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (optim.LBFGS, "about all parameters at once"),
        (lambda ps: Coupled(ps, {"lr": 1.0, "k": 0}), "when there are others"),
    ],
)
def test_state_that_cannot_be_split_is_refused(tmp_path, make, says):
    with pytest.raises(OffloadError, match=says):
        OffloadedOptimizer(make(parameters()), FileStore(tmp_path), SETTINGS)


def test_a_disk_that_is_full_or_slow_or_fails(tmp_path, monkeypatch):
    store, ps = FileStore(tmp_path), parameters()
    with pytest.raises(OffloadError, match=r"writes \d+ MB/s; .* asks for 1e\+09"):
        check_bandwidth(store, 1e9)
    optimizer = optim.AdamW(ps, 1e-2)
    OffloadedOptimizer(optimizer, store, SETTINGS)
    train(optimizer, ps)

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwritev", broken)
    with pytest.raises(OffloadError, match="disk is full"):
        train(optimizer, ps)
    with pytest.raises(OffloadError):  # and it stays so: parameters and state do not belong together any more
        optimizer.state_dict()
    monkeypatch.setattr(FileStore, "room", lambda _: 0)
    with pytest.raises(OffloadError, match="disk is full"):
        OffloadedOptimizer(optim.AdamW(parameters(), 1e-2), FileStore(tmp_path), SETTINGS)


_BOUND = """
import sys, torch
from lnn_lightning.memory.offload import FileStore, Offload
from lnn_lightning.memory.offload.optimizer import OffloadedOptimizer

def peak():
    return next(int(line.split()[1]) / 1e6 for line in open("/proc/self/status") if line.startswith("VmHWM"))

ps = [torch.nn.Parameter(torch.zeros(8 << 20)) for _ in range(8)]
optimizer = torch.optim.AdamW(ps)
OffloadedOptimizer(optimizer, FileStore(sys.argv[1]), Offload(sys.argv[1]))
for p in ps:
    p.grad = torch.ones_like(p)
before = peak()
optimizer.step()
optimizer.step()
print(peak() - before)
"""


def test_peak_memory(tmp_path):
    command = [sys.executable, "-c", _BOUND, str(tmp_path)]
    above = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert above < 0.3  # the state has 0.54 GB
