"""Gates against their papers, literally transcribed (``papers.py``), gradients included, and their known values."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert import gates
from lnn_lightning.parallel.expert.balance import auxiliary_loss, balance_loss, fractions, update_bias
from lnn_lightning.parallel.expert.router import Router, make_gate
from lnn_lightning.parallel.expert.routing import Routing
from lnn_lightning.parallel.expert.settings import GATES, Upcycle
from lnn_lightning.parallel.step.remember import Decisions, remembered
from tests.helpers.ranks import run_ranks
from tests.parallel.expert import papers

TOKENS, EXPERTS = 24, 6


def random_logits(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    skew = torch.linspace(1.5, 0, EXPERTS)  # some experts overflow
    return (torch.randn(TOKENS, EXPERTS, generator=generator) * 1.5 + skew).double().requires_grad_()


def as_gates(routing: Routing, experts: int = EXPERTS) -> Tensor:
    """[N, E] from the choices; the last column, of what is dropped, is cut off."""
    sent = routing.expert >= 0
    whole = routing.weights.new_zeros(len(sent), experts + 1)
    index = torch.where(sent, routing.expert, experts)
    return whole.scatter_add(1, index, torch.where(sent, routing.weights, 0.0))[:, :experts]


def check_equal(
    routing: Routing, expected: Tensor, losses: dict[str, Tensor], *leaves: Tensor, capacity: float = math.inf
) -> None:
    """The same gates and losses, and the same gradients of an arbitrary mixture of them."""
    actual = as_gates(routing)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert ((actual > 0).sum(0) <= capacity).all()
    losses = {**losses, "z": papers.z_loss(leaves[0])}
    assert set(routing.losses) == set(losses)
    gradients = []
    for weights, values in ((actual, routing.losses), (expected, losses)):
        mixture = (weights * torch.linspace(-1, 2, weights.numel()).view_as(weights)).sum()
        for scale, name in enumerate(sorted(values), start=2):
            mixture = mixture + scale * values[name]
        gradients.append(torch.autograd.grad(mixture, leaves))
    for name, loss in losses.items():
        torch.testing.assert_close(routing.losses[name], loss, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def room(k: int, factor: float | None) -> float:
    return math.inf if factor is None else math.ceil(factor * k * TOKENS / EXPERTS)


@pytest.mark.parametrize("factor", [None, 0.6])
def test_gates_with_capacity_are_those_of_their_papers(factor: float | None) -> None:
    logits = random_logits()
    for k in (1, 2, 3):
        capacity = room(k, factor)
        expected, loss = papers.mixtral(logits, k, capacity)
        routing = gates.top_k(logits, k, capacity_factor=factor)
        check_equal(routing, expected, {"balance": loss}, logits, capacity=capacity)
        assert int(routing.dropped) == k * TOKENS - int((expected > 0).sum())
        assert (int(routing.dropped) > 0) == (factor is not None)
        assert routing.load.tolist() == [int((logits.topk(k).indices == e).sum()) for e in range(EXPERTS)]

    expected, loss = papers.switch(logits, room(1, factor))
    check_equal(gates.switch(logits, capacity_factor=factor), expected, {"balance": loss}, logits)

    uniform = torch.rand(TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected, loss = papers.gshard(logits, uniform, room(2, factor))
    routing = gates.gshard(logits, capacity_factor=factor, uniform=uniform)
    check_equal(routing, expected, {"balance": EXPERTS**2 * loss}, logits, capacity=room(2, factor))
    unsent = 2 * TOKENS - int((papers.gshard(logits, uniform)[0] > 0).sum())
    assert 0 < unsent == 2 * TOKENS - int(routing.load.sum())  # left out by the draw
    assert int(routing.dropped) == 2 * TOKENS - unsent - int((expected > 0).sum())


def test_noisy_top_k_is_shazeers() -> None:
    logits, noise_logits = random_logits(), random_logits(1)
    normal = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).double()
    for k in (1, 2, EXPERTS - 1):
        expected, importance, load = papers.shazeer(logits, noise_logits, normal, k)
        routing = gates.noisy_top_k(logits, noise_logits, k, noise=normal)
        check_equal(routing, expected, {"importance": importance, "load": load}, logits, noise_logits)
    everyone = gates.noisy_top_k(logits, noise_logits, EXPERTS, noise=normal)
    assert everyone.losses["load"] == 0
    quiet = gates.noisy_top_k(logits, noise_logits, 2, training=False)
    assert torch.equal(quiet.expert, logits.topk(2).indices)
    assert torch.equal(quiet.weights, logits.topk(2).values.softmax(-1))


def test_noise_that_vanishes_leaves_finite_gradients() -> None:
    logits, noise_logits = random_logits().float(), torch.full((TOKENS, EXPERTS), -200.0, requires_grad=True)
    logits = logits.detach().requires_grad_()
    routing = gates.noisy_top_k(logits, noise_logits, 2)
    routing.losses["load"].backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert noise_logits.grad is not None and noise_logits.grad.isfinite().all()


def test_experts_choose_tokens() -> None:
    logits = random_logits()
    for average in (1.0, 2.0, 0.9):
        capacity = math.ceil(average * TOKENS / EXPERTS)
        expected = papers.expert_choice(logits, capacity)
        routing = gates.expert_choice(logits, average)
        check_equal(routing, expected, {}, logits, capacity=capacity)
        assert routing.load.tolist() == [capacity] * EXPERTS
        assert int(routing.dropped) == int((expected == 0).all(1).sum())
        assert routing.expert.shape[1] == int((expected > 0).sum(1).max())
    assert (gates.expert_choice(logits, 100.0).expert == torch.arange(EXPERTS)).all()  # no more tokens than there are
    with FakeTensorMode():
        assert gates.expert_choice(torch.randn(8, 4), 1.0).expert.shape == (8, 4)


@pytest.mark.parametrize("groups", [(1, 1), (3, 2), (3, 1), (2, 1)])
def test_bias_chooses_and_does_not_weigh(groups: tuple[int, int]) -> None:
    logits = random_logits()
    bias = torch.linspace(-0.4, 0.6, EXPERTS, dtype=torch.float64)
    expected = papers.deepseek(logits, bias, 2, *groups)
    routing = gates.bias_balanced(logits, bias, 2, groups=groups[0], keep_groups=groups[1])
    check_equal(routing, expected, {}, logits)
    without = gates.bias_balanced(logits, torch.zeros_like(bias), 2, groups=groups[0], keep_groups=groups[1])
    assert not torch.equal(without.expert, routing.expert)


def test_gshard_and_fairscale(monkeypatch: pytest.MonkeyPatch) -> None:
    """fairscale draws *which* expert is second and always sends to it; without its noise that is the second largest."""
    top2gate = pytest.importorskip("fairscale.nn.moe.top2gate")
    monkeypatch.setattr(top2gate, "gumbel_rsample", lambda shape, device: torch.zeros(shape, device=device))
    logits = random_logits().detach().float().requires_grad_()
    theirs, combine, mask = top2gate.top2gating(logits)
    routing = gates.gshard(logits, training=False, capacity_factor=1.0)
    sent = as_gates(routing)
    assert torch.equal(sent > 0, mask.any(-1))  # the same places in the buffers
    assert 0 < int(routing.dropped) == 2 * TOKENS - int(mask.sum())
    kept = sent / sent.sum(-1, keepdim=True).clamp_min(1e-9)  # they divide by the weights that were not dropped
    torch.testing.assert_close(kept, combine.sum(-1))
    torch.testing.assert_close(routing.losses["balance"], EXPERTS**2 * theirs)
    ours = torch.autograd.grad(routing.losses["balance"], logits)[0]
    torch.testing.assert_close(ours, EXPERTS**2 * torch.autograd.grad(theirs, logits)[0], atol=1e-6, rtol=1e-5)


def test_losses_under_uniform_and_balanced_routing() -> None:
    even = torch.zeros(16, 8)
    for routing in (gates.top_k(even, 2), gates.switch(even), gates.gshard(even)):
        assert routing.losses["balance"] == 1.0
        assert routing.losses["z"] == pytest.approx(math.log(8) ** 2)
    collapsed = torch.tensor([[30.0] + [0.0] * 7]).expand(16, 8)
    assert gates.switch(collapsed).losses["balance"] == pytest.approx(8.0)  # one expert has everything: E
    circle = torch.stack(
        [torch.arange(8.0).roll(shift) for shift in range(8)]
    )  # every expert is each token's n-th once
    balanced = gates.noisy_top_k(circle, torch.zeros(8, 8), 2, noise=torch.zeros(8, 8))
    assert balanced.losses["importance"] == pytest.approx(0, abs=1e-12)
    assert balanced.losses["load"] == pytest.approx(0, abs=1e-12)
    losses = gates.top_k(even, 2).losses
    assert auxiliary_loss(losses, 0.01, 0.0) == pytest.approx(0.01)  # Switch: alpha
    assert auxiliary_loss(losses, 0.0, 0.5) == pytest.approx(0.5 * math.log(8) ** 2)
    assert auxiliary_loss(losses, 0.0, 0.0) is None


@pytest.mark.parametrize("gate", GATES)
def test_router(gate: str) -> None:
    """What all gates share: seeds, evaluation, precision, NaN, no tokens, copies and checkpoints."""
    k = 1 if gate == "switch" else 2
    settings = Upcycle(blocks="*", experts=EXPERTS, top_k=k, gate=gate, capacity_factor=1.25)  # type: ignore[arg-type]
    torch.manual_seed(3)
    router = make_gate(settings, 16)
    hidden = torch.randn(40, 16, requires_grad=True)
    twice = []
    for _ in range(2):
        torch.manual_seed(7)
        twice.append(router(hidden))
    assert torch.equal(twice[0].expert, twice[1].expert) and torch.equal(twice[0].weights, twice[1].weights)
    draws = gate in ("gshard", "noisy_top_k")
    assert torch.equal(router(hidden).expert, twice[0].expert) == (not draws)
    router.eval()
    assert torch.equal(router(hidden).expert, router(hidden).expert)
    if gate == "gshard":
        assert int(router(hidden).load.sum()) == 2 * len(hidden)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = router(hidden)
    assert low.weights.dtype == torch.float32 and torch.equal(low.weights, router(hidden).weights)
    assert router(hidden.detach().double()).weights.dtype == torch.float64

    assert bool(low.finite)
    broken = hidden.detach().clone()
    broken[3, 5] = torch.nan
    routing = router(broken)
    assert not bool(routing.finite)
    assert routing.expert.min() >= -1 and routing.expert.max() < EXPERTS

    router.train()
    empty = router(hidden[:0])
    mixture = empty.weights.sum() + torch.stack(list(empty.losses.values())).sum()
    mixture.backward()
    assert mixture == 0 and all(not parameter.grad.any() for parameter in router.parameters())

    names = {"weight"} | {"noisy_top_k": {"noise_weight"}, "bias": {"bias"}}.get(gate, set())
    assert set(router.state_dict()) == names
    half = copy.deepcopy(router).bfloat16()  # steps of a bias would vanish in bf16
    assert half.weight.dtype == torch.bfloat16 and (half.bias is None or half.bias.dtype == torch.float32)
    assert half(hidden.detach().bfloat16()).weights.dtype == torch.float32


@pytest.mark.parametrize("gate", GATES)
def test_a_second_run_does_not_choose_again(gate: str) -> None:
    """TT#1117, Automodel#3325: numbers and draws that differ a little in recomputation do not change the routing."""
    router = Router(16, EXPERTS, gate, 1 if gate == "switch" else 2, 1.0, std=0.5)  # type: ignore[arg-type]
    hidden, decisions, averages = torch.randn(40, 16), Decisions(), []

    def average(value: Tensor) -> Tensor:
        averages.append(value)
        return value

    with decisions.first():
        first = router(hidden, average, remembered)
    sent, other = len(averages), torch.randn(40, 16, requires_grad=True)
    with decisions.again():
        second = router(other, average, remembered)
    assert len(averages) == sent == (gate in ("top_k", "switch", "gshard"))  # nothing is sent again
    assert torch.equal(first.expert, second.expert) and torch.equal(first.load, second.load)
    assert not torch.equal(first.expert, router(other).expert)
    second.weights.sum().backward()
    assert not torch.equal(first.weights, second.weights) and other.grad is not None


