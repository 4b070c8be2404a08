"""Receptive fields against measured footprints: random and well-known networks; what is said where there is none."""

import copy
import itertools
import os
import pickle
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from backdrop import Backdrop2d
from backdrop.experiments.models import all_cnn, gp_network, ponce_network
from backdrop.placement.fields import Field, Fields, receptive_fields
from footprints import box, by_change, by_gradient, positive, some
from foreign import import_or_skip

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

FRESH = int(os.environ.get("BACKDROP_FRESH", "0"))  # so many new networks instead of the same few
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOL = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveAvgPool3d}
ZERO_PAD = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
LARGEST = {1: 30, 2: 11, 3: 6}
CHANNELS = 2


class Join(nn.Module):
    def __init__(self, *branches, cat=False):
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.cat = cat

    def forward(self, x):
        maps = [branch(x) for branch in self.branches]
        if self.cat:
            return torch.cat(maps, 1).unflatten(1, (len(maps), CHANNELS)).sum(1)
        return sum(maps[1:], start=maps[0])


class Around(nn.Module):
    """Down, up to the size of the input, and past that: strides differ where sizes were rounded."""

    def __init__(self, down, mode):
        super().__init__()
        self.down, self.mode = down, mode

    def forward(self, x):
        return x + F.interpolate(self.down(x), size=x.shape[2:], mode=self.mode)


def sizes(draw, spatial, low, high):
    """One size for all axes, or one for each."""
    if draw(st.booleans()):
        return draw(st.integers(low, high))
    return tuple(draw(st.integers(low, high)) for _ in range(spatial))


def conv(draw, spatial, most=3):
    kernel, dilation = sizes(draw, spatial, 1, 4), sizes(draw, spatial, 1, 2)
    stride, padding, mode = sizes(draw, spatial, 1, most), sizes(draw, spatial, 0, 2), "zeros"
    if draw(st.integers(0, 9)) == 0:
        padding, stride = "same", 1
    if draw(st.integers(0, 4)) == 0:
        mode = draw(st.sampled_from(["reflect", "replicate", "circular"]))
    return CONV[spatial](CHANNELS, CHANNELS, kernel, stride, padding, dilation, padding_mode=mode)


