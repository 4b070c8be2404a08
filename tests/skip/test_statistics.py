"""Layers with statistics over the batch or over space: the three policies against slow references."""

import copy

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, Skip, skip_blocked
from backdrop._core import kernels
from backdrop.skip import windows
from backdrop.skip.epilogue import Epilogue, Moments, finish
from skipping import assert_close, assert_same_gradients, captures, check, ran_windows, step

pytestmark = captures


def network(order):
    """Two blocks of a convolution, batch normalisation and a rectifier in one order or the other, and pooling."""

    def block(inputs, outputs, **settings):
        conv, norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **settings), nn.BatchNorm2d(outputs)
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
        return [conv, norm, nn.ReLU()] if order == "norm first" else [conv, nn.ReLU(), norm]

    return nn.Sequential(*block(2, 3), *block(3, 4, stride=2), nn.MaxPool2d(3, 2, 1)).double()


def test_exact_is_the_plain_gradient_and_says_where_skipping_ends():
    model = nn.Sequential(network("relu first"), Backdrop2d(0.9)).double()
    fast = check(model, torch.randn(2, 2, 20, 21, dtype=torch.float64))
    assert fast.skip_report[0].skipped == ["0.6"]
    ((path, reason),) = fast.skip_report[0].kept
    assert path == "0.5"
    assert "batch statistics couple all samples and positions" in reason


def test_exact_with_samples_dropped():
    model = nn.Sequential(network("norm first"), Backdrop(0.8)).double()
    fast = check(model, torch.randn(10, 2, 12, 11, dtype=torch.float64))
    assert fast.skip_report[0].skipped == ["0.5", "0.6"]
    assert fast.skip_report[0].kept[0][0] == "0.4"


class Reference(torch.autograd.Function):
    """Batch normalisation over a batch in which each sample may stand for a window.

    `full` holds the activations that the statistics are taken from; `cells` says which cells of x count.
    """

    @staticmethod
    def forward(ctx, x, gamma, beta, full, cells, policy, eps):
        mean = full.mean((0, 2, 3), keepdim=True)
        std = (full.var((0, 2, 3), keepdim=True, correction=0) + eps).sqrt()
        x_hat = (x - mean) / std
        ctx.save_for_backward(x_hat, std, gamma, cells)
        ctx.policy = policy
        return x_hat * gamma.view(1, -1, 1, 1) + beta.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx, dy):
        x_hat, std, gamma, cells = ctx.saved_tensors
        dy = dy * cells
        number = cells.sum()
        inner = dy.clone()
        if ctx.policy == "sampled":
            inner -= dy.sum((0, 2, 3), keepdim=True) / number
            inner -= x_hat * (dy * x_hat).sum((0, 2, 3), keepdim=True) / number
        dx = inner * cells * gamma.view(1, -1, 1, 1) / std
        return dx, (dy * x_hat).sum((0, 2, 3)), dy.sum((0, 2, 3)), None, None, None, None


class PerSample(torch.autograd.Function):
    """Normalisation of copies of maps, each with the statistics of its sample's groups of channels.

    The formula of `Reference` over the cells that count in all copies of a sample, for every group.
    """

    @staticmethod
    def forward(ctx, x, full, cells, sample, groups, policy, eps):
        wide = full.unflatten(1, (groups, -1))
        mean = wide.mean((2, 3, 4), keepdim=True)[sample]
        std = (wide.var((2, 3, 4), keepdim=True, correction=0) + eps).sqrt()[sample]
        x_hat = (x.unflatten(1, (groups, -1)) - mean) / std
        ctx.save_for_backward(x_hat, std, cells, sample)
        ctx.policy = policy
        return x_hat.flatten(1, 2)

    @staticmethod
    def backward(ctx, dy):
        x_hat, std, cells, sample = ctx.saved_tensors
        cells = cells[:, None].expand_as(x_hat)
        dy = dy.view_as(x_hat) * cells
        dx = dy.clone()
        if ctx.policy == "sampled":
            for n in sample.unique():
                own = sample == n
                number = cells[own].sum((0, 2, 3, 4), keepdim=True)
                dx[own] -= dy[own].sum((0, 2, 3, 4), keepdim=True) / number
                dx[own] -= x_hat[own] * (dy[own] * x_hat[own]).sum((0, 2, 3, 4), keepdim=True) / number
        return (dx * cells / std).flatten(1, 2), *[None] * 6


