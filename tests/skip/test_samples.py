"""Samples dropped: kept ones run with gradients, the others without; any module, any nesting of tensors."""

import copy
import dataclasses
import math
from typing import ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from backdrop import Backdrop, Backdrop2d, Skip, functional, register_rule, skip_blocked
from backdrop.graph import cost
from memory import peak_of
from skipping import assert_close, assert_same_gradients, captures, check, step

pytestmark = captures


def images(count=12, channels=3):
    return torch.randn(count, channels, 8, 8, dtype=torch.float64)


def network(*extra):
    return nn.Sequential(
        *(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.LayerNorm(8),
            nn.InstanceNorm2d(4),
        ),
        *(*extra, nn.Flatten(), nn.Linear(256, 5), nn.Softmax(1)),
    ).double()


@settings(max_examples=15)
@given(
    count=st.integers(1, 20),
    p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999]),
    exact=st.booleans(),
    scale=st.sampled_from(["count", "eq1", "probability", None]),
    seed=st.integers(0, 9),
)
def test_any_batch_has_the_gradients_of_the_plain_pair(count, p, exact, scale, seed):
    check(nn.Sequential(network(), Backdrop(p, exact=exact, scale=scale)), images(count), seed=seed)


@pytest.mark.parametrize("at_once", [None, 5])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.Identity])
def test_images_turn_for_the_pass_without_gradients(norm, at_once):
    """Convolutions on a CPU want the channels together; outputs lie in memory as the plain model's do."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 6, 3)]
    plain = nn.Sequential(*layers, Backdrop(0.7, exact=True))
    x = torch.randn(24, 3, 20, 16)
    if norm is nn.Identity:  # under the others gradients are estimated
        check(plain, x, tolerance=1e-5, at_once=at_once)
    fast = skip_blocked(plain, statistics="sampled", when="always", at_once=at_once)
    expected, out = plain(x), fast(x)
    assert "ran with gradients" in fast.skip_report[0].last
    assert out.stride() == expected.stride()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(fast.named_buffers()), dict(plain.named_buffers()), rtol=1e-5, atol=1e-5)


class Watch(nn.Module):
    """Writes down how many samples it sees, and whether they have gradients."""

    seen: ClassVar = []

    def forward(self, x):
        return torch.ops.watching.watch(x)


def _watch(x):
    if not isinstance(x, FakeTensor):
        Watch.seen.append((len(x), torch.is_grad_enabled()))
    return x * 2


library = torch.library.Library("watching", "DEF")
library.define("watch(Tensor x) -> Tensor")
library.impl("watch", _watch, "CompositeImplicitAutograd")


@register_rule(torch.ops.watching.watch)
def _(call):
    return call.elementwise()


def test_only_kept_samples_run_with_gradients():
    model = skip_blocked(nn.Sequential(nn.Linear(3, 3), Watch(), Backdrop(0.75, exact=True)), when="always")
    model(torch.randn(16, 3))
    Watch.seen.clear()
    model(torch.randn(16, 3)).sum().backward()
    assert sorted(Watch.seen) == [(4, True), (12, False)]
    assert model.skip_report[0].last == "4 of 16 samples ran with gradients"


def test_large_batches_run_in_parts():
    from backdrop.skip import samples

    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), Backdrop(0.99, exact=True)).double()
    check(model, torch.randn(3 * samples.AT_ONCE, 2, dtype=torch.float64))


@pytest.mark.parametrize(("most", "parts"), [(9, 4), (3, 2), (1, 1), (0, None)])
@pytest.mark.parametrize("norm", [False, True])
def test_parts_are_fewer_where_many_would_not_pay(monkeypatch, most, parts, norm):
    from backdrop.skip import samples

    layers = [nn.Linear(2, 3), Watch(), *([nn.BatchNorm1d(3)] if norm else []), nn.Linear(3, 1)]
    model = nn.Sequential(*layers, Backdrop(0.99, exact=True)).double()
    rates = cost.CPU._replace(call=1.0, step_call=0.0, normed_call=0.0, split=0.0)
    rates = rates._replace(multiplications=math.inf, numbers=math.inf)
    monkeypatch.setattr(cost, "_rates", lambda device: rates)
    x = torch.randn(4 * samples.AT_ONCE, 2, dtype=torch.float64)
    with torch.no_grad(), cost.Meter() as meter:
        model(x)
    calls = meter.cost.calls
    monkeypatch.setattr(cost, "pays", lambda spent, saved: spent <= most * calls)  # seconds: a call takes one
    fast = skip_blocked(model, statistics="sampled")
    fast(x)  # which captures it
    Watch.seen.clear()
    fast(x)
    if norm and parts:
        parts = 1  # all in one pass, for the statistics
    assert [grad for _, grad in Watch.seen].count(False) == (parts or 0)
    assert fast.skip_report[0].last.startswith("15 of 1536" if parts else "plain")


class Outputs(NamedTuple):
    first: torch.Tensor
    rest: dict


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    index: torch.Tensor
    note: str
    nothing: None = None


class Nested(nn.Module):
    """Takes and returns tensors in tuples, lists, dictionaries and dataclasses."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, batch, *, table=None, flag=True):
        left, right = self.a(batch["left"]), self.b(batch["others"][0])
        if flag and table is not None:
            left = left + table
        record = Record(left * right, batch["others"][1], "kept as it is")
        return Outputs(left.tanh(), {"record": record, "list": [right, (left + right)]})


