"""Positions dropped: Skip against the plain layer, over random segments of layers, borders included."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, Skip, skip_blocked
from skipping import ChannelNorm, assert_same_gradients, captures, check, ran_windows, step

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOL = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
BACKDROP = {1: Backdrop1d, 2: Backdrop2d, 3: Backdrop3d}
LARGEST = {1: 40, 2: 15, 3: 7}
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.PReLU, lambda: nn.LeakyReLU(0.1))


pytestmark = [captures, pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")]


def sizes(draw, spatial, low, high):
    """One size for all axes, or one for each."""
    if draw(st.booleans()):
        return draw(st.integers(low, high))
    return tuple(draw(st.integers(low, high)) for _ in range(spatial))


@st.composite
def layers(draw, spatial, channels):
    """A layer for feature maps with so many channels, and how many it returns."""
    kind = draw(st.sampled_from(["conv", "conv", "conv", "max", "avg", "activation", "channel norm", "batch norm"]))
    if kind == "conv":
        groups = draw(st.sampled_from([1, channels]))
        outputs = groups * draw(st.integers(1, 2))
        kernel = sizes(draw, spatial, 1, 7 if spatial == 1 else 4)
        padding = sizes(draw, spatial, 0, 3)
        stride, dilation = sizes(draw, spatial, 1, 3), sizes(draw, spatial, 1, 2)
        if draw(st.integers(0, 9)) == 0:
            padding, stride = "same", 1
        bias = draw(st.booleans())
        conv = CONV[spatial](channels, outputs, kernel, stride, padding, dilation, groups, bias)
        return conv, outputs
    if kind == "max":
        kernel = draw(st.integers(1, 4))
        padding = draw(st.integers(0, kernel // 2))
        ceil = draw(st.booleans())
        return MAX_POOL[spatial](
            kernel, draw(st.integers(1, 3)), padding, draw(st.integers(1, 2)), ceil_mode=ceil
        ), channels
    if kind == "avg":
        kernel = draw(st.integers(1, 4))
        padding = draw(st.integers(0, kernel // 2))
        stride, ceil, count = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans())
        return AVG_POOL[spatial](kernel, stride, padding, ceil_mode=ceil, count_include_pad=count), channels
    if kind == "activation":
        return draw(st.sampled_from(ACTIVATIONS))(), channels
    if kind == "channel norm":
        return ChannelNorm(channels, spatial), channels
    norm = BATCH_NORM[spatial](channels).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm, channels


@st.composite
def segments(draw, spatial):
    """A segment, some of it nested, and an input that it accepts."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    channels = draw(st.integers(1, 3))
    x = torch.randn(
        draw(st.integers(1, 3)), channels, *(draw(st.integers(3, LARGEST[spatial])) for _ in range(spatial))
    )
    modules = []
    for _ in range(draw(st.integers(1, 5))):
        layer, channels = draw(layers(spatial, channels))
        try:
            out = nn.Sequential(*modules, layer)(x)
        except RuntimeError:  # torch refuses the sizes
            out = None
        # A dilated max-pool may see nothing but padding, which torch itself gets wrong in backward.
        if out is None or not out.numel() or not out.isfinite().all():
            channels = nn.Sequential(*modules)(x).shape[1]
            continue
        modules.append(layer)
        if isinstance(layer, nn.modules.conv._ConvNd) and draw(st.booleans()):
            modules.append(nn.ReLU(inplace=True))
    cut = draw(st.integers(0, len(modules)))
    return nn.Sequential(nn.Sequential(*modules[:cut]), *modules[cut:]).double(), x.double()


@st.composite
def masks(draw, spatial):
    p = draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 0.9999]))
    patch = draw(st.integers(1, 3))
    scale = draw(st.sampled_from(["count", "probability", None]))
    return BACKDROP[spatial](p, patch=patch, shared=draw(st.booleans()), exact=draw(st.booleans()), scale=scale)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@settings(max_examples=15)
@given(data=st.data())
def test_random_segments_have_the_gradients_of_the_plain_pair(spatial, data):
    segment, x = data.draw(segments(spatial))
    mask = data.draw(masks(spatial))
    check(nn.Sequential(segment, mask), x, seed=data.draw(st.integers(0, 9)))


