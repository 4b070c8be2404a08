"""Segments in tiles against the plain masked model: random segments, borders, halos, branches and sources."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import processes
from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, Skip, skip_blocked
from backdrop.skip.positions import Positions
from skip.test_windows import masks, segments
from skipping import ChannelNorm, assert_close, assert_same_gradients, captures, check, step
from sources import Held, step_on

pytestmark = [captures, pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")]


def in_tiles_backward(monkeypatch):
    """The backward pass in tiles, too, wherever it can."""
    monkeypatch.setattr(Positions, "tiles_pay", lambda self, device: self.tiling.in_tiles)


@pytest.mark.parametrize("backward", ["windows", "tiles"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
@settings(max_examples=12)
@given(data=st.data())
def test_random_segments_in_tiles_have_the_gradients_of_the_plain_pair(spatial, backward, data):
    segment, x = data.draw(segments(spatial))
    mask = data.draw(masks(spatial))
    smallest = 1
    for layer in segment.modules():
        stride = getattr(layer, "stride", 1)
        smallest *= stride if isinstance(stride, int) else max(stride)
    tile = data.draw(st.integers(smallest, smallest + 20))
    with pytest.MonkeyPatch.context() as patch:
        if backward == "tiles":
            in_tiles_backward(patch)
        check(nn.Sequential(segment, mask), x, seed=data.draw(st.integers(0, 9)), tile=tile)


class Net(nn.Module):
    """Branches, a skip connection over two scales, padding of all kinds, and a mask at one of two places."""

    def __init__(self, p=0.97, spatial=2, where="output", patch=1, choose="uniform"):
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[spatial]
        up = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[spatial]
        mask = {1: Backdrop1d, 2: Backdrop2d, 3: Backdrop3d}[spatial]
        self.first = conv(2, 4, 3, padding=1, padding_mode="replicate" if spatial > 1 else "zeros")
        self.norm = ChannelNorm(4, spatial)
        self.down = conv(4, 6, 3, stride=2, padding=1)
        self.deep = conv(6, 6, 3, padding=2, dilation=2)
        self.up = up(6, 4, 4, stride=2, padding=1)
        self.last = conv(8, 3, 3, padding=1)
        self.mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[spatial]
        self.pool = getattr(F, f"max_pool{spatial}d")
        self.mask, self.where = mask(p, patch=patch, choose=choose, exact=True), where

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        y = self.down(x)
        y = (y + self.deep(y).relu()).tanh()
        if self.where == "bottleneck":
            y = self.mask(y)
        up = self.up(y)
        wide = F.interpolate(self.pool(y, 3, 1, 1)[:, :4], scale_factor=2, mode=self.mode)
        x = self.last(torch.cat([up, x + wide], 1))
        return self.mask(x) if self.where == "output" else x


SIZES = {1: (2, 2, 46), 2: (2, 2, 26, 34), 3: (2, 2, 10, 8, 12)}


@pytest.mark.parametrize("backward", ["windows", "tiles"])
@pytest.mark.parametrize("where", ["output", "bottleneck"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_skip_connections(spatial, where, backward, monkeypatch):
    if backward == "tiles":
        in_tiles_backward(monkeypatch)
    x = torch.randn(SIZES[spatial], dtype=torch.float64)
    for tile in (2, 7, 100) if spatial < 3 else (5,):
        model = Net(spatial=spatial, where=where).double()
        fast = check(model, x, tile=tile)
        assert "computed again" in fast.skip_report[0].last
        assert ("tiles" in fast.skip_report[0].last) == (backward == "tiles")
        a, b = step_on(copy.deepcopy(model), x), step_on(fast, Held(x)) if where == "output" else None
        if b is not None:
            assert_close(a.output, b.output, 1e-10)
            assert_same_gradients(a, b)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("settings", [{"tile": 9}, {"tile": (6, 20)}, {"memory": "400kB"}, {"tile": 64}], ids=str)
def test_from_dense_to_one_unit(p, settings):
    model, x = Net(p, patch=2).double(), torch.randn(2, 2, 26, 34, dtype=torch.float64)
    source = Held(x)
    fast = check(model, x, when="pays", **settings)
    a, b = step_on(copy.deepcopy(model), x), step_on(fast, source)
    assert_close(a.output, b.output, 1e-10)
    assert_same_gradients(a, b)
    assert "computed again" in fast.skip_report[0].last
    assert source.largest < 26 * 34 or settings in ({"tile": 64}, {"memory": "400kB"})


def test_in_float32():
    model, x = Net(0.9), torch.randn(2, 2, 26, 34)
    for how in ({"tile": 9}, {"memory": "250kB"}):
        check(model, x, when="pays", tolerance=2e-5, **how)


def test_informed_masks():
    model, x = Net(0.9, choose="gradient").double(), torch.randn(2, 2, 26, 34, dtype=torch.float64)
    for when in ("pays", "always"):
        fast = check(model, x, tile=9, when=when)
        assert "chosen by gradients" in fast.skip_report[0].last


def test_several_masks():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), Backdrop2d(0.9, exact=True)),
        *(nn.Conv2d(4, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1), Backdrop2d(0.8, patch=3)),
        *(nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(1)),
    ).double()
    x = torch.randn(2, 1, 29, 31, dtype=torch.float64)
    for how in ({"tile": 6}, {"memory": "400kB"}):
        fast = check(model, x, **how)
        assert all("computed again" in entry.last for entry in fast.skip_report)
        assert_same_gradients(step_on(copy.deepcopy(model), x), step_on(fast, Held(x)))


def test_one_module_and_one_mask():
    torch.manual_seed(0)
    segment, mask = nn.Sequential(nn.Conv1d(1, 3, 5, 2), nn.GELU(), nn.Conv1d(3, 2, 3)).double(), Backdrop1d(0.9)
    x = torch.randn(3, 1, 101, dtype=torch.float64)
    skip = Skip(segment, mask, tile=16)
    assert "tile=16" in repr(skip)
    plain = step(nn.Sequential(segment, mask), x)
    plain.parameters = {f"module{name[1:]}": grad for name, grad in plain.parameters.items()}
    assert_same_gradients(plain, step(skip, x))


def test_the_first_whole_map_is_the_one_at_the_mask():
    """No call gives more than a tile with its halo, but for what is put together at the mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, 4, 1), Backdrop2d(0.99))
    fast, source = skip_blocked(model, tile=16), Held(torch.randn(1, 1, 128, 128))
    step_on(fast, source)
    assert source.largest <= 20 * 20


