"""The five tasks: their presets, data and metrics, each against something independent."""

import copy
import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from backdrop import Backdrop
from backdrop.experiments import data
from backdrop.experiments.image_tasks import hold_out
from backdrop.experiments.report.statistics import CHOSEN
from backdrop.experiments.settings import build
from backdrop.experiments.task import Examples, find_preset, product
from backdrop.experiments.tasks import AUC, CIFAR10, GP, TASKS, Latent, Ponce, find_task, reference
from backdrop.losses import class_distance_loss

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).parents[2] / "examples" / "05_your_own_task.py"


def points(task, preset):
    """All settings of a preset with seed 0."""
    found = find_preset(task, preset)
    return [build(task.Settings, {**found.base, **point}) for point in found.grid]


@pytest.mark.parametrize("preset", ["quick", "paper"])
@pytest.mark.parametrize("name", TASKS)
def test_presets_are_whole(name, preset):
    task = TASKS[name]
    found = points(task, preset)
    assert len(set(map(str, found))) == len(found)
    varied = {key for point in task.presets[preset].grid for key in point}
    masked = [s for s in found if any(getattr(s, mask) for mask in task.masks)]
    assert masked

    def without_masks(settings):
        return dataclasses.replace(settings, **dict.fromkeys(task.masks, 0.0))

    def without_choice(settings):  # nor what may be chosen for each configuration on its own
        return dataclasses.replace(without_masks(settings), **dict.fromkeys(CHOSEN, 1))

    unmasked = [s for s in found if s not in masked]
    for settings in masked:  # each has the same without masks to be compared with, whatever is chosen or all alike
        same = unmasked.count(without_masks(settings))
        assert same == 1 or [without_choice(s) for s in unmasked].count(without_choice(settings)) == 1
    assert set(task.masks) <= varied
    assert task.presets[preset].seeds >= (5 if preset == "paper" else 4)
    assert all(settings.judge == "test" for settings in found)


def test_the_grids_of_the_paper():
    gp = points(GP, "paper")
    pairs = set(itertools.product((0.0, 0.99, 0.999), (0.0, 0.75, 0.94)))
    assert {(s.p_small, s.p_large) for s in gp if s.crop is None} == pairs
    assert {(s.p_small, s.p_large, s.crop) for s in gp if s.crop} == {(0.0, 0.0, 512), (0.0, 0.0, 256)}
    assert all((s.size, s.small, s.large, s.per_class) == (1024, (9.5, 10.0), (80.0, 140.0), 1) for s in gp)
    assert all((s.channels, s.blocks, s.norm, s.test_per_class) == (64, (4, 3), "batch", 25) for s in gp)
    assert GP.presets["paper"].seeds == 10
    ranges = {Ponce: (8, 256, 0.9375), CIFAR10: (16, 2048, 0.9), AUC: (32, 2048, 0.97)}
    for task, (least, most, p) in ranges.items():
        found = points(task, "paper")
        sizes, ps = {s.batch_size for s in found}, {s.p for s in found}
        assert (min(sizes), max(sizes), min(ps), max(ps)) == (least, most, 0.0, p)
        left_out = {(2048, 0.5)} if task is AUC else set()
        assert {(s.batch_size, s.p) for s in found} == set(itertools.product(sizes, ps)) - left_out
        assert all(s.samples is None and s.shrink == 1 for s in found)
    assert Ponce.presets["paper"].seeds == 25
    latent = points(Latent, "paper")
    pairs = set(itertools.product((0.0, 0.94, 0.97), repeat=2))
    assert {(s.p_x, s.p_d) for s in latent if s.batch_size == 2048} == pairs
    assert {s.batch_size for s in latent if s.p_x == s.p_d == 0} == {32, 128, 512, 2048}
    assert all(s.width == 96 for task in (CIFAR10, AUC, Latent) for s in points(task, "paper"))


def test_gp_metrics():
    task = GP.with_preset("quick")
    labels = torch.tensor([0, 1, 2, 3])
    outputs = torch.eye(4)[torch.tensor([0, 0, 3, 1])]  # all right; small wrong; small wrong; large wrong
    found = task.evaluate(outputs, labels)
    assert (found["accuracy"], found["small"], found["large"]) == (25.0, 50.0, 75.0)
    assert found["loss"] == pytest.approx(log_loss(labels, outputs.double().softmax(1), labels=range(4)))