def nested_loss(outputs):
    record = outputs.rest["record"]
    assert record.note == "kept as it is"
    terms = [outputs.first, record.hidden, *outputs.rest["list"]]
    return sum((i + 1) * term.square().sum() for i, term in enumerate(terms)) + record.index.sum()


def test_any_nesting_of_tensors():
    module, mask = Nested().double(), Backdrop(0.7)
    batch = {"left": torch.randn(10, 3).double(), "others": (torch.randn(10, 2).double(), torch.arange(10))}
    table = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    skip = Skip(copy.deepcopy(module), mask, when="always")
    torch.manual_seed(0)
    fast = skip(batch, table=table)
    assert torch.equal(fast.rest["record"].index, torch.arange(10))
    nested_loss(fast).backward()
    fast_table, table.grad = table.grad, None
    torch.manual_seed(0)
    weight = mask.draw_weight(torch.empty(10, dtype=torch.float64))[:, None]
    plain = module(batch, table=table)
    plain = Outputs(*(plain.first, plain.rest))
    masked = [
        functional.mask_gradient(t, weight) for t in (plain.first, plain.rest["record"].hidden, *plain.rest["list"])
    ]
    record = dataclasses.replace(plain.rest["record"], hidden=masked[1])
    nested_loss(Outputs(masked[0], {"record": record, "list": masked[2:]})).backward()
    assert_close(plain.first, fast.first, 1e-12)
    assert_close(table.grad, fast_table, 1e-10)
    for a, b in zip(module.parameters(), skip.module.parameters(), strict=True):
        assert_close(a.grad, b.grad, 1e-10)
    assert skip.report[0].last.endswith("samples ran with gradients")


class Unfollowable(Nested):
    """Torch's capture of the graph ends where Python code asks for a number."""

    def forward(self, batch, *, table=None, flag=True):
        return super().forward(batch, table=table, flag=flag and bool(batch["left"].sum() > -1e9))


@pytest.mark.parametrize("kind", [Nested, Unfollowable])
def test_nested_outputs_without_skipping_share_one_mask(kind):
    skip = Skip(kind(), Backdrop(0.5))  # ten samples: not worth it
    left, right = torch.randn(10, 3, requires_grad=True), torch.randn(10, 2, requires_grad=True)
    outputs = skip({"left": left, "others": (right, torch.arange(10))}, table=torch.zeros(1, 4))
    assert skip.report[0].last.startswith("plain: running all" if kind is Nested else "plain")
    (outputs.first.sum() + outputs.rest["list"][0].sum()).backward()  # the one from left alone, the other from right
    kept = left.grad.any(1)
    assert 0 < kept.sum() < 10
    assert torch.equal(kept, right.grad.any(1))


