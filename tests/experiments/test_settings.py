"""Settings from text: what is taken, and what is refused with which words."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from backdrop import Backdrop2d
from backdrop.experiments.image_tasks import (
    AUCSettings,
    CIFAR10Settings,
    ImageSettings,
    LatentSettings,
    MaskedImageSettings,
    PonceSettings,
)
from backdrop.experiments.settings import build, parse
from backdrop.experiments.study.plan import as_text, plan
from backdrop.experiments.task import Settings
from backdrop.experiments.tasks import AUC, CIFAR10, GP, TASKS, GPSettings, Latent, Ponce

INF, NAN = float("inf"), float("nan")


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
        ({"lr": float("nan")}, "lr has to be finite"),
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


NONSENSE = {
    Settings: [
        ("seed", -1),
        ("seed", 2**53),
        *[(name, value) for name in ("batch_size", "epochs", "passes", "evaluations") for value in (0, -1, 2**31)],
        *[("lr", value) for value in (0.0, -1.0, NAN, INF)],
        *[("weight_decay", value) for value in (-1.0, NAN, INF, -INF)],
        *[("p_warmup", value) for value in (-0.1, 1.1, NAN)],
        ("optimizer", "adam"),
        ("lr_schedule", "step"),
        ("exact", 2),
        ("precision", "8"),
        ("skip", "on"),
        ("judge", "train"),
    ],
    GPSettings: [
        *[(name, value) for name in ("p_small", "p_large") for value in (1.0, -0.1, NAN, INF)],
        *[("crop", value) for value in (0, -1, 1, 3, 100, 128, 2048)],
        *[("size", value) for value in (0, -1, 1, 512, 2**17)],
        *[
            (name, value)
            for name in ("small", "large")
            for value in ((), (0.0, 1.0), (-1.0, 1.0), (NAN, 1.0), (1.0, INF), (1.0, 1e9))
        ],
        *[("channels", value) for value in (0, -1, 2**17)],
        *[("blocks", value) for value in ((0, 0), (0, 3), (-1, 3), (4, -1), (4, 30), (4, 5), (4,), (4, 3, 2))],
        ("norm", "layer"),
        *[(name, value) for name in ("per_class", "test_per_class", "eval_batch") for value in (0, -1, 2**31)],
        ("flips", "maybe"),
        ("adapt", 2),
        ("shared", 2),
    ],
    ImageSettings: [
        *[(name, value) for name in ("width", "shrink", "samples", "test_samples", "eval_batch") for value in (0, -1)],
        ("width", 2**17),
        ("norm", "layer"),
        ("shrink", 4),
    ],
    MaskedImageSettings: [("p", value) for value in (1.0, -0.1, NAN)],
    PonceSettings: [("shrink", 21)],
    CIFAR10Settings: [("attacked", -1), ("attacked", 2**31)],
    AUCSettings: [("temperature", value) for value in (0.0, -1.0, NAN, INF)],
    LatentSettings: [
        *[(name, value) for name in ("p_x", "p_d") for value in (1.0, -0.1, NAN)],
        *[("distance", value) for value in (-1.0, NAN, INF)],
    ],
}


def allowed(kind):
    """What is nonsense for the settings of a task, its own and those that it shares."""
    shared = [case for parent in kind.__mro__ for case in NONSENSE.get(parent, ())]
    return [case for case in shared if kind is not PonceSettings or case != ("shrink", 4)]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_setting_of_every_task_has_nonsense_that_is_refused_by_name(task):
    cases = allowed(task.Settings)
    assert {name for name, _ in cases} == {field.name for field in dataclasses.fields(task.Settings)}
    for name, value in cases:
        with pytest.raises(ValueError, match=rf"\b{name} has to|setting {name}\b|\b{name} at least"):
            build(task.Settings, {name: value})


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_nonsense_is_refused_when_a_study_is_planned(task):
    """From the text of the command line, before anything is begun."""
    for name, value in allowed(task.Settings):
        if value == () or name == "seed":
            continue
        with pytest.raises(ValueError, match=name):
            plan(task.name, "paper", [f"{name}={as_text(value)}"])


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_presets_are_allowed(task):
    for name in task.presets:
        spec, points = plan(task.name, name)
        assert points
        assert spec.name == f"{task.name}-{name}"


SIZES = [(17, (1, 1)), (9, (1, 0)), (33, (2, 1)), (129, (3, 2)), (20, (1, 1))]


@pytest.mark.parametrize(("size", "blocks"), SIZES)
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_what_is_allowed_can_be_trained(size, blocks, norm):
    """The smallest images for so many blocks; one pixel less is refused. Masks have as many units as are said."""
    given = {
        "size": size,
        "blocks": blocks,
        "channels": 8,
        "norm": norm,
        "batch_size": 1,
        "p_small": 0.5,
        "p_large": 0.5,
    }
    task = GP.with_preset("quick", given)
    model, images = task.model().train(), torch.zeros(1, 1, size, size)
    assert model(images).isfinite().all()
    if size in (17, 9, 33, 129):
        with pytest.raises(ValueError, match=f"setting size has to be at least {size} for {sum(blocks)} blocks"):
            GP.with_preset("quick", {**given, "size": size - 1})
    seen = []
    for layer in model:
        if isinstance(layer, Backdrop2d):
            layer.register_forward_hook(lambda layer, inputs, output: seen.append(output[0, 0].numel()))
    model(images)
    assert seen == list(task.units().values())


def test_the_smallest_crops_can_be_trained():
    given = {"size": 64, "blocks": (2, 1), "channels": 4, "norm": "batch", "batch_size": 1}
    task = GP.with_preset("quick", {**given, "crop": 16})
    assert task.model().train()(torch.zeros(1, 1, 16, 16)).isfinite().all()
    with pytest.raises(ValueError, match="setting crop has to divide the size, 64, and to be at least 16"):
        GP.with_preset("quick", {**given, "crop": 8})


@pytest.mark.parametrize("task", [CIFAR10, AUC, Latent, Ponce], ids=lambda task: task.name)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_images_that_are_shrunk_most_can_be_trained(task, batch_size):
    kind, full = task.Settings, (1, 300, 400) if task is Ponce else (3, 32, 32)
    shrink = kind.most_shrunk - (batch_size == 1 and task is not Ponce)
    model = task.with_preset("quick", {"shrink": shrink, "width": 1, "batch_size": batch_size}).model().train()
    images = torch.nn.functional.avg_pool2d(torch.zeros(batch_size, *full), shrink)
    model(images)
    with pytest.raises(ValueError, match=f"setting shrink has to be at most {shrink}, but got {shrink + 1}"):
        task.with_preset("quick", {"shrink": shrink + 1, "batch_size": batch_size})


def test_channels_are_normalised_in_groups_of_the_same_size():
    for task, name in ((GP, "channels"), (CIFAR10, "width"), (Ponce, "width"), (Latent, "width")):
        with pytest.raises(ValueError, match=f"setting {name} has to be a multiple of 8 with norm=group, but got 12"):
            task.with_preset("quick", {name: 12, "norm": "group"})


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ("99999999999", "seeds have to be at most 100,000, but got 99999999999: .* alone is --seeds 99999999999,"),
        ("9" * 5000, "seeds have to be how many"),
        ("9" * 17 + ",", "seeds have to be how many"),
        (f"{2**53},", "setting seed has to be at most"),
        ("-1,", "seeds have to be how many"),
        ("90000", "a study has to have at most 100,000 trials, but these are 180,000"),
        ("\u0663", "seeds have to be how many"),
    ],
)
def test_seeds_that_make_no_sense(seeds, message):
    with pytest.raises(ValueError, match=message):
        plan("gp", "quick", seeds=seeds)


def test_grids_that_make_no_sense():
    hundred = ",".join(str(i / 1000) for i in range(100))
    axes = [f"{name}={hundred}" for name in ("p_small", "p_large", "p_warmup", "weight_decay")]
    with pytest.raises(ValueError, match="a study has to have at most 100,000 trials, but these are 200,000,000"):
        plan("gp", "quick", axes)