class Mean(torch.autograd.Function):
    """The mean over a whole map for every sample; its gradient goes evenly to the cells that count in its copies."""

    @staticmethod
    def forward(ctx, x, full, cells, sample, policy):
        ctx.save_for_backward(cells, sample)
        ctx.channels, ctx.policy = x.shape[1], policy
        return full.mean((2, 3))

    @staticmethod
    def backward(ctx, grad):
        cells, sample = ctx.saved_tensors
        dx = torch.zeros_like(cells).repeat(1, ctx.channels, 1, 1)
        if ctx.policy == "sampled":
            for k, n in enumerate(sample.tolist()):
                dx[k] = cells[k] * grad[n].view(-1, 1, 1) / cells[sample == n].sum()
        return dx, *[None] * 4


class SqueezeExcite(nn.Module):
    """Channels weighted by what a small network makes of their means."""

    def __init__(self, channels, way):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.a, self.b, self.way = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1), way

    def gate(self, mean):
        return torch.sigmoid(self.b(nn.functional.relu(self.a(mean), inplace=True)))

    def forward(self, x):
        if self.way == "layer":
            return x * self.gate(self.pool(x))
        if self.way == "keepdim":
            return x * self.gate(x.mean((2, 3), keepdim=True))
        return self.gate(x.mean(dim=[-1, -2])[:, :, None, None]).expand_as(x) * x


class Whole(torch.autograd.Function):
    """A whole map; what its gradient is at the cells that count in the copies of a sample stands for all cells."""

    @staticmethod
    def forward(ctx, x, full, cells, sample, policy):
        ctx.save_for_backward(cells, sample)
        ctx.policy = policy
        return full.clone()

    @staticmethod
    def backward(ctx, grad):
        cells, sample = ctx.saved_tensors
        dx = cells * grad[sample]
        for k, n in enumerate(sample.tolist()):
            dx[k] *= grad[0, 0].numel() / cells[sample == n].sum() if ctx.policy == "sampled" else 0
        return dx, *[None] * 4


class Gathering(nn.Module):
    """Something that is made of all positions of a sample, and then used at each of them.

    `late`: the map goes on before that is made of it, as a graph has it.
    """

    def __init__(self, channels, late=False):
        super().__init__()
        self.gate, self.late = nn.Conv2d(channels, channels, 1), late

    def join(self, x, pooled):
        return x * pooled

    def forward(self, x):
        if not self.late:
            return self.join(x, self.pooled(x))
        y = nn.functional.silu(x)
        return self.join(y, self.pooled(x))


class Context(Gathering):
    """Weights for all positions that sum up to one."""

    def __init__(self, channels):
        super().__init__(channels)
        self.look, self.norm = nn.Conv2d(channels, 1, 3, padding=1), nn.BatchNorm2d(channels)

    def pooled(self, x):
        weights = self.look(x).flatten(2).softmax(-1)
        context = x.flatten(2) @ weights.transpose(1, 2)
        return torch.sigmoid(self.gate(self.norm(context.unsqueeze(3))))


class Response(Gathering):
    """The norm of each channel over that of all."""

    def pooled(self, x):
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        return self.gate(size / (size.mean(1, keepdim=True) + 1e-6))


class Largest(Gathering):
    def pooled(self, x):
        return self.gate(x.amax((2, 3), keepdim=True))


class Average(Gathering):
    def pooled(self, x):
        return self.gate(x.mean((2, 3), keepdim=True))