def test_a_transformers_encoder():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    encoder = transformers.BertModel(config).double()
    tokens = torch.randint(50, (9, 7))
    padding = (torch.arange(7) < torch.randint(2, 8, (9, 1))).long()
    mask = Backdrop(0.7)
    skip = Skip(copy.deepcopy(encoder), mask, when="always")
    torch.manual_seed(0)
    fast = skip(input_ids=tokens, attention_mask=padding)
    (fast.last_hidden_state.square().sum() + fast.pooler_output.sum()).backward()
    torch.manual_seed(0)
    plain = encoder(input_ids=tokens, attention_mask=padding)
    weight = mask.draw_weight(torch.empty(9, dtype=torch.float64))
    hidden = functional.mask_gradient(plain.last_hidden_state, weight[:, None, None])
    (hidden.square().sum() + functional.mask_gradient(plain.pooler_output, weight[:, None]).sum()).backward()
    assert type(fast) is type(plain)
    assert "samples ran with gradients" in skip.report[0].last
    assert_close(plain.last_hidden_state, fast.last_hidden_state, 1e-10)
    for (name, a), b in zip(encoder.named_parameters(), skip.module.parameters(), strict=True):
        assert_close(a.grad, b.grad, 1e-10, name)


@pytest.mark.parametrize("dims", [-2, (-2,)])
def test_samples_counted_from_the_last_axis(dims):
    check(nn.Sequential(network(), Backdrop(0.7, dims)), images())


class Table(nn.Module):
    """Looks its rows up by a buffer, which is saved for the backward pass; its length may differ between calls."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.register_buffer("scale", torch.linspace(1, 2, 4, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.rows[: x.shape[1]]) * self.scale


def test_two_calls_of_different_shape_in_one_step():
    def gradient(encode, module):
        torch.manual_seed(0)
        first, second = (encode(x=torch.ones(8, length, dtype=torch.float64)) for length in (6, 5))
        (first * second).sum().backward()
        return module.rows.grad

    plain, mask = Table(), Backdrop(0.5, exact=True)
    skip = Skip(copy.deepcopy(plain), mask, when="always")
    expected = gradient(lambda x: mask(plain(x=x)), plain)
    assert_close(expected, gradient(skip, skip.module), 1e-10)
    assert "samples ran with gradients" in skip.report[0].last


class Pairs(nn.Module):
    """Two rows for each sample on the way, where the segment begins because something else is read there."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.mask = nn.Linear(3, 4), nn.Linear(4, 2), Backdrop(0.5)

    def forward(self, x):
        rows = self.first(x.flatten(0, 1))
        return self.mask(self.second(rows).unflatten(0, (-1, 2))), rows


def test_a_segment_that_begins_with_other_rows():
    plain = Pairs().double()
    fast, x = skip_blocked(plain, when="always"), torch.randn(8, 2, 3, dtype=torch.float64)
    for model in (plain, fast):
        torch.manual_seed(0)
        pairs, rows = model(x)
        (pairs.square().sum() + rows.sum()).backward()
    assert "of 8 samples ran with gradients" in fast.skip_report[0].last
    assert fast.skip_report[0].kept == [("first", "its result goes elsewhere too: the model returns it")]
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert_close(a.grad, b.grad, 1e-10, name)


def test_second_derivatives():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), Backdrop(0.5)).double()
    fast, x = skip_blocked(model, when="always"), torch.randn(8, 3, dtype=torch.float64)
    results = []
    for each in (model, fast):
        torch.manual_seed(0)
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(each(inputs).square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), list(each.parameters())))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, 1e-10)


