"""Gradient modes and autocast inside a model."""

import torch
from torch import nn

from sound.comparing import EITHER, WAYS, Body, add, case


@case("no_grad block", skips=True, ways=WAYS)
class NoGrad(Body):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x).tanh()
        return self.b(x)


@case("no_grad method", skips=True, kinds=EITHER)
class NoGradMethod(Body):
    @torch.no_grad()
    def features(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.features(x))


@case("no_grad branch", skips=True)
class NoGradBranch(Body):
    def forward(self, x):
        with torch.no_grad():
            gate = self.a(x).sigmoid()
        return self.b(x) * gate


@case("no_grad for all of it", kinds=EITHER)
class AllNoGrad(Body):
    def forward(self, x):
        with torch.no_grad():
            return self.b(self.a(x))


@case("inference_mode block", ways=WAYS)
class InferenceMode(Body):
    def forward(self, x):
        with torch.inference_mode():
            x = self.a(x).tanh()
        return self.b(x.clone())


@case("inference_mode method", kinds=EITHER)
class InferenceMethod(Body):
    @torch.inference_mode()
    def features(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.features(x).clone()) + x


@case("enable_grad within no_grad")
class EnableGrad(Body):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x).tanh()
            with torch.enable_grad():
                x = self.b(x)
        return x * 2


@case("enable_grad method", kinds=EITHER)
class EnableGradMethod(Body):
    @torch.enable_grad()
    def last(self, x):
        return self.b(x)

    def forward(self, x):
        with torch.no_grad():
            x = self.a(x).tanh()
            return self.last(x)


@case("gradients switched by an attribute", before=lambda body, i: setattr(body, "learns", i != 1), kinds=EITHER)
class Switched(Body):
    def forward(self, x):
        with torch.set_grad_enabled(self.learns):
            x = self.a(x).tanh()
        return self.b(x)


@case("set_grad_enabled as a call", kinds=EITHER)
class SetGrad(Body):
    def forward(self, x):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        x = self.a(x).tanh()
        torch.set_grad_enabled(before)
        return self.b(x)


def in_bfloat16(model, inputs, i):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*inputs)


SINGLE = {"dtype": torch.float32, "tolerance": 1e-5, "head": lambda kind: nn.Identity()}


@case("autocast off in a block", call=in_bfloat16, **SINGLE, ways=WAYS)
class AutocastOff(Body):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.b(self.a(x).tanh())


@case("autocast off by a decorator", call=in_bfloat16, **SINGLE, kinds=EITHER)
class AutocastOffMethod(Body):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.b(self.a(x).tanh())


BFLOAT = {"dtype": torch.float32, "tolerance": 3e-2}
add("bfloat16 autocast", Body, call=in_bfloat16, skips=True, **BFLOAT, ways=WAYS)


@case("autocast in a block", **BFLOAT)
class AutocastOn(Body):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
        return self.b(x.float().tanh())
