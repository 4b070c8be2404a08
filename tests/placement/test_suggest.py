"""From the size of a structure to a place for a mask."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d
from backdrop.experiments.models import gp_network
from backdrop.placement.suggest import Suggestions, _probabilities, rounded, suggest
from backdrop.placement.surgery import insert
from foreign import import_or_skip

LAYERS = {layer.__name__: layer for layer in (Backdrop, Backdrop1d, Backdrop2d, Backdrop3d)}


def blocks_everything(model, name, shape):
    """Whether no gradient reaches the input when none passes this module."""
    model = copy.deepcopy(model).eval()
    model.get_submodule(name).register_forward_hook(lambda module, args, out: out.detach())
    x = torch.rand(shape, requires_grad=True)
    out = model(x)
    if not out.requires_grad:
        return True
    (grad,) = torch.autograd.grad(out.sum(), x, allow_unused=True)
    return grad is None or not grad.any()


def as_told(model, suggestion):
    """What the last line of the words gives."""
    return eval(suggestion.why.splitlines()[-1], {"model": model, "insert": insert, **LAYERS})


def gp(small=None, large=None):
    return gp_network(small or nn.Identity(), large or nn.Identity(), channels=8)


def test_the_papers_network():
    model = gp()
    found = suggest(model, (4, 1, 1024, 1024), [10, 140])
    assert [(each.size, each.field.size, each.field.lattice) for each in found] == [
        (10, (11, 11), (512, 512)),
        (140, (155, 155), (64, 64)),
    ]
    # In each case the last layer before the next convolution or pooling.
    assert [type(model.get_submodule(each.after)) for each in found] == [nn.BatchNorm2d, nn.BatchNorm2d]
    assert [each.after for each in found] == ["9", "34"]
    assert found[1].p == (0, 0.88, 0.99, 0.998, 0.9998)


def test_the_papers_places():
    """Its masks stand where a field is about nine correlation lengths of 10 and 140 pixels wide."""
    small, large = suggest(gp(Backdrop2d(0.99), Backdrop2d(0.9)), (1, 1, 1024, 1024), [9 * 10, 9 * 140])
    assert (small.after, small.field.size, small.field.lattice) == ("27", (91, 91), (64, 64))
    assert (large.after, large.field.size, large.field.lattice) == ("53", (1275, 1275), (4, 4))
    assert large.p == (0, 0.62, 0.81, 0.94)
    assert small.why.endswith("A mask stands there already: model.get_submodule('28').p = 0.97")
    assert large.why.endswith("A mask stands there already: model.get_submodule('54').p = 0.94")  # as in the paper
    plain = suggest(gp(), (1, 1, 1024, 1024), [9 * 10, 9 * 140])
    # An Identity stands there instead, and is the last of its kind.
    assert [each.why.splitlines()[-1] for each in plain] == [
        'insert(model, {"28": Backdrop2d(0.97)})',
        'insert(model, {"54": Backdrop2d(0.94)})',
    ]


def test_words():
    (found,) = suggest(gp(), (1, 1, 1024, 1024), 140)
    assert found.why.splitlines() == [
        "Structures of size 140: put a mask behind 34, where a position sees 155x155 cells of the input: the smallest "
        "receptive field that holds the structure.",
        "Its 64x64 positions are 4096 units per sample, one every 16x16 cells of the input; 49 of them have receptive "
        "fields that do not overlap.",
        "Of 4096 units p=0 keeps 4096, p=0.88 keeps 492, p=0.99 keeps 41, p=0.998 keeps 8, p=0.9998 keeps 1. "
        "Try p=0.99 first, which keeps about as many as do not overlap; the higher p, the more epochs training needs.",
        'insert(model, {"34": Backdrop2d(0.99)})',
    ]
    both = suggest(gp(), (1, 1, 1024, 1024), (140, 1275))
    assert isinstance(both, Suggestions)
    first, second = str(both).split("\n\n")
    assert [first.split(), second.split()] == [each.why.split() for each in both]
    assert first.splitlines()[-1] == 'insert(model, {"34": Backdrop2d(0.99)})'
    assert max(map(len, str(both).splitlines())) <= 88
    assert "; all receptive fields overlap." in both[1].why


def test_resnet_18():
    timm = import_or_skip("timm")
    model = timm.create_model("resnet18", num_classes=2)
    shape = (1, 3, 224, 224)
    found = suggest(model, shape, [16, 60, 100, 200, 400, 2000])
    assert [(each.after, each.field.size[0]) for each in found] == [
        *(("layer1.0", 27), ("layer2.0", 67), ("layer2", 99), ("layer3", 211), ("layer4", 435), ("layer4", 435)),
    ]
    assert all(blocks_everything(model, each.after, (1, 3, 64, 64)) for each in found)
    assert "though smaller; there is no larger one" in found[-1].why
    assert as_told(model, found[3]).layer3.backdrop.p == found[3].first == 0.995


class Block(nn.Module):
    """As torchvision writes it: one activation for two places."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(x + self.conv2(self.relu(self.conv1(x))))