def reference_layer(layer, y, full, cells, sample, policy):
    """One layer on copies of maps, where `cells` count, and on the whole maps."""
    if isinstance(layer, nn.BatchNorm2d):
        y = Reference.apply(y, layer.weight, layer.bias, full, cells, policy, layer.eps)
        return y, nn.functional.batch_norm(full, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
    if isinstance(layer, (nn.GroupNorm, nn.InstanceNorm2d)):
        groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else full.shape[1]
        y = PerSample.apply(y, full, cells, sample, groups, policy, layer.eps)
        if layer.weight is not None:
            y = y * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
    elif isinstance(layer, Gathering):
        pooled = layer.pooled(Whole.apply(y, full, cells, sample, policy))[sample]
        y = layer.join(nn.functional.silu(y) if layer.late else y, pooled)
    elif isinstance(layer, SqueezeExcite):
        y = y * layer.gate(Mean.apply(y, full, cells, sample, policy)[:, :, None, None])[sample]
    else:
        y = layer(y)
    return y, layer(full)


def reference_gradients(stage, x, weight, upstream, policy, boxes):
    """Every kept unit has a whole copy of the map to itself, in which only the cells of its boxes count.

    `boxes` gives for each layer, per axis, the first cell and the number of cells that one unit needs of its output.
    """
    units = weight[:, 0].nonzero()
    copies = x[units[:, 0]].clone().requires_grad_()
    full, y = x, copies
    for index, layer in enumerate(stage):
        cells = torch.zeros(len(units), 1, *y.shape[2:], dtype=y.dtype)
        for k, (_, *unit) in enumerate(units.tolist()):
            spans = [
                range(max(0, step * u + start), min(size, step * u + start + count))
                for u, size, (step, start, count) in zip(unit, y.shape[2:], boxes[index], strict=True)
            ]
            cells[k, 0, spans[0].start : spans[0].stop, spans[1].start : spans[1].stop] = 1
        y, full = reference_layer(layer, y, full, cells, units[:, 0], policy)
    seeds = torch.zeros_like(y)
    for k, (n, i, j) in enumerate(units.tolist()):
        seeds[k, :, i, j] = upstream[n, :, i, j] * weight[n, 0, i, j]
    parameters = list(stage.parameters())
    grads = torch.autograd.grad(y, [copies, *parameters], seeds)
    total = torch.zeros_like(x)
    total.index_add_(0, units[:, 0], grads[0])
    return total, grads[1:]


def boxes_of(stage):
    """(step, start, count) of the cells of each layer's output that unit u needs, by walking back through kernels."""
    step, start, count = 1, 0, 1
    found = {}
    for index in reversed(range(len(stage))):
        found[index] = [(step, start, count)] * 2
        layer = stage[index]
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            kernel, stride, padding = (
                value[0] if isinstance(value, tuple) else value
                for value in (layer.kernel_size, layer.stride, layer.padding)
            )
            step, start, count = step * stride, start * stride - padding, (count - 1) * stride + kernel
    return found


@pytest.fixture
def drawn(monkeypatch):
    """The weights of all masks that were drawn."""
    found, draw = [], Backdrop2d.draw_weight
    monkeypatch.setattr(Backdrop2d, "draw_weight", lambda self, x: found.append(draw(self, x)) or found[-1])
    return found


def assert_by_definition(stage, x, policy, drawn, ps):
    skip = Skip(copy.deepcopy(stage), Backdrop2d(ps[0]), statistics=policy, when="always")
    for p in ps:
        skip.mask.p = p
        skip.zero_grad()
        inputs = x.clone().requires_grad_()
        output = skip(inputs)
        upstream = torch.randn_like(output)
        output.backward(upstream)
        assert "computed again" in skip.report[0].last
        assert not skip.report[0].kept
        assert skip.report[0].skipped[0] == "module.0"
        grad, parameters = reference_gradients(stage, x, drawn[-1], upstream, policy, boxes_of(stage))
        assert_close(grad, inputs.grad, 1e-10, "input")
        for (name, _), a, b in zip(stage.named_parameters(), parameters, skip.module.parameters(), strict=True):
            assert_close(a, b.grad, 1e-10, name)


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("order", ["norm first", "relu first"])
def test_positions_against_the_definition(policy, order, drawn, monkeypatch):
    monkeypatch.setattr(windows, "ONE_THREAD", 100)  # so that cells are counted in several parts
    stage, x = network(order), torch.randn(2, 2, 21, 18, dtype=torch.float64)
    assert_by_definition(stage, x, policy, drawn, ps=(0.7, 0.95, 0.999))


def over_space(kind):
    """Two blocks with a layer that takes statistics over the positions of each sample."""
    make = {
        "group norm": lambda: nn.GroupNorm(2, 4),
        "group norm without weights": lambda: nn.GroupNorm(1, 4, affine=False, eps=1e-3),
        "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
        "instance norm without weights": lambda: nn.InstanceNorm2d(4),
        "layer": lambda: SqueezeExcite(4, "layer"),
        "keepdim": lambda: SqueezeExcite(4, "keepdim"),
        "squeezed": lambda: SqueezeExcite(4, "squeezed"),
        "context": lambda: Context(4),
        "response": lambda: Response(4),
        "response, late": lambda: Response(4, late=True),
        "largest": lambda: Largest(4),
        "average, late": lambda: Average(4, late=True),
    }[kind]
    first, second = make(), make()
    for parameter in (*first.parameters(), *second.parameters()):
        nn.init.normal_(parameter)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), first, nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.Tanh()),
        *(second, nn.MaxPool2d(3, 2, 1)),
    ).double()


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize(
    "kind", ["group norm", "group norm without weights", "instance norm", "instance norm without weights"]
)
def test_norms_over_space_against_the_definition(policy, kind, drawn):
    x = torch.randn(3, 2, 21, 18, dtype=torch.float64)
    assert_by_definition(over_space(kind), x, policy, drawn, ps=(0.7, 0.95, 0.99))


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("kind", ["layer", "keepdim", "squeezed", "average, late"])
def test_means_over_space_against_the_definition(policy, kind, drawn):
    x = torch.randn(3, 2, 21, 18, dtype=torch.float64)
    assert_by_definition(over_space(kind), x, policy, drawn, ps=(0.7, 0.95, 0.99))


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("kind", ["context", "response", "response, late", "largest"])
def test_what_all_positions_make_against_the_definition(policy, kind, drawn):
    x = torch.randn(3, 2, 21, 18, dtype=torch.float64)
    assert_by_definition(over_space(kind), x, policy, drawn, ps=(0.7, 0.95, 0.99))