def test_evaluation_runs_in_tiles():
    model, x = Net(0.9).double(), torch.randn(2, 2, 26, 34, dtype=torch.float64)
    fast, source = skip_blocked(model, tile=9).eval(), Held(x)
    with torch.no_grad():
        torch.testing.assert_close(fast(source), copy.deepcopy(model).eval()(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast(source), copy.deepcopy(model).eval()(x), rtol=1e-10, atol=1e-12)
    assert source.largest < 26 * 34


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype):
    model, x = Net(0.9), torch.randn(2, 2, 26, 34)
    for how in ({"tile": 9}, {"tile": 9, "when": "always"}):
        fast, outputs, gradients = skip_blocked(model, **how), [], []
        for each in (copy.deepcopy(model), fast):
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype):
                y = each(x)
            y.float().square().mean().backward()
            outputs.append(y)
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert outputs[0].dtype == outputs[1].dtype
        a, b = (torch.cat([grad.flatten() for grad in each]) for each in gradients)
        assert (a - b).norm() < 0.03 * a.norm()


def test_channels_last_and_accumulation():
    model = Net(0.9).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 2, 26, 34, dtype=torch.float64).to(memory_format=torch.channels_last)
    plain, fast = copy.deepcopy(model), skip_blocked(model, tile=9)
    for each in (plain, fast):
        torch.manual_seed(0)
        for _ in range(2):
            y = each(x)
            y.square().sum().backward()
        each.strides = y.stride()
    assert plain.strides == fast.strides
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


