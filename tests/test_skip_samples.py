"""Samples dropped: kept ones run with gradients, the others without; any module, any nesting of tensors."""

import copy
import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backdrop import Backdrop, Backdrop2d, Skip, functional, skip_blocked
from skipping import always_skip, assert_close, assert_same_gradients, check, step


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    always_skip(monkeypatch)


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


@given(
    count=st.integers(1, 20),
    p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999]),
    exact=st.booleans(),
    scale=st.sampled_from(["count", "eq1", "probability", None]),
    seed=st.integers(0, 9),
)
def test_any_batch_has_the_gradients_of_the_plain_pair(count, p, exact, scale, seed):
    check(nn.Sequential(network(), Backdrop(p, exact=exact, scale=scale)), images(count), seed=seed)


def test_only_kept_samples_run_with_gradients():
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            seen.append((len(x), torch.is_grad_enabled()))
            return x * 2

    model = skip_blocked(nn.Sequential(nn.Linear(3, 3), Watch(), Backdrop(0.75, exact=True)))
    for module in model.modules():
        if isinstance(module, Watch):
            module.register_forward_pre_hook(lambda module, args: None)  # so that it stays one call
    model(torch.randn(16, 3))
    seen.clear()
    model(torch.randn(16, 3)).sum().backward()
    assert sorted(seen) == [(4, True), (12, False)]
    assert model.skip_report[0].last == "4 of 16 samples ran with gradients"


def test_large_batches_run_in_parts():
    from backdrop.skip import samples

    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), Backdrop(0.99, exact=True)).double()
    check(model, torch.randn(3 * samples.AT_ONCE, 2, dtype=torch.float64))


@pytest.mark.parametrize(("most", "parts"), [(9, 4), (3, 2), (1, 1), (0, None)])
@pytest.mark.parametrize("norm", [False, True])
def test_parts_are_fewer_where_many_would_not_pay(monkeypatch, most, parts, norm):
    from backdrop.skip import cost, samples

    layers = [nn.Linear(2, 3), *([nn.BatchNorm1d(3)] if norm else []), nn.Linear(3, 1)]
    model = nn.Sequential(*layers, Backdrop(0.99, exact=True)).double()
    seen, rates = [], cost.CPU._replace(call=1.0, step_call=0.0, normed_call=0.0, split=0.0)
    monkeypatch.setattr(cost, "CPU", rates._replace(multiplications=math.inf, numbers=math.inf))
    x = torch.randn(4 * samples.AT_ONCE, 2, dtype=torch.float64)
    with torch.no_grad(), cost.Meter() as meter:
        model(x)
    calls = meter.cost.calls
    monkeypatch.setattr(cost, "pays", lambda spent, saved: spent <= most * calls)  # seconds: a call takes one
    fast = skip_blocked(model, statistics="sampled")
    fast(x)  # which counts the calls
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *rest: (seen.append(torch.is_grad_enabled()), linear(x, *rest))[1]
    )
    fast(x)
    assert seen.count(False) == 2 * (parts or 0)
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
        if flag and left.sum() > -1e9:  # which torch.fx cannot follow
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
    skip = Skip(copy.deepcopy(module), mask)
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


def test_nested_outputs_without_skipping_share_one_mask(monkeypatch):
    monkeypatch.undo()
    skip = Skip(Nested(), Backdrop(0.5))  # ten samples: not worth it
    left, right = torch.randn(10, 3, requires_grad=True), torch.randn(10, 2, requires_grad=True)
    outputs = skip({"left": left, "others": (right, torch.arange(10))}, table=torch.zeros(1, 4))
    assert skip.report[0].last.startswith("plain: running all")
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
    skip = Skip(copy.deepcopy(encoder), mask)
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
    skip = Skip(copy.deepcopy(plain), mask)
    expected = gradient(lambda x: mask(plain(x=x)), plain)
    assert_close(expected, gradient(skip, skip.module), 1e-10)
    assert "samples ran with gradients" in skip.report[0].last


