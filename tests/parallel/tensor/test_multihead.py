"""nn.MultiheadAttention in ordinary operations: the same numbers as torch's own."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lnn_lightning.parallel.tensor.multihead import expanded_forward, project_with

BATCH, LENGTH, SOURCE, WIDTH, HEADS = 3, 4, 5, 12, 3

INPUTS = ["self", "kv", "different", "same q and k", "kdim", "vdim"]
ATTN_MASKS = [None, "bool 2-D", "float 2-D", "bool 3-D", "float 3-D", "causal"]
PADDINGS = [None, "bool", "float"]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def module_of(inputs: str, **options: Any) -> nn.MultiheadAttention:
    kdim, vdim = 7 if inputs == "kdim" else None, 6 if inputs in ("kdim", "vdim") else None
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=kdim, vdim=vdim, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases start at zero
    return module


def inputs_of(inputs: str, batched: bool, batch_first: bool) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The leaves, and which of them are query, key and value."""

    def make(length: int, width: int) -> Tensor:
        shape = (length, width) if not batched else (BATCH, length, width) if batch_first else (length, BATCH, width)
        return rand(*shape).requires_grad_()

    if inputs == "self":
        x = make(LENGTH, WIDTH)
        return [x], (x, x, x)
    if inputs == "kv":
        q, m = make(LENGTH, WIDTH), make(SOURCE, WIDTH)
        return [q, m], (q, m, m)
    if inputs == "same q and k":
        q, m = make(LENGTH, WIDTH), make(LENGTH, WIDTH)
        return [q, m], (q, q, m)
    kdim, vdim = 7 if inputs == "kdim" else WIDTH, 6 if inputs in ("kdim", "vdim") else WIDTH
    q, k, v = make(LENGTH, WIDTH), make(SOURCE, kdim), make(SOURCE, vdim)
    return [q, k, v], (q, k, v)


def masks_of(attn: str | None, padding: str | None, batched: bool, source: int) -> dict[str, Any]:
    batch = BATCH if batched else 1
    given: dict[str, Any] = {}
    if attn == "causal":
        given["attn_mask"] = torch.ones(LENGTH, source).triu(1).bool()
        given["is_causal"] = True
    elif attn is not None:
        shape = (LENGTH, source) if "2-D" in attn else (batch * HEADS, LENGTH, source)
        mask = torch.rand(shape) < 0.3
        mask[..., 0] = False  # no row without any key
        given["attn_mask"] = mask if "bool" in attn else rand(*shape).masked_fill(mask, -torch.inf)
    if padding is not None:
        pad = torch.zeros(batch, source, dtype=torch.bool)
        pad[0, 3:] = True
        pad = pad if batched else pad[0]
        given["key_padding_mask"] = pad if padding == "bool" else rand(*pad.shape)
    return given


def results(
    module: nn.MultiheadAttention, expanded: bool, leaves: list[Tensor], qkv: Any, given: dict[str, Any]
) -> list[Tensor]:
    """Output, weights, and the gradients of everything."""
    module.zero_grad()
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(3)
    out, weights = expanded_forward(module, *qkv, **given) if expanded else module(*qkv, **given)
    random = torch.Generator().manual_seed(4)
    total = sum(
        (x * torch.randn(x.shape, generator=random, dtype=x.dtype)).sum() for x in (out, weights) if x is not None
    )
    if total.requires_grad:
        total.backward()
    gradients = [x.grad for x in (*leaves, *module.parameters())]
    return [x.detach() for x in (out, weights, *gradients) if x is not None]


def compare(module: nn.MultiheadAttention, leaves: list[Tensor], qkv: Any, given: dict[str, Any]) -> None:
    expected = results(module, False, leaves, qkv, given)
    found = results(module, True, leaves, qkv, given)
    assert len(found) == len(expected)
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Support for mismatched.*")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("weights", ["none", "average", "by head"])
def test_masks_and_layouts(inputs: str, weights: str) -> None:
    torch.manual_seed(0)
    needed = {"need_weights": weights != "none", "average_attn_weights": weights != "by head"}
    for attn, padding, batched, batch_first in itertools.product(ATTN_MASKS, PADDINGS, (True, False), (True, False)):
        module = module_of(inputs, batch_first=batch_first)
        leaves, qkv = inputs_of(inputs, batched, batch_first)
        source = qkv[1].size(-2 if batch_first or not batched else 0)
        compare(module, leaves, qkv, {**masks_of(attn, padding, batched, source), **needed})


@pytest.mark.filterwarnings("ignore:Support for mismatched.*")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_options(inputs: str, need_weights: bool) -> None:
    """Biases, appended keys, dropout (the same random numbers), training and evaluation with gradients."""
    torch.manual_seed(0)
    for bias, add_bias_kv, add_zero_attn, dropout, attn, padding, training in itertools.product(
        (True, False),
        (True, False),
        (True, False),
        (0.0, 0.4),
        (None, "bool 2-D", "float 3-D"),
        PADDINGS,
        (True, False),
    ):
        options = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "dropout": dropout}
        module = module_of(inputs, batch_first=True, **options).train(training)
        leaves, qkv = inputs_of(inputs, True, True)
        given = masks_of(attn, padding, True, qkv[1].size(1))
        compare(module, leaves, qkv, {**given, "need_weights": need_weights})


