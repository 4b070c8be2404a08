"""Operations that no rule knows."""

import torch
from torch import nn

from sound.comparing import Body, between, case


def operation(name, forward, backward):
    """An operation of torch.library with a gradient; `backward` is given the gradient and the input."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return forward(x).clone()

    found = torch.library.custom_op(f"backdrop_sound::{name}", run, mutates_args=())
    found.register_fake(lambda x: torch.empty_like(x))
    found.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return found


def _largest_gradient(grad, x):
    return grad / x.abs().max() - (grad * x).sum() / x.abs().max() ** 2 * (x.abs() == x.abs().max()) * x.sign()


OPERATIONS = {
    "each number alone": operation("alone", lambda x: x.tanh(), lambda grad, x: grad * (1 - x.tanh() ** 2)),
    "less the mean of all": operation("less", lambda x: x - x.mean(0), lambda grad, x: grad - grad.mean(0)),
    "coupled on the way back alone": operation("back", lambda x: 2 * x, lambda grad, x: 2 * grad - grad.mean(0)),
    "coupled on the way forward alone": operation("forth", lambda x: x - x.mean(0), lambda grad, x: grad),
    "by the largest": operation("largest", lambda x: x / x.abs().max(), _largest_gradient),
    "faintly coupled": operation("faint", lambda x: x + 1e-4 * x.mean(0), lambda g, x: g + 1e-4 * g.mean(0)),
    "the next sample": operation("next", lambda x: x + x.roll(1, 0), lambda grad, x: grad + grad.roll(-1, 0)),
    "by the size of the batch": operation("size", lambda x: x / len(x), lambda grad, x: grad / len(x)),
    "the sign of the gradient": operation("sign", lambda x: x * 1.0, lambda grad, x: grad.sign()),
}
for _name, _function in OPERATIONS.items():
    between(f"custom operation: {_name}", lambda h, x, function=_function: function(h.tanh()))


@case("custom operation: behind a gate that is zero at first", kinds=("samples",), steps=4)
class GatedOperation(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h + self.gate * OPERATIONS["less the mean of all"](h))