class Pairs(nn.Module):
    """Two rows for each sample on the way, where the stretch begins because something else is read there."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.mask = nn.Linear(3, 4), nn.Linear(4, 2), Backdrop(0.5)

    def forward(self, x):
        rows = self.first(x.flatten(0, 1))
        return self.mask(self.second(rows).unflatten(0, (-1, 2))), rows


def test_a_stretch_that_begins_with_other_rows_runs_plain():
    plain = Pairs().double()
    fast, x = skip_blocked(plain), torch.randn(8, 2, 3, dtype=torch.float64)
    for model in (plain, fast):
        torch.manual_seed(0)
        pairs, rows = model(x)
        (pairs.square().sum() + rows.sum()).backward()
    assert fast.skip_report[0].last == "plain: it takes 16 rows and returns 8"
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert_close(a.grad, b.grad, 1e-10, name)


def test_second_derivatives():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), Backdrop(0.5)).double()
    fast, x = skip_blocked(model), torch.randn(8, 3, dtype=torch.float64)
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
    model = skip_blocked(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Dropout(0.5), Backdrop(0.5, exact=True)))
    y = model(torch.eye(8))  # column j of the weight's gradient comes from sample j
    y.sum().backward()
    assert model.skip_report[0].last == "4 of 8 samples ran with gradients"
    grad, kept = model[0].weight.grad, model[0].weight.grad.any(0)
    assert kept.sum() == 4
    assert torch.equal(grad[:, kept], 4.0 * (y[kept].T != 0))  # 2 for dropout, 2 for the mask


def test_a_module_that_mixes_samples_runs_plain():
    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    fast = check(nn.Sequential(nn.Linear(3, 4), Centre(), Backdrop(0.7)).double(), torch.randn(10, 3).double())
    assert fast.skip_report[0].last == "plain: its output for one sample depends on the others"


def test_a_mask_inside_that_spans_all_samples():
    inner = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5))
    skip = Skip(nn.ModuleDict({"inner": inner}), Backdrop(0.5))
    skip.module.forward = lambda x, y: inner(x) + y
    skip(torch.randn(6, 3), torch.randn(6, 3)).sum().backward()
    assert "drawn over all samples" in skip.report[0].kept[0][1]


def test_outputs_without_rows_are_an_error():
    class Mean(nn.Module):
        def forward(self, x, scale):
            return (x * scale).mean()

    with pytest.raises(ValueError, match="one row per sample"):
        Skip(Mean(), Backdrop(0.5))(torch.randn(6, 3, requires_grad=True), 2.0)


def test_what_cannot_be_taken_apart_is_named():
    class Odd:
        pass

    with pytest.raises(TypeError, match=r"Odd at \[0\]\[1\]"):
        Skip(nn.Identity(), Backdrop(0.5))(torch.randn(6, 3, requires_grad=True), Odd())
    with pytest.raises(ValueError, match="at least one tensor"):
        Skip(nn.Identity(), Backdrop(0.5))(1, 2)
    with pytest.raises(ValueError, match="one tensor where positions are dropped"):
        Skip(nn.Bilinear(2, 2, 2), Backdrop2d(0.5))(torch.randn(2, 2), torch.randn(2, 2))


def test_eval_no_grad_and_p_zero_are_plain():
    module = network()
    skip, x = Skip(module, Backdrop(0.5)), images()
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


def test_small_batches_run_plain(monkeypatch):
    monkeypatch.undo()
    fast = check(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Backdrop(0.5)).double(), torch.randn(6, 3).double())
    assert fast.skip_report[0].last == "plain: running all 6 samples with gradients is faster"


def test_frozen_parameters_and_integer_inputs():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2), Backdrop(0.6)).double()
    model[0].weight.requires_grad_(False)
    tokens = torch.randint(10, (8, 3))
    a, b = step(copy.deepcopy(model), tokens), step(skip_blocked(model), tokens)
    assert_same_gradients(a, b)
    assert b.parameters["0.weight"] is None