class Written(nn.Module):
    """The map is written over behind its use for a value of all positions."""

    def __init__(self):
        super().__init__()
        self.a, self.gate, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 3)

    def forward(self, x):
        h = self.a(x)
        h.add_(self.gate(h.sum((2, 3), keepdim=True).tanh()))
        return self.b(h.sigmoid())


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
def test_what_all_positions_make_of_a_map_that_is_written_over(policy):
    model = nn.Sequential(Written(), Backdrop2d(0.9, generator=torch.Generator())).double()
    fast = skip_blocked(model, statistics=policy, when="always")
    x = torch.randn(3, 2, 30, 28, dtype=torch.float64)
    a, b = step(model, x), step(fast, x)
    assert_close(a.output, b.output, 1e-10)
    assert not fast.skip_report[0].kept
    for name in ("0.gate.weight", "0.gate.bias", "0.b.weight", "0.b.bias"):
        assert_close(a.parameters[name], b.parameters[name], 1e-10, name)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x):
        h = self.first(x)
        return self.last((h @ h.tanh().transpose(1, 2)).softmax(-1) @ h)


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
def test_attention_is_never_estimated(policy):
    model = nn.Sequential(Attending(), Backdrop(0.8, dims=(0, 1), generator=torch.Generator())).double()
    fast = check(model, torch.randn(3, 20, 4, dtype=torch.float64), statistics=policy)
    assert fast.skip_report[0].kept


