"""The router of a layer of experts: its weights, and the gate that its settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lnn_lightning.parallel.expert import gates
from lnn_lightning.parallel.expert.balance import Average
from lnn_lightning.parallel.expert.routing import Remember, Routing, at_once
from lnn_lightning.parallel.expert.settings import Gate, Upcycle


class Router(nn.Module):
    """Scores tokens for experts and lets them choose; see :mod:`lnn_lightning.parallel.expert.gates`.

    It computes in fp32, under autocast too (Switch, section 2.4: selective precision). In evaluation there is no noise
    and no draw (GShard's second expert is always kept); the capacity is that of training.

    Attributes:
        weight: [experts, features].
        noise_weight: of the gate ``noisy_top_k``, [experts, features]. It starts at zero, as in the paper: noise of
            softplus(0) for every expert.
        bias: of the gate ``bias``, [experts], a buffer in fp32.

    Args:
        features: size of a token.
        experts: number of experts.
        gate: how tokens choose.
        k: experts a token goes to. With ``expert_choice`` on average: an expert takes
            ``capacity_factor * k * N / experts`` tokens (a factor of 1, if it is None).
        capacity_factor: see :class:`~lnn_lightning.parallel.expert.settings.Upcycle`.
        std: standard deviation of the first weights.
        device: where the weights are made.
        dtype: of the weights.
    """

    weight: nn.Parameter
    noise_weight: nn.Parameter | None
    bias: Tensor | None

    def __init__(
        self,
        features: int,
        experts: int,
        gate: Gate = "top_k",
        k: int = 2,
        capacity_factor: float | None = None,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.k, self.capacity_factor, self.std = gate, k, capacity_factor, std
        self.weight = nn.Parameter(torch.empty(experts, features, device=device, dtype=dtype))
        noise = torch.empty_like(self.weight) if gate == "noisy_top_k" else None
        self.register_parameter("noise_weight", None if noise is None else nn.Parameter(noise))
        bias = torch.empty(experts, device=device, dtype=torch.float32)
        self.register_buffer("bias", bias if gate == "bias" else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives weights their first values."""
        nn.init.normal_(self.weight, std=self.std)
        for start_at_zero in (self.noise_weight, self.bias):
            if start_at_zero is not None:
                nn.init.zeros_(start_at_zero)

    def forward(self, hidden: Tensor, average: Average | None = None, remember: Remember = at_once) -> Routing:
        """Where tokens go.

        Args:
            hidden: the tokens, [N, features].
            average: averages a small tensor over the ranks that have other tokens: balancing losses are then of all
                tokens. A collective: all those ranks must call this.
            remember: keeps what was chosen and drawn for recomputation.
        """
        logits = self._logits(hidden, self.weight)
        capacity, training = self.capacity_factor, self.training
        if self.gate == "switch":
            return gates.switch(logits, capacity_factor=capacity, average=average, remember=remember)
        if self.gate == "gshard":
            return gates.gshard(logits, training=training, capacity_factor=capacity, average=average, remember=remember)
        if self.noise_weight is not None:
            noise = self._logits(hidden, self.noise_weight)
            return gates.noisy_top_k(
                logits, noise, self.k, training=training, capacity_factor=capacity, remember=remember
            )
        if self.gate == "expert_choice":
            return gates.expert_choice(logits, self.k * (1.0 if capacity is None else capacity), remember=remember)
        if self.bias is not None:
            return gates.bias_balanced(logits, self.bias, self.k, capacity_factor=capacity, remember=remember)
        return gates.top_k(logits, self.k, capacity_factor=capacity, average=average, remember=remember)

    def extra_repr(self) -> str:
        """The settings, for the printed module."""
        experts, features = self.weight.shape
        return f"{features}, experts={experts}, gate={self.gate}, k={self.k}, capacity_factor={self.capacity_factor}"

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.to(dtype), weight.to(dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """As of any module, but the bias stays in fp32: steps of 0.001 would vanish in bf16."""
        bias: Any = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self


def make_gate(
    settings: Upcycle, features: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Router:
    """The router that the settings describe, for tokens of ``features``; ``aux_loss`` and ``z_loss`` are the caller's.

    See :func:`~lnn_lightning.parallel.expert.balance.auxiliary_loss` for these.
    """
    return Router(
        features,
        settings.experts,
        settings.gate,
        settings.top_k,
        settings.capacity_factor,
        settings.router_std,
        device,
        dtype,
    )