def test_a_new_size_costs_no_second_pass(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), Backdrop2d(0.9)).double()
    fast, seen = skip_blocked(model, tile=8), []
    for size in (16, 19, 24, 33, 16):
        source = Held(torch.randn(1, 1, size, size, dtype=torch.float64))
        fast(source)
        seen.append(sum((b - a) * (d - c) for _, (a, c), (b, d) in source.reads) / size**2)
    assert max(seen) < 2  # with halos


def test_only_tiles_with_a_gradient_are_computed_again(monkeypatch):
    in_tiles_backward(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), Backdrop2d(0.5)).double()
    fast, x = skip_blocked(model, tile=8), torch.randn(1, 1, 32, 32, dtype=torch.float64)
    fast(x)[:, :, :8, :8].sum().backward()
    assert fast.skip_report[0].last == "1 of 16 tiles were computed again"


def test_masks_are_drawn_as_in_the_plain_model():
    model, x = Net(0.9).double(), torch.randn(2, 2, 26, 34, dtype=torch.float64)
    fast, states = skip_blocked(model, tile=9), []
    for each in (model, fast):
        torch.manual_seed(0)
        each(x).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_what_the_report_says():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), Backdrop2d(0.99), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    fast = skip_blocked(nn.Sequential(*layers), memory="1MB")
    fast(torch.randn(1, 1, 256, 256)).sum().backward()
    (entry,) = fast.skip_report
    # At the mask: 4 channels of 128 x 128 in float32, and a gradient; behind it a convolution and a rectifier.
    assert entry.tiles.startswith("1 x 3, 1.00 times the work of the whole; about ")
    assert entry.tiles.endswith(" kept; what lies outside of segments keeps about 508 kB")
    assert f"  in tiles: {entry.tiles}\n" in str(entry)


def test_segments_share_a_budget():
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), Backdrop2d(0.99)]
    second = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), Backdrop2d(0.9)]
    x, said = torch.randn(1, 1, 128, 128), []
    for layers in (first, [*first, *second]):
        fast = skip_blocked(nn.Sequential(*layers), memory="2100kB")
        fast(x)
        said.append(fast.skip_report[0].tiles)
    # The value at the mask and its gradient are 524 kB; the second segment has as much.
    assert ", 688 kB kept" in said[0]
    assert ", 1.21 MB kept" in said[1]


@pytest.mark.parametrize("dims", [(2, 3), (0, 2), (0, 3)])
def test_masks_along_some_axes_of_space(dims):
    """A source is read along all of the others."""
    layers = [nn.Conv2d(1, 3, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), Backdrop(0.8, dims=dims)]
    model, x = nn.Sequential(*layers).double(), torch.randn(3, 1, 33, 41, dtype=torch.float64)
    fast = check(model, x, tile=10)
    a, b = step_on(copy.deepcopy(model), x), step_on(fast, Held(x))
    assert_close(a.output, b.output, 1e-10)
    assert_same_gradients(a, b)


def test_positions_along_the_second_axis():
    """As of tokens, (samples, tokens, channels)."""
    layers = [nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3), Backdrop(0.8, dims=(0, 1))]
    model, x = nn.Sequential(*layers).double(), torch.randn(3, 50, 6, dtype=torch.float64)
    fast = check(model, x, tile=7)
    a, b = step_on(copy.deepcopy(model), x), step_on(fast, Held(x))
    assert_close(a.output, b.output, 1e-10)
    assert_same_gradients(a, b)


def test_samples_of_a_source_lie_along_the_first_axis():
    class Turned(nn.Sequential):
        def forward(self, x):
            return super().forward(x.transpose(0, 2))

    model = skip_blocked(Turned(nn.Conv1d(1, 4, 3, 2, 1), nn.ReLU(), Backdrop1d(0.8)), tile=7)
    with pytest.raises(RuntimeError, match="samples along axis 0, but the model has them along 2"):
        model(Held(torch.randn(40, 1, 3)))


def test_zeros_of_either_sign_are_not_one_value():
    class Inverse(nn.Module):
        def forward(self, x):
            return (1 / x).tanh()

    x = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    x[..., 8:] = -0.0
    model = nn.Sequential(Inverse(), nn.Conv2d(1, 1, 1), Backdrop2d(0.5)).double()
    fast = skip_blocked(model, tile=8)
    assert_close(step_on(copy.deepcopy(model), x).output, step_on(fast, Held(x)).output, 1e-10)


