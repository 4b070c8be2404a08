"""What docs/theory.md states, checked with numbers: most of it exactly, over all masks that can be drawn.

Where masks are drawn instead, means are compared by Bernstein's inequality: a mean of T independent numbers with
variance v and range r is further off than sqrt(2 x v / T) + x r / (3 T) at most once in exp(x) / 2 times. With x = 21.5
that is once in 1e9, and no test makes more than 500 such comparisons: each fails by chance less than once in 2e6 times.
"""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import oracle
from backdrop import Backdrop, functional, skip_blocked
from backdrop.losses import rank_statistic_loss
from skipping import captures

PAGE = Path(__file__).parent.parent / "docs" / "theory.md"
X = 21.5
P, FLOOR = 0.6, 0.1


def allowed(variance, reach, draws):
    return (2 * X * variance / draws) ** 0.5 + X * reach / (3 * draws)


def masks_of(kind, norms):
    """All masks of units with gradients of these sizes: (probability, weights)."""
    size = len(norms)
    k = max(1, round(size * (1 - P)))
    if kind == "Bernoulli":
        return list(oracle.bernoulli_masks(size, P))
    if kind == "exact":
        return list(oracle.exact_masks(size, k))
    if kind == "informed":
        return list(oracle.independent_masks(oracle.inclusion(norms, size * (1 - P), FLOOR)))
    return list(oracle.systematic_masks(oracle.inclusion(norms, k, FLOOR)))


KINDS = ("Bernoulli", "exact", "informed", "informed exact")
kinds = pytest.mark.parametrize("kind", KINDS)


def drawn(kind, norms, draws, p=P):
    """As many masks as the library draws: (draws, units)."""
    exact = kind.endswith("exact")
    if kind.startswith("informed"):
        rows = norms.double().expand(draws, -1)
        return functional.choose_weight(rows, p, (0, 1), exact=exact, floor=FLOOR)
    return functional.draw_weight((draws, len(norms)), p, (0, 1), exact=exact, dtype=torch.float64)


def variance_over(masks, contributions):
    """The trace of the covariance of sum_u w_u c_u over all masks."""
    sums = [(chance, weights @ contributions) for chance, weights in masks]
    mean = sum(chance * x for chance, x in sums)
    return sum(chance * (x - mean).square().sum() for chance, x in sums).item()


NORMS = torch.tensor([0.2, 3.0, 1.0, 0.5, 0.05], dtype=torch.float64)


@kinds
def test_the_library_draws_the_masks_that_are_enumerated_here(kind):
    torch.manual_seed(0)
    draws, chances, expected = 60_000, {}, {}
    for chance, weights in masks_of(kind, NORMS.tolist()):
        kept = tuple((weights > 0).tolist())
        chances[kept] = chances.get(kept, 0.0) + chance
        expected[kept] = weights
    found = drawn(kind, NORMS, draws)
    seen = {tuple(row): 0 for row in (found > 0).unique(dim=0).tolist()}
    assert seen.keys() <= chances.keys()
    assert sum(chances.values()) == pytest.approx(1)
    for kept, chance in chances.items():
        rows = found[((found > 0) == torch.tensor(kept)).all(1)]
        assert abs(len(rows) / draws - chance) <= allowed(chance * (1 - chance), 1, draws)
        torch.testing.assert_close(rows, expected[kept].expand_as(rows), rtol=1e-6, atol=0)


# Unbiased


def small_network(outputs=1):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return network, torch.randn(5, 3).double(), torch.tensor([1, 0, 0, 1, 0])


def rank_loss(scores, labels):
    return rank_statistic_loss(scores.flatten(), labels, temperature=0.5)