@settings(max_examples=15)
@given(data=st.data())
def test_two_segments_in_a_row(data):
    first, x = data.draw(segments(2))
    channels, *spatial = first(x).shape[1:]
    kernel = min(3, *spatial)
    second = nn.Sequential(nn.Conv2d(channels, 2, kernel, padding=kernel // 2), nn.ReLU()).double()
    model = nn.Sequential(first, data.draw(masks(2)), second, data.draw(masks(2)))
    check(model, x, seed=data.draw(st.integers(0, 9)))


@pytest.mark.parametrize("statistics", ["exact", "sampled", "frozen"])
def test_outputs_and_buffers_are_the_same_bits(statistics):
    """In float32 and with layers whose results do not depend on where torch's libraries find their memory."""
    stage = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, 2, 1), nn.MaxPool2d(3, 2)]
    model = nn.Sequential(*stage, Backdrop2d(0.9))
    x = torch.randn(2, 1, 40, 40)
    a, b = step(copy.deepcopy(model), x), step(skip_blocked(model, statistics=statistics, when="always"), x)
    assert torch.equal(a.output, b.output)
    for name, buffer in a.buffers.items():
        assert torch.equal(buffer, b.buffers[name]), name


def test_only_units_with_incoming_gradient_are_computed_again():
    stage = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(
        *stage, Backdrop2d(0.5, exact=True), nn.Conv2d(2, 1, 3), Backdrop2d(0.999, exact=True)
    ).double()
    fast = check(model, torch.randn(1, 1, 22, 22, dtype=torch.float64))
    counts = [int(entry.last.split()[0]) for entry in fast.skip_report]
    assert counts[1] == 1
    assert 1 <= counts[0] <= 9  # of 242 kept positions, those in one 3 x 3 window


def test_no_incoming_gradient_gives_zeros():
    model = skip_blocked(nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.5)), when="always")
    x = torch.randn(1, 1, 8, 8, requires_grad=True)
    (model(x) * 0).sum().backward()
    assert not x.grad.any()
    assert not model[0].weight.grad.any()


def test_one_kept_unit_anywhere(monkeypatch):
    """At corners, borders and inside, through paddings that reach over one another."""
    stage = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3).eval(), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(3, 3, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2, 1, 1, count_include_pad=False)),
        nn.Conv2d(3, 2, 2),
    ).double()
    weight = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    monkeypatch.setattr(Backdrop2d, "draw_weight", lambda self, x: weight)
    skip, plain = Skip(copy.deepcopy(stage), Backdrop2d(0.9), when="always"), nn.Sequential(stage, Fix(weight))
    for unit in [(0, 0), (0, 7), (7, 0), (7, 7), (3, 0), (4, 4)]:
        weight.zero_()[0, 0, unit[0], unit[1]] = 64
        x = torch.randn(1, 1, 15, 15, dtype=torch.float64)
        fast, slow = step(skip, x), step(plain, x)
        slow.parameters = {f"module{name[1:]}": grad for name, grad in slow.parameters.items()}
        assert_same_gradients(slow, fast)
        assert skip.report[0].last == "1 of 64 units were computed again"


class Fix(nn.Module):
    """A mask with given weights."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return Fixed.apply(x, self.weight)


class Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight, None


@pytest.mark.parametrize("dims", [(0, 2), (0, 3), (2,), (-1, 0, -2)])
def test_masks_along_some_axes(dims):
    stage = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))
    fast = check(nn.Sequential(stage, Backdrop(0.8, dims)).double(), torch.randn(2, 2, 12, 13, dtype=torch.float64))
    assert ran_windows(fast)


def test_a_mask_along_channels_is_left_alone():
    fast = check(nn.Sequential(nn.Conv2d(2, 3, 3), Backdrop(0.8, (0, 1))).double(), torch.randn(2, 2, 9, 9).double())
    assert fast.skip_report[0].kept == [("0", "the mask runs along its channels")]


def test_a_series_with_time_before_channels():
    stage = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    fast = check(nn.Sequential(stage, Backdrop(0.9, (0, 1))).double(), torch.randn(4, 30, 3, dtype=torch.float64))
    assert ran_windows(fast)


class Branches(nn.Module):
    """Two ways with different reach, joined by addition and by concatenation, and functions instead of modules."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.b = nn.Conv2d(4, 4, 5, padding=2)
        self.short = nn.Conv2d(2, 4, 1, stride=2)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.mask = Backdrop2d(0.95)

    def forward(self, x):
        y = torch.relu(self.a(x))
        y = self.b(y) * self.scale
        y += self.short(x)
        z = torch.cat([y, nn.functional.avg_pool2d(y, 3, 1, 1).sigmoid()], dim=1)
        z = nn.functional.max_pool2d(nn.functional.relu(z, inplace=True), 2)
        return self.mask(z).mean((2, 3))


