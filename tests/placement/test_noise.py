"""The noise of masked gradients against closed forms, and against all masks one by one."""

import itertools
import math

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, effective_batch_size, skip_blocked
from backdrop.functional import mask_gradient
from backdrop.placement.noise import gradient_noise

SIGMAS = 6  # normal errors beyond this: two in a thousand million, and seeds are fixed


def linear(mask, features=3):
    """y = Xw and a mask on samples, in float64; also its data and the gradient of each sample, n times."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (features, 1))
    model = nn.Sequential(nn.Linear(features, 1, bias=False, dtype=torch.float64), mask)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(1, features, generator=generator, dtype=torch.float64))
    return model, (x, y), 2 * (model[0](x) - y).detach() * x


def square(outputs, targets):
    return (outputs - targets).square().mean()


def spread(singles):
    """S^2 of the gradients of single samples."""
    return (singles - singles.mean(0)).square().sum().item() / (len(singles) - 1)


def weights(n, p, scale):
    """Every Bernoulli mask over n units with what kept units weigh, and its probability; none is empty."""
    for bits in itertools.product((0.0, 1.0), repeat=n):
        mask = torch.tensor(bits, dtype=torch.float64)
        kept = int(mask.sum())
        chance = (1 - p) ** kept * p ** (n - kept)
        for one in torch.eye(n, dtype=torch.float64) if not kept else [mask]:
            count = int(one.sum())
            by = {"count": n / count, "eq1": (1 - p) * n / count, "probability": 1 / (1 - p), None: 1.0}[scale]
            yield one * by, chance / (1 if kept else n)


def moments(gradients, chances):
    """Mean, variance and the standard deviation of the squared distance from the mean, of given gradients."""
    mean = (gradients * chances[:, None]).sum(0)
    squares = (gradients - mean).square().sum(1)
    variance = (squares * chances).sum()
    return mean, variance.item(), ((squares - variance).square() * chances).sum().sqrt().item()


def assert_agrees(row, g, mean, variance, deviation, draws):
    """What was measured is within the error of what is true."""
    size = g.norm().item()
    away = (mean - g).norm().item() / size
    error = math.sqrt(variance / draws) / size
    assert abs(row.bias - away) < SIGMAS * error + 1e-12
    assert row.along == pytest.approx((mean @ g / (g @ g)).item(), abs=SIGMAS * error + 1e-12)
    assert row.along_error <= error * (1 + SIGMAS / math.sqrt(draws))
    tolerance = SIGMAS * deviation / math.sqrt(draws) + 2 * variance / draws
    assert row.variance == pytest.approx(variance, abs=tolerance)
    assert row.relative_variance == pytest.approx(row.variance / size**2)
    assert row.bias_error == pytest.approx(math.sqrt(row.variance / draws) / size)


@pytest.mark.parametrize("p", [0.25, 0.5, 0.875])
def test_exact_masks_on_samples_are_as_noisy_as_minibatches(p):
    model, batch, singles = linear(Backdrop(p, exact=True))
    noise = gradient_noise(model, square, batch, draws=2000, seed=0)
    n, kept = len(singles), effective_batch_size(len(singles), p)
    variance = spread(singles) / kept * (1 - kept / n)
    minibatches = [singles[list(rows)].mean(0) for rows in itertools.combinations(range(n), int(kept))]
    chances = torch.full((len(minibatches),), 1 / len(minibatches), dtype=torch.float64)
    mean, exact, deviation = moments(torch.stack(minibatches), chances)
    assert exact == pytest.approx(variance)  # the closed form itself
    (row,) = noise.rows
    assert_agrees(row, singles.mean(0), mean, variance, deviation, noise.draws)
    tolerance = kept * (SIGMAS * deviation / variance / math.sqrt(noise.draws) + 2 / noise.draws)
    assert row.effective_batch_size == pytest.approx(kept, abs=tolerance)
    assert noise.total.is_unbiased
    assert (row.name, row.parameters, noise.batch_size) == ("0", 3, n)
    assert row.gradient == pytest.approx(singles.mean(0).norm().item())


@pytest.mark.parametrize("scale", ["count", "eq1", "probability", None])
@pytest.mark.parametrize("p", [0.4, 0.9])
def test_bernoulli_masks_with_every_scale(scale, p):
    model, batch, singles = linear(Backdrop(p, scale=scale))
    drawn = list(weights(len(singles), p, scale))
    gradients = torch.stack([(weight[:, None] * singles).mean(0) for weight, _ in drawn])
    mean, variance, deviation = moments(gradients, torch.tensor([chance for _, chance in drawn], dtype=torch.float64))
    draws = 2000
    row = gradient_noise(model, square, batch, draws=draws, seed=3).total
    g = singles.mean(0)
    assert_agrees(row, g, mean, variance, deviation, draws)
    n, empty = len(singles), p ** len(singles)
    factor = {"count": 1, "eq1": 1 - p, "probability": 1 + empty / n / (1 - p), None: 1 - p + empty / n}[scale]
    assert torch.allclose(mean, factor * g)
    assert row.is_unbiased == (abs(factor - 1) < 0.001)  # "probability" is biased where a mask is often empty
    assert row.effective_batch_size == pytest.approx(spread(singles) / (row.variance + spread(singles) / n))


class EveryMask(Backdrop):
    """Deals out all masks of a list, one at a time, instead of drawing them."""

    def __init__(self, weights):
        super().__init__(0.5)
        self.weights, self.calls = weights, 0

    def forward(self, x):
        if not self.training:
            return x
        self.calls += 1
        return mask_gradient(x, self.weights[self.calls - 1].view(len(x), *[1] * (x.ndim - 1)))


def test_moments_over_all_masks_are_exact():
    n = 8
    dealt = [torch.zeros(n, dtype=torch.float64) for _ in range(28)]
    for weight, rows in zip(dealt, itertools.combinations(range(n), 2), strict=True):
        weight[list(rows)] = n / 2
    model, batch, singles = linear(EveryMask(dealt))
    row = gradient_noise(model, square, batch, draws=28).total
    of_all = spread(singles) / 2 * (1 - 2 / n)
    assert row.variance == pytest.approx(of_all * 28 / 27, rel=1e-12)  # n - 1 for draws
    assert row.bias < 1e-14
    assert row.along == pytest.approx(1, abs=1e-14)
    assert model[1].calls == 0


@pytest.mark.parametrize("exact", [True, False])
def test_masks_on_positions(exact):
    """A linear model of positions: 1x1 convolution, mask, sum. Samples have masks of their own."""
    p, size = 0.5, (2, 2, 2, 2)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(2, 1, 1, bias=False, dtype=torch.float64), Backdrop2d(p, exact=exact))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(1, 2, 1, 1, generator=generator, dtype=torch.float64))

    def loss(outputs):
        return outputs.square().sum()

    outputs = model[0](x).detach()
    parts = (2 * outputs * x).flatten(2).transpose(1, 2)  # (samples, positions, weights): what each position adds
    if exact:
        masks = [(2.0 * torch.zeros(4).index_fill(0, torch.tensor(kept), 1).double(), 1 / 6)
                 for kept in itertools.combinations(range(4), 2)]  # fmt: skip
    else:
        masks = list(weights(4, p, "count"))
    pairs = list(itertools.product(masks, masks))
    gradients = torch.stack([a[0] @ parts[0] + b[0] @ parts[1] for a, b in pairs])
    chances = torch.tensor([a[1] * b[1] for a, b in pairs], dtype=torch.float64)
    mean, variance, deviation = moments(gradients, chances)
    noise = gradient_noise(model, loss, x, draws=2000, seed=0)
    assert_agrees(noise.total, parts.sum((0, 1)), mean, variance, deviation, noise.draws)
    between = spread(2 * parts.sum(1))  # each sample alone, twice
    assert noise.total.effective_batch_size == pytest.approx(between / (noise.total.variance + between / 2))


class Everything(nn.Module):
    """Layers with state and randomness of their own, parameters of its own, and outputs in a dictionary."""

    def __init__(self, generator=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), Backdrop(0.5))
        self.head = nn.Linear(6, 2)
        self.mask = Backdrop(0.5, generator=generator)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        hidden = self.body(x)
        scores = self.mask(self.head(hidden) * self.scale)
        return {"hidden": hidden, "scores": scores, "mean": scores.mean(), "count": len(x)}


def loss_of_everything(outputs, targets):
    return nn.functional.cross_entropy(outputs["scores"], targets) + outputs["hidden"].mean() + outputs["mean"]


def batch_of_everything():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(10, 4, generator=generator), torch.randint(2, (10,), generator=generator)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training):
    model = Everything(torch.Generator().manual_seed(4)).train(training)
    loss_of_everything(model(batch_of_everything()[0]), batch_of_everything()[1]).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    own, random = model.mask.generator.get_state(), torch.get_rng_state()
    for seed in (None, 5):
        gradient_noise(model, loss_of_everything, batch_of_everything(), draws=3, seed=seed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert gradients
    assert all(torch.equal(dict(model.named_parameters())[name].grad, grad) for name, grad in gradients.items())
    assert torch.equal(model.mask.generator.get_state(), own)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training is training for module in model.modules())


def test_a_seed_repeats_the_result():
    model, batch = Everything(torch.Generator()), batch_of_everything()

    def measure(seed):
        return gradient_noise(model, loss_of_everything, batch, draws=4, seed=seed)

    first = measure(1)
    torch.rand(3)
    model.mask.generator.manual_seed(9)
    assert str(measure(1)) == str(first)
    assert measure(2) != first
    torch.manual_seed(3)
    now = measure(None)
    assert str(measure(None)) == str(now)
    torch.rand(1)
    assert measure(None) != now


def test_rows_are_the_layers_in_order():
    model = Everything()
    noise = gradient_noise(model, loss_of_everything, batch_of_everything(), draws=5, seed=0)
    assert [row.name for row in noise.rows] == ["", "body.0", "body.1", "head", "unused"]
    assert [row.parameters for row in noise.rows] == [1, 30, 12, 14, 6]
    unused = noise.rows[-1]
    assert unused.gradient == unused.variance == 0
    assert math.isnan(unused.bias)
    assert noise.total.parameters == 63
    assert noise.total.variance == pytest.approx(sum(row.variance for row in noise.rows))
    assert noise.total.gradient**2 == pytest.approx(sum(row.gradient**2 for row in noise.rows))
    parts = [row.along * row.gradient**2 for row in noise.rows if row.gradient]
    assert noise.total.along == pytest.approx(sum(parts) / noise.total.gradient**2)
    assert noise.notes == ()  # dropout is off, BatchNorm starts from the same buffers each time
    head, *_ = str(noise).splitlines()
    assert head.split()[:3] == ["layer", "parameters", "bias"]
    assert "(model)" in str(noise)
    assert noise.sentence in str(noise)


def test_gradients_of_single_samples_go_through_all_outputs():
    """Their mean is the gradient, and S^2 what it is with a loss for each sample."""
    model, (x, y) = Everything(), batch_of_everything()
    noise = gradient_noise(model, loss_of_everything, (x, y), draws=2, seed=0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.eval()
    model.body[1].train()  # batch statistics
    singles = []
    for i in range(len(x)):
        outputs = model(x)
        scores, hidden = outputs["scores"], outputs["hidden"]
        parts = nn.functional.cross_entropy(scores[i], y[i]) + hidden[i].mean() + outputs["mean"]
        grads = torch.autograd.grad(parts, parameters, allow_unused=True)
        singles.append(torch.cat([g.flatten() for g in grads if g is not None]).double())
    total = noise.total
    s = spread(torch.stack(singles))
    assert total.gradient == pytest.approx(torch.stack(singles).mean(0).norm().item(), rel=1e-5)
    assert total.effective_batch_size == pytest.approx(s / (total.variance + s / len(x)), rel=1e-4)


def test_a_large_batch_is_compared_with_some_of_its_samples():
    model, (x, y), singles = linear(Backdrop(0.5, exact=True))
    batch = x.repeat(200, 1), y.repeat(200, 1)  # 1600 samples, every one 200 times
    found = gradient_noise(model, square, batch, draws=2, samples=400, seed=0).total
    n, s = 1600, spread(singles.repeat(200, 1))
    measured = 1 / (1 / found.effective_batch_size - 1 / n) * found.variance  # S^2 that was used
    squares = (singles - singles.mean(0)).square().sum(1)
    error = squares.std().item() / math.sqrt(400)
    assert measured == pytest.approx(s, abs=SIGMAS * error)
    assert measured != pytest.approx(s, rel=1e-9)


def test_skipping_makes_the_same_noise():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), Backdrop2d(0.8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = torch.randn(4, 1, 12, 12), torch.randn(4, 4)
    plain, skipped = (
        gradient_noise(m, nn.functional.mse_loss, batch, draws=8, seed=0).total for m in (model, skip_blocked(model))
    )
    for name in ("gradient", "bias", "along", "variance", "effective_batch_size"):
        assert getattr(skipped, name) == pytest.approx(getattr(plain, name), rel=1e-4)


def test_layers_in_eval_stay_so():
    """Frozen batch statistics in a model that trains."""
    x, y = batch_of_everything()
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Backdrop(0.5), nn.Linear(6, 2))
    model[1].eval()
    model[1].running_mean.fill_(3.0)
    nn.functional.cross_entropy(model(x), y).backward()  # the mask is not drawn for the last layer
    noise = gradient_noise(model, nn.functional.cross_entropy, (x, y), draws=2)
    last = noise.rows[-1]
    grads = torch.cat([p.grad.flatten() for p in model[3].parameters()])
    assert last.gradient == pytest.approx(grads.norm().item(), rel=1e-5)
    assert last.variance < 1e-12


def test_words():
    model, batch, _ = linear(Backdrop(0.5, exact=True))
    unbiased = gradient_noise(model, square, batch, draws=500, seed=0)
    size = unbiased.total.effective_batch_size
    assert unbiased.sentence == (
        "In total the masked gradient is unbiased within its error; "
        f"its noise is that of batches of {size:.1f} of 8 samples."
    )
    model[1].scale = "eq1"
    biased = gradient_noise(model, square, batch, draws=500, seed=0)
    assert biased.sentence.startswith("In total the masked gradient is biased: its mean is ")
    assert biased.total.along == pytest.approx(unbiased.total.along / 2)

    images = nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.99, exact=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    noisy = gradient_noise(images, lambda outputs: outputs.square().sum(), torch.randn(4, 1, 18, 18), draws=50, seed=0)
    assert noisy.total.effective_batch_size < 1
    assert noisy.sentence.endswith(" times that of single samples.")
    single = spread_of(noisy)
    assert f"variance is {noisy.total.variance / (single * 3 / 4):.3g} times" in noisy.sentence


def spread_of(noise):
    """S^2 from the effective batch size."""
    row = noise.total
    return row.variance / (1 / row.effective_batch_size - 1 / noise.batch_size)


def test_one_sample_has_no_effective_batch_size():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.5), nn.Flatten())
    noise = gradient_noise(model, lambda outputs: outputs.square().sum(), torch.randn(1, 1, 6, 6), draws=4)
    assert math.isnan(noise.total.effective_batch_size)
    assert noise.total.variance > 0
    assert "a batch of one sample" in str(noise)
    assert "times its length squared" in noise.sentence


def test_a_model_that_returns_its_loss():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 1), Backdrop(0.5))

        def forward(self, x):
            return self.model(x).square().mean()

    noise = gradient_noise(Loss(), lambda value: value, torch.randn(5, 4), draws=4)
    assert math.isnan(noise.total.effective_batch_size)
    assert "no output of the model has a row for each sample" in noise.notes[0]


def test_other_randomness_is_told():
    class Noisy(nn.Module):
        def forward(self, x):
            return x * torch.rand(len(x), 1)

    model = nn.Sequential(nn.Linear(4, 3), Noisy(), Backdrop(0.5))
    noise = gradient_noise(model, lambda outputs: outputs.square().sum(), torch.randn(6, 4), draws=4, seed=0)
    assert "without masks the gradient changes by" in noise.notes[0]


def test_attention_and_recurrent_layers_are_not_random():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
            self.recurrent = nn.GRU(4, 4, 2, dropout=0.5, batch_first=True)
            self.mask = Backdrop(0.5, dims=(0, 1))

        def forward(self, x):
            return self.mask(self.recurrent(self.attention(x, x, x)[0])[0])

    noise = gradient_noise(Both(), lambda outputs: outputs.square().sum(), torch.randn(3, 5, 4), draws=2)
    assert noise.notes == ()


def test_progress_and_no_output(capsys):
    seen = []

    def progress(draws):
        for i in draws:
            seen.append(i)
            yield i

    model, batch, _ = linear(Backdrop(0.5))
    gradient_noise(model, square, batch, draws=5, progress=progress)
    assert seen == list(range(5))
    gradient_noise(model, square, batch, draws=2)
    assert capsys.readouterr() == ("", "")


X, Y = torch.ones(4, 3), torch.ones(4, 1)


def model_with(p):
    return nn.Sequential(nn.Linear(3, 1), Backdrop(p))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": model_with(0.0)}, ValueError, "no Backdrop layer in training mode with p above 0"),
        ({"model": nn.Linear(3, 1)}, ValueError, "no Backdrop layer"),
        ({"model": nn.Sequential(Backdrop(0.5))}, ValueError, "no parameter that requires a gradient"),
        ({"model": print}, TypeError, r"model has to be a torch\.nn\.Module, but got builtin"),
        ({"loss": "mse"}, TypeError, "loss has to be a function"),
        ({"loss": lambda out, y: out - y}, ValueError, r"one number, but got shape \(4, 1\); take its mean"),
        ({"loss": lambda out, y: 1.0}, ValueError, "one number, but got float"),
        ({"loss": lambda out, y: y.sum()}, ValueError, "carries no gradient"),
        ({"loss": lambda out, y: out.sum() * math.nan}, ValueError, "loss has to be finite, but got nan"),
        ({"loss": lambda out, y: out.sum() * 0}, ValueError, "gradient is zero everywhere"),
        ({"batch": {"x": X}}, TypeError, r"batch has to be \(inputs, \*targets\) or one tensor, but got dict"),
        ({"batch": ()}, TypeError, "batch has to be"),
        ({"batch": (object(), Y)}, TypeError, "the inputs of the model have to be a tensor"),
        ({"batch": (torch.ones(()), Y)}, ValueError, "axis 0 is the batch"),
        ({"batch": (X[:0], Y[:0])}, ValueError, "at least one sample"),
        ({"draws": 1}, ValueError, "draws has to be at least 2, but got 1"),
        ({"draws": 2.0}, TypeError, "draws has to be an integer"),
        ({"samples": 0}, ValueError, "samples has to be at least 1"),
        ({"seed": "one"}, TypeError, "seed has to be an integer"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments, error, message):
    given = {"model": model_with(0.5), "loss": nn.functional.mse_loss, "batch": (X, Y), **arguments}
    with pytest.raises(error, match=message):
        gradient_noise(**given)
