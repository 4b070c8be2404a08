"""Models and habits that strangers bring, each of which the engine once got wrong."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from backdrop import Backdrop, Backdrop2d, Skip, insert, remove, skip_blocked
from backdrop.skip import saved
from skipping import followed_later

pytestmark = [  # torch's own, while it captures
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch._dynamo.*"),
]


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


class Masked(nn.Module):
    def __init__(self, body, mask):
        super().__init__()
        self.body, self.mask = body.double(), mask

    def forward(self, x):
        return self.mask(self.body(x))


def seeded():
    return torch.Generator().manual_seed(3)


def samples():
    return Backdrop(0.6, generator=seeded())


def positions():
    return Backdrop2d(0.8, generator=seeded())


def maps():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


def rows(middle):
    """Two linear layers and a function between them."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.b(middle(self.a(x)))

    return Rows()


def picture(number=4):
    return torch.randn(number, 2, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def table():
    return torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model, x, seed=0, between=None):
    model.mask.generator.manual_seed(seed)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    if between is not None:
        between(model)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(plain, fast, x, steps=2):
    for i in range(steps):
        for a, b in zip(step(plain, x, i), step(fast, x, i), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def pair(body, mask):
    plain = Masked(body, mask)
    return plain, skip_blocked(plain, when="always")


def last(model):
    (entry,) = model.skip_report
    return entry.last


def skips(model):
    return not last(model).startswith("plain")


HOOKS = {
    "forward": lambda mask: mask.register_forward_hook(lambda module, args, output: output * 3),
    "before": lambda mask: mask.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "backward": lambda mask: mask.register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,)),
    "before backward": lambda mask: mask.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,)),
}


@pytest.mark.parametrize("number", [4, 1])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_the_mask_run_once(hook, number):
    plain, fast = pair(maps(), samples())
    for model in (plain, fast):
        HOOKS[hook](model.mask)
    same(plain, fast, picture(number))
    plain.mask.p = fast.mask.p = 0.0
    same(plain, fast, picture(number))


