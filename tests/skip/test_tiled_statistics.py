"""Statistics in tiles: the same as the engine computes on whole maps; running statistics against a slow reference."""

import copy

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, Skip, skip_blocked
from backdrop.skip.positions import Positions, Run
from backdrop.skip.stream import Stream
from skipping import assert_close, assert_same_gradients, captures, step
from sources import Held, step_on

pytestmark = captures


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.less, self.norm = nn.Conv2d(channels, 3, 1, bias=False), nn.BatchNorm2d(3)
        self.more = nn.Conv2d(3, channels, 1)

    def forward(self, x):
        return x * self.more(self.norm(self.less(x.mean((2, 3), keepdim=True))).relu()).sigmoid()


class Block(nn.Module):
    """Residual, with two normalisations behind each other and one beside them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs, momentum=0.3)
        self.beside, self.norm = nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs, affine=False)

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.norm(self.beside(x))).relu()


def networks():
    first = [nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()]
    return {
        "batch": nn.Sequential(*first, Block(4, 6, 2), Block(6, 6, 1), nn.Conv2d(6, 2, 3)),
        "group": nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2)),
        "instance": nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 3, 2)),
        "excite": nn.Sequential(*first, nn.Conv2d(4, 5, 3, 1, 1), SqueezeExcite(5), nn.ReLU(), nn.Conv2d(5, 3, 3)),
    }


@pytest.mark.parametrize("how", [{"tile": 8}, {"tile": 17}, {"memory": "370kB"}, {"memory": "4GB"}], ids=str)
@pytest.mark.parametrize("policy", ["sampled", "frozen", "running"])
@pytest.mark.parametrize("kind", ["batch", "group", "instance", "excite"])
def test_policies_mean_the_same_in_tiles(kind, policy, how):
    torch.manual_seed(0)
    model = nn.Sequential(networks()[kind], Backdrop2d(0.97, exact=True)).double()
    x = torch.randn(3, 1, 37, 42, dtype=torch.float64)
    whole = skip_blocked(model, statistics=policy, when="always")
    tiled = skip_blocked(model, statistics=policy, when="always", **how)
    sources = policy != "running" or kind == "batch"
    for seed in range(2):  # the second step has other running statistics
        a = step_on(whole, x, seed)
        for given in [x, *([Held(x)] if sources else [])]:
            copied = copy.deepcopy(tiled)
            b = step_on(copied, given, seed)
            assert_close(a.output, b.output, 1e-10)
            assert_same_gradients(a, b)
            for name, buffer in a.buffers.items():
                assert_close(buffer.double(), b.buffers[name].double(), 1e-10, name)
        tiled = copied
    assert "computed again" in tiled.skip_report[0].last


@pytest.mark.parametrize("how", [{"when": "lean"}, {"when": "always", "tile": 64}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_windows_in_parts_are_as_good_as_all_at_once(how, dtype, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(networks()["batch"], Backdrop2d(0.8)).to(dtype)
    x = torch.randn(2, 1, 37, 42, dtype=dtype)
    whole = skip_blocked(model, statistics="sampled", when="always")
    a = step(whole, x)
    units, replays, replay = int(whole.skip_report[0].last.split()[0]), [], Run.replay

    def counted(self, windows, entries):
        replays.append(len(windows))
        return replay(self, windows, entries)

    monkeypatch.setattr(Run, "replay", counted)
    monkeypatch.setattr(Run, "_chunk", lambda self, windows: 5)
    monkeypatch.setattr(Positions, "memory", lambda self, p: (2, 1))
    parts = skip_blocked(model, statistics="sampled", **how)
    b = step(parts, x)
    assert sum(replays) == 6 * units  # five normalisations behind each other, and the gradients
    assert max(replays) == 5
    assert_close(a.output, b.output, 1e-10 if dtype == torch.float64 else 1e-5)
    assert_same_gradients(a, b, 1e-10 if dtype == torch.float64 else 1e-4)


def test_one_pass_for_each_normalisation_behind_another():
    """Maps that there is room for are kept between passes, and the image is read once."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 64, 64)
    model = nn.Sequential(networks()["batch"], Backdrop2d(0.99))
    with pytest.raises(ValueError, match="the least that would do") as error:
        skip_blocked(model, statistics="sampled", when="always", memory=1000)(x)
    least = int(str(error.value).rpartition(" bytes")[0].rpartition(" ")[2])
    reads = []
    for memory in (2**32, 2 * least, least):
        source = Held(x)
        skip_blocked(model, statistics="sampled", when="always", memory=memory)(source)
        reads.append(sum((b - a) * (d - c) for _, (a, c), (b, d) in source.reads) / x.numel())
    assert reads[0] == 1
    assert reads[0] <= reads[1] <= reads[2]
    assert reads[2] > 5  # with halos
    source = Held(x)
    skip_blocked(model, statistics="running", tile=32)(source)
    assert sum((b - a) * (d - c) for _, (a, c), (b, d) in source.reads) / x.numel() < 3


