"""Which input cells an output position depends on, measured: from gradients and from changes of the output.

All weights are positive and inputs are zero but for one cell, so nothing cancels, and a maximum takes what comes from
that cell wherever it can. Over inputs with each cell in turn, no dependence is missed.
"""

import itertools

import torch
from torch import nn

NOISE = 1e-11  # rounding of interpolation weights that should be zero


def positive(model):
    """The same network with positive weights and no biases, and statistics that change nothing."""
    for name, parameter in model.named_parameters():
        nn.init.uniform_(parameter, 0.5, 1)
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model.double().eval()


def cell_by_cell(shape):
    """A batch of inputs (cells, channels, spatial axes): each has another cell set."""
    channels, *spatial = shape
    cells = torch.eye(torch.Size(spatial).numel(), dtype=torch.float64)
    return cells.view(-1, 1, *spatial).expand(-1, channels, *spatial).clone()


def box(seen):
    """The range from the first to the last cell along each axis of a boolean map; empty ranges if there is none."""
    where = seen.nonzero()
    if not len(where):
        return (range(0),) * seen.ndim
    return tuple(range(int(a), int(b) + 1) for a, b in zip(where.min(0).values, where.max(0).values, strict=True))


def by_change(model, shape):
    """The footprints of all output positions: the cells whose change changes them."""
    inputs = cell_by_cell(shape)
    with torch.no_grad():
        out = (model(inputs) - model(torch.zeros_like(inputs[:1]))).abs().amax(1)
    out = out.movedim(0, -1).unflatten(-1, tuple(shape[1:]))
    lattice = out.shape[: len(shape) - 1]
    return {at: box(out[at] > NOISE) for at in itertools.product(*map(range, lattice))}


def by_gradient(model, shape, positions):
    """The footprints of some output positions: where the input gradient is not zero for any of the inputs."""
    inputs = cell_by_cell(shape).requires_grad_()
    out = model(inputs)
    found = {}
    for at in positions:
        (grad,) = torch.autograd.grad(out[(slice(None), slice(None), *at)].sum(), inputs, retain_graph=True)
        found[at] = box((grad.abs() > NOISE).any(1).any(0))
    return found


def some(lattice, count=6):
    """The corners of a lattice and a few positions between."""
    corners = itertools.islice(itertools.product(*({0, size - 1} for size in lattice)), count)
    return {*corners, *(tuple(int(torch.randint(size, ())) for size in lattice) for _ in range(count))}
