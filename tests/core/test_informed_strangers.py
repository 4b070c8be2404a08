"""Masks that choose by gradients, in code as others write it: compiled, checkpointed, half precision, two losses."""

import copy
import math
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from backdrop import Backdrop, Backdrop2d, Skip, functional
from backdrop.schedules import LinearP
from skipping import captures


def kept_rows(x):
    return kept_rows_of(x.grad)


def kept_rows_of(grad):
    return int((grad != 0).any(1).sum())


@pytest.mark.parametrize("exact", [True, False])
def test_a_schedule_of_compiled_code_compiles_no_more_than_twice(exact):
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = Backdrop(0.9, exact=exact, choose="gradient")
    schedule = LinearP([layer], start=0.1, steps=8)
    compiled = torch.compile(lambda x: layer(x).sin().sum(), backend=counter)
    for _ in range(9):
        x = torch.randn(400, 2, requires_grad=True)
        compiled(x).backward()
        expected = 400 * (1 - layer.p)
        # Bernoulli masks: at most 10 standard deviations of a number of kept units, by Hoeffding below 1e-13.
        assert abs(kept_rows(x) - expected) <= (0.5 if exact else 100)
        schedule.step()
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("exact", [True, False])
def test_a_p_in_half_precision_keeps_its_share_of_many_units(exact):
    torch.manual_seed(0)
    p, grad = torch.tensor(0.5, dtype=torch.float16), torch.ones(200_000)
    for weight in (
        functional.choose_weight(grad, p, exact=exact),
        functional.draw_weight(grad.shape, p, exact=exact),
        functional.draw_weight(grad.shape, p, exact=exact, scale="eq1") * 2,
    ):
        assert abs(int((weight > 0).sum()) - 100_000) <= (0 if exact else 2_000)  # 9 standard deviations
        assert weight.max().item() == pytest.approx(2.0, rel=0.03)


def test_many_gradients_at_once_are_refused_before_the_choice_and_served_after_it():
    x = torch.randn(4, 2, requires_grad=True)
    y = functional.backdrop(x, 0.5, choose="gradient", exact=True)
    every = torch.eye(8).view(8, 4, 2)
    with pytest.raises(RuntimeError, match="one choice for all passes"):
        torch.autograd.grad(y, x, every, is_grads_batched=True, retain_graph=True)
    (first,) = torch.autograd.grad(y, x, torch.ones(4, 2), retain_graph=True)
    (batched,) = torch.autograd.grad(y, x, every, is_grads_batched=True)
    torch.testing.assert_close(batched.sum(0), first)