def test_balance_of_all_ranks_tokens() -> None:
    """With the shares of all ranks, the average of the ranks' losses and gradients is that of one batch."""
    logits = random_logits()
    whole = gates.top_k(logits, 2).losses["balance"]
    parts = logits.chunk(2)
    counts = [gates.top_k(part, 2).load for part in parts]

    def average(value: Tensor) -> Tensor:
        return torch.stack(counts).to(value.dtype).mean(0)

    losses = [gates.top_k(part, 2, average=average).losses["balance"] for part in parts]
    torch.testing.assert_close(sum(losses) / 2, whole, rtol=1e-12, atol=0)
    gradient = torch.autograd.grad(sum(losses) / 2, logits)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, logits)[0], rtol=1e-10, atol=1e-14)
    local = sum(gates.top_k(part, 2).losses["balance"] for part in parts) / 2
    assert abs(float((local - whole).detach())) > 1e-4  # the shares of a rank alone are another loss
    assert balance_loss(logits.softmax(-1), fractions(torch.zeros(EXPERTS), logits.dtype)) == 0


def move_bias(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    load = torch.tensor([[4, 0, 2], [6, 2, 4]][rank])
    bias = torch.zeros(3)
    for _ in range(3):
        update_bias(bias, load, groups=[dist.group.WORLD])
    return bias.tolist(), load.tolist()


def test_bias_moves_by_the_load_of_all_ranks() -> None:
    """The sum is 10, 2, 6, its mean 6: the third expert stays, as on each rank."""
    alone = torch.zeros(3)
    update_bias(alone, torch.tensor([1, 0, 5]), step=0.5)
    assert alone.tolist() == [0.5, 0.5, -0.5]
    for rank, (bias, load) in enumerate(run_ranks(move_bias, 2)):
        assert bias == pytest.approx([-0.003, 0.003, 0])
        assert load == [[4, 0, 2], [6, 2, 4]][rank]


def test_refused() -> None:
    logits = torch.zeros(4, 3)
    with pytest.raises(LayoutError, match="to 4 of 3 experts"):
        gates.top_k(logits, 4)
    with pytest.raises(LayoutError, match="to 2 of 1 experts"):
        gates.gshard(logits[:, :1])
    with pytest.raises(LayoutError, match="capacity_factor.*positive number.*got 0"):
        gates.switch(logits, capacity_factor=0)
    with pytest.raises(LayoutError, match="positive number.*got -1"):
        gates.expert_choice(logits, -1)
    with pytest.raises(LayoutError, match="3 experts in 2 groups"):
        gates.bias_balanced(logits, torch.zeros(3), 1, groups=2)
    with pytest.raises(LayoutError, match="hold as many experts"):
        gates.bias_balanced(torch.zeros(4, 6), torch.zeros(6), 3, groups=3)
