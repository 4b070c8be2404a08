"""Right, or plain and said so: everyday models against the plain masked model, over several steps, and their lives."""

import copy
import io
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import processes
import sound
from backdrop import Backdrop, Backdrop2d, Skip, insert, skip_blocked
from sound import BOTH, CASES, DRAWS, LINEAR, Body, Case, Masked, Pair, assert_said, assert_same_step, mask_for, numbers

pytestmark = [  # torch's own, while it captures
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch._dynamo.*"),
]
FSDP_ON_A_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


@pytest.fixture(autouse=True)
def _anew():
    """What torch has captured of one case, and how often, does not count for the next."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def named(*values):
    return pytest.param(*values, id="-".join(getattr(value, "name", value) for value in values))


@pytest.mark.parametrize(
    ("case", "kind", "way"), [named(case, kind, way) for case in CASES for kind in case.kinds for way in case.ways]
)
def test_steps_are_those_of_the_plain_model(case, kind, way):
    sound.compare(case, kind, way)


def test_plain_models_repeat_themselves():
    """Otherwise the comparison says nothing."""
    for case in CASES:
        for kind in case.kinds:
            print(case.name, kind)  # so that one that fails is known
            sound.compare(case, kind, "plain")
    for draws in DRAWS:
        for kind in draws.kinds:
            print(draws.name, kind)
            sound.train_drawn(draws, kind, "plain")


def _forgets_buffers(step):
    return step._replace(values={name: 0 * value for name, value in step.values.items()})


def _changed(step, name, change):
    return step._replace(gradients={**step.gradients, name: change(step.gradients[name])})


FAULTS = {
    "a sign": lambda step: _changed(step, "a.weight", lambda grad: -grad),
    "a small error": lambda step: _changed(step, "b.weight", lambda grad: grad * (1 + 1e-8)),
    "a missing gradient": lambda step: _changed(step, "a.bias", lambda grad: None),
    "a gradient too many": lambda step: _changed(step, "frozen", lambda grad: torch.ones(2)),
    "a number that is none": lambda step: _changed(step, "b.bias", lambda grad: grad * float("nan")),
    "a value": _forgets_buffers,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_faults(fault):
    model = Case("two layers", Body, whole=True)
    step = sound.take_step(model, "samples", Body("samples").double(), 0)
    step.gradients["frozen"] = None
    assert_same_step(step, step)
    with pytest.raises(AssertionError):
        assert_same_step(step, FAULTS[fault](step))


# ------------------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("draws", "kind", "way"),
    [named(draws, kind, "skip_blocked") for draws in DRAWS for kind in draws.kinds]
    + [named(draws, draws.kinds[0], "Skip") for draws in DRAWS],
)
def test_random_numbers_are_drawn_anew_and_gradients_belong_to_them(draws, kind, way):
    sound.train_drawn(draws, kind, way)


@pytest.mark.parametrize("way", ["plain", *sound.WAYS])
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_networks_with_dropout_belong_to_the_output(name, way):
    """Where the output is linear in parameters, they times their gradient are the output times its own (Euler)."""
    kind, make, groups = LINEAR[name]
    body, mask, again = make(kind).double(), mask_for(kind, own=True), mask_for(kind, own=True)
    model = Skip(body, mask, when="always") if way == "Skip" else Pair(body, mask)
    model = skip_blocked(model, when="always") if way == "skip_blocked" else model
    (x,) = sound.batch(kind, 0)
    before = None
    for i in range(4):
        model.zero_grad()
        y = model(x)
        upstream = numbers(*y.shape, seed=i)
        y.backward(upstream)
        expected = (upstream * again.draw_weight(y) * y).sum().item()
        assert abs(expected) > 1e-3
        for group in groups:
            parameters = [model.module.get_parameter(parameter) for parameter in group]
            assert sum((p * p.grad).sum().item() for p in parameters) == pytest.approx(expected, rel=1e-10), group
        if way != "plain":
            assert_said(model.report if way == "Skip" else model.skip_report, skips=True)
        assert before is None or not torch.equal(before, y), "drawn once for all steps"
        before = y.detach()


@pytest.mark.parametrize("way", sound.WAYS)
def test_rows_of_dropout_differ_in_mean_as_they_should(way):
    """As often kept as said, whether a sample is kept by the mask or not."""
    mask = Backdrop(0.75, exact=True, generator=torch.Generator().manual_seed(0))
    body = nn.Sequential(nn.Linear(4, 400), nn.Dropout(0.3)).double()
    nn.init.zeros_(body[0].weight)
    nn.init.ones_(body[0].bias)
    model = Skip(body, mask, when="always") if way == "Skip" else skip_blocked(Pair(body, mask), when="always")
    y = model(numbers(40, 4))
    kept = (y != 0).double()
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / 0.7))
    # 5 standard deviations, an error rate below 1e-6; among all and in each half
    for part in (kept, kept[:20], kept[20:]):
        assert abs(part.mean() - 0.7) < 5 * (0.21 / part.numel()) ** 0.5
    similar = torch.corrcoef(kept)[~torch.eye(40, dtype=torch.bool)]
    assert similar.abs().max() < 6 / 400**0.5


# ---------------------------------------------------------------------------- between the forward and the backward pass


class Paused(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.alpha = 0.5
        self.register_buffer("factor", torch.tensor(0.7))
        self.register_buffer("shift", torch.tensor(0.3))

    def forward(self, x):
        h = self.a(x) * self.alpha * self.factor + self.shift
        return self.b(h.tanh() if self.training else h)


def _in_place(tensor):
    with torch.no_grad():
        tensor.mul_(2)


def _forward(model, x, backward=False):
    y = model(x.detach().flip(0))
    if backward:
        y.sum().backward()
        model.zero_grad()


PAUSES = {  # what happens to the model, its body or the input
    "nothing": lambda model, body, x: None,
    "an attribute changes": lambda model, body, x: setattr(body, "alpha", 7.0),
    "a buffer that is saved changes": lambda model, body, x: body.factor.fill_(7.0),
    "a buffer that is not saved changes": lambda model, body, x: body.shift.fill_(7.0),
    "a buffer is replaced": lambda model, body, x: setattr(body, "factor", torch.tensor(7.0, dtype=torch.float64)),
    "weights change in place": lambda model, body, x: _in_place(body.b.weight),
    "the input changes in place": lambda model, body, x: _in_place(x),
    "weights are replaced": lambda model, body, x: setattr(body.b, "weight", nn.Parameter(2 * body.b.weight.detach())),
    "eval": lambda model, body, x: model.eval(),
    "p changes": lambda model, body, x: setattr(model.first.mask, "p", 0.1),
    "weights are frozen": lambda model, body, x: body.a.requires_grad_(False),
    "random numbers are drawn": lambda model, body, x: torch.randn(100),
    "a forward pass": lambda model, body, x: _forward(model, x),
    "a forward pass without gradients": lambda model, body, x: torch.no_grad()(_forward)(model, x),
    "a whole step": lambda model, body, x: _forward(model, x, backward=True),
}


def _paused_step(model, pause, kind):
    """Its output and gradients, or the error that torch gives."""
    (leaf,) = sound.wanting(sound.batch(kind, 0))
    x = leaf * 1
    torch.manual_seed(1)
    y = model(x)
    PAUSES[pause](model, model.first.module, x)
    try:
        y.square().sum().backward()
    except RuntimeError as error:
        return error
    return sound.Step({"output": y}, {**{name: p.grad for name, p in model.named_parameters()}, "input": leaf.grad})


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("pause", PAUSES)
def test_what_changes_between_the_passes(pause, kind):
    """The forward pass counts; where torch finds that a value it needs is gone, an error is as good."""
    case = Case("paused", Paused)
    expected = _paused_step(sound.build(case, kind, "plain"), pause, kind)
    actual = _paused_step(sound.build(case, kind, "skip_blocked"), pause, kind)
    if isinstance(expected, RuntimeError):
        if isinstance(actual, RuntimeError):
            return
        expected = _paused_step(sound.build(case, kind, "plain"), "nothing", kind)
    elif isinstance(actual, RuntimeError):
        raise actual
    assert_same_step(expected, actual)


@pytest.mark.parametrize("kind", BOTH)
def test_a_backward_pass_where_gradients_are_off(kind):
    case = Case("two layers", Body)
    steps = []
    for way in ("plain", "skip_blocked"):
        model = sound.build(case, kind, way)
        torch.manual_seed(0)
        loss = model(*sound.batch(kind, 0)).square().sum()
        with torch.no_grad():
            loss.backward()
        steps.append(sound.Step({"loss": loss}, {name: p.grad for name, p in model.named_parameters()}))
    assert_same_step(*steps)


# -------------------------------------------------------------------------------------------- ways to ask for gradients


def both(kind, make=Masked, seed=0):
    """A plain model and its skipping copy."""
    torch.manual_seed(seed)
    model = make(kind).double()
    return model, skip_blocked(model, when="always")


def gradients(model, values=None):
    return sound.Step(values or {}, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("kind", BOTH)
def test_two_backward_passes_through_one_forward_pass(kind):
    steps = []
    for model in both(kind):
        torch.manual_seed(0)
        y = model(*sound.batch(kind, 0))
        y.square().sum().backward(retain_graph=True)
        y.sum().backward()
        steps.append(gradients(model))
        with pytest.raises(RuntimeError):
            y.sum().backward()  # what it takes was given back
    assert_same_step(*steps)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("wanted", ["all", "the input", "one parameter", "the last parameter"])
def test_autograd_grad(kind, wanted):
    found = []
    for model in both(kind):
        (x,) = sound.wanting(sound.batch(kind, 0))
        torch.manual_seed(0)
        loss = model(x).square().sum()
        places = {"all": [x, *model.parameters()], "the input": [x], "one parameter": [model.a.weight]}
        grads = torch.autograd.grad(loss, places.get(wanted, [model.c.bias]))
        assert all(p.grad is None for p in model.parameters())
        found.append(sound.Step({}, dict(enumerate(grads))))
    assert_same_step(*found)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("way", sound.WAYS)
@pytest.mark.parametrize("name", ["two layers", "gradient reversal", "a gated branch and a sum"])
def test_second_derivatives_are_right_or_an_error(kind, way, name):
    (case,) = [case for case in CASES if case.name == name]
    steps = []
    for made in ("plain", way):
        model = sound.build(case, kind, made)
        (x,) = sound.wanting(sound.batch(kind, 0))
        torch.manual_seed(0)
        y = model(x)
        try:
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            assert slope.requires_grad
            (y.sum() + slope.square().sum()).backward()
        except (RuntimeError, NotImplementedError):
            assert made != "plain"
            return
        steps.append(gradients(model, {"slope": slope}))
    assert_same_step(*steps)


@pytest.mark.parametrize("kind", BOTH)
def test_losses_one_after_the_other(kind):
    """Two forward passes whose backward passes come in the other order."""
    steps = []
    for model in both(kind):
        torch.manual_seed(0)
        first, second = (model(*sound.batch(kind, i)) for i in range(2))
        second.square().sum().backward()
        first.sum().backward()
        steps.append(gradients(model))
    assert_same_step(*steps)


@pytest.mark.parametrize("kind", BOTH)
def test_grad_scaler(kind):
    """With a step that is left out because its gradients are not finite."""
    found = []
    for model in both(kind):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i in range(4):
            torch.manual_seed(i)
            optimizer.zero_grad()
            loss = model(*sound.batch(kind, i)).square().mean() * (float("inf") if i == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(sound.Step(dict(model.named_parameters()), {}))
        assert scaler.get_scale() == 2.0**9
    assert_same_step(*found)


# ----------------------------------------------------------------------------------------------------- copies and files


def assert_same_steps(kind, plain, fast, first=0, case=None):
    case = case or Case("a whole model", Masked, whole=True)
    for i in range(first, first + 2):
        assert_same_step(sound.take_step(case, kind, plain, i), sound.take_step(case, kind, fast, i))


def _file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, _file], ids=["deepcopy", "a file"])
def test_copies_of_skipping_models(kind, used, make_copy):
    plain, fast = both(kind)
    if used:
        assert_same_steps(kind, plain, fast)
    copied = make_copy(fast)
    assert type(copied) is Masked
    before = copy.deepcopy(fast.state_dict())
    assert_same_steps(kind, copy.deepcopy(plain), copied, first=2)
    assert_said(copied.skip_report, skips=True)
    assert all(torch.equal(value, before[name]) for name, value in fast.state_dict().items())
    assert all(p is not q for p, q in zip(fast.parameters(), copied.parameters(), strict=True))
    assert_same_steps(kind, plain, fast, first=2)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, _file], ids=["deepcopy", "a file"])
def test_copies_of_skip(make_copy):
    case = Case("two layers", Body)
    plain, fast = (sound.build(case, "samples", way) for way in ("plain", "Skip"))
    assert_same_steps("samples", plain, fast, case=case)
    assert_same_steps("samples", copy.deepcopy(plain), make_copy(fast), first=2, case=case)
    assert_same_steps("samples", plain, fast, first=2, case=case)


@pytest.mark.parametrize("kind", BOTH)
def test_states_go_from_one_to_the_other(kind):
    plain, fast = both(kind)
    assert type(fast) is type(plain)
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert_same_steps(kind, plain, fast)
    other, _ = both(kind, seed=1)
    fast.load_state_dict(_file(other.state_dict()))
    assert_same_steps(kind, other, fast, first=2)
    plain.load_state_dict(_file(fast.state_dict()))
    assert_same_steps(kind, plain, fast, first=4)


def test_a_copy_of_another_type():
    plain, fast = (model.float() for model in both("positions"))
    case = Case("a whole model", Masked, whole=True, dtype=torch.float32)
    a, b = (sound.take_step(case, "positions", model, 0) for model in (plain, fast))
    assert_same_step(a, b, 1e-5)
    fast.load_state_dict(plain.state_dict())
    assert_same_steps("positions", plain.double(), fast.double(), first=1)


# ---------------------------------------------------------------------------------------------- nothing else is changed


class Stateful(nn.Module):
    """Buffers that a forward pass changes, random numbers, computed weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.register_buffer("calls", torch.tensor(0))
        self.called = 0

    def forward(self, x):
        self.calls += 1
        self.called += 1
        return nn.functional.dropout(self.second(self.norm(self.first(x)).relu()), 0.5, self.training)