class RunningNorm(nn.Module):
    """Written down from the definition: (x - m) / sqrt(v + eps) by what m and v were, which then take up those of x."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm, shape = self.norm, (1, -1, *[1] * (x.ndim - 2))
        mean, variance = norm.running_mean.clone(), norm.running_var.clone()
        y = (x - mean.view(shape)) / (variance.view(shape) + norm.eps).sqrt()
        y = y * norm.weight.view(shape) + norm.bias.view(shape)
        cells = x.detach().transpose(0, 1).flatten(1)
        new_mean = cells.sum(1) / cells.shape[1]
        new_variance = (cells - new_mean[:, None]).square().sum(1) / (cells.shape[1] - 1)
        norm.running_mean.copy_((1 - norm.momentum) * mean + norm.momentum * new_mean)
        norm.running_var.copy_((1 - norm.momentum) * variance + norm.momentum * new_variance)
        norm.num_batches_tracked += 1
        return y


CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MASK = {1: Backdrop1d, 2: Backdrop2d, 3: Backdrop3d}


def with_norms(spatial, mask, norm=lambda layer: layer):
    torch.manual_seed(0)
    conv, batch = CONV[spatial], NORM[spatial]
    return nn.Sequential(
        *(conv(2, 4, 3, 2, 1), norm(batch(4)), nn.ReLU(), conv(4, 3, 3), norm(batch(3, momentum=0.3))),
        *(mask, conv(3, 3, 1), norm(batch(3)), nn.Tanh()),  # one behind the mask, too
    ).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("how", [{}, {"tile": 7}, {"tile": 7, "when": "always"}, {"when": "always"}], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_running_statistics_are_those_of_the_reference(spatial, p, how, dtype):
    mask = MASK[spatial](p)
    reference = with_norms(spatial, mask, RunningNorm).to(dtype)
    model = skip_blocked(with_norms(spatial, mask).to(dtype), statistics="running", **how)
    x = torch.randn(2, 2, *{1: (41,), 2: (21, 17), 3: (9, 8, 11)}[spatial]).to(dtype)
    x[:1] += 1  # far from what the statistics begin with
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for seed in range(3):
        a, b = step(reference, x, seed=seed), step(model, x, seed=seed)
        for each in (a.parameters, a.buffers):
            for name in list(each):
                each[name.replace("norm.", "")] = each.pop(name)
        assert_close(a.output, b.output, tolerance)
        assert_same_gradients(a, b, tolerance)
        for name, buffer in a.buffers.items():
            assert_close(buffer.double(), b.buffers[name].double(), tolerance, name)
    with torch.no_grad():
        assert_close(reference(x), model(x), tolerance)  # the same model where no gradient is wanted


def test_running_statistics_before_masks_of_samples():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers, Backdrop(0.7)).double()
    reference = copy.deepcopy(model)
    reference[1] = RunningNorm(reference[1])
    fast, x = skip_blocked(model, statistics="running", when="always"), torch.randn(30, 5, dtype=torch.float64)
    for seed in range(2):
        a, b = step(reference, x, seed=seed), step(fast, x, seed=seed)
        a.parameters = {name.replace("norm.", ""): grad for name, grad in a.parameters.items()}
        assert_close(a.output, b.output, 1e-10)
        assert_same_gradients(a, b)
        assert_close(reference[1].norm.running_var, fast[1].running_var, 1e-10)


def test_running_statistics_need_layers_that_have_some():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), Backdrop2d(0.9))
    with pytest.raises(ValueError, match=r"but 1 has none; make it with track_running_stats=True"):
        skip_blocked(model, statistics="running")(torch.randn(2, 1, 9, 9))


def test_running_statistics_need_a_model_that_is_followed():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mask = nn.BatchNorm2d(1), Backdrop2d(0.9)

        def forward(self, x):
            return self.mask(self.hidden(x))

        @torch.compiler.disable
        def hidden(self, x):
            return self.norm(x)

    with pytest.raises(RuntimeError, match="follows from end to end"):
        skip_blocked(Broken(), statistics="running")(torch.randn(2, 1, 9, 9))


def test_a_failing_source_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(networks()["batch"], Backdrop2d(0.97)).double()
    x = torch.randn(2, 1, 37, 42, dtype=torch.float64)

    class DiskError(Exception):
        pass

    for policy in ("sampled", "running"):
        fast = skip_blocked(model, statistics=policy, when="always", tile=8)
        step_on(fast, Held(x))
        before = {name: value.clone() for name, value in fast.state_dict().items()}
        whole = Held(x)
        fast(whole)
        fast.load_state_dict(before)
        for at in (0, 3, len(whole.reads) - 1, len(whole.reads)):  # the last one in the backward pass

            def fails(number, sample, low, at=at):
                if number == at:
                    raise DiskError("bad sector")

            torch.manual_seed(1)
            with pytest.raises(
                RuntimeError, match=r"sample \d+, \[\d+:\d+, \d+:\d+\] of .* failed: DiskError: bad sector"
            ):
                fast(Held(x, fails)).square().sum().backward()
            for name, value in fast.state_dict().items():
                assert torch.equal(value, before[name]), name
        fast.zero_grad()
        a, b = step_on(copy.deepcopy(fast), Held(x)), step_on(fast, Held(x))  # and it goes on
        assert_same_gradients(a, b)


class Short(Held):
    def read(self, sample, low, high):
        return super().read(sample, low, high)[:, :-1]


class Other(Held):
    def read(self, sample, low, high):
        return super().read(sample, low, high).float()


@pytest.mark.parametrize(("kind", "said"), [(Short, "has to give the shape"), (Other, "has to give torch.float64")])
def test_reads_that_are_short_or_of_another_dtype(kind, said):
    model = skip_blocked(nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.9)).double(), tile=8)
    with pytest.raises((ValueError, TypeError), match=f"sample 0, .* {said}"):
        model(kind(torch.randn(1, 1, 20, 20, dtype=torch.float64)))


def test_what_reads_all_of_a_source_is_named():
    class Centred(nn.Sequential):
        def forward(self, x):
            return super().forward(x - x.mean((2, 3), keepdim=True))

    source = Held(torch.randn(1, 1, 20, 20))
    model = Centred(nn.Conv2d(1, 2, 3), Backdrop2d(0.9))
    with pytest.raises(RuntimeError, match=r"Held\(shape=\(1, 1, 20, 20\).* mean needs all of it at once"):
        skip_blocked(model, tile=8)(source)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), Backdrop2d(0.9))
    with pytest.raises(RuntimeError, match=r"0 needs all of it at once .*batch statistics"):
        skip_blocked(model, tile=8)(source)
    with pytest.raises(ValueError, match="give tile="):
        skip_blocked(model)(source)


def test_background_is_computed_once(monkeypatch):
    """Tiles of one value are computed once for each kind of place, and give the very same."""
    torch.manual_seed(0)
    calls, compute = [], Stream.compute

    def counted(self, *args):
        calls.append(args)
        return compute(self, *args)

    for policy in ("running", "sampled"):
        model = nn.Sequential(
            *(nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1)),
            *(nn.Conv2d(4, 3, 3, padding=1), Backdrop2d(0.99)),
        ).double()
        x = torch.ones(2, 2, 96, 96, dtype=torch.float64)
        x[:, 1] = 0.25
        x[0, :, 40:52, 30:80] = torch.randn(2, 12, 50, dtype=torch.float64)
        whole = skip_blocked(model, statistics=policy, when="always")
        tiled = skip_blocked(model, statistics=policy, when="always", tile=12)
        a, b = step_on(whole, x), step_on(tiled, Held(x))
        assert_close(a.output, b.output, 1e-10)
        assert_same_gradients(a, b)
        for name, buffer in a.buffers.items():
            assert_close(buffer.double(), b.buffers[name].double(), 1e-10, name)
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "compute", counted)
            skip_blocked(model, statistics="running", tile=12)(Held(x))
        assert len(calls) < 60  # of 128


def test_skip_says_running():
    skip = Skip(nn.Conv2d(1, 2, 3), Backdrop2d(0.9), statistics="running", memory="2GB")
    assert "statistics='running', memory=2000000000" in repr(skip)