def test_modules_that_are_called_once():
    model = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    found = suggest(model, (1, 2, 16, 16), [5, 9, 12])
    assert [(each.after, each.field.size[0]) for each in found] == [("0.0", 5), ("0", 9), ("1", 13)]


def test_a_layer_that_is_called_twice_is_no_place():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Conv1d(1, 1, 3), relu, nn.Conv1d(1, 1, 5), relu)
    assert [each.after for each in suggest(model, (1, 1, 64), [3, 7])] == ["0", "2"]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inside, self.head = (nn.Conv2d(n, 2, 3, padding=1) for n in (1, 2, 4))
        self.down, self.up = nn.Conv2d(2, 2, 4, 4), nn.ConvTranspose2d(2, 2, 4, 4)

    def forward(self, x):
        x = self.stem(x)
        y = F.relu(self.inside(F.relu(self.down(x))))
        return self.head(torch.cat([x, self.up(y)], 1))


def test_u_net():
    model = UNet()
    small, middle, large = suggest(model, (1, 1, 32, 32), [3, 8, 24])
    assert [(each.after, each.field.size[0]) for each in (small, middle, large)] == [
        *(("stem", 3), ("inside", 14), ("head", 18)),
    ]
    assert [blocks_everything(model, each.after, (1, 1, 32, 32)) for each in (small, middle, large)] == [
        *(True, False, True),
    ]
    around = (
        "Other paths lead from the input to the output around it, so this mask blocks only a part of the gradient. "
    )
    nearest = "No layer that all paths pass has a receptive field near that size; the nearest is head, 18x18."
    assert f"\n{around}{nearest}\n" in middle.why
    assert around not in small.why + large.why
    assert "smallest receptive field that holds" in small.why


CHAIN = nn.Sequential(nn.Conv1d(1, 1, 3), nn.ReLU(), nn.Conv1d(1, 1, 10), nn.Conv1d(1, 1, 29))  # fields of 3, 12 and 40


@pytest.mark.parametrize(
    ("size", "after", "words"),
    [
        (3, "1", "the smallest receptive field that holds the structure"),
        (2.5, "1", "the smallest receptive field that holds the structure"),
        (1, "1", "nearest to the size, though more than twice as large"),
        (4, "1", "nearest to the size, though smaller; the next larger one is farther off"),
        (5, "1", "nearest to the size, though smaller; the next larger one is farther off"),
        (6, "2", "the smallest receptive field that holds the structure"),  # twice as large as 3 and half of 12
        (11, "2", "the smallest receptive field that holds the structure"),
        (13, "2", "the smallest receptive field that holds at least nine tenths of the structure"),
        (14, "2", "nearest to the size, though smaller; the next larger one is farther off"),
        (20, "3", "the smallest receptive field that holds the structure"),
        (1000, "3", "nearest to the size, though smaller; there is no larger one"),
    ],
)
def test_which_layer(size, after, words):
    (found,) = suggest(CHAIN, (1, 1, 64), size)
    assert found.after == after
    assert words in found.why.splitlines()[0]


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_the_layer_to_insert(spatial):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[spatial]
    model = nn.Sequential(conv(1, 2, 3), nn.Tanh(), conv(2, 2, 3))
    (found,) = suggest(model, (2, 1, *(9,) * spatial), 3)
    masked = as_told(model, found)
    assert type(masked[1].backdrop) is LAYERS[f"Backdrop{spatial}d"]
    assert masked[1].backdrop.p == found.first
    assert found.field.independent == 3**spatial
    x = torch.rand(2, 1, *(9,) * spatial, requires_grad=True)
    masked(x).sum().backward()
    assert x.grad.any()