def _everything(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return state, modes, hooks, list(map(type, model.modules())), model.called


def _assert_untouched(model, make, rest=()):
    state, *other = _everything(model)
    draws, drawn = torch.get_rng_state(), random.getstate()
    made = make(model)
    after, *others = _everything(model)
    assert others == other
    assert after.keys() == state.keys()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), draws)
    assert random.getstate() == drawn
    return made


def test_making_models_changes_no_state():
    model = Stateful().double()
    model(numbers(2, 2, 8, 8))
    state, *_ = _everything(model)
    masked = _assert_untouched(model, lambda model: insert(model, {"second": Backdrop2d(0.9)}))
    for name, value in masked.state_dict().items():
        assert torch.equal(value, state[name]), name
    fast = _assert_untouched(masked, lambda masked: skip_blocked(masked, when="always"))
    for name, value in fast.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert (masked.called, fast.called) == (1, 1)
    _assert_untouched(model, lambda model: Skip(model, Backdrop2d(0.9), when="always"))
    fast(numbers(2, 2, 8, 8))
    assert fast.calls.item() == 2
    assert fast.norm.num_batches_tracked.item() == 2
    assert fast.called == 2
    assert model.calls.item() == masked.calls.item() == 1


def test_the_mask_given_to_insert_is_the_one_whose_p_counts():
    model, mask = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double(), Backdrop(0.75, exact=True)
    masked = insert(model, {"1": mask})
    x = numbers(8, 6).requires_grad_()
    for p, kept in ((0.75, 2), (0.5, 4), (0.0, 8)):
        mask.p = p
        x.grad = None
        masked(x).sum().backward()
        assert (x.grad != 0).any(1).sum() == kept
    fast = skip_blocked(masked, when="always")
    (own,) = [module for module in fast.modules() if isinstance(module, Backdrop)]
    for p, kept in ((0.75, 2), (0.5, 4), (0.0, 8)):
        own.p = p
        x.grad = None
        fast(x).sum().backward()
        assert (x.grad != 0).any(1).sum() == kept


