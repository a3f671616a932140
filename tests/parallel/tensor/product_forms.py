"""Products, norms, attention and losses on parts: what is divided how, and the calls."""

# ruff: noqa: E501 - tables: a case a line

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lnn_lightning.parallel.tensor.axis import Spec
from lnn_lightning.parallel.tensor.calls import section_linear, transposed_linear

Operand = tuple[tuple[int, ...], Spec | None]


@dataclass(frozen=True)
class Product:
    """A function of several tensors that are divided in their own ways.

    `local`: nothing may be gathered for it (None: it may be).
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[Operand, ...]
    local: bool | None = None


def last(*shape: int, sections: tuple[int, ...] = ()) -> Operand:
    return shape, Spec(len(shape) - 1, sections or (shape[-1],))


def at(dim: int, *shape: int, sections: tuple[int, ...] = (), sequence: bool = False) -> Operand:
    return shape, Spec(dim, sections or (shape[dim],), sequence)


def plain(*shape: int) -> Operand:
    return shape, None


MATMULS = [torch.matmul, torch.Tensor.matmul, lambda a, b: a @ b, lambda a, b: torch.matmul(a, other=b)]
BMMS = [torch.bmm, torch.Tensor.bmm, lambda a, b: torch.bmm(a, mat2=b)]
MMS = [torch.mm, torch.Tensor.mm, lambda a, b: torch.mm(a, mat2=b)]


def _each(functions: list[Any]) -> Callable[..., Any]:
    return lambda *given: [function(*given) for function in functions]


_matmul, _bmm, _mm = _each(MATMULS), _each(BMMS), _each(MMS)

PRODUCTS = [
    Product("heads @ heads", _matmul, (at(1, 2, 6, 4, 5), at(1, 2, 6, 5, 3)), True),
    Product("heads @ heads in sections", _matmul, (at(1, 2, 12, 4, 5, sections=(6, 6)), at(1, 2, 12, 5, 3)), None),
    Product("heads @ whole", _matmul, (at(1, 2, 6, 4, 5), plain(5, 3)), True),
    Product("heads @ whole of heads", _matmul, (at(1, 2, 6, 4, 5), plain(6, 5, 3)), True),
    Product("heads @ whole of one", _matmul, (at(1, 2, 6, 4, 5), plain(1, 1, 5, 3)), True),
    Product("whole @ heads", _matmul, (plain(4, 5), at(1, 2, 6, 5, 3)), True),
    Product("whole of heads @ heads", _matmul, (plain(2, 6, 4, 5), at(1, 2, 6, 5, 3)), True),
    Product("rows @ whole", _matmul, (at(1, 2, 6, 5), plain(5, 3)), True),
    Product("rows @ rows", _matmul, (at(1, 2, 6, 6), at(1, 2, 6, 5)), None),
    Product("whole @ columns", _matmul, (plain(2, 4, 5), last(2, 5, 6)), True),
    Product("features @ whole", _matmul, (last(2, 4, 6), plain(6, 3)), None),
    Product("features @ features", _matmul, (last(2, 4, 6), at(1, 2, 6, 3)), True),
    Product("features @ features in sections", _matmul, (last(4, 12, sections=(6, 6)), at(0, 12, 3)), None),
    Product("features @ features, both in sections", _matmul,
            (last(4, 12, sections=(6, 6)), at(0, 12, 3, sections=(6, 6))), True),
    Product("padded @ padded", _matmul, (last(4, 11), at(0, 11, 3)), None),
    Product("padded @ whole", _matmul, (last(4, 11), plain(11, 3)), None),
    Product("rows of padded @ whole", _matmul, (at(0, 11, 4), plain(4, 3)), None),
    Product("features @ columns", _matmul, (last(2, 4, 6), last(2, 6, 6)), None),
    Product("other batch", _matmul, (at(0, 6, 4, 5), at(1, 6, 5, 6)), None),
    Product("vector", _matmul, (last(4, 6), plain(6)), None),
    Product("vector of parts", _matmul, (plain(4, 6), at(0, 6)), None),
    Product("dot", _matmul, (at(0, 6), at(0, 6)), None),
    Product("tokens @ whole", _matmul, (at(1, 2, 6, 5, sequence=True), plain(5, 3)), True),
    Product("bmm", _bmm, (at(0, 6, 4, 5), at(0, 6, 5, 3)), True),
    Product("bmm of rows", _bmm, (at(1, 2, 6, 5), plain(2, 5, 3)), True),
    Product("bmm of heads, sections", _bmm, (at(0, 12, 4, 5, sections=(6, 6)), at(0, 12, 5, 3, sections=(6, 6))), True),
    Product("bmm whole", _bmm, (plain(6, 4, 5), at(0, 6, 5, 3)), True),
    Product("mm", _mm, (at(0, 6, 5), plain(5, 3)), True),
    Product("mm contracted", _mm, (last(4, 6), at(0, 6, 3)), True),
    Product("rmatmul", lambda a, b: torch.Tensor.__rmatmul__(a, b), (at(1, 2, 6, 5), plain(2, 3, 6)), None),
    Product("rmatmul by numpy order", lambda a, b: torch.Tensor.__rmatmul__(b, a), (at(1, 2, 6, 5), plain(5, 3)), None),
    Product("matmul of in place", lambda a, b: torch.Tensor.__matmul__(a, b), (at(1, 2, 6, 5), plain(5, 3)), True),
    Product("baddbmm", lambda m, a, b: (torch.baddbmm(m, a, b), torch.baddbmm(m, a, b, beta=0.5, alpha=2.0), m.baddbmm(a, b)),
            (plain(6, 4, 3), at(0, 6, 4, 5), at(0, 6, 5, 3)), True),
    Product("baddbmm beta 0", lambda m, a, b: torch.baddbmm(m, a, b, beta=0, alpha=0.3),
            (plain(6, 4, 3), at(0, 6, 4, 5), at(0, 6, 5, 3)), True),
    Product("baddbmm of one mask", lambda m, a, b: torch.baddbmm(m, a, b, beta=2), (plain(1, 1, 3), at(0, 6, 4, 5), at(0, 6, 5, 3))),
    Product("baddbmm of part", lambda m, a, b: torch.baddbmm(m, a, b), (at(0, 6, 4, 3), at(0, 6, 4, 5), at(0, 6, 5, 3)), True),
    Product("baddbmm of part alone", lambda m, a, b: torch.baddbmm(m, a, b), (at(0, 6, 4, 3), plain(6, 4, 5), plain(6, 5, 3))),
    Product("baddbmm kwargs", lambda m, a, b: torch.baddbmm(m, batch1=a, batch2=b), (plain(6, 4, 3), at(0, 6, 4, 5), at(0, 6, 5, 3))),
    Product("einsum heads", lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), (at(1, 2, 6, 4, 5), at(1, 2, 6, 3, 5)), True),
    Product("einsum list", lambda a, b: torch.einsum("bhqd, bhkd -> bhqk", [a, b]), (at(1, 2, 6, 4, 5), at(1, 2, 6, 3, 5)), True),
    Product("einsum contracted", lambda a, b: torch.einsum("bthd,hdo->bto", a, b), (at(2, 2, 4, 6, 5), plain(6, 5, 3)), True),
    Product("einsum whole", lambda a, b: torch.einsum("bthd,de->bthe", a, b), (at(2, 2, 4, 6, 5), plain(5, 3)), True),
    Product("einsum other", lambda a, b: torch.einsum("bthd,bshd->bhts", a, b), (at(2, 2, 4, 6, 5), at(1, 2, 6, 6, 5)), None),
    Product("einsum sections", lambda a, b: torch.einsum("bth,bsh->bts", a, b), (last(2, 4, 12, sections=(6, 6)), last(2, 4, 12)), None),
    Product("einsum implicit", lambda a, b: torch.einsum("bth,bsh", a, b), (last(2, 4, 6), last(2, 3, 6)), None),
    Product("einsum dots", lambda a, b: torch.einsum("...h,h->...", a, b), (last(2, 4, 6), plain(6)), None),
    Product("einsum padded", lambda a, b: torch.einsum("bth,h->bt", a, b), (last(2, 4, 11), plain(11)), None),
    Product("einsum broadcast", lambda a, b: torch.einsum("bth,bh->bth", a, b), (last(2, 4, 6), plain(2, 1)), None),
    Product("linear", lambda x, w, b: (F.linear(x, w, b), F.linear(x, weight=w, bias=b), F.linear(input=x, weight=w)),
            (at(1, 2, 6, 5), plain(3, 5), plain(3)), True),
    Product("linear of heads", lambda x, w: F.linear(x, w), (at(1, 2, 6, 4, 5), plain(3, 5)), True),
    Product("linear of features", lambda x, w, b: F.linear(x, w, b), (last(2, 4, 6), plain(3, 6), plain(3)), None),
    Product("linear with a part as weight", lambda x, w: F.linear(x, w), (plain(2, 4, 6), last(3, 6)), None),
    Product("addmm", lambda m, a, b: (torch.addmm(m, a, b), m.addmm(a, b)), (plain(3), last(4, 6), plain(6, 3)), None),
    Product("transposed_linear", lambda x, w, b: (transposed_linear(x, w, b), transposed_linear(x, w, None)), (at(1, 2, 6, 5), plain(5, 3), plain(3)), True),
    Product("transposed_linear of features", transposed_linear, (last(2, 4, 6), plain(6, 3), plain(3)), None),
    Product("section_linear", lambda x, w, b: (section_linear(x, w, b, 0, 3), section_linear(x, w, None, 1, 2)), (at(1, 2, 6, 5), plain(9, 5), plain(9)), True),
    Product("outer", lambda a, b: (torch.outer(a, b), torch.dot(a, a), torch.mv(torch.outer(b, a), a)), (at(0, 6), plain(3)), None),
]  # fmt: skip

_NORM = plain(12), plain(12)

NORMS = [
    Product("layer_norm of rows", lambda x, w, b: (F.layer_norm(x, (12,), w, b), F.layer_norm(x, (12,), w), F.layer_norm(x, [12], bias=b)),
            (at(1, 2, 6, 12), *_NORM), True),
    Product("layer_norm of tokens", lambda x, w, b: F.layer_norm(x, (12,), weight=w, bias=b, eps=1e-3), (at(1, 2, 6, 12, sequence=True), *_NORM), True),
    Product("layer_norm of heads", lambda x, w, b: F.layer_norm(x, (12,), w, b), (at(1, 2, 6, 4, 12), *_NORM), True),
    Product("layer_norm of features", lambda x, w, b: (F.layer_norm(x, (12,), w, b), F.layer_norm(x, (12,), w, b, 1e-2)), (last(2, 4, 12), *_NORM), True),
    Product("layer_norm of small features", lambda x, w, b: F.layer_norm(x * 1e-3, (12,), w, b), (last(2, 4, 12), *_NORM), True),
    Product("layer_norm, bare", lambda x: (F.layer_norm(x, (12,)), F.layer_norm(x * 1e-2, (12,), eps=1e-4)), (last(2, 4, 12),), True),
    Product("layer_norm in sections", lambda x, w, b: F.layer_norm(x, (12,), w, b, eps=1e-5), (last(2, 4, 12, sections=(6, 6)), *_NORM), True),
    Product("layer_norm of padded", lambda x: F.layer_norm(x, (11,)), (last(2, 4, 11),), None),
    Product("layer_norm of two dims", lambda x, w: F.layer_norm(x, (4, 12), w), (last(2, 4, 12), plain(4, 12)), None),
    Product("torch.layer_norm", lambda x, w, b: (torch.layer_norm(x, (12,), w, b), torch.layer_norm(x, (12,), w, b, 1e-3),
            torch.layer_norm(x, (12,), w, b, 1e-3, True)), (last(2, 4, 12), *_NORM), None),
    Product("torch.layer_norm of rows", lambda x, w, b: (torch.layer_norm(x, (12,), w, b, 1e-3), torch.layer_norm(x, (12,), eps=1e-3),
            torch.layer_norm(x, [12], bias=b)), (at(1, 2, 6, 12), *_NORM), None),
    Product("layer_norm with part as weight", lambda x, w: F.layer_norm(x, (12,), w), (plain(2, 4, 12), at(0, 12)), None),
    Product("rms_norm of rows", lambda x, w: (F.rms_norm(x, (12,), w), F.rms_norm(x, (12,)), F.rms_norm(x, (12,), eps=1e-2)), (at(1, 2, 6, 12), plain(12)), True),
    Product("rms_norm of features", lambda x, w: (F.rms_norm(x, (12,), w), F.rms_norm(x * 1e-6, (12,), w), F.rms_norm(x, (12,), w, 1e-2)),
            (last(2, 4, 12), plain(12)), True),
    Product("rms_norm in sections", lambda x, w: F.rms_norm(x, (12,), w), (last(2, 4, 12, sections=(6, 6)), plain(12)), True),
    Product("torch.rms_norm", lambda x, w: (torch.rms_norm(x, (12,), w), torch.rms_norm(x, (12,), w, 1e-2)), (last(2, 4, 12), plain(12)), True),
    Product("rms_norm float32", lambda x, w: F.rms_norm(x.float() * 1e-4, (12,), w.float()), (last(2, 4, 12), plain(12)), True),
    Product("group_norm", lambda x: F.group_norm(x, 2), (at(1, 2, 6, 5),), None),
    Product("normalize", lambda x: F.normalize(x, dim=-1), (last(2, 4, 12),), None),
]  # fmt: skip

_sdpa = F.scaled_dot_product_attention


def _mask(m: Any) -> Any:
    return m > 0.3


_Q = at(1, 2, 6, 4, 5)
ATTENTION = [
    Product("attention", lambda q, k, v: (_sdpa(q, k, v), _sdpa(q, k, v, is_causal=True), _sdpa(query=q, key=k, value=v, scale=0.3)), (_Q, _Q, _Q), True),
    Product("attention of other length", lambda q, k, v: _sdpa(q, k, v), (_Q, at(1, 2, 6, 3, 5), at(1, 2, 6, 3, 7)), True),
    Product("attention of three dims", lambda q, k, v: _sdpa(q, k, v, None, 0.0, True), (at(0, 6, 4, 5),) * 3, True),
    Product("attention, mask", lambda q, k, v, m: (_sdpa(q, k, v, m), _sdpa(q, k, v, _mask(m))), (_Q, _Q, _Q, plain(4, 4)), True),
    Product("attention, mask of batch", lambda q, k, v, m: _sdpa(q, k, v, attn_mask=m), (_Q, _Q, _Q, plain(2, 1, 4, 4)), True),
    Product("attention, mask of heads", lambda q, k, v, m: (_sdpa(q, k, v, m), _sdpa(q, k, v, _mask(m))), (_Q, _Q, _Q, plain(2, 6, 4, 4)), True),
    Product("attention, mask of heads alone", lambda q, k, v, m: _sdpa(q, k, v, m), (_Q, _Q, _Q, plain(6, 4, 4)), True),
    Product("attention, mask divided", lambda q, k, v, m: _sdpa(q, k, v, m), (_Q, _Q, _Q, at(1, 2, 6, 4, 4)), True),
    Product("attention, mask divided elsewhere", lambda q, k, v, m: _sdpa(q, k, v, m), (at(1, 2, 6, 6, 5),) * 3 + (at(2, 2, 6, 6, 6),), None),
    Product("attention, mask in sections", lambda q, k, v, m: _sdpa(q, k, v, m), (at(1, 2, 12, 4, 5),) * 3 + (at(1, 2, 12, 4, 4, sections=(6, 6)),), None),
    Product("attention in sections", lambda q, k, v: _sdpa(q, k, v), (at(1, 2, 12, 4, 5, sections=(6, 6)),) * 3, True),
    Product("attention, q in sections", lambda q, k, v: _sdpa(q, k, v), (at(1, 2, 12, 4, 5, sections=(6, 6)), at(1, 2, 12, 4, 5), at(1, 2, 12, 4, 5)), None),
    Product("attention, k in sections", lambda q, k, v: _sdpa(q, k, v), (at(1, 2, 12, 4, 5), at(1, 2, 12, 4, 5, sections=(6, 6)), at(1, 2, 12, 4, 5)), None),
    Product("attention in sections, whole v", lambda q, k, v: _sdpa(q, k, v), (at(1, 2, 12, 4, 5, sections=(6, 6)),) * 2 + (plain(2, 12, 4, 5),), None),
    Product("attention in sections, mask of heads", lambda q, k, v, m: _sdpa(q, k, v, m), (at(1, 2, 12, 4, 5, sections=(6, 6)),) * 3 + (plain(12, 4, 4),), None),
    Product("attention, whole keys", lambda q, k, v: _sdpa(q, k, v), (_Q, plain(2, 6, 4, 5), plain(2, 6, 4, 5)), None),
    Product("attention, one whole key head", lambda q, k, v: _sdpa(q, k, v), (_Q, plain(2, 1, 4, 5), plain(2, 1, 4, 5)), None),
    Product("attention, whole queries", lambda q, k, v: _sdpa(q, k, v), (plain(2, 6, 4, 5), _Q, _Q), None),
    Product("attention, groups", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True), (at(1, 2, 12, 4, 5), at(1, 2, 6, 4, 5), at(1, 2, 6, 4, 5)), True),
    Product("attention, groups in sections", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True),
            (at(1, 2, 24, 4, 5, sections=(12, 12)), at(1, 2, 12, 4, 5), at(1, 2, 12, 4, 5)), None),
    Product("attention, whole groups", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True), (at(1, 2, 12, 4, 5), plain(2, 6, 4, 5), plain(2, 6, 4, 5)), None),
    Product("attention, few groups", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True), (_Q, plain(2, 2, 4, 5), plain(2, 2, 4, 5)), None),
    Product("attention, one group", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True), (_Q, plain(2, 1, 4, 5), plain(2, 1, 4, 5)), None),
    Product("attention, three groups", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True), (at(1, 2, 12, 4, 5), plain(2, 3, 4, 5), plain(2, 3, 4, 5)), None),
    Product("attention of batches", lambda q, k, v: _sdpa(q, k, v, is_causal=True), (at(0, 6, 2, 4, 5),) * 3, True),
    Product("attention of batches, mask", lambda q, k, v, m: _sdpa(q, k, v, m), (at(0, 6, 2, 4, 5),) * 3 + (plain(6, 1, 4, 4),), True),
    Product("attention of tokens", lambda q, k, v: _sdpa(q, k, v), (at(2, 2, 3, 6, 5, sequence=True),) * 3, None),
    Product("attention of features", lambda q, k, v: _sdpa(q, k, v), (last(2, 3, 4, 6),) * 3, None),
]  # fmt: skip

_TARGET = torch.tensor([[3, 0, 10, 5], [7, -100, 1, 9]])


def _losses(x: Any) -> Any:
    flat, y, size = x.flatten(0, 1), _TARGET.flatten(), x.size(-1)
    weight = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    return (
        F.cross_entropy(flat, y), F.cross_entropy(x.transpose(1, 2), _TARGET, reduction="none"),
        F.cross_entropy(input=flat, target=y, reduction="sum", label_smoothing=0.1),
        F.cross_entropy(flat, y, weight), F.cross_entropy(flat, y.clamp(min=0), ignore_index=3),
        F.cross_entropy(flat, torch.full((8, size), 1 / size, dtype=torch.float64)), F.cross_entropy(x[0, 0], _TARGET[0, 0]),
        F.nll_loss(F.log_softmax(flat, -1), y), F.nll_loss(flat.log_softmax(dim=1), target=y, weight=weight, reduction="sum"),
        F.cross_entropy(flat, y.clamp(min=0), reduce=False), F.cross_entropy(flat, y, size_average=False),
        F.kl_div(F.log_softmax(flat, -1), torch.softmax(flat.detach(), -1)), F.mse_loss(flat, flat * 0.5),
        F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    )  # fmt: skip


LOSSES = [
    Product("losses of a padded vocabulary", _losses, (last(2, 4, 11),), None),
    Product("losses of a vocabulary", _losses, (last(2, 4, 12),), None),
    Product("losses in sections", _losses, (last(2, 4, 12, sections=(6, 6)),), None),
    Product("losses over tokens", _losses, (at(1, 2, 4, 12, sequence=True),), None),
    Product("cross_entropy over tokens", lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(12)), (at(1, 2, 6, 12, sequence=True),), None),
    Product("a loss stays", lambda x: F.cross_entropy(x.view(-1, x.size(-1)), _TARGET.flatten()), (last(2, 4, 11),), True),
    Product("softmax over a padded vocabulary", lambda x: (torch.softmax(x, -1), x.softmax(2), F.log_softmax(x, dim=-1), torch.logsumexp(x, -1),
            x.logsumexp(-1, True), x.argmax(-1), torch.argmax(x, dim=-1, keepdim=True), torch.special.softmax(x, -1)), (last(2, 4, 11),), True),
    Product("softmax dtype", lambda x: (torch.softmax(x, -1, torch.float32), F.softmax(x, -1, dtype=torch.float32)), (last(2, 4, 11),), True),
    Product("softmax without dim", lambda x: F.softmax(x), (last(4, 12),), None),
    Product("softmax over the first", lambda x: F.softmax(x, 0), (last(2, 4, 12),), True),
]  # fmt: skip
