"""Parameters in unusual places."""

import torch
import torch.nn.functional as F
from torch import nn

from sound.comparing import EITHER, WAYS, WIDTH, Body, between, case, norm


def _outside(body):
    body.outside = [torch.full((), 0.5, dtype=torch.float64, requires_grad=True)]


@case("a tensor with a gradient in a list", extra=lambda body: {"outside": body.outside[0]}, kinds=EITHER)
class Listed(Body):
    def __init__(self, kind):
        super().__init__(kind)
        _outside(self)

    def forward(self, x):
        return self.b(self.a(x).tanh() * self.outside[0])


@case("a tensor with a gradient in a closure", extra=lambda body: {"outside": body.outside()}, kinds=EITHER, ways=WAYS)
class Enclosed(Body):
    def __init__(self, kind):
        super().__init__(kind)
        value = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
        self.outside = lambda: value

    def forward(self, x):
        return self.b(self.a(x).tanh() * self.outside())


GLOBAL = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
between("a global tensor with a gradient", lambda h, x: h * GLOBAL, extra=lambda body: {"global": GLOBAL}, kinds=EITHER)


def _weights_from_elsewhere(body, i):
    """A network that makes the weights of another, outside of the model."""
    if not body.source:
        body.source.append(torch.full((WIDTH, WIDTH), 0.1, dtype=torch.float64, requires_grad=True))
    body.made = (body.source[0] * (i + 1)).tanh()


@case(
    "weights made by another network",
    before=_weights_from_elsewhere,
    extra=lambda body: {"source": body.source[0]},
    kinds=("samples",),
    ways=WAYS,
)
class Made(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.source, self.made = [], None

    def forward(self, x):
        return self.b((self.a(x) @ self.made).tanh())


@case("weights made within", kinds=EITHER)
class Hyper(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.code, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, WIDTH * WIDTH)

    def forward(self, x):
        weight = self.make(self.code).view(WIDTH, WIDTH)
        h = self.a(x).tanh()
        return self.b(F.linear(h, weight) if self.kind == "samples" else F.conv2d(h, weight[..., None, None]))


@case("weights made from each sample", kinds=("samples",))
class HyperEach(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.make = nn.Linear(WIDTH, WIDTH * WIDTH)

    def forward(self, x):
        weight = self.make(x).view(-1, WIDTH, WIDTH)
        return self.b(torch.bmm(weight, self.a(x)[:, :, None])[:, :, 0].tanh())


@case("parameters in lists and dictionaries", kinds=EITHER)
class Collections(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(2)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.randn(()))})

    def forward(self, x):
        h = self.a(x)
        for shift in self.shifts:
            h = (h + shift).tanh()
        return self.b(h * self.scales["a"])


@case("a parameter that is not used", kinds=EITHER)
class Unused(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.spare = nn.Linear(2, 2)


@case("a normalisation for its statistics alone")
class Statistics(Body):
    """Nobody uses its result, but it keeps running statistics of what passes."""

    def __init__(self, kind):
        super().__init__(kind)
        self.norm = norm(kind)

    def forward(self, x):
        self.norm(self.a(x))
        return self.b(x).tanh()


@case("running statistics that are read behind their normalisation")
class ReadsStatistics(Statistics):
    def forward(self, x):
        y = self.norm(self.a(x))
        return self.b(y * (1 + self.norm.running_mean.sum())).tanh()


@case("rectifiers with random slopes", own=True, kinds=("positions",))
class RandomSlopes(Body):
    def forward(self, x):
        return self.b(F.rrelu(self.a(x), training=True))


@case("rectifiers with a slope for each channel, as many as pixels", kinds=("positions",), skips=True)
class Slopes(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.slope = nn.PReLU(WIDTH)

    def forward(self, x):
        return self.slope(self.a(x)[..., :WIDTH])


@case("a convolution with weights of its own for each sample", kinds=("positions",))
class OwnWeights(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, 1, 3, 3))

    def forward(self, x):
        joined = x.reshape(1, -1, *x.shape[2:])
        return F.conv2d(joined, self.weight, padding=1, groups=len(self.weight)).view_as(x)


@case("a lazy layer", own=True, kinds=("samples",), ways=WAYS)
class Lazy(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b = nn.LazyLinear(7), nn.LazyLinear(WIDTH)

    def forward(self, x):
        return self.b(self.a(x).tanh())


@case("an expert for each sample", kinds=("samples",))
class Experts(Body):
    """Each sample goes to one of two layers, chosen by the data."""

    def forward(self, x):
        y = torch.zeros_like(x)
        for number, expert in enumerate((self.a, self.b)):
            chosen = (x[:, 0] > 0) == bool(number)
            y[chosen] = expert(x[chosen])
        return y
