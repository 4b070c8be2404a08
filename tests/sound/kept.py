"""Values that are kept on the model, for the loss or for later."""

import functools

from sound.comparing import EITHER, WAYS, Body, Masked, altered, case, whole


@case("a penalty kept for the loss", loss=lambda body: body.penalty, ways=WAYS)
class Penalty(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        self.penalty = h.square().mean()
        return self.b(h)


@case("a hidden value kept for the loss", loss=lambda body: body.hidden.square().sum())
class Hidden(Body):
    def forward(self, x):
        self.hidden = self.a(x).tanh()
        return self.b(self.hidden)


@case("the output kept for the loss", loss=lambda body: body.output.square().sum(), ways=WAYS)
class OutputKept(Body):
    def forward(self, x):
        self.output = self.b(self.a(x).tanh())
        return self.output


@case("a hidden value kept to be looked at", watch=lambda body: {"seen": body.seen}, kinds=EITHER)
class Seen(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        self.seen = h.detach()
        return self.b(h)


@case(
    "hidden values collected in a list",
    before=lambda body, i: body.features.clear(),
    loss=lambda body: sum(h.square().mean() for h in body.features),
    watch=lambda body: {"number": len(body.features)},
)
class Collected(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.features = []

    def forward(self, x):
        self.features.append(self.a(x).tanh())
        self.features.append(self.b(self.features[-1]))
        return self.features[-1]


def _extract(body):
    body.features = {}
    body.a.register_forward_hook(functools.partial(_remember, body.features))


def _remember(features, module, args, output):
    features["a"] = output


altered(
    "features taken out by a hook",
    _extract,
    ways=("Skip",),  # of a copy, the hook remembers in the dictionary of the original
    loss=lambda body: body.features["a"].square().mean(),
    kinds=EITHER,
)


@whole("a value from before the mask in the output")
class TwoOutputs(Masked):
    def forward(self, x):
        h = self.a(x).tanh()
        return self.c(self.mask(self.b(h)).tanh()), h


@whole("what the mask gets, in the output as well")
class Bypass(Masked):
    def forward(self, x):
        h = self.b(self.a(x).tanh())
        return self.c(self.mask(h).tanh()) + h
