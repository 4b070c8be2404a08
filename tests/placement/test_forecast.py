"""What masks would do at other p, against what masks that are drawn do: to a tenth of the variance."""

import math

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d, gradient_noise, insert, skip_blocked
from backdrop.functional import choose_weight, draw_weight
from backdrop.placement.forecast import inverse_count

DRAWS = 20_000
PS = (0.5, 0.9, 0.97)


def drawn(grad, mask, p, informed):
    """Weights of one group with these gradients, many times."""
    dims = (0, 1) if mask.dims == (0,) else mask.dims  # every draw is a group
    shape, own = (DRAWS, *grad.shape), {"patch": mask.patch, "exact": mask.exact}
    if informed:
        return choose_weight(grad.expand(shape), p, dims, floor=mask.floor, **own).double()
    return draw_weight(shape, p, dims, **own).double()


def measured(below, above, x, loss, mask, p, informed):
    """The variance of the gradient by draws, over |g|^2."""
    h = below(x)
    value, parameters = loss(above(h)), list(below.parameters())
    (g,) = torch.autograd.grad(value, h, retain_graph=True)
    whole = torch.autograd.grad(value, [*parameters, *above.parameters()], retain_graph=True)
    total = 0.0
    for group in [slice(i, i + 1) for i in range(len(x))] if len(mask.dims) > 1 else [slice(None)]:
        rows = g[group].flatten(1)  # of which numbers keep their sign
        rows = rows.squeeze(1) if rows.shape[1] == 1 else rows.norm(dim=1)
        weight = drawn(rows if mask.dims == (0,) else g[group][0], mask, p, informed)
        places = torch.eye(weight[0].numel(), dtype=torch.float64).view(-1, *weight.shape[1:])
        contributions = []
        for place in places:
            part = torch.zeros_like(g)
            part[group] = g[group] * (place.view(-1, *[1] * (g.ndim - 1)) if mask.dims == (0,) else place)
            added = torch.autograd.grad(h, parameters, part, retain_graph=True)
            contributions.append(torch.cat([a.flatten() for a in added]))
        total += ((weight - 1).flatten(1) @ torch.stack(contributions)).square().sum(1).mean()
    return (total / sum(a.square().sum() for a in whole)).item()


def samples(exact):
    torch.manual_seed(0)
    below, above = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)).double(), nn.Identity()
    x, y = torch.randn(40, 6).double(), torch.randn(40, 1).double() ** 3
    return below, above, x, lambda out: (out - y).square().mean(), Backdrop(0.75, (0,), exact=exact)


def positions(exact):
    torch.manual_seed(0)
    below, above = nn.Conv2d(1, 3, 3).double(), nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 1)).double()
    return below, above, torch.randn(3, 1, 8, 8).double(), lambda out: out.pow(3).mean(), Backdrop2d(0.75, exact=exact)


def patches(exact):
    torch.manual_seed(1)
    below = nn.Sequential(nn.Conv1d(1, 4, 5), nn.Tanh()).double()
    above = nn.Sequential(nn.Conv1d(4, 1, 3), nn.Flatten()).double()
    mask = Backdrop1d(0.75, patch=2, exact=exact, floor=0.3)
    return below, above, torch.randn(2, 1, 50).double(), lambda out: out.exp().mean(), mask


@pytest.mark.parametrize("case", [samples, positions, patches])
@pytest.mark.parametrize("exact", [True, False])
def test_variances_are_those_that_are_measured(case, exact):
    below, above, x, loss, mask = case(exact)
    noise = gradient_noise(nn.Sequential(below, mask, above), loss, (x,), draws=2, predict=PS, seed=0)
    (found,) = noise.forecasts
    for row in found.rows:
        for informed, said in ((False, row.uniform), (True, row.informed)):
            assert said == pytest.approx(measured(below, above, x, loss, mask, row.p, informed), rel=0.1), row