class Dropping(SqueezeExcite):
    def gate(self, mean):
        return super().gate(nn.functional.dropout(mean, 0.5))


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
def test_numbers_drawn_in_a_branch_are_not_drawn_again(policy):
    body = nn.Sequential(nn.Conv2d(2, 4, 3), Dropping(4, "keepdim"), nn.Conv2d(4, 3, 3))
    model = nn.Sequential(body, Backdrop2d(0.9, generator=torch.Generator())).double()
    fast = skip_blocked(model, statistics=policy, when="always")
    x = torch.randn(3, 2, 30, 28, dtype=torch.float64)
    a, b = step(model, x), step(fast, x)
    assert ran_windows(fast)
    assert_close(a.output, b.output, 1e-10)
    for name in ("0.1.a.weight", "0.1.a.bias", "0.1.b.weight", "0.1.b.bias"):
        assert_close(a.parameters[name], b.parameters[name], 1e-10, name)


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
def test_the_branch_of_a_mean_has_the_exact_gradient(policy):
    """What differs from the plain gradient is what goes through the mean to the cells that it was taken over."""
    model = nn.Sequential(*over_space("layer")[3:], nn.Conv2d(4, 2, 3), Backdrop2d(0.9)).double()
    fast = skip_blocked(model, statistics=policy, when="always")
    x = torch.randn(3, 4, 30, 28, dtype=torch.float64)
    a, b = step(model, x), step(fast, x)
    assert_close(a.output, b.output, 1e-10)
    assert fast.skip_report[0].skipped[0] == "0"
    for name in ("2.a.weight", "2.a.bias", "2.b.weight", "2.b.bias", "4.weight", "4.bias"):
        assert_close(a.parameters[name], b.parameters[name], 1e-10, name)
    error = (a.parameters["0.weight"] - b.parameters["0.weight"]).norm() / a.parameters["0.weight"].norm()
    assert 1e-6 < error < 1


@pytest.mark.parametrize("kind", ["group norm", "layer"])
def test_exact_ends_at_statistics_over_space(kind):
    fast = check(nn.Sequential(over_space(kind), Backdrop2d(0.9)), torch.randn(2, 2, 20, 21, dtype=torch.float64))
    assert ran_windows(fast)
    assert fast.skip_report[0].skipped[-1] == "0.6"
    assert "0.3" not in fast.skip_report[0].skipped
    assert fast.skip_report[0].kept


@pytest.mark.parametrize("kind", ["group norm", "instance norm", "squeezed"])
def test_statistics_over_space_do_not_couple_samples(kind):
    fast = check(nn.Sequential(over_space(kind), Backdrop(0.6)), torch.randn(8, 2, 12, 11, dtype=torch.float64))
    assert "samples ran with gradients" in fast.skip_report[0].last
    assert not fast.skip_report[0].kept
    assert fast.skip_report[0].skipped[0] == "0.0"


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("order", ["norm first", "relu first"])
def test_samples_against_the_definition(policy, order, monkeypatch):
    """On a GPU the kept samples are rounded up with blocked ones, over which "sampled" takes its formula, too."""
    stage, x = network(order), torch.randn(9, 2, 10, 11, dtype=torch.float64)
    mask = Backdrop(0.6)
    skip = Skip(copy.deepcopy(stage), mask, statistics=policy, when="always")
    for more in (0, 2):
        monkeypatch.setattr(kernels, "few_shapes", lambda number, device, more=more: number + more)
        skip.zero_grad()
        torch.manual_seed(0)
        inputs = x.clone().requires_grad_()
        output = skip(inputs)
        assert "samples ran with gradients" in skip.report[0].last
        upstream = torch.randn_like(output)
        output.backward(upstream)
        torch.manual_seed(0)
        weight = mask.draw_weight(x)[:, 0, 0, 0]
        kept = torch.cat([weight.nonzero().flatten(), (weight == 0).nonzero().flatten()[:more]])
        assert skip.report[0].last.startswith(f"{len(kept)} of 9")
        part = x[kept].clone().requires_grad_()
        y, full = part, x
        for layer in stage:
            y, full = reference_layer(layer, y, full, torch.ones_like(y[:, :1]), kept, policy)
        grads = torch.autograd.grad(y, [part, *stage.parameters()], upstream[kept] * weight[kept].view(-1, 1, 1, 1))
        assert_close(torch.zeros_like(x).index_add_(0, kept, grads[0]), inputs.grad, 1e-10, "input")
        for (name, _), a, b in zip(stage.named_parameters(), grads[1:], skip.module.parameters(), strict=True):
            assert_close(a, b.grad, 1e-10, name)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mask", [Backdrop(0.8), Backdrop2d(0.9)], ids=["samples", "positions"])