def test_dropout_drops() -> None:
    module = module_of("self", dropout=0.5)
    x = rand(LENGTH, BATCH, WIDTH)
    torch.manual_seed(0)
    first = expanded_forward(module, x, x, x)[1]
    second = expanded_forward(module, x, x, x)[1]
    assert first is not None and second is not None and not torch.equal(first, second)


def test_without_gradients_it_is_the_fast_path() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, 4, batch_first=True, dtype=torch.float64).eval()
    x = rand(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, 2:] = True
    with torch.no_grad():
        for given in ({}, {"key_padding_mask": padding}, {"need_weights": False}):
            expected, found = module(x, x, x, **given), expanded_forward(module, x, x, x, **given)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_learned_masks_get_gradients() -> None:
    torch.manual_seed(0)
    module = module_of("self")
    x, mask = rand(LENGTH, BATCH, WIDTH), rand(BATCH * HEADS, LENGTH, LENGTH).requires_grad_()
    for need_weights in (True, False):
        gradients = []
        for forward in (module, lambda *args, **kwargs: expanded_forward(module, *args, **kwargs)):
            out, _ = forward(x, x, x, attn_mask=mask, need_weights=need_weights)
            gradients.append(torch.autograd.grad(out.square().sum(), mask)[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("need_weights", [True, False])
def test_under_autocast(need_weights: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    given = {"need_weights": need_weights, "attn_mask": torch.randn(LENGTH, LENGTH)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = module(x, x, x, **given)[0], expanded_forward(module, x, x, x, **given)[0]
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


def test_outputs_are_laid_out_as_torchs() -> None:
    """A `view` of the output works where it worked."""
    for batch_first in (True, False):
        module = module_of("self", batch_first=batch_first)
        x = rand(BATCH, LENGTH, WIDTH)
        expected, found = module(x, x, x)[0], expanded_forward(module, x, x, x)[0]
        assert found.is_contiguous() >= expected.is_contiguous()


@pytest.mark.parametrize(
    ("inputs", "asked"),
    [("self", ["qkv"]), ("kv", ["q", "kv"]), ("different", ["q", "k", "v"]), ("kdim", ["q", "k", "v"])],
)
def test_projections_can_be_replaced(inputs: str, asked: list[str]) -> None:
    torch.manual_seed(0)
    module = module_of(inputs)
    _, qkv = inputs_of(inputs, True, False)
    seen: list[str] = []

    def project(x: Tensor, which: Any) -> Tensor:
        seen.append(which)
        return 2 * project_with(module, x, which)

    plain, doubled = expanded_forward(module, *qkv)[0], expanded_forward(module, *qkv, project=project)[0]
    assert seen == asked and not torch.allclose(plain, doubled)
    for parameter in (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
        if parameter is not None:
            parameter.data.mul_(2)
    module.in_proj_bias.data.mul_(2)
    torch.testing.assert_close(module(*qkv)[0], doubled)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_inside_torchs_layers() -> None:
    """The layers call their attention by name: replacing its forward is enough while they learn."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    source, target = rand(BATCH, SOURCE, WIDTH), rand(BATCH, LENGTH, WIDTH)
    mask = model.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    expected = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    calls = []
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):

            def forward(*args: Any, _module: nn.MultiheadAttention = module, **kwargs: Any) -> Any:
                calls.append(1)
                return expanded_forward(_module, *args, **kwargs)

            module.forward = forward  # type: ignore[method-assign]
    torch.testing.assert_close(model(source, target, tgt_mask=mask, tgt_is_causal=True), expected)
    assert len(calls) == 6


def test_only_ordinary_operations_with_the_parameters() -> None:
    """A function mode sees the products with the parameters themselves."""
    module = module_of("self")
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    x = rand(LENGTH, BATCH, WIDTH)
    with Watch():
        expanded_forward(module, x, x, x)
    assert [weight is p for weight, p in zip(seen, (module.in_proj_weight, module.out_proj.weight), strict=True)] == [
        True,
        True,
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals() -> None:
    module = module_of("self", batch_first=True)
    x = rand(BATCH, LENGTH, WIDTH)
    for given, words in (
        ({"is_causal": True}, "attn_mask"),
        ({"attn_mask": torch.zeros(1, LENGTH)}, "shape of the attn_mask"),
        ({"attn_mask": torch.zeros(BATCH, LENGTH, LENGTH)}, "shape of the attn_mask"),
        ({"attn_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.int64)}, "boolean"),
        ({"key_padding_mask": torch.zeros(LENGTH, dtype=torch.bool)}, "key_padding_mask"),
    ):
        with pytest.raises(RuntimeError, match=words):
            expanded_forward(module, x, x, x, **given)
        with pytest.raises((RuntimeError, AssertionError)):
            module(x, x, x, **given)
    nested = torch.nested.nested_tensor([rand(2, WIDTH), rand(3, WIDTH)])
    with pytest.raises(ValueError, match="pad"):
        expanded_forward(module, nested, nested, nested)