@kinds
def test_one_mask_is_unbiased(kind):
    """With a loss over ranks, to which no sample adds on its own."""
    network, x, labels = small_network()
    parameters, scores = list(network.parameters()), network(x)
    plain = torch.autograd.grad(rank_loss(scores, labels), [scores, *parameters], retain_graph=True)
    mean = [torch.zeros_like(p) for p in parameters]
    for chance, weights in masks_of(kind, plain[0].abs().flatten().tolist()):
        masked = functional.mask_gradient(network(x), weights[:, None])
        for total, grad in zip(mean, torch.autograd.grad(rank_loss(masked, labels), parameters), strict=True):
            total += chance * grad
    torch.testing.assert_close(mean, list(plain[1:]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("outer", "inner"), [("Bernoulli", "informed exact"), ("informed", "exact")])
def test_several_masks_are_unbiased(outer, inner):
    """Units of the inner mask are features, which are chosen by what the outer one lets through."""
    _, x, labels = small_network()
    below, between, above = (nn.Linear(*shape).double() for shape in ((3, 4), (4, 1), (1, 1)))
    parameters = [p for layer in (below, between, above) for p in layer.parameters()]

    def run(weights_outer, weights_inner):
        hidden = functional.mask_gradient(below(x).tanh(), weights_inner[None])
        scores = between(hidden)
        loss = rank_loss(above(functional.mask_gradient(scores, weights_outer[:, None])).sinh(), labels)
        return loss, hidden, scores

    ones = torch.ones(5).double(), torch.ones(4).double()
    loss, _, scores = run(*ones)
    arriving, *plain = torch.autograd.grad(loss, [scores, *parameters])
    mean = [torch.zeros_like(p) for p in parameters]
    for chance, weights_outer in masks_of(outer, arriving.abs().flatten().tolist()):
        loss, hidden, _ = run(weights_outer, ones[1])
        (passed,) = torch.autograd.grad(loss, hidden)
        for given, weights_inner in masks_of(inner, passed.norm(dim=0).tolist()):
            grads = torch.autograd.grad(run(weights_outer, weights_inner)[0], parameters)
            torch.testing.assert_close(grads[4:], tuple(plain[4:]))  # above both masks nothing is random
            for total, grad in zip(mean, grads, strict=True):
                total += chance * given * grad
    torch.testing.assert_close(mean, plain, rtol=1e-10, atol=1e-12)


def test_masks_in_series_that_draw_alike_are_biased():
    """Weights of 2 twice are 4: the mean of w^2 is 2, where that of w is 1."""
    x, same = torch.ones(8, 1, requires_grad=True), [torch.Generator().manual_seed(3) for _ in range(2)]
    alike = nn.Sequential(*(Backdrop(0.5, exact=True, generator=generator) for generator in same))
    (grad,) = torch.autograd.grad(alike(x).sum(), x)
    assert grad.sum() == 2 * len(x)
    first = functional.draw_weight((40_000, 8), 0.5, (0, 1), exact=True)
    second = functional.draw_weight((40_000, 8), 0.5, (0, 1), exact=True)
    assert ((first * second).mean(0) - 1).abs().max() <= allowed(3, 4, 40_000)


# Variance


def contributions(size, seed=0):
    torch.manual_seed(seed)
    return torch.randn(size, 3, dtype=torch.float64) * torch.randn(size, 1).double().exp()


def scatter(c):
    """N S^2, N times the sum of squared distances from the mean over N - 1."""
    return len(c) * (c - c.mean(0)).square().sum().item() / (len(c) - 1)


def test_variance_of_uniform_masks():
    c = contributions(6)
    for k in range(1, 7):
        found = variance_over(oracle.exact_masks(6, k), c)
        assert found == pytest.approx(scatter(c) * (6 / k - 1), rel=1e-10, abs=1e-12)
    for p in (0.1, 0.5, 0.9):
        inverse = p**6 + sum(math.comb(6, k) * (1 - p) ** k * p ** (6 - k) / k for k in range(1, 7))
        found = variance_over(oracle.bernoulli_masks(6, p), c)
        assert found == pytest.approx(scatter(c) * (6 * inverse - 1))
        assert inverse >= 1 / (6 * (1 - p) + p**6)  # Jensen: no less than with as many units, exactly


def test_variance_of_informed_masks():
    c, size = contributions(6, 2), 6
    pi = oracle.inclusion(contributions(6, 3).norm(dim=1).tolist(), 2.4, FLOOR)
    empty = math.prod(1 - q for q in pi)
    included = [q + empty * q / sum(pi) for q in pi]
    expected = sum((1 / included[u] - 1) * c[u].square().sum().item() for u in range(size))
    for u, v in itertools.permutations(range(size), 2):
        expected += (pi[u] * pi[v] / (included[u] * included[v]) - 1) * (c[u] @ c[v]).item()
    assert variance_over(oracle.independent_masks(pi), c) == pytest.approx(expected)


def test_no_probabilities_have_less_variance_than_those_in_proportion():
    """Of masks that draw units by themselves and keep as many on average."""
    norms = contributions(12).norm(dim=1)
    k = 4.0

    def variance(pi):
        return ((1 / pi - 1) * norms.square()).sum().item()

    best = torch.tensor(oracle.inclusion(norms.tolist(), k, 0.0), dtype=torch.float64)
    sure = best >= 1
    rest = norms[~sure].sum() ** 2 / (k - sure.sum()) - norms[~sure].square().sum()
    assert sure.any()
    assert variance(best) == pytest.approx(rest.item())
    for _ in range(300):
        other = (best * (0.3 * torch.randn(12)).exp()).clamp(max=1)
        other = torch.tensor(oracle.inclusion(other.tolist(), k, 0.0), dtype=torch.float64)
        assert variance(other) >= variance(best) - 1e-9


def test_exact_informed_masks_make_no_noise_where_contributions_are_in_proportion():
    pi = oracle.inclusion([1.0, 2.0, 0.5, 4.0, 1.5, 1.0], 3, 0.0)
    direction = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    c = torch.tensor(pi, dtype=torch.float64)[:, None] * direction
    assert variance_over(oracle.systematic_masks(pi), c) < 1e-20
    assert variance_over(oracle.independent_masks(pi), c) > 1
    uniform = [0.5] * 6  # where all units are alike: neither do uniform masks, if they are exact
    assert variance_over(oracle.systematic_masks(uniform), torch.ones(6, 1).double()) < 1e-20


@pytest.mark.parametrize(("size", "k"), [(40, 8), (200, 20)])
def test_variance_of_exact_informed_masks_is_hartleys_and_raos(size, k):
    """To 5% here, and the error of a variance that is measured over 20,000 masks besides."""
    c, draws = contributions(size), 20_000
    norms = c.norm(dim=1) * (0.3 * torch.randn(size)).exp()
    pi = torch.tensor(oracle.inclusion(norms.tolist(), k, FLOOR), dtype=torch.float64)
    apart = c / pi[:, None] - c.sum(0) / k
    expected = (pi * (1 - pi * (k - 1) / k) * apart.square().sum(1)).sum()
    torch.manual_seed(5)
    squares = (drawn("informed exact", norms, draws, 1 - k / size) @ c - c.sum(0)).square().sum(1)
    assert (squares.mean() - expected).abs() <= 0.05 * expected + allowed(squares.var(), squares.max(), draws)


@kinds
def test_variance_of_the_masks_that_the_library_draws(kind):
    c, draws = contributions(5), 60_000
    expected = variance_over(masks_of(kind, NORMS.tolist()), c)
    torch.manual_seed(6)
    squares = (drawn(kind, NORMS, draws) @ c - c.sum(0)).square().sum(1)
    assert (squares.mean() - expected).abs() <= allowed(squares.var(), squares.max(), draws)


@pytest.mark.parametrize("floor", [0.05, 0.1, 0.5])
def test_what_the_floor_costs_and_what_it_bounds(floor):
    for seed in range(50):
        squares, size, k = contributions(20, seed).square().sum(1), 20, 5
        guess = contributions(20, seed + 100).norm(dim=1).pow(1 + seed % 3)  # which says nothing about them
        fewer = k * (1 - floor) / (1 - floor * k / size)
        assert k * (1 - floor) <= fewer <= k
        guesses = [oracle.inclusion(guess.tolist(), *how) for how in ((fewer, 0.0), (k, floor))]
        without, mixed = torch.tensor(guesses, dtype=torch.float64)
        assert (mixed[without >= 1] == 1).all()
        assert (squares * (1 / mixed - 1)).sum() <= (squares * (1 / without - 1)).sum() * (1 + 1e-9)
        assert (squares / mixed).sum() <= squares.sum() * size / k / floor * (1 + 1e-9)


def test_both_signs_keep_their_share():
    """What contributions have in common is then no noise where gradients add up to zero, and masks are unbiased."""
    torch.manual_seed(7)
    g, draws, squares = torch.rand(40, dtype=torch.float64) + 0.5, 10_000, []
    g[:20] *= -1
    pi = torch.tensor(oracle.inclusion(g.abs().tolist(), 8, FLOOR), dtype=torch.float64)
    for sizes in (g, g.abs()):
        weights = drawn("informed exact", sizes, draws, 0.8)
        assert ((weights > 0).sum(1) == 8).all()
        bounds = [allowed(1 / q - 1, 1 / q, draws) for q in pi.tolist()]
        assert ((weights.mean(0) - 1).abs() <= torch.tensor(bounds)).all()
        squares.append((weights @ g).square().mean())
    assert squares[0] < 0.2 * squares[1]


def test_what_choosing_by_the_gradient_that_arrives_costs():
    """Against choosing by what units add: 1 + the squared variation of the gains, at most (a + b)^2 / 4ab."""
    for seed in range(50):
        torch.manual_seed(seed)
        g, gain = torch.rand(30).double() + 0.5, 1 + 3 * torch.rand(30).double()
        shares = g / g.sum()
        pi, best = 5 * shares, 5 * g * gain / (g * gain).sum()
        ratio = ((g * gain).square() / pi).sum() / ((g * gain).square() / best).sum()
        mean = (shares * gain).sum()
        assert ratio == pytest.approx(1 + ((shares * (gain - mean).square()).sum() / mean**2).item())
        assert ratio <= (gain.min() + gain.max()) ** 2 / (4 * gain.min() * gain.max()) + 1e-12


# Convergence


@kinds
def test_a_step_goes_down_in_the_mean(kind):
    """E F(theta - eta g) <= F - eta |grad F|^2 + l eta^2 / 2 E|g|^2, for a loss with l-Lipschitz gradients."""
    torch.manual_seed(7)
    a, labels = torch.randn(5, 3).double(), torch.tensor([1.0, -1, 1, 1, -1], dtype=torch.float64)
    lipschitz = torch.linalg.eigvalsh(a.T @ a)[-1] / 4

    def loss(theta):
        return torch.nn.functional.softplus(-labels * (a @ theta)).sum()

    for _ in range(5):
        theta = torch.randn(3).double()
        arriving = -labels * torch.sigmoid(-labels * (a @ theta))
        each = arriving[:, None] * a
        masks = masks_of(kind, arriving.abs().tolist())
        for eta in (0.01, 0.1, 1.0):
            after = sum(chance * loss(theta - eta * weights @ each) for chance, weights in masks)
            second = sum(chance * (weights @ each).square().sum() for chance, weights in masks)
            bound = loss(theta) - eta * each.sum(0).square().sum() + lipschitz * eta**2 / 2 * second
            assert after <= bound + 1e-12


@kinds
def test_steps_converge(kind):
    """With rates whose sum diverges and whose squares' sum does not; the sum of eta |grad F|^2 stays below its bound.

    For least squares E|g|^2 <= M F with M = 2 W max|a|^2, W the largest weight, and Robbins and Siegmund's numbers are
    alpha = l M eta^2 / 2 and beta = alpha F*. The mean over runs stays below half the bound on its expectation.
    """
    torch.manual_seed(8)
    size, runs, steps = 20, 100, 1500
    a = torch.randn(size, 3).double()
    b = a @ torch.tensor([1.0, -2, 0.5], dtype=torch.float64) + 0.5 * torch.randn(size).double()
    best = torch.linalg.lstsq(a, b[:, None]).solution.flatten()
    lipschitz = torch.linalg.eigvalsh(a.T @ a)[-1] / size
    lowest = (a @ best - b).square().mean() / 2
    weights_at_most = {"Bernoulli": size, "exact": size / 8}.get(kind, size / (FLOOR * 8))
    growth = weights_at_most * 2 * a.square().sum(1).max()
    theta = torch.zeros(runs, 3).double()
    bound, product, seen = (b.square().mean() / 2 - lowest), 1.0, torch.zeros(runs).double()
    for t in range(steps):
        eta = 0.3 / lipschitz / (10 + t) ** 0.75
        arriving = (theta @ a.T - b) / size
        gradient = arriving @ a
        seen += eta * gradient.square().sum(1)
        if kind.startswith("informed"):
            exact = kind.endswith("exact")
            weights = functional.choose_weight(arriving, P, (0, 1), exact=exact, floor=FLOOR)
        else:
            weights = drawn(kind, b, runs)
        alpha = lipschitz * growth * eta**2 / 2
        product *= 1 + alpha
        bound += alpha * lowest
        theta = theta - eta * (weights * arriving) @ a
    assert seen.mean() <= bound * product / 2
    assert (theta - best).norm(dim=1).max() < 0.2 * best.norm()
    assert ((theta @ a.T - b) @ a / size).norm(dim=1).max() < 0.1 * (b @ a / size).norm()


def test_chosen_units_without_weights_end_somewhere_else():
    """scale=None: at the minimum the mean step is not zero."""
    arriving = torch.tensor([3.0, -1.0, -1.0, -1.0])
    torch.manual_seed(9)
    weights = functional.choose_weight(arriving.expand(20_000, -1), 0.5, (0, 1), exact=True, scale=None)
    assert (weights @ arriving).mean() > 1
    weights = functional.choose_weight(arriving.expand(20_000, -1), 0.5, (0, 1), exact=True)
    assert (weights @ arriving).mean().abs() <= allowed((weights @ arriving).var(), 50, 20_000)


@captures
@pytest.mark.parametrize("statistics", ["exact", "sampled", "frozen"])
def test_batch_statistics_that_are_not_exact_are_biased(statistics):
    """The mean over all masks that keep 3 of 5 samples, below a batch normalisation."""
    torch.manual_seed(10)
    layers = [nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)]
    mask = Backdrop(0.4, exact=True, generator=torch.Generator())
    plain = nn.Sequential(*layers, mask).double()
    model, x = skip_blocked(plain, statistics=statistics, when="always"), torch.randn(5, 1, 3, 3).double()
    target = torch.tensor([1, 0, 0, 1, 0])

    def gradient(model, seed=None):
        masks = [module for module in model if isinstance(module, Backdrop)]
        for each in masks:
            each.train(seed is not None)
            each.generator.manual_seed(seed or 0)
        loss = rank_loss(model(x), target)
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model[0].parameters()))])

    by_mask = {}
    for seed in itertools.count():
        mask.generator.manual_seed(seed)
        kept = tuple((mask.draw_weight(torch.empty(5, 1).double()) > 0).flatten().tolist())
        if kept not in by_mask:
            by_mask[kept] = gradient(model, seed)
        if len(by_mask) == 10:
            break
    if statistics != "exact":
        assert "3 of 5 samples" in model.skip_report[0].last
    whole = gradient(plain)
    off = (sum(by_mask.values()) / 10 - whole).norm() / whole.norm()
    assert off < 1e-10 if statistics == "exact" else off > 0.01