def test_large_volumes():
    (found,) = suggest(nn.Sequential(nn.Conv3d(1, 64, 3, padding=1)), (1, 1, 512, 512, 512), 3)
    assert found.p[-1] == 0.999999993
    assert "p=0.999999993 keeps 1." in found.why


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(self.conv(x).permute(0, 2, 3, 1))


def test_channels_last():
    model = ChannelsLast()
    (found,) = suggest(model, (1, 1, 9, 9), 3)
    assert found.why.endswith('insert(model, {"norm": Backdrop(0.82, (0, 1, 2))})')
    assert as_told(model, found).norm.backdrop.dims == (0, 1, 2)


def test_masks_that_were_inserted():
    model = insert(CHAIN, {"1": Backdrop1d(0.5)})
    (found,) = suggest(model, (1, 1, 64), 3)
    assert found.after == "1"
    assert found.why.endswith("A mask stands there already: model.get_submodule('1.backdrop').p = 0.66")
    samples = insert(CHAIN, {"1": Backdrop(0.5)})
    assert suggest(samples, (1, 1, 64), 3)[0].why.endswith('insert(model, {"1": Backdrop1d(0.66)})')
    between = nn.Sequential(nn.Conv1d(1, 1, 3), Backdrop1d(0.5), nn.ReLU(), nn.Conv1d(1, 1, 3))
    assert "A mask stands there already: model.get_submodule('1').p" in suggest(between, (1, 1, 64), 3)[0].why


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def test_containers_that_insert_does_not_take():
    """It refuses a Sequential with a forward of its own."""
    model = nn.Sequential(Own(nn.Conv1d(1, 1, 3), nn.ReLU()), nn.Conv1d(1, 1, 3))
    (found,) = suggest(model, (1, 1, 64), 3)
    assert found.after == "0.1"
    as_told(model, found)


def test_one_position_is_not_enough():
    model = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Conv1d(1, 1, 7))
    assert suggest(model, (1, 1, 9), 9)[0].after == "0"


@given(units=st.integers(2, 10**7), share=st.floats(0, 1))
def test_probabilities_from_all_units_to_one(units, share):
    first = rounded(min(0.5, max(1, round(units * share)) / units))
    p = _probabilities(units, first)
    assert first in p
    kept = [max(1, round(units * (1 - each))) for each in p]
    assert p[0] == 0
    assert kept[0] == units
    assert kept[-1] == 1
    assert units * (1 - p[-1]) > 0.5
    assert list(p) == sorted(set(p))
    assert p[-1] < 1
    assert min(3, units) <= len(p) <= 7 or units < 8


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: suggest(CHAIN, (1, 1, 64), []), ValueError, "sizes has to hold at least one size"),
        (lambda: suggest(CHAIN, (1, 1, 64), [3, 0]), ValueError, "sizes has to be positive and finite, but got 0"),
        (lambda: suggest(CHAIN, (1, 1, 64), -1.5), ValueError, "sizes has to be positive and finite, but got -1.5"),
        (lambda: suggest(CHAIN, (1, 1, 64), math.inf), ValueError, "sizes has to be positive and finite, but got inf"),
        (lambda: suggest(CHAIN, (1, 1, 64), ["3"]), TypeError, "sizes has to be a number, but got '3'"),
        (lambda: suggest(CHAIN, (1, 1, 64), "3"), TypeError, "sizes has to be a number, but got '3'"),
        (lambda: suggest(None, (1, 1, 64), 3), TypeError, "model has to be a torch.nn.Module"),
        (lambda: suggest(nn.Sequential(nn.Linear(4, 2)), (1, 4), 3), ValueError, r"only samples; Backdrop\(p\) behind"),
        (
            lambda: suggest(nn.Sequential(nn.Flatten(), nn.Linear(128, 2)), (1, 2, 8, 8), 3),
            ValueError,
            "no place for a mask in Sequential: no layer of its own has a bounded receptive field and at least 2 "
            "positions, since 0: it reshapes the positions",
        ),
        (lambda: suggest(nn.Sequential(nn.Conv1d(1, 1, 9)), (1, 1, 9), 3), ValueError, "at least 2 positions$"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