def test_gp_classes_are_as_in_the_paper():
    """Label 2 l + s has the small length s and the large length l."""
    task = GP.with_preset(
        "quick", {"size": 64, "blocks": (1, 1), "small": (1.5, 4.0), "large": (8.0, 30.0), "per_class": 40}
    )
    (images, labels), _ = task.data(CPU)
    step = images.diff(dim=-1).square().mean((1, 2, 3))  # finer textures change faster
    assert step[labels % 2 == 0].min() > step[labels % 2 == 1].max()
    means = torch.nn.functional.avg_pool2d(images, 8).diff(dim=-1).square().mean((1, 2, 3))
    for small in (0, 1):
        assert means[labels == small].mean() > 1.5 * means[labels == 2 + small].mean()


def test_crops_cover_the_training_images_and_leave_the_others_alone():
    values = {"size": 64, "test_per_class": 1, "blocks": (1, 1), "channels": 8}
    whole, cropped = (GP.with_preset("quick", {**values, "crop": crop}) for crop in (None, 32))
    (images, _), (judge, _) = whole.data(CPU)
    (tiles, labels), (same, _) = cropped.data(CPU)
    assert tiles.shape == (16, 1, 32, 32)
    assert labels.tolist() == [c for c in range(4) for _ in range(4)]
    assert tiles.double().sum().item() == pytest.approx(images.double().sum().item(), abs=1e-6)
    assert torch.equal(judge, same)
    assert cropped.model()(tiles).shape == (16, 4)


def test_auc_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(500, generator=generator) < 0.2).long()
    for scale, shift in ((1.0, 0.0), (1e-9, 30.0), (1e4, -5e4)):  # sigmoids of these are all alike in float32
        scores = (torch.randn(500, 1, generator=generator, dtype=torch.float64) + labels[:, None]).round(decimals=1)
        found = AUC.with_preset("quick").evaluate(scores * scale + shift, labels)["auc"]
        assert found == pytest.approx(roc_auc_score(labels, scores.flatten()), abs=1e-6)
    assert AUC.with_preset("quick").evaluate(torch.zeros(500, 1), labels)["auc"] == 0.5


def test_latent_metrics():
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(60) % 3
    scores, hidden = (torch.randn(60, n, generator=generator) for n in (3, 5))
    task = Latent.with_preset("quick", {"batch_size": 25, "distance": 2.0})
    found = task.evaluate([scores, hidden], labels)
    means = torch.stack([hidden[labels == c].double().mean(0) for c in range(3)])
    pairs = [(means[a] - means[b]).square().sum() - 4.0 for a, b in ((0, 1), (0, 2), (1, 2))]
    assert found["dist"] == pytest.approx(sum(x**2 for x in pairs).item(), rel=1e-6)
    assert found["xe"] == pytest.approx(log_loss(labels, scores.double().softmax(1)), rel=1e-6)
    assert found["loss"] == found["xe"] + found["dist"]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    parts = [order[:25], order[25:50]]  # whole batches only
    each = [class_distance_loss(hidden[rows].double(), labels[rows], distance=2.0).item() for rows in parts]
    assert found["dist_minibatch"] == pytest.approx(sum(each) / 2)
    assert found["dist_minibatch"] < found["dist"]  # means of few samples lie further apart, here nearer to 2
    whole = Latent.with_preset("quick", {"batch_size": 60, "distance": 2.0}).evaluate([scores, hidden], labels)
    assert whole["dist_minibatch"] == pytest.approx(whole["dist"])
    assert whole["xe_minibatch"] == pytest.approx(whole["xe"])


def test_latent_masks_each_term_by_itself():
    """Eq. 4: with one kept sample per mask, each term's gradient comes through that sample alone."""
    torch.manual_seed(0)
    task = Latent.with_preset("quick", {"p_x": 0.9, "p_d": 0.8, "exact": True, "width": 8, "norm": "none"})
    model = task.model()
    images, labels = torch.randn(10, 3, 32, 32, requires_grad=True), torch.arange(10) % 2
    scores, hidden = model(images)
    assert (model.scores_mask.p, model.hidden_mask.p) == (0.9, 0.8)
    task.loss((scores, hidden), labels).backward()
    rows = images.grad.abs().sum((1, 2, 3)).nonzero().flatten()
    assert 2 <= len(rows) <= 3  # 1 for one term, 2 for the other
    (grad,) = torch.autograd.grad(task.loss((model(images)[0], hidden.detach()), labels), images)
    assert grad.abs().sum((1, 2, 3)).count_nonzero() == 1