@pytest.mark.parametrize("policy", ["exact", "sampled", "frozen"])
def test_running_statistics_are_updated_once_per_step(policy, mask, momentum):
    plain = nn.Sequential(network("relu first"), mask)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    fast = skip_blocked(plain, statistics=policy, when="always")
    for number in range(1, 4):
        x = torch.randn(8, 2, 12, 12, dtype=torch.float64)
        a, b = step(plain, x), step(fast, x)
        assert_close(a.output, b.output, 1e-10, "output")
        for name, buffer in a.buffers.items():
            assert_close(buffer.double(), b.buffers[name].double(), 1e-10, name)
        assert b.buffers["0.2.num_batches_tracked"] == number


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("mask", [Backdrop(0.8), Backdrop2d(0.9)], ids=["samples", "positions"])
def test_kinds_of_batch_norm(settings, mask):
    """With constants for statistics, the gradient is that of the same affine map in place of the layer."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **settings), nn.Tanh(), mask).double()
    x = torch.randn(6, 2, 12, 12, dtype=torch.float64)
    fast = skip_blocked(model, statistics="frozen", when="always")
    with torch.no_grad():
        inner = model[0](x)
        mean, std = inner.mean((0, 2, 3)), (inner.var((0, 2, 3), correction=0) + 1e-5).sqrt()
    affine = nn.Conv2d(3, 3, 1, groups=3).double()
    gamma, beta = (1.0, 0.0) if model[1].weight is None else (model[1].weight.detach(), model[1].bias.detach())
    affine.weight.data, affine.bias.data = (gamma / std).view(3, 1, 1, 1), beta - mean / std * gamma
    plain = nn.Sequential(model[0], affine, model[2], model[3])
    a, b = step(plain, x), step(fast, x)
    assert_close(a.output, b.output, 1e-10)
    assert_close(a.parameters["0.weight"], b.parameters["0.weight"], 1e-10)
    assert_close(a.inputs[0], b.inputs[0], 1e-10)


class Unfollowable(nn.Module):
    """Batch normalisation where torch's capture of the graph ends: what follows is another graph."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.mask = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), Backdrop(0.7)

    def forward(self, x):
        x = self.a(x)
        x = self.norm(x) if x.sum() > -1e9 else x
        if x.sum() > -1e9:
            x = self.b(x)
        return self.mask(x)


def test_batch_statistics_where_the_model_cannot_be_followed():
    fast = check(Unfollowable().double(), torch.randn(10, 3, dtype=torch.float64), statistics="sampled")
    assert fast.skip_report[0].skipped == ["b"]
    assert fast.skip_report[0].kept[0][0] == "a graph break"


def test_instance_norm_with_running_statistics():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True), Backdrop(0.7)).double()
    fast = check(model, torch.randn(6, 2, 8, 8, dtype=torch.float64), statistics="sampled")
    assert fast.skip_report[0].kept[0][0] == "1"


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), SqueezeExcite(3, "layer")]
)
def test_sampled_windows_agree_with_the_exact_gradient_where_everything_is_kept(layer):
    """With every unit kept and windows that tile the map, the sample is the population."""
    stage = nn.Sequential(nn.Conv2d(2, 3, 4, stride=4), layer, nn.Tanh()).double()
    model = nn.Sequential(stage, Backdrop2d(1e-9))
    x = torch.randn(3, 2, 16, 16, dtype=torch.float64)
    fast = skip_blocked(model, statistics="sampled", when="always")
    assert_same_gradients(step(model, x), step(fast, x))
    assert ran_windows(fast)
    assert fast.skip_report[0].skipped[0] == "0.0"


