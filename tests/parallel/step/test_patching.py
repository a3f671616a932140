"""Between a caller and a unit, around every hook."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lnn_lightning.parallel.step.patching import patched_calls


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.said: list[str] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.said.append("forward")
        return self.fc(x) * scale


def passing(said: list[str]) -> Any:
    """Lets every call through and notes it."""

    def enter(name: str, unit: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        said.append(f"enter {name}")
        out = original(*args, **kwargs)
        said.append(f"leave {name}")
        return out

    return enter


def test_outside_of_all_hooks() -> None:
    unit = Unit()
    unit.register_forward_pre_hook(lambda module, args: unit.said.append("pre"))
    unit.register_forward_pre_hook(lambda module, args: unit.said.append("first pre"), prepend=True)
    unit.register_forward_hook(lambda module, args, out: (unit.said.append("hook"), out + 1)[1])
    unit.register_forward_hook(lambda module, args, out: unit.said.append("last hook"), always_call=True)
    expected = unit(torch.ones(1, 2))
    unit.said.clear()
    with patched_calls({"u": unit}, passing(unit.said)):
        assert torch.equal(unit(torch.ones(1, 2)), expected)
    assert unit.said[0] == "enter u"
    assert unit.said[-1] == "leave u"
    inner = [word for word in unit.said if not word.endswith(" u")]
    assert inner == ["first pre", "pre", "forward", "hook", "last hook"]


def test_arguments_and_the_units_own_answer() -> None:
    unit = Unit()
    seen: list[Any] = []

    def enter(name: str, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        seen.append((name, module, args, kwargs))
        return "answered"

    x = torch.ones(1, 2)
    with patched_calls({"a.b": unit}, enter):
        assert unit(x, scale=2.0) == "answered"
    (name, module, args, kwargs) = seen[0]
    assert name == "a.b"
    assert module is unit
    assert args[0] is x
    assert kwargs == {"scale": 2.0}
    assert unit.said == [], "the unit did not run"


def test_forward_called_directly() -> None:
    unit = Unit()
    with patched_calls({"u": unit}, passing(unit.said)):
        unit.forward(torch.ones(1, 2))
    assert unit.said == ["enter u", "forward", "leave u"]


def test_other_modules_are_left_alone() -> None:
    patched, other = Unit(), Unit()
    with patched_calls({"u": patched}, passing(patched.said)):
        other(torch.ones(1, 2))
        patched.fc(torch.ones(1, 2))
    assert other.said == ["forward"]
    assert patched.said == []
    assert "_call_impl" not in vars(patched.fc)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, Stop])
def test_everything_is_as_before(error: type[BaseException] | None) -> None:
    plain, replaced = Unit(), Unit()
    own = lambda x: x * 3  # noqa: E731
    replaced.forward = own  # type: ignore[method-assign]
    before = [dict(vars(plain)), dict(vars(replaced))]

    def enter(name: str, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        if error is not None:
            raise error
        return original(*args, **kwargs)

    x = torch.ones(1, 2)
    try:
        with patched_calls({"plain": plain, "replaced": replaced}, enter):
            assert error is not None or torch.equal(replaced(x), 3 * x)
            plain(x)
    except BaseException as caught:
        assert type(caught) is error
    else:
        assert error is None
    assert [dict(vars(plain)), dict(vars(replaced))] == before
    assert replaced.forward is own
    assert torch.equal(plain(x), plain.fc(x))


def test_patched_twice_and_undone_in_order() -> None:
    unit = Unit()
    with patched_calls({"outer": unit}, passing(unit.said)):
        with patched_calls({"inner": unit}, passing(unit.said)):
            unit(torch.ones(1, 2))
        assert [word for word in unit.said if word.startswith("enter")][:2] == ["enter inner", "enter outer"]
        unit.said.clear()
        unit(torch.ones(1, 2))
        assert "enter inner" not in unit.said
        assert unit.said[0] == "enter outer"
    assert "forward" not in vars(unit)


def test_an_error_while_patching_leaves_nothing() -> None:
    class Slots:
        """Not a module: there is nothing to patch."""

    unit = Unit()
    with pytest.raises(AttributeError), patched_calls({"u": unit, "x": Slots()}, passing([])):  # type: ignore[dict-item]
        pass
    assert "_call_impl" not in vars(unit)


def test_a_compiled_unit_is_entered() -> None:
    unit = Unit()
    unit.compile(backend="eager")
    compiled = unit._compiled_call_impl
    with patched_calls({"u": unit}, lambda name, module, original, args, kwargs: "answered"):
        assert unit(torch.ones(1, 2)) == "answered"
    assert unit._compiled_call_impl is compiled