def pool(draw, spatial):
    kernel = draw(st.integers(1, 4))
    settings = {"padding": draw(st.integers(0, kernel // 2)), "ceil_mode": draw(st.booleans())}
    kind = draw(st.sampled_from([MAX_POOL, AVG_POOL]))
    if kind is MAX_POOL:
        settings["dilation"] = draw(st.integers(1, 2))
    return kind[spatial](kernel, draw(st.integers(1, 3)), **settings)


def transposed(draw, spatial):
    stride = draw(st.integers(1, 3))
    more, padding = draw(st.integers(0, stride - 1)), draw(st.integers(0, 2))
    kernel, dilation = sizes(draw, spatial, 1, 4), draw(st.integers(1, 2))
    return TRANSPOSED[spatial](CHANNELS, CHANNELS, kernel, stride, padding, more, dilation=dilation)


def upsampling(draw, spatial):
    mode = draw(st.sampled_from(["nearest", "nearest-exact", LINEAR[spatial], LINEAR[spatial], "area"]))
    aligned = draw(st.booleans()) if mode == LINEAR[spatial] else None
    if mode != "area" and draw(st.booleans()):
        return nn.Upsample(scale_factor=draw(st.sampled_from([2, 3, 1.5, 0.5])), mode=mode, align_corners=aligned)
    return nn.Upsample(sizes(draw, spatial, 2, LARGEST[spatial]), mode=mode, align_corners=aligned)


def joined(draw, spatial):
    """Branches whose sizes agree."""
    stride = draw(st.integers(1, 2))
    widths = draw(st.lists(st.sampled_from([(1, 1), (3, 1), (3, 2), (5, 1)]), min_size=2, max_size=3))
    branches = [
        CONV[spatial](CHANNELS, CHANNELS, kernel, stride, dilation * (kernel // 2), dilation)
        for kernel, dilation in widths
    ]
    # What it pads behind the convolution depends on nothing there, along one axis or another.
    if stride == 1 and draw(st.booleans()):
        rim = [draw(st.integers(0, 2)) for _ in range(spatial)]
        bare = CONV[spatial](CHANNELS, CHANNELS, [2 * size + 1 for size in rim])
        branches.append(nn.Sequential(bare, ZERO_PAD[spatial]([size for size in reversed(rim) for _ in range(2)])))
    return Join(*branches, cat=draw(st.booleans()))


def layer(draw, spatial):
    kind = draw(st.sampled_from(["conv", "conv", "pool", "transposed", "upsampling", "join", "around", "other"]))
    if kind == "around":
        return Around(conv(draw, spatial), draw(st.sampled_from(["nearest", LINEAR[spatial]])))
    if kind == "other":
        others = [nn.ReLU(), BATCH_NORM[spatial](CHANNELS), ADAPTIVE[spatial](draw(st.integers(2, 5))), nn.Dropout()]
        return draw(st.sampled_from(others))
    makers = {"conv": conv, "pool": pool, "transposed": transposed, "upsampling": upsampling, "join": joined}
    return makers[kind](draw, spatial)


@st.composite
def networks(draw, spatial):
    """A network and the shape of a sample that it accepts."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shape = (CHANNELS, *(draw(st.integers(3, LARGEST[spatial])) for _ in range(spatial)))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        more = layer(draw, spatial)
        try:
            with torch.no_grad():
                out = nn.Sequential(*layers, more).eval()(torch.ones(1, *shape))
        except (RuntimeError, ValueError):  # torch refuses the sizes
            continue
        # A dilated max-pool may see nothing but padding, which torch itself gets wrong in backward.
        if out.numel() and out.isfinite().all() and max(out.shape[2:]) <= 3 * LARGEST[spatial]:
            layers.append(more)
    assume(layers)
    return positive(nn.Sequential(*layers)), shape


@pytest.mark.parametrize("spatial", [1, 2, 3])
@settings(max_examples=FRESH or 40)
@given(data=st.data())
def test_footprints_of_random_networks(spatial, data):
    model, shape = data.draw(networks(spatial))
    fields = receptive_fields(model, (1, *shape))
    changes = by_change(model, shape)
    last = fields[-1]
    assert set(changes) == set(itertools.product(*map(range, last.lattice)))
    assert {at: last.footprint(*at) for at in changes} == changes
    for at, measured in by_gradient(model, shape, some(last.lattice, 2)).items():
        assert last.footprint(*at) == measured, at


@st.composite
def series_networks(draw):
    """Networks that end in a repeating pattern in the middle of a long series."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    makers = [lambda d, s: conv(d, s, 2), pool, transposed, joined, upsampling]
    layers, out = [], torch.ones(1, CHANNELS, 300)
    for _ in range(draw(st.integers(1, 3))):
        more = draw(st.sampled_from(makers))(draw, 1)
        if getattr(more, "size", None) or getattr(more, "align_corners", False):
            continue  # these depend on the length
        with torch.no_grad():
            out = more.eval()(out)
        layers.append(more)
    assume(layers and out.isfinite().all())
    return positive(nn.Sequential(*layers))


@settings(max_examples=FRESH or 50)
@given(model=series_networks())
def test_sizes_strides_and_starts_are_those_far_from_the_ends(model):
    cells = 300
    field = receptive_fields(model, (1, CHANNELS, cells))[-1]
    ((size,), (stride,), (start,), (positions,)) = field.size, field.stride, field.start, field.lattice
    assume(0 < size < cells // 4)
    period = field._boxes[0][0].period
    measured = {at: found for (at,), (found,) in by_change(model, (CHANNELS, cells)).items()}
    margin = int((size + 30) / stride) + 1
    middle = range(margin, positions - margin)
    assume(len(middle) > 2 * period)
    assert max(len(measured[at]) for at in middle) == size
    for at in middle:
        assert bool(measured[at]) == bool(measured[middle[(at - margin) % period]])
        if not measured[at]:
            continue
        if at + period in middle:
            assert measured[at + period].start - measured[at].start == period * stride
        if at % period == 0:
            assert measured[at].start - at * stride == start
    near = int(size / stride) + 2 * period  # farther apart they cannot overlap
    assume(len(middle) > near + period)
    apart = [b for a in range(period) for b in range(near) if _overlap(measured[middle[a]], measured[middle[a + b]])]
    assert field.independent == (positions - 1) // (max(apart) + 1) + 1


def _overlap(a, b):
    return bool(range(max(a.start, b.start), min(a.stop, b.stop)))


def test_a_branch_that_is_padded_along_one_axis_is_not_counted_there():
    """In the first row, the wide branch holds zeros only; its columns are not those of the sum."""
    wide = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, (3, 5), padding=(0, 2)), nn.ZeroPad2d((0, 0, 1, 1)))
    model = positive(Join(wide, nn.Conv2d(CHANNELS, CHANNELS, 1)))
    field = receptive_fields(model, (1, CHANNELS, 6, 7))[-1]
    assert field.footprint(0, 3) == (range(1), range(3, 4))
    assert field.footprint(1, 3) == (range(3), range(1, 6))
    assert field.size == (3, 5)
    assert by_change(model, (CHANNELS, 6, 7))[0, 3] == (range(1), range(3, 4))


# Networks that people use


def averaging(model):
    """Average pooling over the same windows: its gradient reaches each cell that the largest value may come from."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MaxPool2d):
                pooling = nn.AvgPool2d(child.kernel_size, child.stride, child.padding, ceil_mode=child.ceil_mode)
                setattr(module, name, pooling)
    return model


def assert_measured(model, shape, names, count=1):
    """The footprints of these modules, at corners and elsewhere, are where the input gradient is not zero."""
    fields = receptive_fields(model, (1, *shape))
    plain = averaging(copy.deepcopy(model)).double().eval()
    outputs = {}
    for name in names:
        plain.get_submodule(name).register_forward_hook(lambda m, args, out, name=name: outputs.update({name: out}))
    x = torch.rand(1, *shape, dtype=torch.float64, requires_grad=True)
    plain(x)
    for name in names:
        field, out = fields[name], outputs[name]
        assert field.lattice == tuple(out.shape[2:])
        for at in [*sorted(some(field.lattice, count)), tuple(n // 2 for n in field.lattice)]:
            target = (out[(0, slice(None), *at)] * torch.rand(out.shape[1], dtype=out.dtype)).sum()
            (grad,) = torch.autograd.grad(target, x, retain_graph=True)
            assert field.footprint(*at) == box((grad[0] != 0).any(0)), (name, at)
    return fields


def small_weights(model):
    """Positive, and such that values stay of the order of one."""
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1)
        if parameter.ndim > 1:
            parameter.data /= parameter[0].numel()
    return model


def test_resnet_18():
    timm = import_or_skip("timm")
    model = small_weights(timm.create_model("resnet18", num_classes=2))
    fields = assert_measured(model, (3, 130, 161), ["conv1", "maxpool", "layer1.0", "layer2", "layer3", "layer4"])
    assert [fields[name].size[0] for name in ("maxpool", "layer1", "layer2", "layer3", "layer4")] == [
        *(11, 43, 99, 211, 435)
    ]
    assert fields["layer4"].stride == (32, 32)
    assert fields["layer1.0.add"].note == "the largest of 2 branches (27x27 by layer1.0.bn2, 11x11 by maxpool)"
    assert fields["layer1.0"] == fields["layer1.0.act2"]
    assert fields["global_pool.pool"].size is None
    assert fields["fc"].note == "unbounded since global_pool.pool: it pools over all positions"


def test_vgg_11():
    timm = import_or_skip("timm")
    model = small_weights(timm.create_model("vgg11", num_classes=2).features)
    fields = assert_measured(model, (3, 70, 96), ["0", "2", "5", "10", "15", "20"])
    assert [fields[name].size[0] for name in ("0", "2", "5", "10", "15", "20")] == [3, 4, 10, 30, 70, 150]
    assert fields["20"].stride == (32, 32)


def test_convnext():
    timm = import_or_skip("timm")
    model = timm.create_model("convnext_tiny", num_classes=2, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            nn.init.ones_(parameter)
    names = ["stem", *(f"stages.{i}" for i in range(4))]
    fields = assert_measured(model, (3, 128, 160), names)
    assert [fields[name].size[0] for name in names] == [4, 28, 80, 280, 488]
    assert fields["stages.3"].stride == (32, 32)
    assert not any(field.note for field in fields if field.kind == "LayerNorm2d")


@pytest.mark.parametrize(
    ("name", "last", "size"),
    [("vgg16", "features", 212), ("inception_v3", "Mixed_7c", 1311), ("densenet121", "features", 2071)],
)
def test_published_figures(name, last, size):
    """Of Araujo, Norris and Sim, Computing Receptive Fields of Convolutional Neural Networks, and of torchvision."""
    timm = import_or_skip("timm")
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=2)
    assert receptive_fields(model, (1, 3, 299, 299))[last].size == (size, size)


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def up():
    return nn.Upsample(scale_factor=2, mode="bilinear")


class UNet(nn.Module):
    """Two levels; what comes up is padded to the size of what went past, as is common."""

    def __init__(self, bilinear=False):
        super().__init__()
        self.inc, self.down1, self.down2 = block(2, 4), block(4, 8), block(8, 8)
        self.pool = nn.MaxPool2d(2)
        self.up1, self.up2 = (up() for _ in range(2)) if bilinear else (nn.ConvTranspose2d(8, n, 2, 2) for n in (8, 4))
        self.conv1, self.conv2 = block(16, 8), block(12 if bilinear else 8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        a = self.inc(x)
        b = self.down1(self.pool(a))
        c = self.down2(self.pool(b))
        b = self.conv1(self.join(self.up1(c), b))
        return self.out(self.conv2(self.join(self.up2(b), a)))

    def join(self, small, large):
        high, wide = large.size(2) - small.size(2), large.size(3) - small.size(3)
        small = F.pad(small, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
        return torch.cat([large, small], dim=1)


@pytest.mark.parametrize("bilinear", [False, True])
def test_u_net(bilinear):
    model = small_weights(UNet(bilinear))
    names = ["inc", "down2", "up1", "conv1", "up2", "conv2", "out"]
    fields = assert_measured(model, (2, 27, 38), names, count=4)
    assert fields["out"].stride == (1, 1)
    assert fields["up1"].stride == (2, 2)
    assert fields["pool (2)"].size == (10, 10)
    assert "the largest of 2 branches" in fields["join" if "join" in str(fields) else "cat"].note
    measured = by_change(averaging(positive(model)), (2, 27, 38))
    assert all(fields["out"].footprint(*at) == found for at, found in measured.items())


def test_the_tables_of_the_papers_networks():
    def sizes(model, shape):
        fields = receptive_fields(model, shape)
        kinds = (nn.Conv2d, nn.MaxPool2d)
        layers = [fields[name] for name, module in model.named_modules() if isinstance(module, kinds)]
        return [(field.size[0], *field.lattice) for field in layers if field.size]

    gp = gp_network(Backdrop2d(), Backdrop2d(), channels=8)
    found = sizes(gp, (1, 1, 1024, 1024))
    assert found[2:21:3] == [
        *((7, 512, 512), (19, 256, 256), (43, 128, 128), (91, 64, 64), (187, 32, 32), (379, 16, 16), (763, 8, 8)),
    ]
    assert found[-2:] == [(1019, 6, 6), (1275, 4, 4)]
    mask = next(field for field in receptive_fields(gp, (1, 1, 1024, 1024)) if field.kind == "Backdrop2d")
    assert (mask.size, mask.stride, mask.lattice) == ((91, 91), (16, 16), (64, 64))
    ponce = sizes(ponce_network(nn.Identity(), channels=8), (1, 1, 300, 400))
    assert ponce == [(7, 75, 100), (15, 37, 49), (31, 19, 25), (63, 9, 12), (127, 5, 6), (255, 5, 6)]
    cifar = sizes(all_cnn(width=8, norm="group"), (1, 3, 32, 32))
    assert [size for size, *_ in cifar] == [3, 5, 7, 11, 15, 19, 27, 35, 43]


# One layer at a time


class Calls(nn.Module):
    """A function instead of a layer."""

    def __init__(self, function, *weights):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(shape) + 0.5 for shape in weights)
        self.norm = nn.GroupNorm(1, CHANNELS)

    def forward(self, x):
        return self.function(x, *(self.weights[i] for i in range(len(self.weights))))


def shuffled(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, -1, h, w)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(4, 5), mode="bicubic"),
        lambda x: F.interpolate(x, size=(1, 3), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(F.avg_pool2d(x, (7, 2)), size=(5, 3), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=1.3, recompute_scale_factor=True),
        lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2),
        lambda x: F.pixel_unshuffle(x[:, :, 1:, :6], 2),
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.pad(x, (0, 0, 2, -1)),
        lambda x: F.pad(x, (2, 1, 3, 2), mode="reflect"),
        lambda x: F.pad(x, (2, 1, 3, 2), mode="circular"),
        lambda x: F.pad(x, (2, 1, 3, 2), mode="replicate"),
        lambda x: F.avg_pool2d(x, 2)[:, :1],
        lambda x: F.avg_pool2d(x, 2)[..., 1:, ::2],
        lambda x: F.avg_pool2d(x, 2)[:, 0].unsqueeze(1),
        lambda x: torch.chunk(F.avg_pool2d(x, 3), 2, 1)[1],
        lambda x: F.avg_pool2d(x, 3).split(1, dim=1)[0],
        lambda x: F.avg_pool2d(x, 3).mean(1, keepdim=True),
        lambda x: F.avg_pool2d(x, 3).sum(1).unsqueeze(1),
        lambda x: shuffled(F.avg_pool2d(x, 3, 1)),
        lambda x: F.avg_pool2d(x.permute(0, 1, 3, 2), (1, 3)).transpose(2, 3),
        lambda x: F.avg_pool2d(x, 3, 1).flatten(1, 1).add_(1).relu_(),
        lambda x: F.dropout(F.batch_norm(x, torch.zeros(2).double(), torch.ones(2).double()), training=False),
    ],
)
def test_functions(function):
    model = Calls(function).double().eval()
    shape = (CHANNELS, 7, 8)
    field, measured = receptive_fields(model, (1, *shape))[-1], by_change(model, shape)
    assert {at: field.footprint(*at) for at in measured} == measured


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda x, w: F.conv2d(x, w, None, 2, (1, 0), 2), (3, CHANNELS, 2, 3)),
        (lambda x, w: F.conv2d(x, weight=w, padding="same"), (3, CHANNELS, 2, 3)),
        (lambda x, w: F.conv2d(x, w, padding="valid"), (3, CHANNELS, 2, 3)),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, dilation=(1, 2)), (CHANNELS, 3, 2, 3)),
    ],
)
def test_convolutions_as_functions(function, weight):
    model = Calls(function, weight).double()
    shape = (CHANNELS, 5, 6)
    field, measured = receptive_fields(model, (1, *shape))[-1], by_change(model, shape)
    assert {at: field.footprint(*at) for at in measured} == measured


@pytest.mark.parametrize(
    ("layer", "size", "stride", "start"),
    [
        (nn.Conv2d(2, 2, 3, 2, 1, dilation=2), 5, 2, -1),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), 3, 1, -1),
        (nn.ConvTranspose2d(2, 2, 4, 2, 1), 2, Fraction(1, 2), -1),
        (nn.ConvTranspose2d(2, 2, 2, 2), 1, Fraction(1, 2), 0),
        (nn.ConvTranspose2d(2, 2, 1, 3, 2), 1, Fraction(1, 3), 1),
        (nn.Upsample(scale_factor=2), 1, Fraction(1, 2), 0),
        (nn.Upsample(scale_factor=2, mode="bilinear"), 2, Fraction(1, 2), -1),
        (nn.Upsample(scale_factor=2, mode="bicubic"), 4, Fraction(1, 2), -2),
        (nn.Upsample(13, mode="bilinear", align_corners=True), 2, Fraction(11, 12), 0),
        (nn.AdaptiveAvgPool2d(4), 3, 3, 0),
        (nn.AdaptiveAvgPool2d(5), 4, Fraction(12, 5), 0),
        (nn.PixelUnshuffle(3), 3, 3, 0),
        (nn.ReflectionPad2d(2), 1, 1, -2),
        (nn.ReplicationPad2d(1), 1, 1, -1),
        (nn.CircularPad2d(1), 1, 1, -1),
        (nn.ConstantPad2d((1, 0, 1, 0), 2.0), 1, 1, -1),
        (nn.LayerNorm([12, 12]), 1, 1, 0),
        (nn.Softmax(1), 1, 1, 0),
    ],
)
def test_layers(layer, size, stride, start):
    field = receptive_fields(nn.Sequential(layer), (1, 2, 12, 12))[0]
    assert (field.size, field.stride, field.start) == ((size,) * 2, (stride,) * 2, (start,) * 2)


def test_circular_padding_reaches_around():
    field = receptive_fields(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), (1, 1, 9))[-1]
    assert [field.footprint(at) for at in (0, 4, 8)] == [(range(9),), (range(3, 6),), (range(9),)]


def test_positions_that_see_nothing_but_padding():
    field = receptive_fields(nn.Sequential(nn.Conv2d(1, 1, 1, padding=1)), (1, 1, 3, 3))[0]
    assert field.footprint(0, 1) == (range(0), range(0))
    assert field.footprint(1, 1) == (range(1), range(1))


def test_a_start_where_the_first_position_sees_nothing():
    gaps = nn.Sequential(nn.ConvTranspose1d(1, 1, 1, 3), nn.Conv1d(1, 1, 1, padding=1))
    field = receptive_fields(gaps, (1, 1, 5))[-1]
    assert (field.size, field.stride, field.start) == ((1,), (Fraction(1, 3),), (0,))
    assert [field.footprint(at)[0] for at in range(4)] == [range(0), range(1), range(0), range(0)]


def test_strides_of_branches_that_differ():
    model = Around(nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1), "nearest")
    field = receptive_fields(model, (1, CHANNELS, 9, 9))["add"]
    assert field.stride == (1, 1)
    assert field.size == (3, 3)
    assert field.note == (
        "the largest of 2 branches (3x3 by interpolate, 1x1 by the input); "
        "the strides of its branches differ (1x1, 10/9x10/9)"
    )


def test_statistics_over_positions_are_not_counted():
    layers = [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm([4, 6, 6]), nn.BatchNorm2d(4)]
    fields = receptive_fields(nn.Sequential(*layers), (1, 2, 8, 8))
    coupled = "its statistics couple all positions of a sample; they are not counted"
    assert [field.note for field in fields] == ["", coupled, coupled, coupled, ""]
    assert [field.size for field in fields] == [(3, 3)] * 5


def test_constants_depend_on_nothing():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.where = nn.Parameter(torch.rand(1, 2, 6, 6))
            self.scale = nn.Parameter(torch.rand(2))

        def forward(self, x):
            return torch.cat([x * self.scale.reshape(1, -1, 1, 1) + self.where, self.where], 1)

    assert receptive_fields(Positions(), (1, 2, 6, 6))[-1].size == (1, 1)


# Where there is no field


@torch.compiler.disable
def aside(x):
    """What torch.compile does not follow."""
    return x.flip(2)


class ElsewhereConv(nn.Conv2d):
    """A convolution that does something of its own."""

    def forward(self, x):
        return super().forward(x.roll(5, 2))


class ElsewhereUp(nn.Upsample):
    def forward(self, x):
        return super().forward(aside(x))


class Excite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

    def forward(self, x):
        x = self.conv(x)
        return x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0]


class SeriesAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(2, 1, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x.transpose(1, 2))


UNBOUNDED = [
    (nn.AdaptiveAvgPool2d(1), "0", "it pools over all positions"),
    (nn.AdaptiveMaxPool2d((1, None)), "0", "it pools over all positions"),
    (nn.Flatten(), "0", "it reshapes the positions"),
    (Calls(lambda x: x.view(x.shape[0], -1)), "0.view", "it reshapes the positions"),
    (Calls(lambda x: x.mean((-2, -1))), "0.mean", "it takes the mean over all positions"),
    (Calls(lambda x: x.sum()), "0.sum", "it takes the sum over all positions"),
    (Calls(lambda x: x.softmax(-1)), "0.softmax", "it mixes positions along a spatial axis"),
    (nn.Softmax(2), "0", "it mixes positions along a spatial axis"),
    (nn.Linear(8, 3), "0", "it mixes positions along a spatial axis"),
    (Calls(lambda x: torch.cat([x, x], 2)), "0.cat", "it joins maps along a spatial axis"),
    (Calls(lambda x: torch.cat([x, x.transpose(2, 3)], 1)), "0.cat", "whose positions lie along different axes"),
    (Calls(lambda x: x + x.transpose(2, 3)), "0.add", "it combines maps whose positions lie along different axes"),
    (Calls(lambda x: x * F.avg_pool2d(x, 8)), "0.mul", "it combines a map with one value for all positions"),
    (Calls(lambda x: F.conv2d(x, x[:, :, :3, :3])), "0.conv2d", "its parameters depend on the input"),
    (Calls(lambda x: F.avg_pool2d(x.transpose(1, 2), 2)), "0.avg_pool2d", "it takes positions for channels"),
    (
        Calls(lambda x: F.conv2d(x.transpose(1, 2), torch.ones(1, 8, 1, 1))),
        "0.conv2d",
        "it takes positions for channels",
    ),
    (Calls(lambda x: x[:, :, 3]), "0.getitem", "it takes one position out of a map"),
    (Calls(lambda x: x[:, :, [0, 1]]), "0.getitem", "it looks up samples or positions by an index"),
    (Calls(lambda x: x.cumsum(2)), "0.cumsum", "it mixes positions along a spatial axis"),
    (Calls(lambda x: torch.fft.fft2(x).abs()), "0.fft_fft2", "there is no rule for fft_fft2"),
    (nn.Upsample(scale_factor=1.0471976), "0", "its factor 1.0471976 is not a simple ratio"),
    (nn.Fold(8, 3), "0", "there is no rule for fold"),
    (Calls(lambda x: F.interpolate(x, 4, mode="bilinear", antialias=True)), "0.interpolate", "antialias=True"),
    (ElsewhereConv(2, 2, 3), "0.roll", "it mixes positions along a spatial axis"),
    (Excite(), "0.mean", "it takes the mean over all positions"),
    (Attention(), "0.flatten", "it reshapes the positions"),
]


@pytest.mark.parametrize(("layer", "name", "reason"), UNBOUNDED)
def test_unbounded(layer, name, reason):
    if isinstance(layer, nn.Fold):
        layer, shape = nn.Fold((4, 4), 2), (1, 8, 9)
    else:
        shape = (1, 2, 8, 8)
    fields = receptive_fields(nn.Sequential(layer, nn.Identity()), shape)
    field = fields[name]
    assert field.size is field.stride is field.start is field.independent is None
    assert reason in field.note
    assert fields["1"].size is None
    assert fields["1"].note == f"unbounded since {name}: {field.note}"
    with pytest.raises(ValueError, match="has no footprint, because its receptive field is unbounded"):
        field.footprint(0, 0)


def test_attention_and_recurrence_over_a_series():
    field = receptive_fields(SeriesAttention(), (1, 2, 9))["attention"]
    assert field.note == "attention lets every position see all others"
    assert field.lattice == (9,)
    recurrent = Calls(lambda x: x)
    recurrent.rnn = nn.GRU(5, 3, batch_first=True)
    recurrent.function = lambda x: recurrent.rnn(x)[0]
    (field,) = receptive_fields(recurrent, (1, 4, 5))
    assert (field.name, field.kind, field.note) == ("rnn", "GRU", "it carries a state from position to position")


def test_graph_breaks():
    """What is known goes on behind them; what comes of code that is not followed is unbounded."""

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3)

        def forward(self, x):
            return torch.relu(self.conv(x)) if x.sum() < 1 else x

    fields = receptive_fields(nn.Sequential(nn.Conv2d(2, 2, 3), Looks(), nn.Conv2d(2, 2, 3)), (1, 2, 12, 12))
    assert [(name, fields[name].size) for name in ("0", "1.conv", "1.relu", "1", "2")] == [
        *(("0", (3, 3)), ("1.conv", (5, 5)), ("1.relu", (5, 5)), ("1", (5, 5)), ("2", (7, 7))),
    ]
    fields = receptive_fields(nn.Sequential(nn.Conv2d(2, 2, 3), ElsewhereUp(scale_factor=2)), (1, 2, 8, 8))
    assert [field.size for field in fields] == [(3, 3), None]
    assert "torch does not follow" in fields[1].note


def test_lattices_of_unbounded_values():
    fields = receptive_fields(
        nn.Sequential(Excite(), nn.Conv2d(2, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (1, 2, 8, 8)
    )
    assert [field.lattice for field in fields] == [(8, 8), (1, 1), (1, 1), (1, 1), (8, 8), (6, 6), (1, 1), ()]
    assert fields["0.mul"].note == "unbounded since 0.mean: it takes the mean over all positions"


def test_inputs_without_positions():
    fields = receptive_fields(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (8, 4))
    assert [(field.lattice, field.size, field.independent) for field in fields] == [((), (), 1)] * 2
    assert fields[1].note == "the input has no spatial axes"
    assert fields[1].footprint() == ()
    assert (
        str(fields).splitlines()[1]
        == "0      Linear  -        -      -              1            the input has no spatial axes"
    )


# What comes back


def test_names_and_slices():
    stage = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    fields = receptive_fields(nn.Sequential(stage, nn.MaxPool2d(2)), (1, 1, 8, 8))
    assert isinstance(fields, Fields)
    assert [field.name for field in fields] == ["0.0", "0.1", "1"]
    assert [field.kind for field in fields] == ["Conv2d", "ReLU", "MaxPool2d"]
    assert fields["0"] is fields["0.1"] is fields[1] is fields[-2]
    assert fields[1:]["1"] is fields[2]
    assert isinstance(fields[1:], Fields)
    assert fields["1"] == Field("1", "MaxPool2d", (1, 2, 3, 3), (3, 3), (4, 4), (2, 2), (0, 0), 4)
    with pytest.raises(KeyError, match=r"no layer '0\.11'; the nearest are '0\.1'"):
        fields["0.11"]
    with pytest.raises(IndexError):
        fields[3]
    again = pickle.loads(pickle.dumps(fields))
    assert again == fields
    assert again["0"].footprint(5, 0) == (range(5, 8), range(3))


def test_layers_that_are_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3)

        def forward(self, x):
            return F.relu(torch.relu(self.conv(self.conv(x)).relu()))

    fields = receptive_fields(Twice(), (1, 1, 9))
    assert [field.name for field in fields[:2]] == ["conv", "conv (2)"]
    assert len({field.name for field in fields}) == len(fields)
    assert [fields[name].size for name in ("conv", "conv (2)")] == [(3,), (5,)]


def test_table():
    fields = receptive_fields(nn.Sequential(nn.ConvTranspose1d(2, 2, 2, 2), nn.Flatten()), (1, 2, 8))
    assert str(fields).splitlines() == [
        "layer  kind             lattice  field      stride  start  independent  note",
        "0      ConvTranspose1d  16       1          1/2     0      8",
        "1      Flatten          -        unbounded                              it reshapes the positions",
    ]


def test_positions_have_to_lie_in_the_lattice():
    field = receptive_fields(nn.Sequential(nn.Conv2d(1, 1, 3)), (1, 1, 8, 9))[0]
    for position in [(0,), (0, 0, 0), (6, 0), (0, -1)]:
        with pytest.raises(IndexError, match=r"0 has positions in 6x7, counted from 0, but got \("):
            field.footprint(*position)


def test_nothing_is_computed_and_nothing_changes():
    model = nn.Sequential(nn.Conv3d(1, 512, 3, padding=1), nn.BatchNorm3d(512), nn.Dropout(), nn.MaxPool3d(2))
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    field = receptive_fields(model, (8, 1, 512, 512, 512))[-1]  # two terabytes of features
    assert (field.size, field.lattice) == ((4, 4, 4), (256, 256, 256))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: receptive_fields("model", (1, 1, 8, 8)), TypeError, "model has to be a torch.nn.Module, but got str"),
        (lambda: receptive_fields(nn.Conv2d(1, 1, 3), 8), ValueError, "input_shape has to be the shape of a batch"),
        (lambda: receptive_fields(nn.Conv2d(1, 1, 3), (1, 1, 0, 8)), ValueError, "input_shape has to be at least 1"),
        (lambda: receptive_fields(nn.Sequential(nn.Conv2d(3, 1, 3)), (1, 1, 8, 8)), ValueError, "cannot take an input"),
        (
            lambda: receptive_fields(nn.Bilinear(2, 2, 2), (1, 2)),
            ValueError,
            "has to take one tensor, but Bilinear takes 2",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