def test_dropout_inside():
    """The numbers that dropout drops forward are those whose gradient it drops."""
    model = skip_blocked(
        nn.Sequential(nn.Linear(8, 16, bias=False), nn.Dropout(0.5), Backdrop(0.5, exact=True)), when="always"
    )
    y = model(torch.eye(8))  # column j of the weight's gradient comes from sample j
    y.sum().backward()
    assert model.skip_report[0].last == "4 of 8 samples ran with gradients"
    grad, kept = model[0].weight.grad, model[0].weight.grad.any(0)
    assert kept.sum() == 4
    assert torch.equal(grad[:, kept], 4.0 * (y[kept].T != 0))  # 2 for dropout, 2 for the mask


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Turn(nn.Module):
    def forward(self, x):
        return x.roll(1, 0)


class Sort(nn.Module):
    def forward(self, x):
        return x.sort(0)[0]


def test_what_mixes_samples_is_left_alone():
    x = torch.randn(10, 3, dtype=torch.float64)
    fast = check(nn.Sequential(nn.Linear(3, 4), Centre(), Backdrop(0.7)).double(), x)
    assert fast.skip_report[0].kept == [("0", "its result goes elsewhere too: 1.mean uses it")]
    fast = check(nn.Sequential(nn.Linear(3, 4), Turn(), Backdrop(0.7)).double(), x)
    assert fast.skip_report[0].last == "plain: it mixes samples"
    fast = check(nn.Sequential(nn.Linear(3, 4), Sort(), nn.Tanh(), Backdrop(0.7)).double(), x)
    assert fast.skip_report[0].kept == [("1.sort", "it mixes samples")]


class TwoMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5)), Backdrop(0.5)

    def forward(self, x, y):
        return self.outer(self.inner(x) + y)


def test_a_mask_inside_is_drawn_over_all_samples():
    x, y = torch.randn(2, 12, 3, dtype=torch.float64)
    fast = check(TwoMasks().double(), x, y)
    assert [entry.mask for entry in fast.skip_report] == ["inner.1", "outer"]
    assert all("of 12 samples ran with gradients" in entry.last for entry in fast.skip_report)
    assert fast.skip_report[1].kept == [("inner.1", "another mask ends here")]


class Mean(nn.Module):
    def forward(self, x, scale):
        return (x * scale).mean()


class Odd:
    scale = 2.0


class TakesOdd(nn.Module):
    def forward(self, x, odd):
        return x * odd.scale


class ReturnsOdd(nn.Module):
    def forward(self, x):
        return 2 * x, (3, Odd())


def test_what_cannot_be_masked_is_an_error():
    x = torch.randn(6, 3, requires_grad=True)
    with pytest.raises(ValueError, match="a 0-d input has none"):
        Skip(Mean(), Backdrop(0.5), when="always")(x, 2.0)
    with pytest.raises(TypeError, match=r"Odd at \[1\]\[1\]"):
        Skip(ReturnsOdd(), Backdrop(0.5), when="always")(x)
    with pytest.raises(TypeError, match="needs a tensor, but got tuple"):
        Skip(nn.Identity(), Backdrop2d(0.5), when="always")((x, x))
    with pytest.raises(ValueError, match=r"expects input \(N, C, H, W\)"):
        Skip(nn.Bilinear(2, 2, 2), Backdrop2d(0.5), when="always")(torch.randn(2, 2), torch.randn(2, 2))
    skip = Skip(TakesOdd(), Backdrop(0.5), when="always")
    skip(x, Odd()).sum().backward()
    assert torch.equal(x.grad.unique(), torch.tensor([0.0, 2 * 6 / int(x.grad.any(1).sum())]))