def test_some_units_stand_for_all():
    """Sixty of 1,024 positions, chosen by their gradients: as close, and in far fewer passes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), Backdrop2d(0.9, exact=True), nn.Flatten(), nn.Linear(3 * 1024, 1)
    ).double()
    x, found = torch.randn(2, 1, 34, 34).double(), []
    for units in (60, 1024):
        noise = gradient_noise(model, lambda out: out.pow(3).mean(), (x,), 2, predict=(0.9, 0.99), units=units, seed=0)
        found.append([(row.uniform, row.informed) for row in noise.forecasts[0].rows])
    for few, all_units in zip(*found, strict=True):
        assert few == pytest.approx(all_units, rel=0.25)


def skewed(rows=200):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1), Backdrop(0.75, exact=True)).double()
    weight = torch.exp(2 * torch.randn(rows, 1)).double()
    batch = torch.randn(rows, 6).double(), torch.randn(rows, 1).double()
    return model, lambda out, y: ((out - y).square() * weight).mean(), batch


def test_the_best_share_and_whether_masks_pay():
    """Of a mean over samples, uniform masks never do (docs/theory.md), and informed ones do for skewed gradients."""
    ps = [1 - 2.0**-i for i in range(1, 7)]
    noise = gradient_noise(*skewed(), draws=2, samples=200, units=200, predict=ps, seed=0)
    (found,) = noise.forecasts
    assert found.uniform_work == pytest.approx(1, rel=0.02)
    assert found.uniform_share == 1
    assert found.informed_work < 0.7
    assert 1 / 64 < found.informed_share < 0.5
    for row in found.rows:  # by hand, at the shares that were asked for
        work = (found.batch + row.informed) * (1 + 3 * row.kept / 200) / (3 * found.batch)
        assert work >= found.informed_work * 0.999
    assert found.batch * 200 == pytest.approx(found.rows[0].uniform * 200, rel=0.01)  # N S^2 (N / k - 1) at a half
    said = str(noise)
    assert "uniform masks are as good" in said
    assert "informed masks pay" in said
    some = gradient_noise(*skewed(), draws=2, samples=200, units=50, predict=ps, seed=0)
    for row, close in zip(found.rows, some.forecasts[0].rows, strict=True):
        assert (close.uniform, close.informed) == pytest.approx((row.uniform, row.informed), rel=0.25)
    alike = gradient_noise(skewed()[0], nn.functional.mse_loss, skewed()[2], draws=2, samples=200, predict=ps, seed=0)
    assert alike.forecasts[0].informed_work > found.informed_work


def test_each_mask_is_predicted_alone_and_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Linear(6, 8), Backdrop(0.5), nn.Tanh(), nn.Linear(8, 1), Backdrop(0.9, exact=True))
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    noise = gradient_noise(model, nn.functional.mse_loss, (x, y), draws=2, predict=(0.5, 0.9), seed=0)
    assert [found.name for found in noise.forecasts] == ["1", "4"]
    assert "draw_weight" not in before["1"]
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == {
        name: set(state) for name, state in before.items()
    }
    only = nn.Sequential(*model[:4])
    alone = gradient_noise(only, nn.functional.mse_loss, (x, y), draws=2, predict=(0.5, 0.9), seed=0)
    assert alone.forecasts[0].rows[1].uniform == pytest.approx(noise.forecasts[0].rows[1].uniform, rel=1e-4)
    assert not gradient_noise(model, nn.functional.mse_loss, (x, y), draws=2, seed=0).forecasts


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return {"a": hidden.tanh(), "b": hidden.exp()}


def test_masks_in_other_peoples_models():
    """A branch that goes around the mask, one behind a module of a model, one that is called twice, several tensors."""
    torch.manual_seed(0)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mask = nn.Linear(6, 1), Backdrop(0.5, exact=True)

        def forward(self, x):
            h = self.linear(x)
            return self.mask(h) + 3 * h.tanh(), self.mask(h * 2)

    x, loss = torch.randn(16, 6), lambda out: sum(o.square().mean() for o in out)
    noise = gradient_noise(Around(), loss, (x,), draws=1500, predict=(0.5,), seed=0)
    assert [found.name for found in noise.forecasts] == ["mask", "mask (2)"]
    both = sum(found.rows[0].uniform for found in noise.forecasts)
    assert noise.total.relative_variance == pytest.approx(both, rel=0.1)

    inserted = insert(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), {"0": Backdrop(0.5)})
    (found,) = gradient_noise(inserted, lambda out: out.square().mean(), (x,), 2, predict=(0.5,), seed=0).forecasts
    assert found.rows[0].informed > 0
    fast = skip_blocked(inserted, when="always")
    noise = gradient_noise(fast, lambda out: out.square().mean(), (x,), 2, predict=(0.5,), seed=0)
    assert "give the model without skipping" in str(noise)

    several = insert(nn.Sequential(Two()), {"0": Backdrop(0.5)})
    noise = gradient_noise(several, lambda out: out["a"].sum() + out["b"].sum(), (x,), 2, predict=(0.5,), seed=0)
    assert not noise.forecasts
    assert "several tensors at once" in str(noise)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        gradient_noise(inserted, lambda out: out.sum(), (x,), predict=(1.0,))


@pytest.mark.parametrize(("size", "p"), [(1, 0.5), (7, 0.3), (50, 0.99), (3, 0.0)])
def test_the_mean_of_one_over_the_number_of_kept_units(size, p):
    expected = p**size + sum(math.comb(size, j) * (1 - p) ** j * p ** (size - j) / j for j in range(1, size + 1))
    assert inverse_count(size, p) == pytest.approx(expected)