# The best share


@pytest.mark.parametrize("cost", [2, 3])
@pytest.mark.parametrize("batch", [0.5, 1.5, 5.0, 40.0])
def test_the_best_share(batch, cost):
    """Of all a, a* has the least variance for the same work."""
    masks = 1.0

    def noise(a):
        return (batch + masks * (1 / a - 1)) * (1 + cost * a)

    best = min(1.0, math.sqrt(masks / (cost * (batch - masks)))) if batch > masks else 1.0
    shares = torch.linspace(0.001, 1, 5000).double()
    assert noise(best) <= noise(shares).min() + 1e-12


def test_a_uniform_mask_on_a_sum_is_a_smaller_batch():
    """All batches of 4 of 6 samples and all masks that keep 2 of 4: as if 2 of 6 were drawn at once."""
    c, squares = contributions(6), []
    batches = list(itertools.combinations(range(6), 4))
    for batch in batches:
        for chance, weights in oracle.exact_masks(4, 2):
            mean = (weights @ c[list(batch)]) / 4
            squares.append(chance / len(batches) * (mean - c.mean(0)).square().sum())
    assert sum(squares) == pytest.approx(variance_over(oracle.exact_masks(6, 2), c) / 36)


def test_informed_masks_on_a_sum_pay_from_a_fourth_of_the_variance_on():
    shares = torch.linspace(0.0005, 1, 20_000).double()

    def least(gain, cost):
        return ((1 + (1 / shares - 1) / gain) * (1 + cost * shares)).min().item()

    assert least(4.1, 3) < 3 - 1e-4  # 3: the variance and the work of a smaller batch
    assert least(3.9, 3) > 3 - 1e-9
    assert least(1.0, 2) >= 3 - 1e-9  # uniform masks never


def test_the_page_names_tests_that_exist():
    named = set(re.findall(r"`tests/test_theory\.py::(\w+)`", PAGE.read_text()))
    tests = {name for name in globals() if name.startswith("test_")} - {"test_the_page_names_tests_that_exist"}
    assert named == tests