def test_eval_no_grad_and_p_zero_are_plain():
    module = network()
    skip, x = Skip(module, Backdrop(0.5), when="always"), images()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(skip(x), module(x))
    skip.mask.p = 0.0
    step(skip, x, seed=0)
    skip.mask.p = 0.5
    skip.eval()
    torch.set_rng_state(state)
    skip(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_small_batches_run_plain():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Backdrop(0.5)).double()
    fast = check(model, torch.randn(6, 3).double(), when="pays")
    assert fast.skip_report[0].last.startswith("plain: running all 6 samples with gradients is faster; it pays ")


def test_frozen_parameters_and_integer_inputs():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2), Backdrop(0.6)).double()
    model[0].weight.requires_grad_(False)
    tokens = torch.randint(10, (8, 3))
    a, b = step(copy.deepcopy(model), tokens), step(skip_blocked(model, when="always"), tokens)
    assert_same_gradients(a, b)
    assert b.parameters["0.weight"] is None


class Spectrum(nn.Module):
    """A layer with complex weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


def test_complex_parameters_in_parts():
    torch.manual_seed(0)
    model, x = nn.Sequential(Spectrum(), Backdrop(0.3, exact=True)), torch.randn(20, 6, dtype=torch.float64)
    fast, found = skip_blocked(model, at_once=4), []
    for each in (model, fast):
        torch.manual_seed(1)
        each(x).square().sum().backward()
        found.append(each[0].weight.grad)
    assert "at most 4 at once" in fast.skip_report[0].last
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Unused(nn.Module):
    """Dropout whose result nobody wants still draws, and what is drawn afterwards depends on it."""

    def __init__(self):
        super().__init__()
        self.a, self.mask = nn.Linear(6, 8), Backdrop(0.5, generator=torch.Generator().manual_seed(3))

    def forward(self, x):
        h = self.mask(self.a(x))
        torch.dropout(h, 0.5, train=True)
        return torch.dropout(h, 0.5, train=True)


def test_dropout_that_nobody_uses_still_draws():
    model, x = Unused(), torch.randn(20, 6)
    fast = skip_blocked(model, when="always")
    outputs = []
    for each in (model, fast):
        torch.manual_seed(0)
        outputs.append(each(x))
    torch.testing.assert_close(*outputs)


def test_views_alone_before_a_mask():
    """Nothing to compute: no division by what it costs."""
    x = torch.randn(6, 4, 5, 5, requires_grad=True)
    for model in (nn.Sequential(nn.Flatten(), Backdrop(0.5)), nn.Sequential(nn.Unflatten(1, (2, 2)), Backdrop(0.5))):
        for when in ("pays", "lean", "always"):
            fast = skip_blocked(model, when=when)
            fast(x).sum().backward()
            assert fast.skip_report[0].last


def cached(module, mask, x, part):
    """Gradient caching: results without gradients, part by part; their gradient; each part again with it."""
    with torch.no_grad():
        z = torch.cat([module(rows) for rows in x.split(part)])
    z.requires_grad_()
    mask(z).square().mean().backward()
    for rows, grad in zip(x.split(part), z.grad.split(part), strict=True):
        module(rows).backward(grad)


@pytest.mark.parametrize("p", [0.0, 0.9])
def test_parts_take_no_more_memory_than_gradient_caching(p):
    torch.manual_seed(0)
    layers = [nn.Linear(32, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4)]
    module, x = nn.Sequential(*layers), torch.randn(1024, 32)
    skip = Skip(copy.deepcopy(module), Backdrop(p, exact=True), at_once=64)

    def step(model):
        model(x).square().mean().backward()

    whole = peak_of(lambda: step(module), module.zero_grad)
    parts = peak_of(lambda: cached(module, Backdrop(p, exact=True), x, 64), module.zero_grad)
    # Beside what the parts take there is the state of the random numbers before each, of 5 KB.
    assert peak_of(lambda: step(skip), skip.zero_grad) < 1.05 * parts < 0.5 * whole
    assert "at most 64 at once" in skip.report[0].last
