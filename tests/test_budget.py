"""A budget of variance: masks whose noise is known end where the theory says, and resumed runs go on as they were."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, skip_blocked
from backdrop._core.informed import inclusion_probabilities
from backdrop._core.regression import Regression
from backdrop.schedules import VarianceBudget
from skipping import captures


def scores(**how):
    return nn.Sequential(nn.Linear(8, 1), Backdrop(0.9, exact=True, **how))


def step(model, rows=100, skew=0.0):
    """Of a mean over independent samples: a mask adds h = p / (1 - p) times the variance from batch to batch."""
    x, weight = torch.randn(rows, 8), torch.exp(skew * torch.randn(rows, 1))
    model.zero_grad()
    ((model(x) - torch.randn(rows, 1)).square() * weight).mean().backward()


def run(model, budget, steps, **how):
    odds = []
    for i in range(steps):
        step(model, **how)
        budget.step()
        if i > 2 * budget.memory:
            odds.append(list(budget._odds))
    return torch.tensor(odds).mean(0).tolist()


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_uniform_masks_of_a_sum_end_where_they_should(share):
    """They are minibatches, whose variance is known: the mean of h is the share."""
    torch.manual_seed(0)
    model = scores()
    (odds,) = run(model, VarianceBudget(model, share=share, memory=500), 3000)
    assert odds == pytest.approx(share, rel=0.2)


def test_informed_masks_may_drop_more():
    found = []
    for choose in ("uniform", "gradient"):
        torch.manual_seed(0)
        model = scores(choose=choose)
        found += run(model, VarianceBudget(model, share=0.5, memory=200), 1000, skew=1.0)
    assert found[1] > 2 * found[0]


@pytest.mark.parametrize("skew", [0.3, 1.0, 3.0])
def test_what_a_line_makes_of_the_variance_of_informed_masks(skew):
    """Convex in the odds, and 0 at 0; with a floor no more than that of fewer units (docs/theory.md)."""
    torch.manual_seed(0)
    sizes, odds = torch.exp(skew * torch.randn(1, 200, dtype=torch.float64)), [i / 10 for i in range(301)]
    without, with_floor = (
        torch.stack([((1 / inclusion_probabilities(sizes, 200 / (1 + h), f) - 1) * sizes.square()).sum() for h in odds])
        for f in (0.0, 0.1)
    )
    for found in (without, with_floor):
        assert found[0].abs() < 1e-9 * found[-1]
        assert (found.diff().diff() >= -1e-9 * found[-1]).all()
    assert (with_floor >= without * (1 - 1e-9)).all()
    fewer = [(1 + h) / 0.9 - 0.1 / 0.9 for h in odds]  # N / k of k (1 - f) / (1 - f k / N) units
    bound = [((1 / inclusion_probabilities(sizes, 200 / n, 0.0) - 1) * sizes.square()).sum() for n in fewer]
    assert (with_floor <= torch.stack(bound) * (1 + 1e-9)).all()


class TwoMasks(nn.Module):
    """Of which one stands on the input, where it blocks nothing."""

    def __init__(self):
        super().__init__()
        self.idle, self.linear, self.mask = Backdrop(0.5, exact=True), nn.Linear(8, 1), Backdrop(0.9, exact=True)

    def forward(self, x):
        return self.mask(self.linear(self.idle(x)))


def test_a_mask_that_adds_nothing_may_drop_all_it_likes():
    torch.manual_seed(0)
    model = TwoMasks()
    budget = VarianceBudget(model, share=1.0, memory=300, largest=0.95)
    idle, mask = run(model, budget, 1500)
    assert idle > 8
    assert mask == pytest.approx(0.5, rel=0.3)  # half of the budget
    assert max(budget.get_last_p()) <= 0.95


def test_masks_of_positions_and_a_skipping_model():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), Backdrop2d(0.5, exact=True), nn.Flatten(), nn.Linear(2 * 36, 1))
    budget = VarianceBudget([plain[1]], share=0.5, parameters=plain[0].parameters(), memory=50)
    for _ in range(300):
        plain.zero_grad()
        plain(torch.randn(8, 1, 8, 8)).square().mean().backward()
        budget.step()
    assert 0.05 < budget.shares()[0] < 5
    assert 0 < budget.get_last_p()[0] < 0.99


@captures
def test_the_same_numbers_where_gradients_are_skipped():
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), Backdrop(0.5, exact=True))
    fast, found = skip_blocked(plain, when="always"), []
    for model in (plain, fast):
        torch.manual_seed(1)
        budget = VarianceBudget(model, share=0.5, memory=20)
        for _ in range(30):
            step(model, rows=20)
            budget.step()
        found.append(budget.get_last_p() + budget.shares())
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("stop", [0, 1, 7, 30])
@pytest.mark.parametrize("observed", [False, True])
def test_resumes_exactly(stop, observed):
    """Also where a checkpoint was made between the optimiser's step and the schedule's."""
    torch.manual_seed(0)
    model = scores()
    budget = VarianceBudget(model, share=0.5, memory=10)
    for _ in range(stop):
        step(model)
        budget.step()
    if observed:
        step(model)
        budget.observe()
    saved, state, other = json.loads(json.dumps(budget.state_dict())), torch.get_rng_state(), copy.deepcopy(model)
    resumed = VarianceBudget(other, share=0.3, memory=77)
    resumed.load_state_dict(saved)
    assert float(other[1].p) == float(model[1].p)
    if observed:
        other.zero_grad()
        resumed.step()
        budget.step()
    for one, schedule in ((model, budget), (other, resumed)):
        torch.set_rng_state(state)
        for _ in range(20):
            step(one)
            schedule.step()
    assert resumed.state_dict() == budget.state_dict()
    assert resumed.get_last_p() == budget.get_last_p()


def test_levels_have_the_mean_they_should():
    """5,000 draws: the mean of h lies within 7 of its standard deviations."""
    for share, high in ((2.0, 2.5), (0.1, 10.0)):
        budget = VarianceBudget(scores(), share=share, largest=0.9999)
        odds = [p / (1 - p) for p in (budget._level(t, 0, 3.0) for t in range(5000))]
        spread = 3 * (high - 0.5) * math.sqrt(0.5 / (high - 0.5) / 5000)
        assert abs(sum(odds) / 5000 - 3) < 7 * spread
        assert {round(h, 6) for h in odds} == {1.5, round(3 * high, 6)}


def test_gradients_that_are_not_finite_are_passed_over():
    torch.manual_seed(0)
    model = scores()
    budget = VarianceBudget(model, share=0.5, memory=40)
    for i in range(80):
        step(model)
        if i % 7 == 3:
            model[0].weight.grad[0, 0] = math.nan
        budget.step()
    assert math.isfinite(budget.shares()[0])


def test_what_is_refused():
    model = scores()
    for wrong, error, said in (
        ({"share": 0}, ValueError, "share"),
        ({"share": "a"}, TypeError, "share"),
        ({"share": 0.1, "memory": 2}, ValueError, "memory"),
        ({"share": 0.1, "largest": 1.0}, ValueError, "1.0"),
        ({"share": 0.1, "parameters": []}, ValueError, "parameters"),
    ):
        with pytest.raises(error, match=said):
            VarianceBudget(model, **wrong)
    with pytest.raises(ValueError, match="parameters"):
        VarianceBudget([model[1]], share=0.1)
    with pytest.raises(ValueError, match="at least one Backdrop layer"):
        VarianceBudget(nn.Linear(2, 2), share=0.1)
    budget = VarianceBudget(model, share=0.1)
    with pytest.raises(RuntimeError, match="before zero_grad"):
        budget.step()
    assert math.isnan(budget.shares()[0])
    before = budget.state_dict()
    step(model)
    budget.step()
    for change in ({"_odds": [1.0, 2.0]}, {"_before": [1.0]}, {"_regression": {}}):
        with pytest.raises(ValueError, match="VarianceBudget"):
            budget.load_state_dict({**before, **change})
    assert budget.last_step == 1


def test_regression_against_least_squares():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 2, generator=generator, dtype=torch.float64)
    y = 2 + x @ torch.tensor([3.0, 0.5]).double() + 0.1 * torch.randn(400, generator=generator)
    found = Regression(2, 10**9)
    found.mean, found.count = 1.0, 10**10  # so that all weigh the same
    for row, value in zip(x.tolist(), y.tolist(), strict=True):
        found.add(row, value)
    expected = torch.linalg.lstsq(torch.cat([torch.ones(400, 1), x], 1).double(), y.double()[:, None]).solution
    assert found.solve() == pytest.approx(expected.flatten().tolist(), rel=1e-6)
    for row in x.tolist():  # what falls with x has no slope
        found.add(row, 3 - row[0])
    for row in x.tolist():
        for _ in range(5):
            found.add(row, 3 - row[0])
    assert found.solve()[1] == 0
