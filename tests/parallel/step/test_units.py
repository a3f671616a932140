"""Which sub-modules count as units."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.units import find_units, is_stateful
from tests.zoo import ZOO


def numbered(prefix: str, numbers: range | list[int]) -> list[str]:
    return [f"{prefix}.{number}" for number in numbers]


# name of a zoo model -> (trunks, blocks, the other units), in order of registration
EXPECTED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "gpt_tied": (
        ["model.transformer.h"],
        numbered("model.transformer.h", range(4)),
        ["model.transformer.wte", "model.transformer.wpe", "model.transformer.ln_f", "model.lm_head"],
    ),
    "sequential": (["net"], numbered("net", [0, 2, 4, 6, 8, 10]), []),
    "resnet": (
        ["layer1", "layer2", "layer3"],
        [f"layer{i}.{j}" for i in (1, 2, 3) for j in (0, 1)],
        ["conv1", "bn1", "fc"],
    ),
    "swin": (["layers"], numbered("layers", range(3)), ["patch_embed", "norm", "head"]),
    "timm_vit": (["blocks"], numbered("blocks", range(4)), ["patch_embed", "norm", "head"]),
    "hf_t5": (
        ["model.decoder.block", "model.encoder.block"],
        [*numbered("model.encoder.block", range(3)), *numbered("model.decoder.block", range(3))],
        [
            *("model.shared", "model.encoder.embed_tokens", "model.encoder.final_layer_norm"),
            *("model.decoder.embed_tokens", "model.decoder.final_layer_norm", "model.lm_head"),
        ],
    ),
    "module_dict_trunk": (["layers"], numbered("layers", range(4)), ["embed", "head"]),
    "auto_encoder": (
        ["decoder", "encoder"],
        [*numbered("encoder", [0, 2]), *numbered("decoder", [0, 2])],
        ["code", "out"],
    ),
    "no_trunk": ([], [], ["fc1", "fc2", "fc3", "fc4"]),
    "lstm": (["layers"], numbered("layers", range(4)), ["embed", "head"]),
    "wrapped": (
        ["net.module.module.blocks"],
        numbered("net.module.module.blocks", range(6)),
        ["net.module.module.embed", "net.module.module.head"],
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name].build()


@pytest.mark.parametrize("name", EXPECTED)
def test_trunks_of_known_models(name: str) -> None:
    module = build(name)
    units = find_units(module)
    trunks, blocks, rest = EXPECTED[name]
    assert sorted(units.trunks) == sorted(trunks)
    assert units.blocks == set(blocks)
    assert [unit for unit in units.names if unit in units.blocks] == blocks
    assert [unit for unit in units.names if unit not in units.blocks] == rest
    assert list(units.names) == [unit for unit, _ in module.named_modules() if unit in units.names]


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_in_one_unit_or_belongs_to_glue(name: str) -> None:
    module = build(name)
    units = find_units(module)
    assert not [(a, b) for a in units.names for b in units.names if b.startswith(a + ".")], "units do not nest"
    inside = {id(p) for unit in units.names for p in module.get_submodule(unit).parameters()}
    glue = {parameter for parameter, value in module.named_parameters() if id(value) not in inside}
    owners = {name.rpartition(".")[0] for name in glue}
    ancestors = {trunk.rpartition(".")[0] for trunk in units.trunks} | set(units.trunks) | {""}
    assert owners <= {".".join(a.split(".")[:d]) for a in ancestors for d in range(len(a.split(".")) + 1)}


class Stages(nn.Module):
    """A stage's own modules beside its blocks."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)])


def test_heavy_blocks_are_opened_for_more_stages() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([Stages(1), Stages(12), Stages(1)])
    assert find_units(root).names == ("layers.0", "layers.1", "layers.2")
    units = find_units(root, num_stages=4)
    opened = [*numbered("layers.1.blocks", range(12))]
    assert list(units.names) == ["layers.0", "layers.1.proj", *opened, "layers.2"]
    assert units.blocks == {*opened, "layers.0", "layers.2"}
    assert set(units.trunks) == {"layers", "layers.1.blocks"}


def test_swin_is_opened_where_half_of_it_sits_in_one_stage() -> None:
    swin = build("swin")
    sizes = {n: sum(p.numel() for p in swin.get_submodule(n).parameters()) for n in find_units(swin).names}
    total = sum(sizes.values())
    for num_stages in (2, 3, 4, 8):
        heavy = {name for name, size in sizes.items() if size > total / num_stages and name.startswith("layers.")}
        names = find_units(swin, num_stages).names
        for name in numbered("layers", range(3)):
            assert (name in names) == (name not in heavy)
            assert any(unit.startswith(name + ".blocks.") for unit in names) == (name in heavy)


def test_sequential_of_sequentials_is_one_long_trunk() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    root = nn.Module()
    root.body = nn.Sequential(nn.Sequential(layer(), layer(), layer()), nn.Sequential(layer(), layer()))
    root.head = nn.Linear(4, 1)
    units = find_units(root)
    blocks = [*numbered("body.0", range(3)), *numbered("body.1", range(2))]
    assert list(units.names) == [*blocks, "head"]
    assert units.blocks == set(blocks)