# ---------------------------------------------------------------------------------------------------- captures, reports


def captures():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", BOTH)
def test_a_new_float_or_p_is_no_new_capture(kind):
    case = Case("a float that changes", sound.Scaled)
    model = sound.build(case, kind, "skip_blocked")
    counts = []
    for i in range(12):
        model.first.mask.p = 0.5 + 0.03 * i
        model(*sound.batch(kind, i), scale=1 + i / 7).sum().backward()
        assert_said(model.skip_report, skips=True)
        counts.append(captures())
    assert counts[3:] == counts[3:4] * 9, "it was captured anew"


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_in_eval_is_said_to_be_one(kind):
    _, model = both(kind)
    model(*sound.batch(kind, 0)).sum().backward()
    assert_said(model.skip_report, skips=True)
    model.eval()
    model(*sound.batch(kind, 1)).sum().backward()
    for entry in model.skip_report:
        assert "eval" in entry.last
        assert entry.share == 0
    model.train()
    model(*sound.batch(kind, 2)).sum().backward()
    assert_said(model.skip_report, skips=True)


@pytest.mark.parametrize("kind", BOTH)
def test_two_masks_have_an_entry_each(kind):
    _, model = both(kind, sound.Chain)
    model(*sound.batch(kind, 0)).sum().backward()
    assert sorted(entry.mask for entry in model.skip_report) == ["mask", "other"]


