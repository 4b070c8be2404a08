"""Cox's loss against its definition, many digits of it, lifelines and torchsurv; at its edges; over processes."""

import copy
import itertools
import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import processes
from backdrop.losses import CoxLoss, cox_loss, survival
from memory import Peak

OPTIONS = [
    pytest.param(*given, id=" ".join(name for name, on in zip(("strata", "entry", "weight"), given, strict=True) if on))
    for given in itertools.product([False, True], repeat=3)
]


def cohort(n=90, tied=True, strata=False, entry=False, weighted=False, dtype=torch.float64):
    """Log hazards, times and events, and what else is asked for; with ties each time has several of both kinds."""
    eta = torch.randn(n, dtype=dtype, requires_grad=True)
    times = torch.randint(1, 9, (n,)) if tied else 1 + 9 * torch.rand(n)
    events, more = torch.rand(n) < 0.6, {}
    if strata:
        more["strata"] = torch.tensor([10**15, -3, 10**15 + 1, 7])[torch.randint(4, (n,))]
    if entry:
        more["entry"] = times - (torch.randint(1, 9, (n,)) if tied else 5 * torch.rand(n) + 1e-3)
    if weighted:
        more["weight"] = torch.rand(n, dtype=dtype) * (torch.rand(n) < 0.8)
    return eta, times, events, more


def by_definition(eta, times, events, ties, strata=None, entry=None, weight=None):
    """In float64, with a loop over events."""
    eta, n = eta.double(), len(eta)
    w = torch.ones(n).double() if weight is None else weight.double()
    c = torch.zeros(n) if strata is None else strata
    start = torch.full((n,), -math.inf) if entry is None else entry
    total = weights = 0
    for stratum in c.unique():
        here = (c == stratum) & (w > 0)
        for t in times[here & (events == 1)].unique():
            dead, risk = here & (events == 1) & (times == t), here & (times >= t) & (start < t)
            d = dead.sum().item()
            for place, i in enumerate(dead.nonzero()[:, 0]):
                at_risk = (w * eta.exp())[risk].sum()
                if ties == "efron":
                    at_risk = at_risk - place / d * (w * eta.exp())[dead].sum()
                total = total + w[dead].mean() * at_risk.log() - w[i] * eta[i]
                weights = weights + w[i]
    return total / weights


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("strata", "entry", "weighted"), OPTIONS)
@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_the_definition(ties, tied, strata, entry, weighted, logs, dtype, monkeypatch):
    if logs:
        monkeypatch.setattr(survival, "SPREAD", -1.0)
    for n in (2, 7, 90):
        eta, times, events, more = cohort(n, tied, strata, entry, weighted, dtype)
        events[0] = True
        if weighted:
            more["weight"][0] = 0.4
        expected, actual = (
            by_definition(eta, times, events, ties, **more),
            cox_loss(eta, times, events, ties=ties, **more),
        )
        assert actual.dtype == dtype
        close = 1e-12 if dtype == torch.float64 else 3e-7
        torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close)
        gradients = [torch.autograd.grad(value, eta)[0] for value in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=close, atol=close * 0.1)


def test_ties_are_counted_in_two_ways():
    eta, times, events, _ = cohort()
    assert cox_loss(eta, times, events) == cox_loss(eta, times, events, ties="efron")
    assert cox_loss(eta, times, events) < cox_loss(eta, times, events, ties="breslow") - 1e-3
    apart = torch.rand(90)
    values = [cox_loss(eta, apart, events, ties=ties) for ties in ("efron", "breslow")]
    torch.testing.assert_close(*values, rtol=1e-14, atol=0)


