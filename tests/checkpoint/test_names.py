import pytest

from lnn_lightning.checkpoint import CheckpointError
from lnn_lightning.checkpoint.names import Renaming, find_renaming, match_names

NAMES = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]


def _shapes(names: list[str], prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + name: (len(name),) for name in names}


@pytest.mark.parametrize(
    ("wanted", "found", "renaming"),
    [
        ("", "", Renaming()),
        ("model.", "", Renaming(add="model.")),
        ("", "model.", Renaming(drop="model.")),
        ("net.model.", "", Renaming(add="net.model.")),
        ("net.", "net.model.", None),
    ],
)
def test_one_prefix_more_or_less(wanted: str, found: str, renaming: Renaming | None) -> None:
    module, file = _shapes(NAMES, wanted), _shapes(NAMES, found)
    if renaming is None:
        with pytest.raises(CheckpointError, match="does not fit the module: missing 'net.embed.weight'"):
            match_names(module, file, {})
        return
    assert find_renaming(module, file) == renaming
    assert match_names(module, file, {}) == {wanted + name: found + name for name in NAMES}


def test_the_base_model_alone_is_no_prefix_for_the_head() -> None:
    """As from BertModel into BertForMaskedLM: its names have a prefix, the head is missing."""
    module = _shapes(NAMES[:3], "bert.") | {"cls.weight": (3,)}
    file = _shapes(NAMES[:3])
    with pytest.raises(CheckpointError, match="missing 'cls.weight'; not in the module: nothing. Set `strict_loading"):
        match_names(module, file, {})
    assert match_names(module, file, {}, strict=False) == {f"bert.{name}": name for name in NAMES[:3]}


def test_what_compile_puts_between_does_not_count() -> None:
    module = _shapes(NAMES, "model._orig_mod.")
    assert match_names(module, _shapes(NAMES), {}) == {f"model._orig_mod.{name}": name for name in NAMES}
    file = {"_orig_mod.layers.0._orig_mod.weight": (1,)}
    assert match_names({"layers.0.weight": (1,)}, file, {}) == {"layers.0.weight": next(iter(file))}


def test_tied_keys_are_filled_by_one() -> None:
    module = _shapes(["embed.weight", "norm.weight"]) | {"head.weight": (12,)}
    tensors = {"embed.weight": "embed.weight", "head.weight": "embed.weight", "norm.weight": "norm.weight"}
    for gone in ("embed.weight", "head.weight"):
        file = {key: shape for key, shape in module.items() if key != gone}
        kept = "head.weight" if gone == "embed.weight" else "embed.weight"
        assert match_names(module, file, tensors) == {"embed.weight": kept, "norm.weight": "norm.weight"}
    assert match_names(module, module, tensors)["embed.weight"] == "head.weight"  # as `load_state_dict`: the last
    with pytest.raises(CheckpointError, match="missing 'embed.weight', 'head.weight'"):
        match_names(module, {"norm.weight": (11,)}, tensors)


def test_what_does_not_fit_is_listed() -> None:
    module, file = _shapes([*NAMES, "more.weight"]), _shapes([*NAMES, *(f"extra.{i}" for i in range(7))])
    with pytest.raises(CheckpointError) as caught:
        match_names(module, file, {}, where="w.safetensors")
    assert str(caught.value) == (
        "w.safetensors does not fit the module: missing 'more.weight'; not in the module: 'extra.0', 'extra.1', "
        "'extra.2', 'extra.3', 'extra.4' and 2 more. Set `strict_loading = False` in the module to load what fits."
    )
    assert match_names(module, file, {}, strict=False) == {name: name for name in NAMES}
    with pytest.raises(
        CheckpointError, match="missing 'a'; not in the module: 'b'.$"
    ):  # nothing fits: also if not strict
        match_names({"a": (1,)}, {"b": (1,)}, {}, strict=False)
    with pytest.raises(CheckpointError, match=r"'embed.weight' with the shape \(9,\); 'embed.weight' needs \(12,\)"):
        match_names(module, file | {"embed.weight": (9,)}, {}, strict=False)


def test_two_places_that_fit_equally_are_not_guessed() -> None:
    module = _shapes(NAMES, "model.") | _shapes(NAMES, "average.")
    with pytest.raises(CheckpointError, match="its prefix may be 'average.' or 'model.'"):
        match_names(module, _shapes(NAMES), {}, strict=False)
