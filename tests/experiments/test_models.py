"""The networks of Table 1: every row of the tables in their docstrings, measured."""

import re

import pytest
import torch
from torch import nn

from backdrop import Backdrop2d
from backdrop.experiments import models


class Seen(nn.Module):
    """Remembers the shape of what passes."""

    def forward(self, x):
        self.shape = tuple(x.shape)
        return x


def rows(function):
    """Of the table in a docstring: what stands in each cell."""
    lines = [line.strip() for line in function.__doc__.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def sizes(text):
    """ "64 x 512 x 512" as numbers, or nothing."""
    return tuple(map(int, re.findall(r"\d+", text))) if re.fullmatch(r"\d+( x \d+)*", text) else None


def stages(model, image):
    """The shape and receptive field after every convolution and pooling, found by following gradients to the image."""
    model.eval()
    found = []
    for depth, layer in enumerate(model, 1):
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            part = nn.Sequential(*(linear(layer) for layer in model[:depth]))
            x = torch.zeros(1, *image, requires_grad=True)
            y = part(x)
            _, _, height, width = y.shape
            y[0, 0, height // 2, width // 2].backward()
            columns = x.grad[0].abs().sum((0, 1)).nonzero().flatten()
            found.append(((*y.shape[1:],), int(columns[-1] - columns[0]) + 1))
    return found


def linear(layer):
    """A layer with the same geometry whose every input counts."""
    if isinstance(layer, nn.Conv2d):
        copy = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
        nn.init.constant_(copy.weight, 1e-3)
        return copy
    if isinstance(layer, nn.MaxPool2d):
        return nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding)
    return nn.Identity()


# Images larger than the paper's, so that no receptive field meets a border; the sizes are those of the paper's images.
CASES = {
    "gp": (models.gp_network, lambda: models.gp_network(nn.Identity(), nn.Identity()), (1, 1024, 1024), (1, 64, 2816)),
    "ponce": (models.ponce_network, lambda: models.ponce_network(nn.Identity()), (1, 300, 400), (1, 300, 900)),
    "cifar": (models.all_cnn, lambda: models.all_cnn(norm="batch"), (3, 32, 32), (3, 32, 128)),
}


@pytest.mark.parametrize("name", CASES)
def test_networks_are_those_of_table_1(name):
    function, make, image, _ = CASES[name]
    table = [row for row in rows(function) if sizes(row[1])]
    assert sizes(table[0][1]) == image
    assert sizes(table[-1][1])[0] == {"gp": 4, "ponce": 25, "cifar": 10}[name]
    model, shape = make().eval(), image
    with torch.no_grad():
        x = torch.zeros(1, *image)
        shapes = []
        for layer in model:
            x = layer(x)
            shapes.append(tuple(x.shape[1:]))
    for _, size, _ in table[1:]:
        shape = sizes(size)
        assert shape in shapes, f"no layer has the output {size}"
        shapes = shapes[shapes.index(shape) :]
    assert shapes[0] == sizes(table[-1][1])
    assert shapes[-1] == sizes(table[-1][1])[:1]  # the mean over positions


@pytest.mark.parametrize("name", ["ponce", "cifar"])
def test_receptive_fields_are_those_in_the_table(name):
    function, make, _, wide = CASES[name]
    stated = [int(field) for _, size, field in rows(function) if sizes(size) and field.isdigit()][1:]
    found = [field for _, field in stages(make(), wide)]
    assert found == stated


def test_receptive_fields_of_the_gp_network():
    """Of its blocks, by the rule that a layer with a kernel of k adds k - 1 times the strides so far."""
    model, field, stride, found = models.gp_network(nn.Identity(), nn.Identity()), 1, 1, []
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            kernel, step = (x if isinstance(x, int) else x[0] for x in (layer.kernel_size, layer.stride))
            field, stride = field + (kernel - 1) * stride, stride * step
            found.append(field)
    stated = [int(field) for _, size, field in rows(models.gp_network) if sizes(size) and field.isdigit()][1:]
    assert [field for field in found if field in stated] == stated
    assert found[-1] == stated[-1]
    small = models.gp_network(nn.Identity(), nn.Identity(), channels=2, blocks=(2, 1))
    assert [field for _, field in stages(small, (1, 64, 256))] == [3, 5, 7, 11, 15, 19, 27, 35, 43, 59, 75]


def test_masks_lie_on_the_lattices_of_the_paper():
    small, large = Seen(), Seen()
    models.gp_network(small, large).eval()(torch.zeros(1, 1, 1024, 1024))
    assert small.shape == (1, 64, 64, 64)
    assert large.shape == (1, 4, 4, 4)
    ponce, cifar = Seen(), Seen()
    models.ponce_network(ponce).eval()(torch.zeros(1, 1, 300, 400))
    assert ponce.shape == (1, 25, 5, 6)
    models.all_cnn(mask=cifar, norm="batch").eval()(torch.zeros(1, 3, 32, 32))
    assert cifar.shape == (1, 10, 6, 6)


@pytest.mark.parametrize("shrink", [1, 2, 4])
def test_smaller_ponce_images_have_the_same_lattice(shrink):
    mask = Seen()
    models.ponce_network(mask, channels=8, stride=4 // shrink).eval()(torch.zeros(1, 1, 300 // shrink, 400 // shrink))
    assert mask.shape == (1, 25, 5, 6)


@pytest.mark.parametrize("crop", [512, 256])
def test_crops_need_padding(crop):
    image = torch.zeros(1, 1, crop, crop)
    assert models.gp_network(nn.Identity(), nn.Identity(), channels=8, padded=True).eval()(image).shape == (1, 4)
    with pytest.raises(RuntimeError, match="Kernel size"):
        models.gp_network(nn.Identity(), nn.Identity(), channels=8).eval()(image)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_every_convolution_but_the_last_is_followed_by_relu_and_norm(norm):
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    networks = [
        models.gp_network(nn.Identity(), nn.Identity(), channels=8, norm=norm),
        models.ponce_network(nn.Identity(), channels=8, norm=norm),
        models.all_cnn(width=8, norm=norm),
    ]
    for layers in map(list, networks):
        places = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
        for place in places[:-1]:
            assert isinstance(layers[place + 1], nn.ReLU)
            assert norm == "none" or isinstance(layers[place + 2], kinds[norm])
        assert not isinstance(layers[places[-1] + 1], nn.ReLU)


def test_the_two_outputs_of_the_latent_network():
    scores_mask, hidden_mask = Seen(), Seen()
    model = models.LatentCNN(scores_mask, hidden_mask, width=8, norm="batch").eval()
    images = torch.randn(3, 3, 32, 32)
    scores, hidden = model(images)
    assert scores_mask.shape == scores.shape == (3, 10)
    assert hidden_mask.shape == hidden.shape == (3, 16)
    maps = model.features(images)
    assert torch.equal(hidden, maps.mean((2, 3)))
    torch.testing.assert_close(scores, model.scores(maps).mean((2, 3)))


def test_gradients_pass_the_masks_of_the_gp_network():
    torch.manual_seed(0)
    model = models.gp_network(Backdrop2d(0.99), Backdrop2d(0.75), channels=4, blocks=(2, 2), norm="none")
    image = torch.randn(1, 1, 128, 128, requires_grad=True)
    model(image).sum().backward()
    assert 0 < image.grad.count_nonzero() < image.numel() / 2