def with_many_digits(eta, times, events, ties, entry, weight):
    """Loss and gradient as by_definition has them, with as many digits as log hazards of 1e4 ask for."""
    with mpmath.workdps(9_000):
        x = [w * mpmath.exp(mpmath.mpf(e)) for w, e in zip(weight.tolist(), eta.tolist(), strict=True)]
        total, weights, gradient = mpmath.mpf(0), mpmath.mpf(0), [mpmath.mpf(0)] * len(eta)
        for t in times[events].unique():
            dead = ((times == t) & events).nonzero()[:, 0].tolist()
            risk = ((times >= t) & (entry < t)).nonzero()[:, 0].tolist()
            mean = sum(weight[i].item() for i in dead) / mpmath.mpf(len(dead))
            for place, i in enumerate(dead):
                part = {j: mpmath.mpf(1) for j in risk}
                for j in dead:
                    part[j] -= mpmath.mpf(place) / len(dead) if ties == "efron" else 0
                at_risk = sum(part[j] * x[j] for j in risk)
                total += mean * mpmath.log(at_risk) - weight[i].item() * mpmath.mpf(eta[i].item())
                weights += weight[i].item()
                gradient[i] -= weight[i].item()
                for j in risk:
                    gradient[j] += mean * part[j] * x[j] / at_risk
        return float(total / weights), [float(g / weights) for g in gradient]


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e4, 300.0])  # the sums that 300 asks for would still fit into float64
def test_far_log_hazards(ties, entry, dtype, size):
    """A sum over those at risk that is what a cumulative sum lost, or a difference of sums, would be far off."""
    n = 14
    eta = (size * (2 * torch.rand(n, dtype=dtype) - 1)).requires_grad_()
    with torch.no_grad():
        eta[:6] = torch.tensor([size, -size, size, 0.5, 0.25, -size])
    times, events, weight = torch.randint(1, 6, (n,)), torch.rand(n) < 0.7, torch.rand(n, dtype=dtype) + 0.1
    begin = times - torch.randint(1, 5, (n,)) if entry else torch.full((n,), -1)
    actual = cox_loss(eta, times, events, ties=ties, entry=begin if entry else None, weight=weight)
    (gradient,) = torch.autograd.grad(actual, eta)
    value, expected = with_many_digits(eta.detach(), times, events, ties, begin, weight)
    close = 1e-13 if dtype == torch.float64 else 2e-7
    assert actual.item() == pytest.approx(value, rel=close)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-9 if dtype == torch.float64 else 1e-5, abs=close)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_far_log_hazards_of_many(ties):
    eta, times, events, _ = cohort(5000, tied=False)
    far = (1e4 * eta).detach().requires_grad_()
    loss = cox_loss(far, times, events, ties=ties, entry=times - 3)
    loss.backward()
    assert loss.isfinite()
    assert far.grad.isfinite().all()
    assert far.grad.sum().abs() < 1e-10  # only differences of log hazards matter


def test_gradcheck():
    eta, times, events, more = cohort(20, strata=True, entry=True, weighted=True)
    for ties in ("efron", "breslow"):
        assert torch.autograd.gradcheck(lambda x, ties=ties: cox_loss(x, times, events, ties=ties, **more), eta)


@pytest.mark.filterwarnings("ignore")  # of lifelines about pandas
@pytest.mark.parametrize(("strata", "entry", "weighted"), OPTIONS)
def test_lifelines_finds_the_minimum_of_this_loss(strata, entry, weighted):
    lifelines = pytest.importorskip("lifelines", reason="lifelines is not installed")
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    _, times, events, more = cohort(200, True, strata, entry, weighted)
    x = torch.randn(200, 2, dtype=torch.float64)
    keep = more["weight"] > 0 if weighted else torch.ones(200).bool()
    table = pandas.DataFrame({"a": x[keep, 0], "b": x[keep, 1], "time": times[keep], "event": events[keep].long()})
    names = {"strata": "strata", "entry": "entry_col", "weight": "weights_col"}
    for name, column in more.items():
        table[name] = column[keep].numpy()
    fitter = lifelines.CoxPHFitter()
    settings = {names[name]: [name] if name == "strata" else name for name in more}
    fitter.fit(table, "time", "event", robust=weighted, fit_options={"precision": 1e-12}, **settings)
    beta = torch.tensor(fitter.params_.to_numpy(), requires_grad=True)
    loss = cox_loss(x @ beta, times, events, **more)
    counted = more["weight"][events].sum() if weighted else events.sum()
    assert loss.item() == pytest.approx(-fitter.log_likelihood_ / counted.item(), rel=1e-9)
    assert torch.autograd.grad(loss, beta)[0].abs().max() < 1e-6


