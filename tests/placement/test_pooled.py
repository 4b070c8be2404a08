"""Where informed masks cannot help: said by `inspect` and `suggest`, and so it is."""

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, gradient_noise, insert, inspect, suggest


def network(above):
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, 2), nn.ReLU(), Backdrop2d(0.9, exact=True), *above, nn.Flatten(), nn.LazyLinear(3)
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mask, self.last = nn.Conv2d(1, 4, 3), Backdrop2d(0.9, exact=True), nn.Linear(4, 2)


class Mean(Model):
    def forward(self, x):
        return self.last((self.mask(self.conv(x)) + 1).mean((2, 3)))


class Attention(Model):
    def forward(self, x):
        hidden = self.mask(self.conv(x)).flatten(2)
        return self.last((hidden * (5 * hidden[:, :1]).softmax(-1)).sum(-1))


class MeanAndMaximum(Model):
    def forward(self, x):
        hidden = self.mask(self.conv(x))
        return self.last(hidden.mean((2, 3)) + hidden.amax((2, 3)))


class OfOneAxis(Model):
    def forward(self, x):
        return self.last(self.mask(self.conv(x)).mean(2).transpose(1, 2)).square()


POOLED = {
    "layer": (network([nn.AdaptiveAvgPool2d(1)]), "3"),
    "function": (Mean(), "mean"),
}
OTHERS = {
    "maximum": network([nn.AdaptiveMaxPool2d(1)]),
    "some positions": network([nn.AdaptiveAvgPool2d(2)]),
    "rectifier": network([nn.ReLU(), nn.AdaptiveAvgPool2d(1)]),
    "convolution": network([nn.Conv2d(6, 6, 3), nn.AdaptiveAvgPool2d(1)]),
    "attention": Attention(),
    "a branch": MeanAndMaximum(),
    "one axis": OfOneAxis(),
}


def found(model):
    model(torch.randn(2, 1, 32, 32))
    (row,) = (row for row in inspect(model, (2, 1, 32, 32)).masks)
    return row.mask.pooled


@pytest.mark.parametrize("name", POOLED)
def test_means_over_all_positions_are_found_and_nothing_is_gained_below_them(name):
    torch.manual_seed(0)
    model, above = POOLED[name]
    assert found(model) == above
    assert "choose='gradient'" in str(inspect(model, (2, 1, 32, 32)))
    x = torch.randn(4, 1, 32, 32)
    noise = gradient_noise(model, lambda out: out.square().mean(), (x,), 2, predict=(0.9,), units=200, seed=0)
    (row,) = noise.forecasts[0].rows
    assert row.informed == pytest.approx(row.uniform, rel=0.02)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_said_where_gradients_may_differ(name):
    assert found(OTHERS[name]) == ""


def test_suggestions_say_it():
    layers = [nn.Conv2d(1, 8, 9), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    (said,) = suggest(nn.Sequential(*layers), (1, 1, 64, 64), 9)
    assert "2 takes the mean over all of them" in said.why
    layers[2] = nn.AdaptiveMaxPool2d(1)
    assert "takes the mean" not in str(suggest(nn.Sequential(*layers), (1, 1, 64, 64), 9))


def test_masks_of_samples_and_inserted_ones():
    model = nn.Sequential(nn.Conv2d(1, 8, 9), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2), Backdrop(0.5))
    masked = insert(model, {"0": Backdrop2d(0.5)})
    assert [row.mask.pooled for row in inspect(masked, (2, 1, 32, 32)).masks] == ["1", ""]