def test_branches_and_functions():
    fast = check(Branches().double(), torch.randn(2, 2, 33, 30, dtype=torch.float64))
    assert ran_windows(fast)
    assert not fast.skip_report[0].kept


class Splits(nn.Module):
    """Parts of one value go ways with different reach before they are joined: windows of it are larger than each."""

    def __init__(self, way):
        super().__init__()
        self.first, self.way = nn.Conv2d(2, 6, 3, padding=1), way
        self.small, self.large = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, (1, 7), padding=(0, 3))
        self.mask = Backdrop2d(0.95)

    def forward(self, x):
        h = self.first(x).tanh()
        a, b, c = (
            h.split(2, 1)
            if self.way == "split"
            else h.chunk(3, 1)
            if self.way == "chunk"
            else h.view(h.shape[0], 3, 2, *h.shape[2:]).unbind(1)
        )
        return self.mask(torch.cat([a, self.small(b), self.large(c)], 1) + torch.cat([b, c, a], 1))


@pytest.mark.parametrize("way", ["split", "chunk", "unbind"])
def test_parts_with_different_reach(way):
    fast = check(Splits(way).double(), torch.randn(2, 2, 17, 23, dtype=torch.float64))
    assert ran_windows(fast)
    assert not fast.skip_report[0].kept


class LeftOut(nn.Module):
    """Stochastic depth as timm has it: a number for each sample, drawn into memory that is written over twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        h = self.first(x)
        y = self.last(h.relu())
        keep = y.new_empty((y.shape[0], 1, 1, 1)).bernoulli_(0.5)
        keep.div_(0.5)
        return h + y * keep


@pytest.mark.parametrize("samples", [False, True], ids=["positions", "samples"])
def test_paths_left_out(samples):
    generator = torch.Generator()
    mask = Backdrop(0.7, generator=generator) if samples else Backdrop2d(0.9, generator=generator)
    fast = check(nn.Sequential(LeftOut(), mask).double(), torch.randn(8, 2, 12, 13, dtype=torch.float64))
    assert not fast.skip_report[0].kept
    assert "0.first" in fast.skip_report[0].skipped


def test_slopes_drawn_at_random():
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.RReLU(), nn.Conv2d(4, 3, 3))
    model = nn.Sequential(body, Backdrop2d(0.9, generator=torch.Generator())).double()
    fast = check(model, torch.randn(2, 2, 15, 14, dtype=torch.float64))
    assert fast.skip_report[0].skipped == ["0.2"]
    ((path, reason),) = fast.skip_report[0].kept
    assert path == "0.1"
    assert "new numbers" in reason


class Shared(nn.Module):
    """One layer twice, and one parameter in two layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.twin = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.twin.weight = self.conv.weight
        self.mask = Backdrop2d(0.9)

    def forward(self, x):
        return self.mask(self.twin(torch.relu(self.conv(torch.relu(self.conv(x))))))


def test_shared_parameters():
    check(Shared().double(), torch.randn(1, 2, 12, 12, dtype=torch.float64))


def test_frozen_parameters_and_no_input_gradient():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), Backdrop2d(0.9)).double()
    model[0].weight.requires_grad_(False)
    x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    a, b = (
        step(copy.deepcopy(model), x, differentiate=False),
        step(skip_blocked(model, when="always"), x, differentiate=False),
    )
    assert b.parameters["0.weight"] is None
    assert_same_gradients(a, b)


def test_gradients_accumulate():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), Backdrop2d(0.8)).double()
    fast, x = skip_blocked(model, when="always"), torch.randn(2, 1, 9, 9, dtype=torch.float64)
    for each in (model, fast):
        torch.manual_seed(0)
        for _ in range(3):
            each(x).square().sum().backward()
    torch.testing.assert_close(fast[0].weight.grad, model[0].weight.grad, rtol=1e-10, atol=0)


def test_windows_in_several_parts(monkeypatch):
    """Where windows would need more memory than the forward pass, they come in parts."""
    from backdrop.skip import positions

    parts = []
    monkeypatch.setattr(positions.Run, "_chunk", lambda self, windows: parts.append(windows) or 3)
    model = nn.Sequential(nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.Conv2d(2, 2, 3), Backdrop2d(0.7)).double()
    check(model, torch.randn(2, 1, 9, 9, dtype=torch.float64))
    assert parts[0] > 3