def _each_its_own_images(rank):
    """Gradients of a model in tiles and of the plain one, on images whose sizes differ from process to process."""
    found = []
    for tile in (None, 9):
        torch.manual_seed(0)
        model = Net(0.9).double()
        model = model if tile is None else skip_blocked(model, tile=tile)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            x = torch.randn(1, 2, 26 + 4 * rank, 30 + 2 * i, dtype=torch.float64)
            wrapped(x if tile is None else Held(x)).square().sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-4 * parameter.grad
                    parameter.grad = None
    return found


def test_two_processes_with_images_of_their_own():
    one, other = processes.run(_each_its_own_images, 2, timeout=120)
    for found in (one, other):
        torch.testing.assert_close(found[3:], found[:3], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Images(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        x = torch.randn(1, 1, 24 + 3 * i, 30 - i, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        return Held(x), i


def test_resuming_in_the_middle_of_an_epoch():
    """What is stored is what any training stores: weights, buffers, the optimiser and the random numbers."""

    def trained(stop, stored=None):
        torch.manual_seed(1)
        layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), Backdrop2d(0.9)]
        model = skip_blocked(nn.Sequential(*layers).double(), statistics="running", tile=8)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        if stored is not None:
            model.load_state_dict(stored["model"])
            optimiser.load_state_dict(stored["optimiser"])
            torch.set_rng_state(stored["random"])
        done, order = 0, torch.Generator()
        for epoch in range(2):
            order.manual_seed(epoch)
            for source, label in DataLoader(Images(), batch_size=None, shuffle=True, generator=order):
                done += 1
                if stored is not None and done <= stored["done"]:
                    continue
                (model(source).mean() - label).square().backward()
                if done % 2 == 0:  # gradients of two images add up
                    optimiser.step()
                    optimiser.zero_grad()
                if done == stop:
                    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                    return copy.deepcopy(state | {"random": torch.get_rng_state(), "done": done})
        return model.state_dict()

    whole, again = trained(0), trained(0, trained(4))
    assert whole.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


BAD = [
    ({"tile": 0}, ValueError, "at least 1"),
    ({"tile": 2.5}, TypeError, "whole number"),
    ({"tile": True}, TypeError, "whole number"),
    ({"tile": "large"}, ValueError, "'auto'"),
    ({"tile": "auto"}, ValueError, "memory='4GB'"),
    ({"memory": "lots"}, ValueError, "such as '4GB'"),
    ({"memory": "4 parsecs"}, ValueError, "such as '4GB'"),
    ({"memory": 0}, ValueError, "at least one byte"),
    ({"memory": 1.5}, TypeError, "whole number"),
]


@pytest.mark.parametrize(("settings", "kind", "said"), BAD, ids=str)
def test_what_cannot_be_a_tile_or_a_budget(settings, kind, said):
    with pytest.raises(kind, match=said):
        skip_blocked(nn.Sequential(nn.Conv2d(1, 1, 3), Backdrop2d(0.9)), **settings)


def test_tiles_below_the_stride():
    model = skip_blocked(nn.Sequential(nn.Conv2d(1, 1, 4, 4), Backdrop2d(0.9)), tile=3)
    with pytest.raises(ValueError, match="at least 4 along each axis"):
        model(torch.randn(1, 1, 32, 32))
    with pytest.raises(ValueError, match="one for each of 2 axes"):
        skip_blocked(nn.Sequential(nn.Conv2d(1, 1, 4, 4), Backdrop2d(0.9)), tile=(8, 8, 8))(torch.randn(1, 1, 32, 32))


def test_a_budget_that_nothing_fits_in_says_the_least_that_would():
    model, x = Net(0.99).double(), torch.randn(1, 2, 64, 64, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="the least that would do") as error:
        skip_blocked(model, memory=10_000)(x)
    least = int(str(error.value).rpartition(" bytes")[0].rpartition(" ")[2])
    check(model, x, memory=least)
    assert least < 700_000
    with pytest.raises(ValueError, match="the least that would do"):
        skip_blocked(model, memory=int(least * 0.9))(x)