def test_fake_and_meta_tensors():
    with FakeTensorMode():
        x = torch.randn(16, 4, requires_grad=True)
        functional.backdrop(x, 0.5, choose="gradient", exact=True).sum().backward()
        assert x.grad.shape == (16, 4)
    x = torch.randn(16, 4, requires_grad=True, device="meta")
    functional.backdrop(x, 0.5, choose="gradient").sum().backward()
    assert x.grad.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_inside_autocast(dtype):
    torch.manual_seed(0)
    x, grads = torch.randn(16, 4), []
    model = nn.Sequential(nn.Linear(4, 8), Backdrop(0.5, exact=True, choose="gradient"), nn.Linear(8, 1))
    for inside in (True, False):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            loss = model(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append(model[0].weight.grad.clone())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_choose_as_without_them(reentrant):
    """With a generator too, whose state moves on by one choice at every step."""
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        mask = Backdrop(0.5, exact=True, choose="gradient", generator=torch.Generator().manual_seed(3))
        model, x = nn.Sequential(nn.Linear(3, 3), mask), torch.randn(8, 3, requires_grad=True)
        for _ in range(3):
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            y.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_calls_choose_each_for_itself():
    """A layer that is called twice in a step, and batches whose losses are added up."""
    torch.manual_seed(0)
    layer, x = Backdrop(0.75, exact=True, choose="gradient"), torch.randn(400, 2)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    (layer(a).sum() + layer(b).sum()).backward()
    assert kept_rows(a) == kept_rows(b) == 100
    assert not torch.equal(a.grad != 0, b.grad != 0)


def test_a_second_loss_through_the_same_call_is_unbiased():
    """Its gradient meets a mask chosen for another: still 1 on average, by Hoeffding's inequality."""
    torch.manual_seed(0)
    x, draws = torch.zeros(6, requires_grad=True), 20_000
    first, second = torch.tensor([4.0, 1, 1, 0, 0, 2]), torch.tensor([0.0, 1, 0, 5, 1, 1])
    total = torch.zeros(6)
    for _ in range(draws):
        y = functional.backdrop(x, 0.5, choose="gradient", floor=0.5)
        y.backward(first, retain_graph=True)
        x.grad = None
        y.backward(second)
        total, x.grad = total + x.grad, None
    # Weights lie between 0 and 4: a mean is off by t with a probability below 2 exp(-2 n t^2 / 16).
    allowed = second * math.sqrt(16 * math.log(2 * 6 / 1e-7) / (2 * draws))
    assert ((total / draws - second).abs() <= allowed).all()


def test_copies_and_pickles_keep_their_settings():
    mask = Backdrop2d(0.9, choose="gradient", floor=0.3, shared=True)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert repr(other) == repr(mask)


@captures
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_scaler_sees_gradients_that_are_not_finite(odd):
    """So that the step is left out, in the engine as well: the sample is kept for sure without a floor."""
    mask = Backdrop(0.75, exact=True, choose="gradient", floor=0.0)
    for model in (nn.Sequential(nn.Linear(3, 2), mask), Skip(nn.Linear(3, 2), mask, when="always")):
        grad = torch.ones(8, 2)
        grad[5] = odd
        model(torch.randn(8, 3)).backward(grad)
        assert not next(model.parameters()).grad.isfinite().all()


@captures
def test_a_loss_without_gradients_in_the_engine():
    skip = Skip(nn.Linear(3, 2), Backdrop(0.5, exact=True, choose="gradient"), when="always")
    (skip(torch.randn(8, 3)) * 0).sum().backward()
    assert "worth 0 equal ones" in skip.report[0].last
    assert not skip.module.weight.grad.any()


def test_units_without_a_gradient_are_never_kept_without_a_floor():
    """Even where rounding leaves a sliver of the line behind the last unit: 1 / 0 would be NaN."""
    torch.manual_seed(0)
    grad = torch.zeros(50_000, 7, dtype=torch.float64)
    grad[:, :4] = torch.rand(50_000, 4)
    weight = functional.choose_weight(grad, 0.6, (0, 1), exact=True, floor=0.0)
    assert weight.isfinite().all()
    assert not weight[:, 4:].any()
    assert ((weight > 0).sum(1) == 3).all()


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize(("dims", "patch"), [(0, 1), (1, 3), ((0, 1), 2), ((0, 1, 2), (3, 2)), ((1, 2), 10**9)])
def test_gradients_without_numbers(shape, dims, patch):
    weight = functional.choose_weight(torch.zeros(shape), 0.5, dims, patch=patch)
    assert torch.broadcast_shapes(weight.shape, shape) == shape
    x = torch.zeros(shape, requires_grad=True)
    functional.backdrop(x, 0.5, dims, patch=patch, choose="gradient").sum().backward()
    assert x.grad.shape == shape


def test_gradients_of_few_rows_of_a_table():
    """Sparse ones, as an embedding has them."""
    torch.manual_seed(0)
    table, rows = torch.randn(20, 3, requires_grad=True), torch.tensor([1, 4, 4, 9])
    nn.functional.embedding(
        rows, functional.backdrop(table, 0.9, choose="gradient", exact=True), sparse=True
    ).sum().backward()
    dense = table.grad.to_dense()
    assert 1 <= int((dense != 0).any(1).sum()) <= 2
    grad = torch.zeros(6, 2)
    grad[2] = 1
    weight = functional.choose_weight(grad.to_sparse(), 0.9, exact=True, floor=0.0)
    assert weight.flatten().tolist() == [0, 0, 1, 0, 0, 0]


def test_several_choices_at_once():
    torch.manual_seed(0)
    grads = torch.randn(5, 8, 2)
    weights = torch.vmap(lambda g: functional.choose_weight(g, 0.5, exact=True), randomness="different")(grads)
    assert ((weights > 0).sum(1) == 4).all()
    assert not (weights == weights[:1]).all()


def test_compiled_code_chooses_anew_in_every_pass():
    """The first pass's choice cannot be kept there: 8 of 16 alike by chance once in 12,870 times; the seed is fixed."""
    torch.manual_seed(0)
    compiled = torch.compile(
        lambda x: functional.backdrop(x, 0.5, choose="gradient", exact=True) * 1, backend="aot_eager"
    )
    x = torch.randn(16, 2, requires_grad=True)
    y = compiled(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert kept_rows_of(first) == kept_rows_of(second) == 8
    assert not torch.equal(first != 0, second != 0)
