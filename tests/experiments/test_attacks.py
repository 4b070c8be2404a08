"""FGSM and PGD against a linear network, for which the worst change of an image is known."""

import pytest
import torch
from torch import nn

from backdrop.experiments import data
from backdrop.experiments.attacks import Pixels, accuracy_under, fgsm, pgd
from backdrop.experiments.tasks import CIFAR10
from backdrop.experiments.train import fit

SHAPE = (3, 4, 4)
STD, MEAN = torch.tensor([0.5, 1.0, 2.0]).view(1, 3, 1, 1), torch.tensor([0.2, 0.5, 0.7]).view(1, 3, 1, 1)
PIXELS = Pixels((0 - MEAN) / STD, (1 - MEAN) / STD)
RADIUS = 8 / 255


@pytest.fixture
def linear():
    """A network of two classes, images whose pixels are far from black and white, and labels."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(2, 48, generator=generator))
    bright = torch.rand(200, *SHAPE, generator=generator) * 0.5 + 0.25
    return model, (bright - MEAN) / STD, torch.randint(0, 2, (200,), generator=generator)


def margin(model, images, labels):
    """By how much the right class is ahead."""
    scores = model(images)
    return scores[torch.arange(len(labels)), labels] - scores[torch.arange(len(labels)), 1 - labels]


@pytest.mark.parametrize("attack", [fgsm, pgd])
def test_the_margin_of_a_linear_network_falls_as_far_as_it_can(linear, attack):
    model, images, labels = linear
    weight = (model[1].weight[0] - model[1].weight[1]).view(SHAPE)
    most = (weight.abs() * RADIUS / STD[0]).sum()  # every pixel of every channel by the radius
    changed = attack(model, images, labels, RADIUS, PIXELS)
    torch.testing.assert_close(margin(model, images, labels) - margin(model, changed, labels), most.expand(200))


@pytest.mark.parametrize("attack", [fgsm, pgd])
def test_changes_stay_within_the_radius_and_images_within_their_range(linear, attack):
    model, _, labels = linear
    bright = torch.rand(200, *SHAPE, generator=torch.Generator().manual_seed(1))
    changed = attack(model, (bright - MEAN) / STD, labels, RADIUS, PIXELS) * STD + MEAN
    assert changed.min() >= -1e-6
    assert changed.max() <= 1 + 1e-6
    assert (changed - bright).abs().max() <= RADIUS + 1e-6
    assert ((changed - bright).abs() > RADIUS / 2).float().mean() > 0.9


def test_accuracy_is_that_of_the_margins(linear):
    model, images, labels = linear
    model[1].bias.data += 0.1
    most = margin(model, images, labels) - margin(model, fgsm(model, images, labels, RADIUS, PIXELS), labels)
    expected = 100 * (margin(model, images, labels) > most).double().mean().item()
    assert 0 < expected < 90
    for batch in (7, 1000):
        assert accuracy_under(fgsm, model, images, labels, RADIUS, PIXELS, batch) == expected
    assert accuracy_under(pgd, model, images, labels, 0.0, PIXELS) == pytest.approx(
        100 * (margin(model, images, labels) > 0).double().mean().item()
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_more_steps_are_worse_for_a_network_that_is_not_linear():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    images = torch.randn(300, *SHAPE) * 0.2
    labels = model(images).argmax(1)
    wide = Pixels(torch.full((1, 3, 1, 1), -2.0), torch.full((1, 3, 1, 1), 2.0))
    one, many = (accuracy_under(attack, model, images, labels, 0.02, wide) for attack in (fgsm, pgd))
    assert many <= one < 100


def test_cifar10_is_attacked_if_asked(tmp_path, monkeypatch):
    def fake(*_, **__):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(60) % 10
        images = torch.randint(0, 256, (60, 3, 32, 32), generator=generator, dtype=torch.uint8)
        images[torch.arange(60), 0, labels] = 255  # a bright line that tells the class
        return [data.ImageSet(images, labels, tuple("abcdefghij"))] * 2

    monkeypatch.setattr(data, "cifar10", fake)
    tiny = {"width": 8, "samples": None, "test_samples": None, "epochs": 4, "passes": 4, "batch_size": 20, "lr": 1e-2}
    plain = fit(CIFAR10.with_preset("quick", tiny), tmp_path / "plain")
    assert set(plain.metrics) == {"accuracy", "loss"}
    attacked = fit(CIFAR10.with_preset("quick", {**tiny, "attacked": 60}), tmp_path / "attacked")
    found = attacked.metrics
    assert {name: found[name] for name in plain.metrics} == plain.metrics
    assert set(found) - set(plain.metrics) == {"clean", "fgsm_2", "fgsm_8", "pgd_2", "pgd_8"}
    assert found["accuracy"] == found["clean"] > 50
    assert found["accuracy"] >= found["fgsm_2"] >= found["pgd_2"] >= found["pgd_8"]
    fewer = fit(CIFAR10.with_preset("quick", {**tiny, "attacked": 20}), tmp_path / "fewer").metrics
    assert all(fewer[name] % 5 == 0 for name in ("clean", "fgsm_2", "pgd_8"))  # of 20 images
    with pytest.raises(ValueError, match="setting attacked has to be at least 0, but got -1"):
        CIFAR10.with_preset("quick", {**tiny, "attacked": -1})