def test_memory_format_and_noncontiguous_inputs():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Backdrop2d(0.9)).double()
    x = torch.randn(2, 3, 11, 10, dtype=torch.float64)
    check(model, x.to(memory_format=torch.channels_last))
    check(model, x.transpose(2, 3))


@pytest.mark.parametrize("layer", [nn.LeakyReLU(0.5, inplace=True), nn.Hardswish(inplace=True), nn.ELU(inplace=True)])
def test_a_segment_that_starts_in_place(layer):
    """What enters the segment is needed again in backward, so it may not be overwritten."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), layer, nn.Conv2d(4, 2, 3), Backdrop2d(0.9)).double()
    fast = check(model, torch.randn(2, 1, 14, 14, dtype=torch.float64))
    assert fast.skip_report[0].skipped == ["2", "3"]


def test_an_input_of_zero_samples():
    model = skip_blocked(nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.9)), when="always")
    model(torch.randn(0, 1, 8, 8)).sum().backward()
    assert not model[0].weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_restored_in_backward(dtype):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), Backdrop2d(0.9))
    fast, x = skip_blocked(model, when="always"), torch.randn(2, 2, 20, 20)
    gradients = []
    for each in (model, fast):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype):
            y = each(x)
        assert y.dtype == dtype
        (y.float() * 16).square().mean().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert ran_windows(fast)
    for a, b in zip(*gradients, strict=True):
        assert b.dtype == torch.float32
        assert (a - b).norm() < 0.02 * a.norm()
    with torch.autocast("cpu", dtype):
        loss = fast(x).float().square().mean()
    with ConvolutionDtypes() as seen:
        loss.backward()
    assert seen.dtypes == {dtype}


class ConvolutionDtypes(TorchDispatchMode):
    """Writes down what convolutions are given."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), Backdrop2d(0.9)).double()
    fast, x = skip_blocked(model, when="always"), torch.randn(1, 1, 12, 12, dtype=torch.float64)
    for each in (model, fast):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        torch.manual_seed(0)
        scaler.scale(each(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(fast[0].weight, model[0].weight, rtol=1e-10, atol=1e-12)


def test_the_state_of_random_numbers_is_that_of_the_plain_model():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.9))
    fast, x = skip_blocked(model, when="always"), torch.randn(1, 1, 12, 12)
    states = []
    for each in (model, fast):
        torch.manual_seed(0)
        for _ in range(2):
            each(x).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_changing_what_backward_needs_is_an_error():
    model = skip_blocked(nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.9)), when="always")
    y = model(torch.randn(1, 1, 12, 12))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_an_error():
    model = skip_blocked(nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.9)), when="always")
    x = torch.randn(1, 1, 12, 12, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_dense_where_windows_would_cost_more():
    model = nn.Sequential(nn.Conv2d(1, 2, 7, padding=3), nn.ReLU(), nn.Conv2d(2, 2, 7, padding=3), Backdrop2d(0.5))
    fast = check(model.double(), torch.randn(1, 1, 30, 30, dtype=torch.float64), when="pays")
    assert fast.skip_report[0].last.startswith("plain: windows would cost")


REFUSED = [
    (nn.GroupNorm(2, 4), "over space"),
    (nn.InstanceNorm2d(4), "over space"),
    (nn.LayerNorm([4, 9, 9]), "over space"),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), "mode='circular'"),
    (nn.AlphaDropout(0.5), "alpha_dropout would draw new numbers"),
    (nn.FeatureAlphaDropout(0.5), "feature_alpha_dropout would draw new numbers"),
    (nn.AdaptiveAvgPool2d(4), "different numbers of cells"),
    (nn.Upsample(71), "units that are too large"),
    (nn.Upsample(18, mode="bicubic"), "mode='bicubic'"),
]


@pytest.mark.parametrize(("layer", "reason"), REFUSED, ids=lambda value: type(value).__name__)
def test_what_is_not_supported_is_named(layer, reason):
    segment = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer, nn.Conv2d(4, 2, 3, padding=1)).double()
    x = torch.randn(2, 1, 9, 9, dtype=torch.float64)
    fast = check(nn.Sequential(segment, Backdrop2d(0.9)), x)
    ((path, why),) = fast.skip_report[0].kept
    assert path == "0.1"
    assert reason in why
    skip = Skip(copy.deepcopy(segment), Backdrop2d(0.9), when="always")
    plain = step(nn.Sequential(segment, Backdrop2d(0.9)), x)
    plain.parameters = {f"module{name[1:]}": grad for name, grad in plain.parameters.items()}
    assert_same_gradients(plain, step(skip, x))
    assert skip.report[0].kept == [("module.1", why)]
    assert skip.report[0].skipped[-1] == "module.2"
    assert "module.0" not in skip.report[0].skipped