@pytest.mark.parametrize("relu_first", [False, True])
@pytest.mark.parametrize("relu_last", [False, True])
@pytest.mark.parametrize("norm", [None, "sampled", "frozen"])
@pytest.mark.parametrize("outside", [False, True])
def test_finish_against_plain_operations(relu_first, relu_last, norm, outside):
    """Forward and backward against autograd of plain operations, but for the spread of the statistics' gradient."""
    if relu_last and norm is None:
        pytest.skip("a rectifier alone counts as the first")
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    moments = Moments(torch.randn(3).double(), torch.rand(3).double() + 0.5) if norm else None
    ranges = torch.tensor([[[0, 5], [0, 6]], [[2, 5], [0, 3]], [[0, 1], [4, 6]], [[0, 0], [0, 0]]], dtype=torch.int32)
    valid = torch.zeros(4, 1, 5, 6, dtype=torch.bool)
    for k, ((a, b), (c, d)) in enumerate(ranges.tolist()):
        valid[k, :, a:b, c:d] = True
    valid = valid if outside else torch.ones_like(valid)
    how = Epilogue(relu_first, moments, None, relu_last, ranges if outside else None, (2, 3), -2.5)

    def plain(x, gamma, beta):
        y = x.relu() if relu_first else x
        if moments:
            y = (y - moments.mean.view(3, 1, 1)) * moments.inverse_std.view(3, 1, 1)
            y = y * gamma.view(3, 1, 1) + beta.view(3, 1, 1)
        y = y.relu() if relu_last else y
        return torch.where(valid, y, -2.5) if outside else y

    expected = plain(x, gamma, beta)
    assert_close(expected, finish(x, gamma, beta, how), 1e-12)
    upstream = torch.randn_like(expected)
    inputs = [x, gamma, beta] if norm else [x]
    a = torch.autograd.grad(expected, inputs, upstream)
    if norm == "sampled":
        how = how._replace(cells=int(valid.sum()))
        x_hat = ((x.relu() if relu_first else x) - moments.mean.view(3, 1, 1)) * moments.inverse_std.view(3, 1, 1)
        after = gamma.view(3, 1, 1) * moments.inverse_std.view(3, 1, 1)
        dy = upstream * valid * ((x_hat * gamma.view(3, 1, 1) + beta.view(3, 1, 1) > 0) if relu_last else 1)
        spread = dy.sum((0, 2, 3), keepdim=True) + x_hat * (dy * x_hat).sum((0, 2, 3), keepdim=True)
        dx = (dy - spread / valid.sum()) * valid * after * ((x > 0) if relu_first else 1)
        a = (dx.detach(), *a[1:])
    b = torch.autograd.grad(finish(x, gamma, beta, how), inputs, upstream)
    for left, right in zip(a, b, strict=True):
        assert_close(left, right, 1e-12)


def test_finish_cannot_be_differentiated_twice():
    x = torch.randn(2, 3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(finish(x, None, None, Epilogue(relu_first=True)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Shared(nn.Module):
    """One normalisation that is called twice, or two with the same weights; and elsewhere once more."""

    def __init__(self, mask, norms, elsewhere=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.mask, self.elsewhere = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), mask, elsewhere
        self.norms = nn.ModuleList([nn.BatchNorm2d(3)] * 2 if norms == 1 else [nn.BatchNorm2d(3) for _ in range(2)])
        for name in ("weight", "bias"):
            setattr(self.norms[1], name, getattr(self.norms[0], name))

    def forward(self, x):
        y = self.norms[1](self.b(self.norms[0](self.a(x)).relu()))
        other = self.norms[0](2 * x[:, :1].expand(-1, 3, -1, -1)).mean() if self.elsewhere else 0
        return self.mask(y) + other


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("mask", [Backdrop(0.7), Backdrop2d(0.8)], ids=["samples", "positions"])
def test_a_norm_that_is_called_twice(policy, mask):
    x = torch.randn(6, 2, 9, 9, dtype=torch.float64)
    found = []
    for norms in (1, 2):
        fast = skip_blocked(Shared(mask, norms).double(), when="always", statistics=policy)
        found.append(step(fast, x))
        assert fast.skip_report[0].share == 1.0
    assert_same_gradients(*found, tolerance=0)
    plain = step(Shared(mask, 1).double(), x)
    for name, buffer in plain.buffers.items():
        assert_close(buffer.double(), found[0].buffers[name].double(), 1e-12, name)


@pytest.mark.parametrize("mask", [Backdrop(0.7), Backdrop2d(0.8)], ids=["samples", "positions"])
def test_a_norm_that_is_called_elsewhere_too_keeps_the_order_of_its_statistics(mask):
    x = torch.randn(6, 2, 9, 9, dtype=torch.float64)
    fast = check(Shared(mask, 1, elsewhere=True).double(), x, statistics="sampled")
    assert "also those of a call that is not skipped" in fast.skip_report[0].last
