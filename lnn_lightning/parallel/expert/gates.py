"""How tokens choose experts: one function a gate, from the router's logits to a :class:`Routing`.

All gates compute in fp32 (or the logits' own precision, if it is higher): Switch's selective precision. Which tokens an
expert has room for is decided in GShard's order: all first choices before second ones, in token order; the "group" of
GShard's group capacity is this rank's tokens. Nothing here makes the host wait for the device, but for expert choice.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.balance import Average, count_choices, cv_squared, z_loss
from lnn_lightning.parallel.expert.capacity import capacity_of
from lnn_lightning.parallel.expert.routing import Remember, Routing, at_once, balance_of, checked_logits, place

_SMALLEST_NOISE = 1e-6  # of the logits' noise where Shazeer's load divides by it: softplus can be 0 in floating point


def top_k(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float | None = None,
    average: Average | None = None,
    remember: Remember = at_once,
) -> Routing:
    r"""The k most probable experts (Mixtral, Jiang et al. 2024, arXiv 2401.04088, section 2.1).

    .. math:: p = \mathrm{softmax}(x), \quad w_i = p_i / \sum_{j \in \mathrm{Top}_k(p)} p_j

    which is the softmax over the k largest logits (with k = 1 always 1: the router then learns from its losses alone;
    :func:`switch` multiplies by the probability). "balance" is Switch's loss with the share of all N*k choices as f
    (transformers' ``load_balancing_loss_func`` counts choices a token and so is k times as large).

    Args:
        logits: the router's, [N, E].
        k: experts a token goes to.
        capacity_factor: an expert takes ``ceil(capacity_factor * k * N / E)`` tokens; None: all.
        average: averages over the ranks that have other tokens, for the shares in the balancing loss; None: it is of
            this rank's tokens alone.
        remember: keeps what was chosen (and drawn) for recomputation.
    """
    logits = checked_logits(logits, k, capacity_factor)
    probs = logits.softmax(-1)
    chosen = remember(lambda: probs.detach().topk(k, dim=-1).indices)
    weights = probs.gather(-1, chosen)
    return place(
        logits,
        chosen,
        weights / weights.sum(-1, keepdim=True),
        {"balance": balance_of(probs, chosen, average, remember)},
        capacity_factor,
    )


def switch(
    logits: Tensor,
    *,
    capacity_factor: float | None = None,
    average: Average | None = None,
    remember: Remember = at_once,
) -> Routing:
    r"""Switch's one expert (Fedus et al. 2021, arXiv 2101.03961, section 2).

    .. math:: y = p_i(x) E_i(x), \; i = \mathrm{argmax}\, p(x); \qquad
        \mathrm{capacity} = N / E \cdot \mathrm{factor}; \qquad L = E \sum_i f_i P_i

    f_i is the share of tokens whose most probable expert is i, whether or not it has room (equations 4 to 6; alpha is
    the caller's). The capacity is rounded up. Arguments are those of :func:`top_k`.
    """
    logits = checked_logits(logits, 1, capacity_factor)
    probs = logits.softmax(-1)
    chosen = remember(lambda: probs.detach().argmax(-1, keepdim=True))
    losses = {"balance": balance_of(probs, chosen, average, remember)}
    return place(logits, chosen, probs.gather(-1, chosen), losses, capacity_factor)


def gshard(
    logits: Tensor,
    *,
    training: bool = True,
    capacity_factor: float | None = None,
    average: Average | None = None,
    remember: Remember = at_once,
    uniform: Tensor | None = None,
) -> Routing:
    r"""GShard's top-2 with a random second expert (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1).

    .. math:: w_1 = g_1 / (g_1 + g_2), \quad w_2 = g_2 / (g_1 + g_2), \quad
        L = E \sum_e \frac{c_e}{S} m_e

    g are the two largest probabilities. A token goes to its second expert if ``2 w_2 > u``, u uniform in [0, 1); in
    evaluation always. As the algorithm is printed, a second choice that the draw leaves out still takes its place in
    the expert's buffer, and an expert's places are given to first choices, then to second ones; the weight of the
    other is not changed if one of the two is dropped. c_e counts first choices, dropped ones included; m_e is the mean
    probability. The paper's loss is 1/E of the sum; this one is E^2 times that (as in the authors' code), which is 1
    under uniform routing, like Switch's.

    fairscale's ``Top2Gate`` differs: it draws *which* expert is second (Gumbel noise), always sends to it, divides
    weights by the sum of those not dropped, and has the paper's 1/E.

    Args:
        logits: the router's, [N, E].
        training: draw the second expert.
        capacity_factor: an expert takes ``ceil(capacity_factor * 2 * N / E)`` tokens; None: all.
        average: see :func:`top_k`.
        remember: see :func:`top_k`.
        uniform: the draws u, [N]; None: from the device's generator.
    """
    logits = checked_logits(logits, 2, capacity_factor)
    probs = logits.softmax(-1)
    chosen = remember(lambda: probs.detach().topk(2, dim=-1).indices)
    weights = probs.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    losses = {"balance": balance_of(probs, chosen[:, :1], average, remember)}
    if not training:
        return place(logits, chosen, weights, losses, capacity_factor)

    def draw() -> Tensor:
        return torch.rand(len(logits), dtype=logits.dtype, device=logits.device) if uniform is None else uniform

    sent = remember(lambda: 2 * weights.detach()[:, 1] > draw())
    sent = torch.stack([torch.ones_like(sent), sent], -1)
    return place(logits, chosen, weights, losses, capacity_factor, sent)


def noisy_top_k(
    logits: Tensor,
    noise_logits: Tensor,
    k: int,
    *,
    training: bool = True,
    capacity_factor: float | None = None,
    remember: Remember = at_once,
    noise: Tensor | None = None,
) -> Routing:
    r"""Noisy top-k gating (Shazeer et al. 2017, arXiv 1701.06538, sections 2.1 and 4, appendix A).

    .. math:: H_i = (x W_g)_i + \epsilon_i \,\mathrm{softplus}((x W_n)_i), \quad
        G = \mathrm{softmax}(\mathrm{KeepTopK}(H, k))
    .. math:: L_{importance} = CV\Bigl(\sum_x G(x)\Bigr)^2, \quad L_{load} = CV\Bigl(\sum_x P(x, i)\Bigr)^2, \quad
        P(x, i) = \Phi\Bigl(\frac{(x W_g)_i - \mathrm{kth\_excluding}(H, k, i)}{\mathrm{softplus}((x W_n)_i)}\Bigr)

    with the population's standard deviation. kth_excluding is the k-th largest of H without its i-th; with k = E every
    expert is always chosen, P = 1. In evaluation there is no noise and "load" is that of the tokens counted, without a
    gradient.

    Both losses are of **this rank's tokens**: a CV^2 is not linear in the batch, so their average over ranks is not
    (though close to) that of all tokens, and no sharing of fractions makes it so.

    Args:
        logits: x W_g, [N, E].
        noise_logits: x W_n, [N, E].
        k: experts a token goes to.
        training: add noise.
        capacity_factor: see :func:`top_k`.
        remember: see :func:`top_k`.
        noise: the draws epsilon, [N, E]; None: from the device's generator.
    """
    logits = checked_logits(logits, k, capacity_factor)
    experts = logits.shape[1]
    spread = functional.softplus(noise_logits.to(logits.dtype))
    noisy = logits
    if training:
        noisy = logits + remember(lambda: torch.randn_like(logits) if noise is None else noise) * spread
    first = remember(
        lambda: noisy.detach().topk(min(k + 1, experts), dim=-1).indices
    )  # one more: the first that is not chosen
    chosen = first[:, :k]
    highest = noisy.gather(-1, first)
    weights = highest[:, :k].softmax(-1)
    importance = torch.zeros_like(logits).scatter(-1, chosen, weights).sum(0)
    if not training or k == experts:
        loads = count_choices(chosen, experts).to(logits.dtype)
    else:
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)
        others = torch.where(is_chosen, highest[:, k:], highest[:, k - 1 : k])
        loads = torch.special.ndtr((logits - others) / spread.clamp_min(_SMALLEST_NOISE)).sum(0)
    losses = {"importance": cv_squared(importance), "load": cv_squared(loads)}
    routing = place(logits, chosen, weights, losses, capacity_factor)
    return replace(routing, finite=routing.finite & noise_logits.isfinite().all())


def expert_choice(logits: Tensor, average_experts: float, *, remember: Remember = at_once) -> Routing:
    r"""Experts choose tokens (Zhou et al. 2022, arXiv 2202.09368, section 3.2).

    .. math:: S = \mathrm{softmax}(X W_g), \quad G, I = \mathrm{TopK}(S^\top, C), \quad C = N c / E

    Every expert takes the C tokens (rounded up, at most N) with its largest scores, and multiplies by the scores
    themselves; a token has any number of experts, c on average. Nothing is to be balanced. What a token gets depends
    on tokens after it: not for a causal model that is to generate text.

    The columns of the result are as many as the token with the most experts has, which makes the host wait for the
    device once; experts of a token are in rising order.

    Args:
        logits: the router's, [N, E].
        average_experts: c, the paper's capacity factor.
        remember: see :func:`top_k`.
    """
    logits = checked_logits(logits, 1, average_experts)
    tokens, experts = logits.shape
    size = min(capacity_of(tokens, experts, 1, average_experts), tokens)
    probs = logits.softmax(-1)
    taken = remember(lambda: probs.detach().topk(size, dim=0).indices)  # [C, E]
    is_taken = torch.zeros_like(probs, dtype=torch.bool).scatter(0, taken, True)
    counts = is_taken.sum(-1)
    fake = isinstance(counts, FakeTensor) or counts.is_meta
    width = experts if fake or not tokens else max(int(counts.max()), 1)
    column = torch.arange(experts, device=logits.device)
    order = torch.where(is_taken, column, column + experts).sort(-1).values[:, :width]
    expert = torch.where(order < experts, order, -1)
    weights = probs.gather(-1, order % experts)
    load = torch.full((experts,), size, dtype=torch.int64, device=logits.device)
    return Routing(expert, weights, {"z": z_loss(logits)}, load, (counts == 0).sum(), logits.isfinite().all())


def bias_balanced(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    groups: int = 1,
    keep_groups: int = 1,
    capacity_factor: float | None = None,
    remember: Remember = at_once,
) -> Routing:
    r"""Sigmoid scores, balanced by a bias (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16).

    .. math:: s_i = \mathrm{sigmoid}(x_i), \quad
        g'_i = s_i \text{ if } s_i + b_i \in \mathrm{Topk}(\{s_j + b_j\}, k) \text{ else } 0, \quad
        g_i = g'_i / \sum_j g'_j

    The bias takes part in the choice alone; :func:`~lnn_lightning.parallel.expert.balance.update_bias` moves it once a
    step. There is no balancing loss.

    Args:
        logits: the router's, [N, E].
        bias: b, [E].
        k: experts a token goes to.
        groups: experts are divided into so many groups, and a token chooses among those of its best ``keep_groups``
            (section 2.1.2, node-limited routing): those with the largest sums of the ``k / keep_groups`` highest
            ``s + b`` within.
        keep_groups: see ``groups``.
        capacity_factor: see :func:`top_k`.
        remember: see :func:`top_k`.
    """
    logits = checked_logits(logits, k, capacity_factor)
    experts = logits.shape[1]
    if experts % groups or not 0 < keep_groups <= groups or keep_groups * (experts // groups) < k:
        raise LayoutError(
            f"{experts} experts in {groups} groups, of which a token goes to {keep_groups} and there to {k} experts: "
            "groups must be equal, and the ones that are kept must hold as many experts as a token goes to."
        )
    scores = logits.sigmoid()

    def choose() -> Tensor:
        biased = scores.detach() + bias.to(scores.dtype)
        if groups > 1:
            parts = biased.unflatten(-1, (groups, -1))
            best = parts.topk(min(max(k // keep_groups, 1), parts.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(keep_groups, dim=-1).indices, True)
            biased = parts.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
        return biased.topk(k, dim=-1).indices

    chosen = remember(choose)
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return place(logits, chosen, weights, {}, capacity_factor)
