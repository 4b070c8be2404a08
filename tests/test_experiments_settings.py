"""Settings from text: what is taken, and what is refused with which words."""

from dataclasses import dataclass
from typing import Literal

import pytest

from backdrop.experiments.settings import build, parse
from backdrop.experiments.task import Settings
from backdrop.experiments.tasks import GPSettings


@dataclass(frozen=True, kw_only=True)
class Example:
    whole: int = 1
    number: float = 1.0
    flag: bool = False
    name: Literal["one", "two"] = "one"
    maybe: int | None = None
    pair: tuple[int, int] = (1, 2)
    several: tuple[float, ...] = (1.0,)
    text: str = ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("whole=3", [3]),
        ("whole=3,4,5", [3, 4, 5]),
        ("number=0.5,1", [0.5, 1.0]),
        ("number=1e-3", [0.001]),
        ("flag=true,off", [True, False]),
        ("name=two", ["two"]),
        ("maybe=none,7", [None, 7]),
        ("pair=3/4", [(3, 4)]),
        ("several=1/2.5,3", [(1.0, 2.5), (3.0,)]),
        ("text=a=b", ["a=b"]),
    ],
)
def test_values(text, value):
    (found,) = parse(Example, [text]).values()
    assert found == value
    assert [type(x) for x in found] == [type(x) for x in value]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["whole"], "has to be given as key=value, but got 'whole'"),
        (["whole="], "has to be given as key=value"),
        (["whol=1"], r"no setting 'whol'; did you mean 'whole'\?"),
        (["qqqq=1"], r"no setting 'qqqq'; the settings are whole, number"),
        (["whole=1.5"], "whole has to be a whole number, but got '1.5'"),
        (["number=x"], "number has to be a number, but got 'x'"),
        (["flag=maybe"], "flag has to be true or false, but got 'maybe'"),
        (["name=tow"], r"name has to be one of one, two, but got 'tow'; did you mean 'two'\?"),
        (["pair=1"], "pair has to be 2 whole numbers with slashes"),
        (["pair=1/x"], "pair has to be a whole number, but got 'x'"),
        (["whole=1", "whole=2"], "whole is given twice; for several values write whole=A,B"),
    ],
)
def test_errors(texts, message):
    with pytest.raises(ValueError, match=message):
        parse(Example, texts)


def test_build_checks_names_and_types():
    assert build(Example, {"pair": [3, 4], "number": 2}) == Example(pair=(3, 4), number=2.0)
    with pytest.raises(ValueError, match="did you mean 'pair'"):
        build(Example, {"pai": (1, 2)})
    with pytest.raises(ValueError, match="whole has to be a whole number, but got True"):
        build(Example, {"whole": True})
    with pytest.raises(ValueError, match="maybe has to be a whole number, but got 'x'"):
        build(Example, {"maybe": "x"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size has to be at least 1, but got 0"),
        ({"epochs": -1}, "epochs has to be at least 1"),
        ({"lr": 0.0}, "lr has to be above 0"),
        ({"lr": float("nan")}, "lr has to be above 0"),
        ({"weight_decay": -1.0}, "weight_decay at least 0"),
        ({"p_warmup": 1.5}, "p_warmup has to be a share of training"),
    ],
)
def test_values_that_make_no_sense(values, message):
    with pytest.raises(ValueError, match=message):
        build(Settings, values)


@pytest.mark.parametrize("p", [1.0, -0.1, 2.0])
def test_probabilities_are_checked_by_name(p):
    with pytest.raises(ValueError, match="setting p_small: p has to be"):
        build(GPSettings, {"p_small": p})