@pytest.mark.parametrize(
    ("task", "shape"), [(AUC, (3, 32, 32)), (CIFAR10, (3, 32, 32)), (Latent, (3, 32, 32)), (Ponce, (1, 300, 400))]
)
@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_images_become_examples(task, shape, preset, monkeypatch):
    classes = 2 if task is AUC else 25 if task is Ponce else 10
    generator = torch.Generator().manual_seed(0)

    def fake(*_, **__):
        labels = torch.arange(4 * classes) % classes
        images = torch.randint(0, 256, (4 * classes, *shape), generator=generator, dtype=torch.uint8)
        return (data.ImageSet(images, labels, tuple(map(str, range(classes)))),) * 2

    monkeypatch.setattr(data, "cifar10", fake)
    monkeypatch.setattr(data, "uiuc", fake)
    trial = task.with_preset(preset, {"samples": None, "width": 8, task.masks[0]: 0.5})
    train, judge = trial.data(CPU)
    assert train.inputs.dtype == torch.float32
    torch.testing.assert_close(train.inputs.mean((0, 2, 3)), torch.zeros(shape[0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(train.inputs.std((0, 2, 3)), torch.ones(shape[0]), atol=1e-4, rtol=0)
    outputs = trial.model()(train.inputs)
    trial.loss(outputs, train.labels).backward()
    with torch.no_grad():
        metrics = trial.evaluate(trial.model().eval()(judge.inputs), judge.labels)
    assert trial.metric in metrics
    held = task.with_preset(preset, {"judge": "validation", "samples": None, "width": 8}).data(CPU)
    assert len(held[0].labels) + len(held[1].labels) == len(train.labels)
    for row in held[1].inputs:
        assert not (held[0].inputs == row).flatten(1).all(1).any()


def test_held_out_samples_come_from_every_class():
    labels = torch.tensor([0] * 50 + [1] * 10)
    rest, held = hold_out(Examples(torch.arange(60.0), labels), 0.2, seed=1)
    assert torch.bincount(held.labels).tolist() == [10, 2]
    assert sorted(torch.cat([rest.inputs, held.inputs]).tolist()) == list(range(60))
    again = hold_out(Examples(torch.arange(60.0), labels), 0.2, seed=1)[1]
    other = hold_out(Examples(torch.arange(60.0), labels), 0.2, seed=2)[1]
    assert torch.equal(held.inputs, again.inputs)
    assert not torch.equal(held.inputs, other.inputs)


def test_units_are_what_masks_choose_from():
    for name, expected in {"gp": {"p_small": 4096, "p_large": 16}, "ponce": {"p": 30}, "cifar10": {"p": 36}}.items():
        assert TASKS[name].with_preset("paper").units() == expected
    assert AUC.with_preset("paper", {"batch_size": 256}).units() == {"p": 256}
    quick = GP.with_preset("quick")
    shapes = {}
    model = quick.model()
    for layer in model:
        if isinstance(layer, Backdrop):
            layer.register_forward_hook(lambda layer, _, y: shapes.update({layer: y.shape[2] * y.shape[3]}))
    model(torch.zeros(1, 1, 256, 256))
    assert list(shapes.values()) == list(quick.units().values())


def test_gp_can_be_trained_on_all_orientations():
    values = {"size": 17, "blocks": (1, 1)}
    images = torch.arange(289.0).view(1, 1, 17, 17).expand(400, 1, 17, 17)
    torch.manual_seed(0)
    found = GP.with_preset("quick", {**values, "flips": True}).augment(images)
    assert found.shape == images.shape
    # Each is one of eight, and all occur: one of them is missing by chance once in 1e22 times.
    square = images[0, 0]
    wanted = {tuple(torch.rot90(x, turns).flatten().tolist()) for x in (square, square.T) for turns in range(4)}
    assert len(wanted) == 8
    assert {tuple(image.flatten().tolist()) for image in found} == wanted
    assert GP.with_preset("quick", values).augment(images) is images


def test_gp_can_be_judged_with_statistics_of_the_images_judged(monkeypatch):
    values = {"size": 64, "test_per_class": 3, "blocks": (1, 1), "channels": 8, "batch_size": 12, "eval_batch": 5}
    task = GP.with_preset("quick", {**values, "adapt": True, "p_small": 0.5})
    examples = task.data(CPU)[1]
    torch.manual_seed(0)
    model = task.model().eval()
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):  # statistics of quite other images
            nn.init.constant_(layer.running_mean, 3.0)
            nn.init.uniform_(layer.weight)
    before = copy.deepcopy(model.state_dict())
    seen, evaluate = [], GP.evaluate
    monkeypatch.setattr(GP, "evaluate", lambda self, *judged: seen.append(judged) or evaluate(self, *judged))
    found = task.examine(model, examples)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    ((outputs, labels),) = seen
    # All images at once: in training mode the network uses the very statistics that it should have, but for n - 1.
    torch.testing.assert_close(outputs, copy.deepcopy(model).train()(examples.inputs), rtol=1e-3, atol=1e-3)
    assert (outputs - model(examples.inputs)).abs().max() > 0.01
    wanted = evaluate(task, outputs, examples.labels)
    assert found == {f"adapted_{name}": wanted[name] for name in ("accuracy", "small", "large")}
    assert torch.equal(labels, examples.labels)
    assert GP.with_preset("quick", values).examine(model, examples) == {}


def test_keys_name_a_trial():
    keys = [GP.with_preset("quick", settings, seed=seed).key for settings in ({}, {"lr": 0.5}) for seed in (0, 1)]
    assert len(set(keys)) == 4
    assert GP.with_preset("quick", {"small": [2.5, 3.3]}).key == GP.with_preset("quick").key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpp", r"one of gp, ponce, .* but got 'gpp'; did you mean 'gp'\?"),
        ("nothing.py:Tones", "there is no file"),
        (f"{EXAMPLE}:Nothing", "has to be a subclass of .*Task, but is None"),
        (f"{EXAMPLE}:PERIODS", "has to be a subclass"),
        ("backdrop.experiments.task:Task", "has to be a subclass"),
    ],
)
def test_tasks_that_are_not_there(name, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_task(name)


TASK = """
from backdrop.experiments.task import Classification, Preset
class Own(Classification):
    presets = {"quick": Preset({}, [{}], 1)}
    def data(self, device): ...
    def model(self): ...
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (", r"own.py cannot be imported:\n.*line 1.*\n.*\n.*\nSyntaxError"),
        ("\0", r"own.py cannot be imported:\n.*null bytes"),
        ("import nowhere_at_all", r"own.py cannot be imported:\n.*line 1.*\n.*\nModuleNotFoundError: No module"),
        ("def f():\n    1 / 0\nf()", r"own.py cannot be imported:\n.*line 3, in <module>\n.*\n.*line 2, in f"),
        ("raise SystemExit(0)", r"own.py cannot be imported:\n.*line 1, .*\n.*\nSystemExit: 0"),
        ("Own = 3", r"own.py:Own has to be a subclass of .*Task, but is 3"),
        (TASK.replace("def model(self): ...", ""), "own.py:Own has to be a subclass of .*Task with model"),
        (TASK.replace("presets =", "other ="), "own.py:Own has to be a subclass of .*Task with presets"),
        (TASK.replace("Preset({}, [{}], 1)", "3"), "own.py:Own has presets that cannot be"),
        (TASK.replace("[{}], 1", "[{}], 'x'"), "own.py:Own has presets that cannot be"),
        (TASK + "    Settings = dict", "own.py:Own has Settings that cannot be: .*dict"),
        (TASK + "    masks = 3", "own.py:Own has masks that cannot be: '3'"),
        (TASK + "    name = None", "own.py:Own has name that cannot be: 'None'"),
        (TASK + "    name = 'a\\x1b'", "own.py:Own has name that cannot be"),
    ],
)
def test_tasks_of_ones_own_that_cannot_be(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(text)
    with pytest.raises((ValueError, RuntimeError), match=message):
        find_task("own.py:Own")
    Path("own.py").unlink()
    with pytest.raises(ValueError, match="there is no module 'nowhere_at_all'"):
        find_task("nowhere_at_all:Own")


def test_a_task_that_fails_to_load_leaves_nothing_behind(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
    before = set(sys.modules)
    with pytest.raises(RuntimeError, match="no"):
        find_task(f"{tmp_path / 'broken.py'}:X")
    assert set(sys.modules) == before


def test_references_lead_back_to_tasks():
    tones = find_task(f"{EXAMPLE}:Tones")
    assert find_task(reference(tones)) is tones
    assert reference(GP) == "gp"
    assert tones.name == "tones"


def test_unknown_presets_suggest_a_name():
    with pytest.raises(
        ValueError, match=r"preset has to be one of quick, laptop, paper for gp, but got 'quik'; did you mean"
    ):
        find_preset(GP, "quik")


def test_the_example_trains(tmp_path):
    from backdrop.experiments.train import Options, fit

    tones = find_task(f"{EXAMPLE}:Tones").with_preset("quick", {"epochs": 2, "length": 512, "p": 0.9})
    outcome = fit(tones, tmp_path, Options(threads=1))
    assert outcome.metrics.keys() == {"accuracy", "loss"}
    assert [layer.p for layer in tones.model() if isinstance(layer, Backdrop)] == [0.9]
    assert outcome.curve[1]["loss"] < outcome.curve[0]["loss"]
    assert product(a=[1, 2], b=[3]) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