class OneBlock(nn.Module):
    """ALBERT: a list of one, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8)])


def test_list_of_one_block() -> None:
    units = find_units(OneBlock())
    assert units.names == ("embed", "layers.0")
    assert units.blocks == {"layers.0"}
    assert units.trunks == ("layers",)


def test_blocks_count_before_layers() -> None:
    """A list of plain layers is a trunk only where there is no list of blocks."""
    root = nn.Module()
    root.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert find_units(root).names == ("stem.0", "stem.1")
    root.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    assert find_units(root).names == ("stem", "blocks.0", "blocks.1")


def test_what_holds_nothing_is_no_unit() -> None:
    class Constant(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("value", torch.ones(2), persistent=persistent)

    root = nn.Module()
    root.drop, root.act = nn.Dropout(), nn.GELU()
    root.table = Constant(persistent=False)
    root.statistic = Constant(persistent=True)
    root.norm = nn.BatchNorm1d(2, affine=False)
    root.fc = nn.Linear(2, 2)
    assert find_units(root).names == ("statistic", "norm", "fc")
    assert [is_stateful(child) for child in root.children()] == [False, False, False, True, True, True]


def test_a_module_with_two_names_is_one_unit() -> None:
    root = nn.Module()
    root.encoder_embed = nn.Embedding(4, 4)
    root.decoder_embed = root.encoder_embed
    root.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    assert find_units(root).names == ("encoder_embed", "blocks.0", "blocks.1")


def test_a_module_in_two_places_is_one_unit() -> None:
    """T5's embedding: in the model, the encoder and the decoder."""
    root = nn.Module()
    root.encoder, root.decoder = nn.Module(), nn.Module()
    root.encoder.embed = root.decoder.embed = nn.Embedding(4, 4)
    root.encoder.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    root.decoder.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    assert find_units(root).names == (
        *("encoder.embed", "encoder.blocks.0", "encoder.blocks.1"),
        *("decoder.blocks.0", "decoder.blocks.1"),
    )


def test_a_wrapper_of_one_block_is_no_trunk() -> None:
    root = nn.Module()
    root.net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert find_units(root).names == ("net.0.0", "net.0.1"), "but what it holds is one"
    root = nn.Module()
    root.features = nn.Sequential(nn.Module())
    root.features[0].first, root.features[0].second = nn.Linear(4, 4), nn.Linear(4, 4)
    assert find_units(root).names == ("features",)


def test_blocks_that_hold_lists_of_blocks_stay_whole() -> None:
    """Experts within a block, also where the trunk is a list of lists."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])

    root = nn.Module()
    root.layers = nn.ModuleList([Experts() for _ in range(3)])
    assert find_units(root).names == ("layers.0", "layers.1", "layers.2")
    root.layers = nn.ModuleList([nn.ModuleList([Experts(), Experts()]) for _ in range(2)])
    units = find_units(root)
    assert units.names == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
    assert set(units.trunks) == {"layers", "layers.0", "layers.1"}


# ------------------------------------------------------------------------------------------------ split points


@pytest.mark.parametrize(
    ("point", "inside"),
    [
        ("model.transformer.h.1", None),
        ("model.transformer.h.1.mlp", ["ln_1", "attn", "ln_2", "mlp"]),
        ("model.transformer.h.1.mlp.c_proj", ["ln_1", "attn", "ln_2", "mlp.c_fc", "mlp.c_proj"]),
    ],
)
def test_a_split_point_opens_what_it_is_in(point: str, inside: list[str] | None) -> None:
    gpt = build("gpt_untied")
    block = "model.transformer.h.1"
    names = list(find_units(gpt, 2, [point]).names)
    if inside is None:
        assert names == list(find_units(gpt, 2).names)
        return
    assert [name for name in names if name.startswith(block)] == [f"{block}.{name}" for name in inside]
    others = [name for name in find_units(gpt, 2).names if name != block]
    assert [name for name in names if not name.startswith(block + ".")] == others


def test_a_split_point_within_a_model_without_trunk() -> None:
    root = nn.Module()
    root.net = nn.Module()
    root.net.fc1, root.net.fc2 = nn.Linear(2, 2), nn.Linear(2, 2)
    assert find_units(root).names == ("net",)
    assert find_units(root, 2, ["net.fc2"]).names == ("net.fc1", "net.fc2")


@pytest.mark.parametrize(
    "make", [lambda: "model.transformer.h.9", lambda: "transformer", lambda: "model.transformer.h.0.nothing"]
)
def test_an_unknown_split_point_is_named(make: Callable[[], str]) -> None:
    point = make()
    with pytest.raises(StepError) as caught:
        find_units(build("gpt_untied"), 2, [point])
    text = str(caught.value)
    assert repr(point) in text
    assert "no sub-module of LitGPT" in text
    assert "model.transformer" in text.split("for example")[1]