@pytest.mark.parametrize(
    "layers",
    [
        (nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)),
        (
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            nn.AdaptiveAvgPool2d(3),
            nn.ReplicationPad2d((1, 2, 0, 1)),
        ),
        (nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReflectionPad2d(2)),
        (nn.Dropout(0.5), nn.Upsample(13, mode="bilinear"), nn.Dropout2d(0.3), nn.Dropout(0.1, inplace=True)),
        (nn.UpsamplingBilinear2d(scale_factor=2), nn.Upsample(12, mode="nearest-exact")),
        (nn.PixelUnshuffle(3), nn.Conv2d(36, 4, 1), nn.PixelShuffle(2), nn.Conv2d(1, 4, 1)),
    ],
    ids=lambda layers: type(layers[0]).__name__,
)
def test_what_is_supported(layers):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Conv2d(4, 2, 3, padding=1), Backdrop2d(0.9))
    fast = check(model.double(), torch.randn(2, 1, 9, 9, dtype=torch.float64))
    assert not fast.skip_report[0].kept
    assert fast.skip_report[0].skipped[0] == "0"
    assert ran_windows(fast)


def test_hooks_are_not_lost():
    """They are calls of the model like others, and are made once for the whole map."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), Backdrop2d(0.9)).double()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape) or output * 2)
    fast = check(model, torch.randn(1, 1, 12, 12, dtype=torch.float64))
    assert ran_windows(fast)
    assert seen == [(1, 2, 10, 10)] * 2  # by the plain model, and by the skipping one


def test_a_hook_that_is_added_later():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), Backdrop2d(0.9)).double()
    fast, x = skip_blocked(model, when="always"), torch.randn(1, 1, 12, 12, dtype=torch.float64)
    step(fast, x)
    for each in (model, fast):
        each[1].register_forward_hook(lambda module, args, output: output * 2)
    assert_same_gradients(step(model, x), step(fast, x))


def test_a_dropout_that_is_switched_on_later():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.0), nn.Conv2d(2, 2, 3), Backdrop2d(0.9)).double()
    x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    fast = skip_blocked(model, when="always")
    step(fast, x)
    assert "1" in fast.skip_report[0].skipped
    fast[1].p = model[1].p = 0.5
    assert_same_gradients(step(model, x), step(fast, x))
    assert "1" not in fast.skip_report[0].skipped


def test_a_layer_that_is_replaced():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), Backdrop2d(0.9)).double()
    fast, x = skip_blocked(model, when="always"), torch.randn(1, 1, 12, 12, dtype=torch.float64)
    step(fast, x)
    model[0] = nn.Conv2d(1, 2, 5, padding=1).double()
    fast[0] = copy.deepcopy(model[0])
    assert_same_gradients(step(model, x), step(fast, x))


POLES = {
    "sqrt": torch.sqrt,
    "log": torch.log,
    "pow": lambda x: x**0.5,
    "one over": lambda x: 1 / x,
    "divided": lambda x: x / x.norm(dim=1, keepdim=True),
    "root of a mean": lambda x: nn.functional.avg_pool2d(x, 3, 1, 1).sqrt() * x,
    "p-norms": lambda x: nn.functional.lp_pool2d(x, 2, 2, 1),
    "of two": lambda x: torch.xlogy(x, x) + torch.atan2(x, x),
}


@pytest.mark.parametrize("function", POLES.values(), ids=list(POLES))
def test_what_has_poles_outside_the_map(function):
    """There a convolution of zeros is zero, where such functions have infinite slopes; zero times that is no number."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
            self.second, self.mask = nn.Conv2d(4, 4, 5, padding=2), Backdrop2d(0.5, generator=torch.Generator())
            self.first.weight.data.abs_()

        def forward(self, x):
            return self.mask(self.second(function(self.first(x.abs() + 0.1))))

    fast = check(Model().double(), torch.randn(2, 2, 9, 9, dtype=torch.float64))
    assert fast.skip_report[0].share == 1
