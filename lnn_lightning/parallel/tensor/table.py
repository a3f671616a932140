"""The tensor-parallel plan as a table for people."""

from __future__ import annotations

from math import prod

from torch import nn

from lnn_lightning.parallel.tensor.layers import REPLICATE
from lnn_lightning.parallel.tensor.plan import TensorPlan
from lnn_lightning.parallel.tensor.units import UnitPlan


def tensor_table(root: nn.Module, plan: TensorPlan) -> str:
    """One line a layer: module, role and why; units planned alike are one entry.

    Args:
        root: the module, with whole parameters or stand-ins of their shape.
        plan: its plan.
    """
    rows = [("module", "role", "why")]
    for names, unit_plan in _alike(plan):
        for weight, role in unit_plan.roles.items():
            layer = ".".join(part for part in (_label(names), weight.removesuffix("weight").rstrip(".")) if part)
            rows.append((layer, str(role), unit_plan.reasons.get(weight) or _usual(role.kind)))
    for names, reason in _undivided(root, plan):
        held = sum(parameter.numel() for parameter in root.get_submodule(names[0]).parameters())
        rows.append((_label(names), str(REPLICATE), f"{reason}; {held:,} parameters are on every tensor rank"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=True)), row[2]]) for row in rows
    ]
    divided = sum(map(prod, plan.shapes.values()))
    whole = divided + sum(each.numel() for name, each in root.named_parameters() if name not in plan.specs)
    title = f"Tensor layout: {plan.size} ranks, {divided / max(whole, 1):.0%} of the parameters divided"
    tokens = sum(each.sequence is not None for each in plan.units.values())
    if tokens:
        title += f"; values between blocks are divided along their tokens behind {tokens} unit(s)"
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _usual(kind: str) -> str:
    return {"column": "outputs divided", "row": "inputs divided, results added up", "vocabulary": "rows divided"}.get(
        kind, ""
    )


def _alike(plan: TensorPlan) -> list[tuple[list[str], UnitPlan]]:
    groups: dict[int, tuple[list[str], UnitPlan]] = {}
    for name, unit_plan in plan.units.items():
        groups.setdefault(id(unit_plan), ([], unit_plan))[0].append(name)
    return list(groups.values())


def _undivided(root: nn.Module, plan: TensorPlan) -> list[tuple[list[str], str]]:
    groups: dict[tuple[type, str], list[str]] = {}
    for name, reason in plan.undivided.items():
        groups.setdefault((type(root.get_submodule(name)), reason), []).append(name)
    return [(names, reason) for (_, reason), names in groups.items()]


def _label(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    prefix, _, first = names[0].rpartition(".")
    last = names[-1].rpartition(".")[2]
    if all(name.rpartition(".")[0] == prefix for name in names):
        return f"{prefix}.{{{first}..{last}}}"
    return f"{names[0]} and {len(names) - 1} like it"