# ------------------------------------------------------------------------------------------------------- many processes


class Wide(Masked):
    """With batch normalisation in eval, so that there are buffers."""

    def __init__(self, kind):
        super().__init__(kind)
        self.norm = sound.norm(kind).eval()

    def forward(self, x):
        return self.c(self.mask(self.b(self.norm(self.a(x)).relu())))


def _wrapped(model, wrapper):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if wrapper == "FSDP2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.a, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model, bucket_cap_mb=1e-5 if wrapper == "DDP, small buckets" else 25)


def _distributed(rank, wrappers):
    """Losses and gradients of plain and skipping models in turns, and what the reports say."""
    found = []
    for model, kind, wrapper in [(model, k, w) for w in wrappers for k in BOTH for model in both(k, Wide)]:
        wrapped, steps = _wrapped(model, wrapper), []
        for i in range(3):
            wrapped.zero_grad()
            torch.manual_seed(10 * i + rank)
            loss = wrapped(*sound.batch(kind, 2 * i + rank)).square().sum()
            loss.backward()
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            steps.append((loss.detach(), [grad.clone() for grad in grads]))
            sound.descend(wrapped)
        found.append((steps, [(e.last, e.share, len(e.kept)) for e in getattr(model, "skip_report", [])]))
    return found


@pytest.mark.parametrize("wrappers", [["DDP", "DDP, small buckets"], ["FSDP2"]], ids=["DDP", "FSDP2"])
def test_two_processes(wrappers):
    if wrappers == ["FSDP2"] and not FSDP_ON_A_CPU:
        pytest.skip("this torch has no FSDP2 on a CPU")
    everywhere = processes.run(_distributed, 2, wrappers, timeout=120)
    for found in everywhere:
        for (plain, _), (fast, report) in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)
            assert report
            assert all(share > 0 or last.startswith("plain") or kept for last, share, kept in report)
    for (one, _), (other, _) in zip(*everywhere, strict=True):
        gradients = [[grads for _, grads in steps] for steps in (one, other)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
