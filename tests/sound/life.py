"""The life of a model: sharing, freezing, copies, checkpoints, graph breaks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from backdrop import Backdrop, Backdrop2d, insert
from sound.changes import WarmUp
from sound.comparing import (
    BATCH,
    EITHER,
    MAPS,
    SHAPES,
    WAYS,
    WIDTH,
    Body,
    Masked,
    add,
    batch,
    case,
    layer,
    mask_for,
    norm,
    numbers,
    whole,
)
from sound.ordinary import Residual


@case("a layer used twice", skips=True)
class Twice(Body):
    def forward(self, x):
        return self.b(self.a(self.a(x).tanh()).tanh())


@whole("a layer used before and behind the mask")
class AcrossMask(Masked):
    def forward(self, x):
        return self.a(self.mask(self.b(self.a(x).tanh())).tanh())


@whole("a mask used twice")
class MaskTwice(Masked):
    def forward(self, x):
        return self.mask(self.b(self.mask(self.a(x)).tanh())) + self.c(x)


@whole("two masks on one trunk")
class TwoMasks(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.other = mask_for(kind)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.mask(self.b(h)) * self.other(self.c(h))


@whole("two masks on one value")
class SameValue(TwoMasks):
    def __init__(self, kind):
        super().__init__(kind)
        self.other.p = self.mask.p / 2

    def forward(self, x):
        h = self.b(self.a(x).tanh())
        return self.mask(h), self.c(self.other(h))


@whole("two masks on one value, which goes elsewhere too")
class SameValueElsewhere(SameValue):
    def forward(self, x):
        h = self.b(self.a(x).tanh())
        return self.mask(h) * self.other(h) + self.c(h)


@whole("two masks in a row")
class Chain(TwoMasks):
    def forward(self, x):
        return self.c(self.other(self.b(self.mask(self.a(x)).tanh())).tanh())


@whole("a mask in a branch", kinds=EITHER)
class Branch(Masked):
    def forward(self, x):
        return x + self.c(self.mask(self.b(self.a(x).tanh())))


@whole("a mask in a loop")
class Loop(Masked):
    def forward(self, x):
        for _ in range(3):
            x = self.mask(self.b(self.a(x).tanh()))
        return self.c(x)


def _new_p(model, i):
    model.mask.p = (0.75, 0.0, 0.4, 0.9)[i]


@whole("a p that changes", before=_new_p, steps=4)
def _changing_p(kind):
    return Masked(kind)


@whole("a p that is a tensor and changes", before=_new_p, steps=4)
class TensorP(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.mask = Backdrop2d(torch.tensor(0.9)) if kind == "positions" else Backdrop(torch.tensor(0.75))


@whole("training and eval in turns", before=lambda model, i: model.train(i % 2 == 0), steps=4)
def _in_turns(kind):
    return nn.Sequential(layer(kind), norm(kind), nn.Dropout(0.0), layer(kind), mask_for(kind), nn.Tanh(), layer(kind))


@whole("a mask that is in eval alone", before=lambda model, i: model.mask.train(i != 1), kinds=EITHER)
def _mask_in_eval(kind):
    return Masked(kind)


@whole("a mask that was inserted", skips=True)
def _inserted(kind):
    return insert(nn.Sequential(layer(kind), nn.ReLU(inplace=True), layer(kind), nn.Tanh()), {"2": mask_for(kind)})


@whole("masks that were inserted, one into a block", kinds=MAPS)
def _inserted_twice(kind):
    model = nn.Sequential(Residual(kind), nn.Tanh(), Residual(kind), layer(kind))
    return insert(model, {"0.a": mask_for(kind), "2": mask_for(kind)})


@case("tied weights", skips=True, ways=WAYS)
class Tied(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.b.weight = self.a.weight


@case("tied weights, transposed", kinds=EITHER)
class Transposed(Body):
    def forward(self, x):
        h = self.b(self.a(x).tanh())
        if self.kind == "samples":
            return F.linear(h, self.a.weight.t())
        return F.conv2d(h, self.a.weight.transpose(0, 1), padding=1)


@whole("weights tied across the mask", kinds=EITHER)
class TiedAcross(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.c.weight = self.a.weight


def _freeze(body, i):
    body.a.requires_grad_(i % 2 == 1)


def _freeze_all(body, i):
    body.requires_grad_(i == 1)


add("a layer frozen and trained in turns", Body, before=_freeze, steps=4, ways=WAYS)
add("a layer frozen and trained, inputs without a gradient", Body, before=_freeze, steps=4, wanted=False, skips=True)
add("all layers frozen and trained in turns", Body, before=_freeze_all, kinds=EITHER)
add(
    "biases trained alone",
    Body,
    before=lambda b, i: b.a.weight.requires_grad_(False),
    wanted=False,
    skips=True,
    kinds=EITHER,
)


def _new_size(kind, i):
    shape = list(SHAPES[kind])
    shape[0] = (8, 5, 1, 8, 3)[i]
    return (numbers(*shape, seed=i),)


def _new_map(kind, i):
    return (numbers(2, WIDTH, *((12, 12), (9, 15), (16, 8), (12, 12))[i], seed=i),)


add("batches of several sizes", Body, inputs=_new_size, steps=5, ways=WAYS)
add("maps of several sizes", Body, kinds=("positions",), inputs=_new_map, steps=4, skips=True)
add("a batch of one", Body, inputs=lambda kind, i: (numbers(1, *SHAPES[kind][1:], seed=i),), ways=WAYS)
add("a batch of two", Body, inputs=lambda kind, i: (numbers(2, *SHAPES[kind][1:], seed=i),), kinds=EITHER)
add("an axis more", Body, kinds=("samples",), inputs=lambda kind, i: (numbers(BATCH, 3, WIDTH, seed=i),), skips=True)


def _strided(view):
    """The tensors of a step keep the strides that they have here."""
    return lambda kind, i: tuple(map(view, batch(kind, i)))


def _read(view):
    return lambda model, inputs, i: model(*map(view, inputs))


def _channels_last(x):
    return x.to(memory_format=torch.channels_last)


add(
    "channels last",
    Body,
    kinds=MAPS,
    inputs=_strided(_channels_last),
    call=_read(_channels_last),
    skips=True,
    ways=WAYS,
)
add("channels last weights", lambda kind: Body(kind).to(memory_format=torch.channels_last), kinds=("positions",))
add(
    "transposed inputs",
    Body,
    call=_read(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    skips=True,
    kinds=EITHER,
)
add("every second of the inputs", Body, call=_read(lambda x: x.repeat_interleave(2, 0)[::2]), skips=True, kinds=EITHER)
add("expanded inputs", Body, call=_read(lambda x: x[:1].expand_as(x)), skips=True, kinds=EITHER)
add("a view of the inputs", Body, call=_read(lambda x: F.pad(x, (1, 0))[..., 1:]), skips=True, kinds=EITHER)

add("zero gradients", Body, upstream=lambda i: 0.0, kinds=EITHER)
add("zero gradients in some steps", Body, upstream=lambda i: float(i % 2), steps=4, ways=WAYS)
add("most gradients zero", Body, head=lambda kind: FewRows())
add("only some of the output is used", Body, head=lambda kind: FirstChannel(), kinds=EITHER)


class FewRows(nn.Module):
    def forward(self, x):
        return x[:2] * (x[:2] > 0)


class FirstChannel(nn.Module):
    def forward(self, x):
        return x[:, 0].tanh()


def _functional_call(model, inputs, i):
    return torch.func.functional_call(model, {k: 1.5 * v for k, v in model.named_parameters()}, tuple(inputs))


def _two_forwards(model, inputs, i):
    return model(*inputs) * model(*(x.flip(0) for x in inputs))


def _one_without_gradients(model, inputs, i):
    with torch.no_grad():
        model(*inputs)
    return model(*inputs)


def _checkpointed(reentrant):
    return lambda model, inputs, i: checkpoint(model, *inputs, use_reentrant=reentrant)


add("functional_call", Body, call=_functional_call, kinds=EITHER, ways=WAYS)
add("two forwards and one backward", Body, call=_two_forwards, skips=True, ways=WAYS)
add("two forwards with a buffer that counts", WarmUp, call=_two_forwards)
add("a forward without gradients first", Body, call=_one_without_gradients, kinds=EITHER)
add("a checkpoint around the model", Body, call=_checkpointed(False), ways=WAYS)
add("a reentrant checkpoint around the model", Body, call=_checkpointed(True), own=True, kinds=EITHER, ways=WAYS)
add("gradients accumulated", Body, accumulate=True, skips=True, ways=WAYS)


@case("a checkpoint within the body")
class Checkpointed(Body):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=False).tanh())


@case("a reentrant checkpoint within the body", kinds=EITHER)
class CheckpointedReentrant(Body):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=True).tanh())


@case("a checkpoint with what is kept for the loss", loss=lambda body: body.penalty, kinds=EITHER)
class CheckpointedPenalty(Body):
    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=False)
        self.penalty = h.square().mean()
        return self.b(h)


@case("a graph break", ways=WAYS)
class Break(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h)


@case("a branch on the data")
class Decides(Body):
    def forward(self, x):
        h = self.a(x)
        return self.b(h.tanh() if h.sum() > 0 else h.relu())


@case("code that torch is told not to follow", kinds=EITHER)
class NotFollowed(Body):
    @torch.compiler.disable
    def hidden(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.hidden(x))


@case("the world in numpy", kinds=("samples",))
class Numpy(Body):
    def forward(self, x):
        factor = torch.from_numpy(x.detach().numpy().std(0))
        return self.b(self.a(x) * factor)
