"""The gates as their papers print them: token by token and expert by expert, on one process, slowly."""

import math

import torch
from torch import Tensor

Gates = Tensor
"""[N, E]: what the output of an expert is multiplied by for a token, 0 where the token does not go there."""


def softmax(logits: Tensor) -> Tensor:
    exponentials = torch.stack([torch.exp(value) for value in logits])
    return exponentials / exponentials.sum()


def largest(values: Tensor, count: int) -> list[int]:
    """Places of the largest values, the largest first."""
    return sorted(range(len(values)), key=lambda place: -float(values[place].detach()))[:count]


def matrix(entries: dict[tuple[int, int], Tensor], like: Tensor) -> Gates:
    zero = like.new_zeros(())
    tokens, experts = like.shape
    return torch.stack([torch.stack([entries.get((n, e), zero) for e in range(experts)]) for n in range(tokens)])


def mixtral(logits: Tensor, k: int, capacity: float = math.inf) -> tuple[Gates, Tensor]:
    """Softmax over the k largest logits; Switch's loss, f the share of all choices; first choices have room first."""
    tokens, experts = logits.shape
    gates, taken, chosen = {}, [0] * experts, [largest(row, k) for row in logits]
    for choice in range(k):
        for n in range(tokens):
            expert = chosen[n][choice]
            if taken[expert] < capacity:
                gates[n, expert] = softmax(logits[n, chosen[n]])[choice]
            taken[expert] += 1
    probs = [softmax(row) for row in logits]
    loss = sum(taken[e] / (k * tokens) * sum(p[e] for p in probs) / tokens for e in range(experts)) * experts
    return matrix(gates, logits), loss


def switch(logits: Tensor, capacity: float = math.inf) -> tuple[Gates, Tensor]:
    """Equations 1 to 6 without alpha."""
    tokens, experts = logits.shape
    gates, taken = {}, [0] * experts
    probs = [softmax(row) for row in logits]  # (1)
    for n in range(tokens):
        expert = largest(probs[n], 1)[0]
        if taken[expert] < capacity:  # (3)
            gates[n, expert] = probs[n][expert]  # (2)
        taken[expert] += 1
    f = [sum(largest(p, 1)[0] == e for p in probs) / tokens for e in range(experts)]  # (5)
    mean = [sum(p[e] for p in probs) / tokens for e in range(experts)]  # (6)
    return matrix(gates, logits), experts * sum(f[e] * mean[e] for e in range(experts))  # (4)


def gshard(logits: Tensor, uniform: Tensor, capacity: float = math.inf) -> tuple[Gates, Tensor]:
    """Algorithm 1, line by line; its l_aux, 1/E included."""
    tokens, experts = logits.shape
    entries, c = {}, [0] * experts
    g = [softmax(row) for row in logits]
    m = [sum(row[e] for row in g) / tokens for e in range(experts)]
    for s in range(tokens):
        e1, e2 = largest(g[s], 2)
        g1 = g[s][e1] / (g[s][e1] + g[s][e2])
        if c[e1] < capacity:
            entries[s, e1] = g1
        c[e1] += 1
    l_aux = sum(c[e] / tokens * m[e] for e in range(experts)) / experts
    for s in range(tokens):
        e1, e2 = largest(g[s], 2)
        g2 = g[s][e2] / (g[s][e1] + g[s][e2])
        if c[e2] < capacity and 2 * g2 > uniform[s]:
            entries[s, e2] = g2
        c[e2] += 1
    return matrix(entries, logits), l_aux


def cv(values: list[Tensor]) -> Tensor:
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)).sqrt() / mean


def shazeer(clean: Tensor, noise_logits: Tensor, normal: Tensor, k: int) -> tuple[Gates, Tensor, Tensor]:
    """Equations 3 to 11 without their weights: gates, importance loss, load loss."""
    tokens, experts = clean.shape
    entries, load = {}, [clean.new_zeros(()) for _ in range(experts)]
    for x in range(tokens):
        spread = torch.log(1 + torch.exp(noise_logits[x]))
        h = clean[x] + normal[x] * spread  # (4)
        kept = largest(h, k)  # (5)
        for place, weight in zip(kept, softmax(h[kept]), strict=True):  # (3)
            entries[x, place] = weight
        for i in range(experts):
            others = [h[j] for j in range(experts) if j != i]
            kth_excluding = others[largest(torch.stack(others), k)[k - 1]]
            argument = (clean[x, i] - kth_excluding) / spread[i]
            load[i] = load[i] + (1 + torch.erf(argument / math.sqrt(2))) / 2  # (9), (10)
    gates = matrix(entries, clean)
    importance = [sum(gates[x, i] for x in range(tokens)) for i in range(experts)]  # (6)
    return gates, cv(importance) ** 2, cv(load) ** 2  # (7), (11)


def expert_choice(logits: Tensor, capacity: int) -> Gates:
    """S = softmax(X W), G, I = TopK(S^T, k), experts one by one."""
    scores = torch.stack([softmax(row) for row in logits])
    entries = {}
    for e in range(logits.shape[1]):
        for n in largest(scores[:, e], capacity):
            entries[n, e] = scores[n, e]
    return matrix(entries, logits)


def deepseek(logits: Tensor, bias: Tensor, k: int, groups: int = 1, keep: int = 1) -> Gates:
    """Equations 13 to 16; and node-limited routing, section 2.1.2."""
    experts = logits.shape[1]
    entries, width = {}, experts // groups
    for t, row in enumerate(logits):
        s = [1 / (1 + torch.exp(-value)) for value in row]  # (15)
        biased = [float((s[i] + bias[i]).detach()) for i in range(experts)]
        of_group = [sorted(biased[g * width : (g + 1) * width], reverse=True) for g in range(groups)]
        nodes = largest(torch.tensor([sum(scores[: k // keep]) for scores in of_group]), keep)
        allowed = [i for i in range(experts) if i // width in nodes]
        top = sorted(allowed, key=lambda i: -biased[i])[:k]  # (16)
        total = sum(s[i] for i in top)
        for i in top:
            entries[t, i] = s[i] / total  # (13)
    return matrix(entries, logits)


def z_loss(logits: Tensor) -> Tensor:
    return sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / len(logits)