@pytest.mark.filterwarnings("ignore:Ties in `time` detected")
@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("strata", [False, True])
def test_torchsurv_computes_the_same(ties, tied, strata):
    cox = pytest.importorskip("torchsurv.loss.cox", reason="torchsurv is not installed")
    eta, times, events, more = cohort(200, tied, strata)
    expected = cox.neg_partial_log_likelihood(eta, events, times.double(), ties_method=ties, reduction="sum", **more)
    expected = expected / events.sum()  # its mean is one over the different times
    actual = cox_loss(eta, times, events, ties=ties, **more)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(value, eta)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_weights_say_how_often_a_sample_is_there():
    eta, times, events, more = cohort(strata=True, entry=True)
    often = torch.randint(4, (90,))
    repeated = [x.repeat_interleave(often) for x in (eta, times, events)]
    columns = {name: x.repeat_interleave(often) for name, x in more.items()}
    expected = cox_loss(*repeated, ties="breslow", **columns)
    actual = cox_loss(eta, times, events, ties="breslow", weight=often, **more)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, eta)[0] for value in (actual, expected)))


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_the_size_of_weights_does_not_matter_to_the_gradient(size):
    eta, times, events, _ = cohort()
    losses = [cox_loss(eta, times, events, weight=torch.full((90,), w, dtype=torch.float64)) for w in (1.0, size)]
    torch.testing.assert_close(losses[1] - math.log(size), losses[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(*(torch.autograd.grad(value, eta)[0] for value in losses))


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_padding_has_no_effect(ties):
    """Whatever it holds."""
    eta, times, events, more = cohort(strata=True, entry=True, weighted=True)
    expected = cox_loss(eta, times, events, ties=ties, **more)
    (gradient,) = torch.autograd.grad(expected, eta)
    padding = more["weight"] == 0
    assert 5 < padding.sum() < 80
    junk = [x.detach().double().masked_fill(padding, math.nan) for x in (eta, times, events, more["entry"])]
    x = junk[0].requires_grad_()
    strata = more["strata"].masked_fill(padding, 5)
    more = {"strata": strata, "entry": junk[3], "weight": more["weight"]}
    actual = cox_loss(x, *junk[1:3], ties=ties, **more)
    assert torch.equal(actual, expected)
    assert torch.equal(torch.autograd.grad(actual, x)[0], gradient)
    assert not cox_loss(x, junk[1], torch.zeros(90), single_class="zero", **more)


def test_order_and_shape_do_not_matter():
    eta, times, events, more = cohort(strata=True, entry=True, weighted=True)
    order, expected = torch.randperm(90), cox_loss(eta, times, events, **more)
    shuffled = [x[order] for x in (eta, times, events)]
    torch.testing.assert_close(
        cox_loss(*shuffled, **{k: x[order] for k, x in more.items()}), expected, rtol=1e-14, atol=0
    )
    columns = [x[:, None] for x in (eta, times, events)]
    loss = cox_loss(*columns, **{k: x[:, None] for k, x in more.items()})
    assert torch.equal(loss, expected)
    for dtype in (torch.uint8, torch.int64, torch.float32, torch.float16):
        assert torch.equal(cox_loss(eta, times.to(dtype), events.to(dtype), **more), expected)


def test_those_at_risk():
    """By hand: censored at the time of an event is at risk then, entered at that time is not."""
    zeros = torch.zeros(4, dtype=torch.float64)
    times, events = torch.tensor([1.0, 1.0, 2.0, math.inf]), torch.tensor([1, 0, 1, 0])
    assert cox_loss(zeros, times, events).item() == pytest.approx((math.log(4) + math.log(2)) / 2)
    late = torch.tensor([-math.inf, 0.0, 0.5, 1.0])
    assert cox_loss(zeros, times, events, entry=late).item() == pytest.approx((math.log(3) + math.log(2)) / 2)
    own = torch.tensor([0, 0, 1, 2])
    assert cox_loss(zeros, times, events, strata=own).item() == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_without_events(n):
    eta = torch.randn(n, requires_grad=True)
    with pytest.raises(ValueError, match=rf"the batch of {n} samples has no event.*single_class='zero'"):
        cox_loss(eta, torch.rand(n), torch.zeros(n))
    loss = cox_loss(eta, torch.rand(n), torch.zeros(n), single_class="zero")
    assert loss == 0
    loss.backward()
    assert eta.grad is not None
    assert not eta.grad.any()


def test_an_event_alone_costs_nothing():
    eta = torch.tensor([3.0], requires_grad=True)
    loss = cox_loss(eta, torch.ones(1), torch.ones(1))
    loss.backward()
    assert loss == 0
    assert eta.grad == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_and_autocast(dtype, autocast):
    eta, times, events, more = cohort(200, entry=True)
    rounded = eta.detach().to(dtype)
    reference, x = rounded.double().requires_grad_(), rounded.clone().requires_grad_()
    expected = cox_loss(reference, times, events, **more)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = cox_loss(x, times, events, **more)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert x.grad.dtype == dtype
    assert (x.grad.double() - reference.grad).norm() < 0.02 * reference.grad.norm()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
people = st.lists(
    st.tuples(finite, finite, st.booleans(), st.one_of(st.just(1.0), finite.map(abs)), st.booleans()),
    min_size=1,
    max_size=9,
)


@given(people=people, double=st.booleans(), ties=st.sampled_from(["efron", "breslow"]), entries=st.booleans())
def test_no_finite_input_gives_nan(people, double, ties, entries):
    x, times, events, weight, strata = (torch.tensor(each) for each in zip(*people, strict=True))
    x = (x.double() * 1e268 if double else x).requires_grad_()  # about as large as numbers get
    entry = times.double() - 1e32 if entries else None
    loss = cox_loss(x, times, events, ties=ties, strata=strata, entry=entry, weight=weight, single_class="zero")
    assert not loss.isnan()
    if loss.isfinite():
        loss.backward()
        assert not x.grad.isnan().any()


@pytest.mark.parametrize("which", ["event", "censored"])
@pytest.mark.parametrize("entry", [False, True])
def test_nan_is_not_hidden(which, entry):
    eta, times, events, more = cohort(tied=False, entry=entry)
    with torch.no_grad():
        latest = torch.where(events == (which == "event"), times, 0).argmax()
        eta[latest] = math.nan
    loss = cox_loss(eta, times, events, **more)
    assert loss.isnan()
    loss.backward()
    assert eta.grad.isnan().any()


WRONG = {
    "ties has to be 'efron' or 'breslow', but got 'exact'": {"ties": "exact"},
    "single_class has to be 'error' or 'zero'": {"single_class": "skip"},
    r"log_hazards has to have the shape \(n,\) or \(n, 1\), but got \(3, 2\)": {"log_hazards": torch.zeros(3, 2)},
    r"times has to be one number per sample, shape \(3,\)": {"times": torch.ones(4)},
    "events has to hold 0 and 1, but got .*2": {"events": torch.tensor([0, 1, 2])},
    "times and entry have to hold numbers, but got NaN": {"times": torch.tensor([1.0, math.nan, 2.0])},
    "entry has to be below times, .* but got entry 2 and time 2": {"entry": torch.tensor([0, 2, 0])},
    "weight has to hold finite numbers of at least 0": {"weight": torch.tensor([1.0, -1.0, 1.0])},
    r"strata has to be one number per sample": {"strata": torch.zeros(2, dtype=torch.long)},
}
WRONG_KINDS = {
    "log_hazards has to be a floating-point tensor": {"log_hazards": torch.zeros(3, dtype=torch.long)},
    "times has to be a tensor of real numbers, but got list": {"times": [1.0, 2.0, 3.0]},
    "events has to be a tensor of real numbers, but got list": {"events": [1, 1, 0]},
    "strata has to be a tensor of integers, but got torch.float32": {"strata": torch.zeros(3)},
    "group has to be": {"group": "all"},
}


@pytest.mark.parametrize("message", [*WRONG, *WRONG_KINDS])
def test_what_is_refused(message):
    right = {"log_hazards": torch.zeros(3), "times": torch.tensor([1, 2, 3]), "events": torch.tensor([1, 1, 0])}
    cox_loss(**right)
    with pytest.raises(ValueError if message in WRONG else TypeError, match=message):
        cox_loss(**{**right, **{**WRONG, **WRONG_KINDS}[message]})


def test_second_derivatives_are_refused():
    eta, times, events, _ = cohort()
    (gradient,) = torch.autograd.grad(cox_loss(eta, times, events), eta, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
def test_compiled():
    """A graph break, and the same loss."""
    _, times, events, _ = cohort(30)
    model, x = nn.Linear(5, 1).double(), torch.randn(30, 5, dtype=torch.float64)
    gradients = []
    for call in (
        lambda: cox_loss(model(x), times, events),
        torch.compile(lambda: cox_loss(model(x), times, events), backend="aot_eager"),
    ):
        model.zero_grad()
        call().backward()
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_module():
    eta, times, events, more = cohort(strata=True, entry=True, weighted=True)
    loss = copy.deepcopy(CoxLoss("breslow"))
    assert torch.equal(loss(eta, times, events, **more), cox_loss(eta, times, events, ties="breslow", **more))
    assert repr(loss) == "CoxLoss(ties='breslow')"
    loss.ties, loss.single_class = "efron", "zero"
    assert torch.equal(loss(eta, times, events), cox_loss(eta, times, events))
    assert loss(eta, times, torch.zeros(90)) == 0
    assert repr(loss) == "CoxLoss(ties='efron', single_class='zero')"
    with pytest.raises(ValueError, match="ties has to be"):
        CoxLoss("exact")


def test_memory_grows_with_the_samples(monkeypatch):
    """Not with pairs, nor with the levels of ranges."""
    for logs in (False, True):
        monkeypatch.setattr(survival, "SPREAD", -1.0 if logs else 600.0)
        eta, times, events, more = cohort(4000, tied=False, strata=True, entry=True)
        with Peak() as peak:
            cox_loss(eta, times, events, **more).backward()
        assert peak.bytes < 4000 * 8 * 60


SIZES = [[5, 9, 4], [7, 0, 11], [0, 0, 6]]


def shares(sizes):
    generator = torch.Generator().manual_seed(3)
    n = sum(sizes)
    numbers = [torch.randn(n, 3, generator=generator).double(), torch.randint(1, 6, (n,), generator=generator)]
    numbers.append(torch.rand(n, generator=generator) < 0.6)
    numbers.append(torch.tensor([3, -(2**62), 2**62 + 1])[torch.randint(3, (n,), generator=generator)])
    numbers.append(numbers[1] - torch.randint(1, 6, (n,), generator=generator))
    numbers.append(torch.rand(n, generator=generator).double() * (torch.arange(n) % 4 > 0))
    return [x.split(sizes) for x in numbers]


def parameters_and_loss(model, numbers, full, **more):
    x, times, events, strata, entry, weight = numbers
    more |= {"strata": strata, "entry": entry, "weight": weight} if full else {}
    loss = cox_loss(model(x), times, events, **more)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _train(rank):
    model = nn.parallel.DistributedDataParallel(network())
    found = []
    for sizes in SIZES:
        for full in (False, True):
            model.zero_grad()
            found.append(parameters_and_loss(model, [x[rank] for x in shares(sizes)], full, group="world"))
        with pytest.raises(ValueError, match=f"the batch of {sum(sizes)} samples has no event"):
            cox_loss(torch.zeros(sizes[rank]), torch.ones(sizes[rank]), torch.zeros(sizes[rank]), group="world")
    return found


def test_many_processes_train_like_one():
    everywhere = processes.run(_train, 3)
    cases = [(sizes, full) for sizes in SIZES for full in (False, True)]
    for found in everywhere:
        for (sizes, full), values in zip(cases, found, strict=True):
            expected = parameters_and_loss(network(), [torch.cat(x) for x in shares(sizes)], full)
            torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