class HooksItsWeights(nn.Module):
    """As torch copies modules without the hooks of their parameters, those of the copy have to be given anew."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((4, 5), (5, 3)))
        self.calls = 0
        self.a.weight.register_hook(self.scaled)
        self.b.weight.register_post_accumulate_grad_hook(self.clipped)

    def scaled(self, grad):
        self.calls += 1
        return grad * (2 + self.calls)

    def clipped(self, weight):
        weight.grad.clamp_(-1, 1)

    def forward(self, x):
        return self.b(self.a(x))


def test_hooks_on_parameters_are_copied():
    plain, fast = pair(HooksItsWeights(), samples())
    same(plain, fast, table())
    assert plain.body.calls == fast.body.calls == 2
    assert skips(fast)
    for made in (masked := insert(HooksItsWeights(), {"a": Backdrop(0.5)}), remove(masked)):
        made(table()).sum().backward()
        assert made.calls == 1
        assert made.b.weight.grad.abs().max() == 1


class Doubled(Backdrop):
    def forward(self, x):
        return super().forward(x * 2) + 1


class Tripled(Backdrop):
    def draw_weight(self, x):
        return super().draw_weight(x) * 3


@pytest.mark.parametrize("kind", [Doubled, Tripled])
def test_masks_of_a_kind_of_its_own(kind):
    for number in (4, 1):
        plain, fast = pair(maps(), kind(0.5, generator=seeded()))
        same(plain, fast, picture(number))
        assert skips(fast) == (number > 1)
    assert kind is not Tripled or not torch.equal(
        *(step(Masked(maps(), k(0.5, generator=seeded())), picture())[1] for k in (Tripled, Backdrop))
    )


def test_renorm_of_columns_mixes_samples():
    plain, fast = pair(rows(lambda h: torch.renorm(h, 2, 1, 0.5)), samples())
    same(plain, fast, table())
    assert ("body.renorm", "it mixes samples") in fast.skip_report[0].kept
    plain, fast = pair(rows(lambda h: torch.renorm(h, 2, 0, 0.5)), samples())
    same(plain, fast, table())
    assert fast.skip_report[0].share == 1.0


def test_attention_without_dropout_draws_nothing():
    plain, fast = pair(
        rows(lambda h: F.scaled_dot_product_attention(h, h * 2, h * 3)),
        Backdrop(0.7, dims=(0, 1), generator=seeded()),
    )
    same(plain, fast, torch.randn(3, 9, 4, dtype=torch.float64))
    assert not any("would draw" in reason for _, reason in fast.skip_report[0].kept)
    assert "body.scaled_dot_product_attention" in fast.skip_report[0].skipped


def replaced(model):
    for p in model.parameters():
        p.data = p.data + 0.5


@pytest.mark.parametrize("way", ["positions", "at_once"])
def test_data_replaced_before_the_backward_pass_gives_the_gradient_of_the_output(way):
    if way == "positions":
        plain, fast = pair(maps(), positions())
    else:
        plain = Masked(maps(), samples())
        fast = Skip(copy.deepcopy(plain.body), samples(), when="always", at_once=1)
    for a, b in zip(step(plain, picture()), step(fast, picture(), between=replaced), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["positions", "at_once"])
def test_numbers_changed_through_data_before_the_backward_pass(way):
    """Weights in place are an error, because all would be computed from others; biases are not needed again."""

    def changed(name, change):
        return lambda model: change((model.body if way == "positions" else model.module).get_parameter(name).data)

    for name, change in (("0.bias", lambda x: x.add_(5)), ("2.bias", lambda x: x.zero_())):
        plain, fast = pair(maps(), positions() if way == "positions" else samples())
        if way == "at_once":
            fast = Skip(copy.deepcopy(plain.body), samples(), when="always", at_once=1)
        found = step(plain, picture()), step(fast, picture(), between=changed(name, change))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    for change in (torch.Tensor.neg_, lambda x: x.copy_(x.flip(0)), lambda x: x[0, 0].add_(1e-14)):
        _, fast = pair(maps(), positions())
        if way == "at_once":
            fast = Skip(maps().double(), samples(), when="always", at_once=1)
        with pytest.raises(RuntimeError, match="were changed between the forward and the backward pass"):
            step(fast, picture(), between=changed("2.weight", change))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64])
@pytest.mark.parametrize("shape", [(), (4,), (4, 4), (8, 4, 2, 2), (64, 32, 2, 2), (9000,)])
def test_changes_of_weights_that_are_seen(shape, dtype):
    """Even numbers of rows and columns, in which changed signs cancel in plain sums of bits."""
    generator = torch.Generator().manual_seed(0)
    x = (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    others = [torch.ones(3, dtype=dtype), torch.ones(5, 4)]
    before = saved._sums([x, *others])
    assert all(map(torch.equal, before, saved._sums([x.clone(), *others])))
    assert all(y.dtype in saved.INTEGERS.values() for y in before)  # the order in which they are added does not matter
    changes = [torch.neg]
    if x.numel() > 1:
        changes += [lambda x: x.flip(0), lambda x: x.flip(-1), lambda x: x.index_copy(0, torch.tensor([0]), -x[:1])]
    if dtype.is_floating_point and x.numel() > 1:
        changes.append(lambda x: x.index_copy(0, torch.tensor([0]), x[:1] * (1 + 2 * torch.finfo(dtype).eps)))
    for change in changes:
        assert not all(map(torch.equal, before, saved._sums([change(x), *others])))


def test_code_of_classes_may_be_replaced():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 5)

        def forward(self, x):
            return self.act(self.a(x))

        def act(self, x):
            return x.tanh()

    def other(self, x):
        return x.exp()

    plain, fast = pair(Part(), samples())
    same(plain, fast, table())
    Part.act = lambda self, x: x.sigmoid()
    same(plain, fast, table())
    Part.act.__code__ = other.__code__  # as IPython's autoreload does
    same(plain, fast, table())
    whole = Part.forward
    Part.forward = lambda self, x: whole(self, x) * 3
    same(plain, fast, table())
    assert skips(fast)


def test_functions_of_torch_may_be_replaced(monkeypatch):
    plain, fast = pair(maps(), samples())
    same(plain, fast, picture())
    assert skips(fast)
    relu = F.relu
    with monkeypatch.context() as patch:
        patch.setattr(F, "relu", lambda x, inplace=False: relu(x) * 2)
        same(plain, fast, picture())
        assert "torch.nn.functional.relu was replaced by another function" in last(fast)
        same(*pair(maps(), samples()), picture())
    same(plain, fast, picture())
    assert skips(fast)


class Twice(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is F.relu else out


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "said"), [(Twice, "TorchFunctionMode"), (Watch, "TorchDispatchMode")])
def test_modes_make_a_step_plain(mode, said):
    plain, fast = pair(maps(), samples())
    same(plain, fast, picture())
    with mode():
        same(plain, fast, picture())
    assert said in last(fast)
    with torch.device("cpu"):  # a mode as well, which changes nothing here
        same(plain, fast, picture())
    assert skips(fast)


def test_transforms_of_functions_inside():
    def towards(h):
        return h - 0.1 * vmap(grad(lambda v: v.tanh().sum()))(h)

    for middle in (vmap(lambda v: v.tanh()), towards):
        plain, fast = pair(rows(middle), samples())
        same(plain, fast, table())
        assert "transforms of torch.func" in last(fast)


def test_functions_that_take_functions():
    plain, fast = pair(rows(lambda h: torch.cond(h.sum() > 0, torch.tanh, torch.sin, (h,))), samples())
    same(plain, fast, table())
    assert "functions that take functions are not looked into" in last(fast)


class AddOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.add_(1.0)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_autograd_functions_that_write_over_their_input():
    plain, fast = pair(rows(AddOne.apply), samples())
    same(plain, fast, table())
    assert "writes over what it is given" in last(fast)


def test_a_graph_break_that_leaves_no_graph_is_named():
    class Cumulative(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=None)  # reads a number off a tensor

        def forward(self, x):
            return self.norm(x)

    plain, fast = pair(Cumulative(), samples())
    same(plain, fast, table())
    assert "torch did not follow what lies before the mask" in last(fast)
    assert "item" in last(fast) or "BatchNorm" in last(fast), last(fast)


def test_functions_of_complex_numbers_are_tried_out():
    plain, fast = pair(rows(lambda h: torch.fft.irfft(torch.fft.rfft(h) * (1 + 1j), n=5)), samples())
    same(plain, fast, table())
    assert fast.skip_report[0].share == 1.0
    plain, fast = pair(rows(lambda h: torch.fft.fft(h, dim=0).real), samples())
    same(plain, fast, table())
    assert fast.skip_report[0].share < 1


def test_what_cannot_be_tried_out_is_not_said_to_mix_samples():
    plain, fast = pair(rows(lambda h: F.nll_loss(h, h.argmax(1), reduction="none")[:, None].expand(-1, 5)), samples())
    same(plain, fast, table())
    assert ("body.nll_loss", "there is no rule for nll_loss, and with such inputs it is not tried out") in (
        fast.skip_report[0].kept
    )


def test_an_error_in_forward_does_not_make_later_steps_plain():
    plain, fast = pair(rows(torch.tanh), samples())
    same(plain, fast, table(), 1)
    with pytest.raises(RuntimeError, match="shapes"):
        fast(torch.randn(12, 7, dtype=torch.float64))
    same(plain, fast, table())
    assert skips(fast)


def test_models_are_freed():
    found = []
    for _ in range(2):
        _, fast = pair(maps(), positions())
        step(fast, picture())
        assert skips(fast)
        found.append(weakref.ref(fast))
        del fast, _
    gc.collect()
    assert [each() for each in found] == [None, None]


def test_embeddings_with_gradients_by_frequency_end_the_segment():
    """What a row gets depends on how often all samples look it up."""
    for mask in (samples(), Backdrop(0.6, dims=(0, 1), generator=seeded())):
        body = nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
        torch.manual_seed(0)
        plain, fast = pair(body, mask)
        x = torch.randint(0, 5, (12, 7))
        for model in (plain, fast):
            model.mask.generator.manual_seed(0)
            model(x).square().sum().backward()
        for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-10)
        assert fast.skip_report[0].kept[-1][0] == "body.0"


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128))
        self.b = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x):
        return (((x + 1j) @ self.a).tanh() @ self.b).abs()


@pytest.mark.parametrize("at_once", [None, 1, 5])
def test_complex_weights(at_once):
    class Plain(Masked):
        def __init__(self):
            nn.Module.__init__(self)
            self.body, self.mask = Complex(), samples()

    plain = Plain()
    fast = skip_blocked(plain, when="always", at_once=at_once)
    same(plain, fast, table())
    assert fast.skip_report[0].share == 1.0


def test_dropout_that_nobody_uses_draws_all_the_same():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3)

        def forward(self, x):
            h = self.a(x)
            F.dropout(h, 0.5, self.training)
            return self.b(F.dropout(h, 0.5, self.training))

    plain, fast = pair(Unused(), positions())
    for i in range(2):
        found = []
        for model in (plain, fast):
            torch.manual_seed(i)
            found.append(step(model, picture(), i))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    assert skips(fast)


def test_a_segment_of_views_has_no_multiplications_to_count():
    plain, fast = pair(nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (12, 12))), samples())
    same(plain, fast, picture())
    assert fast.skip_report[0].share == 1.0
    plain, fast = pair(nn.Sequential(nn.PixelShuffle(1), nn.Identity()), positions())
    same(plain, fast, picture())


class Branches(nn.Module):
    """One convolution in two branches, gates over branches, normalisation over channels."""

    def __init__(self):
        super().__init__()
        self.shared, self.wide = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=4, dilation=4)
        self.gates, self.strengths = nn.Conv2d(6, 3, 1), nn.Parameter(torch.randn(3))

    def forward(self, x):
        a = self.shared(x)
        parts = a, self.shared(F.max_pool2d(x, 3, 1, 1)).tanh(), self.wide(a)
        gates = self.gates(torch.cat(parts, 1)).softmax(1).split(1, 1)
        y = sum(g * part * s for g, part, s in zip(gates, parts, self.strengths.softmax(0), strict=True))
        return F.layer_norm(y.movedim(1, -1), (2,), eps=0.1).movedim(-1, 1) + x


class Unrolled(nn.Module):
    """A state that goes round a loop, and results that are put into a tensor one by one."""

    def __init__(self):
        super().__init__()
        self.gate, self.next = nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        state, found = torch.zeros_like(x), x.new_zeros(*x.shape[:2], 3, *x.shape[2:])
        for i in range(3):
            both = torch.cat([x * (i + 1), state], 1)
            gate = self.gate(both).sigmoid()
            state = (1 - gate) * state + gate * self.next(both).tanh()
            found[:, :, i] = state
        return found.mean(2)


class Shuffled(nn.Module):
    """Coordinates, a blur by a buffer, a shift of channels, unit vectors, a pixel shuffle by hand."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.b = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.out = nn.Conv2d(6, 2, 3, padding=1, padding_mode="replicate")
        self.blur = nn.Buffer(torch.ones(4, 1, 3, 3) / 9)

    def forward(self, x):
        n, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
        a = F.silu(self.a(torch.cat([x, rows], 1)))
        small = F.conv2d(a, self.blur, stride=2, padding=1, groups=4)
        shifted = torch.zeros_like(small)
        shifted[:, :2], shifted[:, 2:] = small[:, 2:], small[:, :2] * 0.5
        b = self.b(shifted)
        b = b / (b.square().sum(1, keepdim=True) + 1e-6).sqrt()
        large = b.view(n, 2, 2, 2, h // 2, w // 2).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, h, w)
        return self.out(torch.cat([large, a], 1))


class Written(nn.Module):
    """Values that are written over in every way."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = before = self.a(x)
        y = self.b(F.relu(y, inplace=False))
        y += before
        y.clamp_(-1, 1).mul_(0.5)
        y[:, 0] = y[:, 1] * 2
        y[y > 0.4] = 0.4
        return y


@pytest.mark.parametrize("mask", [positions, samples])
@pytest.mark.parametrize("body", [Branches, pytest.param(Unrolled, marks=followed_later), Shuffled, Written])
def test_networks_that_are_written_by_hand(body, mask):
    torch.manual_seed(0)
    plain, fast = pair(body(), mask())
    same(plain, fast, picture())
    assert fast.skip_report[0].share == 1.0, fast.skip_report
