"""Sources for tests: a tensor that is read region by region, and writes down what was read."""

import torch

from backdrop import Source
from skipping import Step


class Held(Source):
    """`fails` is called before every read with its number, the sample, and where it begins."""

    def __init__(self, x, fails=None):
        self.x, self.fails, self.reads = x, fails, []
        self.shape, self.dtype = tuple(x.shape), x.dtype

    def read(self, sample, low, high):
        if self.fails is not None:
            self.fails(len(self.reads), sample, low)
        self.reads.append((sample, tuple(low), tuple(high)))
        return self.x[(sample, slice(None), *map(slice, low, high))].clone()

    @property
    def largest(self):
        """The most positions of a read."""
        return max(torch.Size(b - a for a, b in zip(low, high, strict=True)).numel() for _, low, high in self.reads)


def step_on(model, x, seed=0):
    """As `skipping.step`, on a tensor or a source."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(x)
    generator = torch.Generator().manual_seed(seed + 1)
    output.backward(torch.randn(output.shape, generator=generator, dtype=output.dtype))
    return Step(
        output.detach().clone(),
        [],
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )
