"""Custom autograd Functions, detach, and hooks of all kinds."""

import contextlib
import functools
import types

import torch
from torch import nn

from sound.comparing import EITHER, WAYS, Body, Masked, add, altered, between, case, layer, whole


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class ScaledReverse(torch.autograd.Function):
    """As domain-adversarial networks have it, with a factor that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Saturating(torch.autograd.Function):
    """Saves what it needs, and its gradient is not the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class SignOfGradient(torch.autograd.Function):
    """Not linear in the gradient, so the gradients of two windows may not be added behind it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.sign()


class CentredGradient(torch.autograd.Function):
    """Works on each sample alone on the way forward, but not on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean()


FUNCTIONS = {
    "gradient reversal": Reverse.apply,
    "gradient reversal with a factor": lambda x: ScaledReverse.apply(x, 0.3),
    "straight-through rounding": StraightThrough.apply,
    "straight-through sign": Saturating.apply,
    "the sign of the gradient": SignOfGradient.apply,
    "gradients coupled on the way back": CentredGradient.apply,
}


class Applied(nn.Module):
    def __init__(self, kind, function):
        super().__init__()
        self.layer, self.function = layer(kind), function

    def forward(self, x):
        return self.layer(self.function(x)).tanh()


for _name, _function in FUNCTIONS.items():
    between(_name, lambda h, x, function=_function: function(h))
    _head = functools.partial(Applied, function=_function)
    add(f"{_name}, behind the mask", Body, kinds=EITHER, head=_head, skips=True)


@case("gradient reversal just before the mask", ways=WAYS)
class ReversedLast(Body):
    def forward(self, x):
        return Reverse.apply(self.b(self.a(x).tanh()))


@case("gradient reversal of the input", kinds=EITHER)
class ReversedFirst(Body):
    def forward(self, x):
        return self.b(self.a(Reverse.apply(x)).tanh())


class Exponential(torch.autograd.Function):
    """With setup_context, as torch.func wants it."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 0.5 * grad * y


between("a Function with setup_context", lambda h, x: Exponential.apply(h.tanh()), kinds=EITHER)


class Weighted(torch.autograd.Function):
    """Takes parameters, and gives them a gradient of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, 3 * (grad * x).sum() if ctx.needs_input_grad[1] else None


@case("a Function with parameters")
class WithParameters(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.b(Weighted.apply(self.a(x), self.weight))


between("detach", lambda h, x: h.detach(), ways=WAYS, skips=True)
between("a gate detached", lambda h, x: h * h.sigmoid().detach(), skips=True)
between("straight-through by detach", lambda h, x: h + (h.round() - h).detach(), skips=True, kinds=EITHER)
between("a detached branch of the input", lambda h, x: h + x.detach().tanh(), skips=True, kinds=EITHER)
between("a value without its gradient by .data", lambda h, x: h.data + 0.5 * h)
between(".data of the input", lambda h, x: h * x.data.sigmoid(), kinds=EITHER)
between("requires_grad_ on a detached value", lambda h, x: h.detach().requires_grad_().tanh(), kinds=EITHER)


def _doubled_gradient(h, x):
    if h.requires_grad:
        h.register_hook(lambda grad: 2 * grad)
    return h.tanh()


def _clipped_gradient(h, x):
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return h.tanh()


def _centred_gradient(h, x):
    if h.requires_grad:
        h.register_hook(lambda grad: grad - grad.mean())
    return h.tanh()


between("a tensor hook", _doubled_gradient, ways=WAYS)
between("a tensor hook that clips", _clipped_gradient)
between("a tensor hook that couples", _centred_gradient)


@case("a hidden gradient retained", watch=lambda body: {"hidden": body.hidden.grad}, kinds=EITHER)
class Retained(Body):
    def forward(self, x):
        self.hidden = self.a(x).tanh()
        self.hidden.retain_grad()
        return self.b(self.hidden)


def _once(change):
    return lambda body, i: change(body) if i == 1 else None


def _clip_parameters(body):
    for p in body.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))


def _count_gradients(body):
    body.counted = []
    for p in body.parameters():
        p.register_post_accumulate_grad_hook(lambda p, counted=body.counted: counted.append(p.grad.sum().item()))


add("hooks on parameters", Body, before=_once(_clip_parameters), ways=WAYS)
add(
    "hooks behind the accumulation of gradients",
    Body,
    before=_once(_count_gradients),
    watch=lambda body: {"counted": torch.tensor(sorted(getattr(body, "counted", [])), dtype=torch.float64)},
)


def _triple(module, args, output):
    return 3 * output


def _halve(module, args):
    return (args[0] / 2,)


def _halve_gradient(module, grads, *more):
    return tuple(g if g is None else g / 2 for g in grads)


altered("a forward hook", lambda body: body.a.register_forward_hook(_triple), ways=WAYS)
altered(
    "a forward hook with keywords",
    lambda b: b.a.register_forward_hook(lambda *x: x[-1] + 1, with_kwargs=True),
    kinds=EITHER,
)
altered("a forward hook on the body", lambda body: body.register_forward_hook(_triple), kinds=EITHER)
altered("a forward pre-hook", lambda body: body.b.register_forward_pre_hook(_halve))
altered("a forward pre-hook on the body", lambda body: body.register_forward_pre_hook(_halve), kinds=EITHER)
altered("a backward hook", lambda body: body.a.register_full_backward_hook(_halve_gradient), ways=WAYS)
altered("a backward hook on the body", lambda body: body.register_full_backward_hook(_halve_gradient), kinds=EITHER)
altered("a backward pre-hook", lambda body: body.b.register_full_backward_pre_hook(_halve_gradient), kinds=EITHER)


def _hook_comes_and_goes(body, i):
    if i == 1:
        body.handle = body.a.register_forward_hook(_triple)
    elif i == 2:
        body.handle.remove()
    elif i == 3:
        body.b.register_full_backward_hook(_halve_gradient)


add("hooks added and removed later", Body, before=_hook_comes_and_goes, steps=4, ways=WAYS)


@whole("a hook on the mask")
class HookedMask(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.mask.register_forward_hook(_triple)


@whole(
    "a hook on the mask that comes later",
    before=_once(lambda model: model.mask.register_forward_hook(_triple)),
    kinds=EITHER,
)
def _hook_on_mask(kind):
    return Masked(kind)


LAYERS = (nn.Linear, nn.Conv2d)
HANDLES: list = []


@contextlib.contextmanager
def _handles():
    """Takes away again what was registered for all modules."""
    try:
        yield
    finally:
        while HANDLES:
            HANDLES.pop().remove()


@contextlib.contextmanager
def _registered(register):
    with _handles():
        HANDLES.append(register())
        yield


def _for_layers(hook):
    return lambda module, *args: hook(module, *args) if isinstance(module, LAYERS) else None


GLOBAL_HOOKS = {
    "a global forward hook": (nn.modules.module.register_module_forward_hook, _triple),
    "a global forward pre-hook": (nn.modules.module.register_module_forward_pre_hook, _halve),
    "a global backward hook": (nn.modules.module.register_module_full_backward_hook, _halve_gradient),
    "a global backward pre-hook": (nn.modules.module.register_module_full_backward_pre_hook, _halve_gradient),
}
for _name, (_register, _hook) in GLOBAL_HOOKS.items():
    _add = functools.partial(_register, _for_layers(_hook))
    add(_name, Body, kinds=EITHER, around=functools.partial(_registered, _add))
    _later = {"around": _handles, "turn": lambda i, add=_add: HANDLES.append(add()) if i == 1 else None}
    add(f"{_name} that comes later", Body, kinds=EITHER, **_later)


def _other_forward(self, x):
    return self.b(self.a(x)).sin()


def _negated(self, x):
    return -type(self).forward(self, x)


def _own_forward(body):
    body.forward = types.MethodType(_other_forward, body)


def _layer_with_own_forward(body):
    body.a.forward = types.MethodType(_negated, body.a)


altered("a forward put on the body", _own_forward, kinds=EITHER, ways=WAYS)
altered("a forward put on a layer", _layer_with_own_forward, kinds=EITHER)
add("a forward put on the body later", Body, before=_once(_own_forward), kinds=EITHER)
add("a forward put on a layer later", Body, before=_once(_layer_with_own_forward), kinds=EITHER)


class NegatedLinear(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


class NegatedConv2d(nn.Conv2d):
    def forward(self, x):
        return -super().forward(x)


def _other_class(body):
    body.a.__class__ = NegatedLinear if body.kind == "samples" else NegatedConv2d


add("a layer that becomes another class", Body, before=_once(_other_class), kinds=EITHER)
