"""What the report says of models that cannot be skipped in full, and errors for those that cannot be copied."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from backdrop import Backdrop, Backdrop2d, Skip, skip_blocked

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it captures


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


def train(model, x, steps=3, before=lambda model, i: None):
    """Gradients and outputs of some steps."""
    seen = []
    for i in range(steps):
        before(model, i)
        torch.manual_seed(i)
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
        seen += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


def assert_same(model, fast, x, **more):
    wanted, found = train(model, x, **more), train(fast, x, **more)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def rows(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class LeavesOne(nn.Module):
    """Calls one of its masks, and the other from the second step on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
        self.mask, self.other, self.both = Backdrop(0.5, exact=True), Backdrop(0.5, exact=True), False

    def forward(self, x):
        h = self.a(x)
        return self.mask(self.b(self.other(h) if self.both else h))


def test_a_mask_that_is_not_called_is_said_to_be_that():
    plain = LeavesOne()
    fast = skip_blocked(plain, when="always")
    assert_same(plain, fast, rows(8, 6), steps=1)
    said = {entry.mask: entry for entry in fast.skip_report}
    assert said["other"].last == "plain: the model did not call it"
    assert said["mask"].share == 1.0
    plain.both = fast.both = True
    assert_same(plain, fast, rows(8, 6))
    assert all(entry.share > 0 for entry in fast.skip_report)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Adversary(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.a, self.b, self.mask = 0.1, nn.Linear(6, 8), nn.Linear(8, 4), Backdrop(0.5)

    def forward(self, x):
        return self.mask(self.b(Reverse.apply(self.a(x), self.alpha)))


def test_a_reversal_with_a_schedule_is_skipped_at_every_step():
    model = Adversary().double()
    fast = skip_blocked(model, when="always")

    def before(model, i):
        if i:
            assert model is not fast or "ran with gradients" in fast.skip_report[0].last
        model.alpha = 0.1 * (i + 1)

    assert_same(model, fast, rows(20, 6), steps=6, before=before)
    assert "ran with gradients" in fast.skip_report[0].last
    assert len(fast.forward.graphs) < 6


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Skip(nn.Linear(6, 8), Backdrop(0.5), when="always")
        self.head = nn.Sequential(nn.Linear(8, 4), Backdrop(0.5))

    def forward(self, x):
        return self.head(self.inner(x))


def test_a_skip_inside_has_its_own_report():
    model = Nested().double()
    fast = skip_blocked(model, when="always")
    assert_same(model, fast, rows(20, 6))
    said = {entry.mask: entry.last for entry in fast.skip_report}
    assert "a module inside skips on its own" in said["inner.mask"]
    assert "ran with gradients" in said["head.1"]
    assert "ran with gradients" in fast.inner.report[0].last


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.mask, self.b = nn.Linear(6, 8), Backdrop(0.5), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: 2 * grad)
        return self.mask(self.b(h))


def test_hooks_on_tensors_are_named():
    model = Hooked().double()
    fast = skip_blocked(model, when="always")
    assert_same(model, fast, rows(20, 6))
    assert "a hook on a tensor has to see all of its gradient" in fast.skip_report[0].last


def test_code_that_torch_leaves_out_is_said():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=None), nn.Conv2d(3, 3, 3), Backdrop2d(0.5))
    model = model.double()
    fast = skip_blocked(model, when="always", statistics="sampled")
    assert_same(model, fast, rows(3, 2, 9, 9))
    assert "torch did not follow what lies before the mask" in fast.skip_report[0].last
    assert "item()" in fast.skip_report[0].last
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), Backdrop(0.5)).double()
    model[0].register_full_backward_hook(lambda *_: None)
    fast = skip_blocked(model, when="always")
    assert_same(model, fast, rows(20, 6))
    assert "torch did not follow what lies before the mask" in fast.skip_report[0].last


def test_lazy_layers_run_once_and_are_skipped_then():
    model = nn.Sequential(nn.LazyLinear(8, dtype=torch.float64), nn.ReLU(), Backdrop(0.5))
    fast = skip_blocked(model, when="always")
    x = rows(20, 6)
    fast(x).sum().backward()
    assert "lazy layers have no parameters yet" in fast.skip_report[0].last
    model(x)
    model.load_state_dict(fast.state_dict())
    assert_same(model, fast, x)
    assert "ran with gradients" in fast.skip_report[0].last


def test_a_bias_changed_before_the_backward_pass():
    """Convolutions do not need their bias for it, so that anything may be done to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), Backdrop2d(0.5, exact=True)).double()
    fast = skip_blocked(model, when="always")
    found = []
    for each in (model, fast):
        torch.manual_seed(0)
        out = each(rows(2, 1, 9, 9))
        each[0].bias.data.add_(5)
        out.square().sum().backward()
        found.append([p.grad for p in each.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def replaced(layer):
    return nn.Sequential(layer(nn.Linear(6, 8)), nn.Tanh(), layer(nn.Linear(8, 3)), Backdrop(0.5)).double()


def pruned(layer):
    return prune.random_unstructured(prune.l1_unstructured(layer, "weight", 0.3), "weight", 0.3)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("layer", [nn.utils.weight_norm, nn.utils.spectral_norm, pruned])
def test_weights_that_hooks_compute_are_copied(layer, called):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(replaced(layer))
        if called:
            models[-1](rows(20, 6))
    fast = skip_blocked(models[0], when="always")
    assert_same(models[1], fast, rows(20, 6))
    assert fast.skip_report[0].share == 1.0
    assert all(p.grad is not None for p in fast.parameters())


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.mask, self.kept = nn.Linear(6, 8), Backdrop(0.5), None

    def forward(self, x):
        self.kept = self.a(x).tanh()
        return self.mask(self.kept)


def test_what_cannot_be_copied_is_named():
    scripted = nn.Sequential(torch.jit.script(nn.Linear(6, 8)), Backdrop(0.5))
    with pytest.raises(ValueError, match=r"because of 0 .*parameters that get no gradient.*Skip\(module, mask\)"):
        skip_blocked(scripted)
    keeping = nn.Sequential(Keeping())
    keeping(torch.randn(20, 6))
    with pytest.raises(ValueError, match=r"because of 0 \(Keeping\).*set 0\.kept to None"):
        skip_blocked(keeping)
    keeping[0].kept = None
    skip_blocked(keeping)


class Aside(nn.Module):
    """A mask in a mode of its own."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.a, self.mask, self.b = mode, nn.Linear(6, 6), Backdrop(0.5), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        with self.mode():
            masked = self.mask(h)
        return self.b(h + masked.to(h.dtype))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (torch.no_grad, "the mask runs without gradients"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "the mask runs under an autocast of its own"),
    ],
)
def test_a_mask_in_a_mode_of_its_own(mode, said):
    model = Aside(mode).double()
    fast = skip_blocked(model, when="always")
    assert_same(model, fast, rows(20, 6))
    assert fast.skip_report[0].last == f"plain: {said}"
