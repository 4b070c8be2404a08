"""Positions dropped: run the stretch without gradients, and in backward compute only the windows that matter.

NOTE [how windows give the exact gradient]
1. The mask is drawn once. Forward runs the stretch on the whole map under no_grad and keeps its inputs alone.
2. Backward looks for *units* (a position, or a patch) that the mask kept and whose incoming gradient is not zero.
   All others contribute exactly nothing to any gradient of the stretch, because the chain rule is linear in them.
3. Walking back from one unit, each layer needs a box of cells: cells [s*i - P, s*i - P + d*(k-1)] for output cell i. A
   union of boxes is a box again, of the same size for every unit, and it starts at step*u + start for unit u.
4. The inputs' boxes are cut out, one window per unit, and the stretch runs on them with gradients. Where a layer pads,
   cells outside its input map get its padding value instead; elsewhere such cells are computed from nonsense, but no
   cell inside the map ever reads them, and their gradient is zero.
5. Parameter gradients are the sums over windows; input gradients are added back where the windows were cut.
6. A layer with batch statistics normalises its windows with those of the forward pass (see statistics.py).
7. The number of windows is rounded up on a GPU, so that few shapes occur; the ones added carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from backdrop import functional
from backdrop.layers import Backdrop
from backdrop.skip import graph, statistics, steps
from backdrop.skip.finish import Finish, Moments, cells_inside, finish
from backdrop.skip.plan import Box, Chain, Plan
from backdrop.skip.windows import Inside, Kept, Windows, cut, find_windows, paste


@dataclass
class Run:
    """One forward and backward pass of a stretch."""

    root: nn.Module
    plan: Plan
    mask: Backdrop
    policy: statistics.Statistics
    owners: list[list[tuple[nn.Module, str]]]  # whose each tensor after the entries is, and under which name
    entry: Any  # of the report
    weight: Tensor | None = None
    kept: Kept | None = None
    moments: dict[fx.Node, Moments] = field(default_factory=dict)
    autocast: list[dict[str, Any]] = field(default_factory=list)

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """The stretch on the whole map, without gradients. The mask is drawn first; nothing else here is random."""
        shape = self.plan.shapes[self.plan.stretch.exit]
        widest = max(tensors, key=lambda tensor: tensor.dtype.itemsize)
        self.weight = self.mask.draw_weight(widest.new_empty(()).expand(shape))
        entries = tensors[: len(self.plan.stretch.entries)]
        self.kept = Kept(self.plan, self.weight)
        values: dict[fx.Node, Any] = dict(zip(self.plan.stretch.entries, entries, strict=True))
        stretch = self.plan.stretch
        for node, do in stretch.calls.items():
            step = self.plan.steps.get(node)
            if step is not None and step.moments:
                args, kwargs = graph.arguments(node, values)
                layer = graph.attribute(self.root, str(node.target))
                values[node], self.moments[node] = statistics.normalise(layer, *args, **kwargs)
                del args, kwargs
            else:
                values[node] = do(values)
            for source in stretch.drops.get(node, ()):
                values.pop(source, None)
        out: Tensor = values[stretch.exit]
        if out.shape != shape:
            raise RuntimeError(
                f"{stretch.exit.name} has shape {tuple(out.shape)}, but had {tuple(shape)} for such inputs before. "
                "Skip cannot follow shapes that depend on the data; use the plain pair here"
            )
        return out

    def replay(self, windows: Windows, entries: Sequence[Tensor]) -> Tensor:
        """The stretch on windows."""
        plan = self.plan
        values: dict[fx.Node, Any] = dict(zip(plan.stretch.entries, entries, strict=True))
        for node in plan.nodes:
            step = plan.steps.get(node)
            if step is None:
                values[node] = graph.call(self.root, node, values)
            elif node in plan.chains:
                values[node] = self._finish(plan.chains[node], windows, values)
            else:
                read = {source: self._read(step, source, windows, values[source]) for source in step.inputs}
                args, kwargs = graph.arguments(node, {**values, **read})
                where = steps.Where(partial(windows.positions, plan.boxes[node]), self._sizes(step))
                values[node] = step.run(self.root, args, kwargs, where)
                del read, args, kwargs
            if node in plan.fills and node not in plan.chains:
                inside = windows.inside[plan.map(node, plan.boxes[node])]
                values[node] = _fill(values[node], inside, plan.boxes[node].axes, plan.fills[node])
            for source in plan.drops.get(node, ()):
                values.pop(source, None)
        out: Tensor = values[plan.stretch.exit]
        return out

    def _finish(self, chain: Chain, windows: Windows, values: dict[fx.Node, Any]) -> Tensor:
        plan, node, norm = self.plan, chain.steps[-1].node, chain.norm
        (source,) = chain.steps[0].inputs
        x = self._read(chain.steps[0], source, windows, values[source])
        gamma = beta = moments = cells = inside = None
        if norm is not None:
            layer = graph.attribute(self.root, str(norm.node.target))
            gamma, beta = layer.weight, layer.bias
            moments = self.moments[norm.node] if norm.moments else statistics.running_moments(layer)
        box = plan.boxes[node]
        sampled = norm is not None and norm.moments and self.policy == "sampled"
        if sampled or node in plan.fills:
            found = windows.inside[plan.map(node, box)]
            inside = None if found.complete else found.ranges
            if sampled:
                shape = plan.shapes[node]
                cells = found.number * math.prod(n for i, n in enumerate(shape) if i > 1 and i not in box.axes)
        kinds = chain.kinds
        last = norm is not None and kinds[-1] == "relu"
        how = Finish(kinds[0] == "relu", moments, cells, last, inside, box.axes, plan.fills.get(node, 0.0))
        return finish(x, gamma, beta, how)

    def _read(self, step: steps.Step, source: fx.Node, windows: Windows, x: Tensor) -> Tensor:
        """One of a step's inputs, cut down to the cells it reads, padded where they lie outside the map."""
        have, need = self.plan.boxes[source], self.plan.need(step.node, source)
        for axis, a, b, m, n in zip(need.axes, have.start, need.start, have.size, need.size, strict=True):
            x = x if m == n else x.narrow(axis, b - a, n)
        if step.sliding is not None and self.plan.fills.get(source) != step.sliding.fill:
            x = _fill(x, windows.inside[self.plan.map(source, need)], need.axes, step.sliding.fill)
        return x

    def _sizes(self, step: steps.Step) -> tuple[int, ...]:
        source, axes = next(iter(step.inputs.items()))
        return tuple(self.plan.shapes[source][axis] for axis in axes)

    def backward(self, grad: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of entries and parameters, from windows alone."""
        plan, weight = self.plan, self.weight
        assert weight is not None
        assert self.kept is not None
        windows = find_windows(plan, self.kept, weight, grad)
        self.entry.last = f"{windows.real} of {plan.units()} units were computed again"
        count = len(plan.stretch.entries)
        entries, parameters = tensors[:count], tensors[count:]
        if not len(windows):
            return [torch.zeros_like(t) if want else None for t, want in zip(tensors, wanted, strict=True)]
        box = plan.boxes[plan.stretch.exit]
        result: list[Tensor | None] = [None] * len(tensors)
        size = len(windows) if plan.coupled and self.policy == "sampled" else self._chunk(len(windows))
        leaves = [p.detach().requires_grad_(want) for p, want in zip(parameters, wanted[count:], strict=True)]
        for first in range(0, len(windows), size):
            part = windows.part(first, first + size)
            last, spelled = plan.stretch.exit, weight.expand(_like(weight, grad, box))
            seeds = functional._multiply(cut(grad, part, last, box.axes), cut(spelled, part, last, box.axes))
            seeds = _fill(seeds, part.inside[plan.map(last, box)], box.axes, 0.0)
            cuts = [self._cut(node, x, part) for node, x in zip(plan.stretch.entries, entries, strict=True)]
            cuts = [x.requires_grad_(want) for x, want in zip(cuts, wanted, strict=False)]
            with torch.enable_grad(), self._as_in_forward(), _replaced(self.owners, leaves):
                out = self.replay(part, cuts)
            inputs = [t for t, want in zip([*cuts, *leaves], wanted, strict=True) if want]
            grads = iter(torch.autograd.grad(out, inputs, seeds, allow_unused=True))
            del out, seeds
            for i, want in enumerate(wanted):
                new = next(grads) if want else None
                if new is None:
                    continue
                if i < count:
                    new = self._paste(plan.stretch.entries[i], new, entries[i], part)
                result[i] = new if result[i] is None else result[i].add_(new)  # type: ignore[union-attr]
        return result

    def _cut(self, node: fx.Node, x: Tensor, windows: Windows) -> Tensor:
        """The windows of an entry, padded already where all that reads them agrees."""
        box = self.plan.boxes[node]
        taken = cut(x, windows, node, box.axes)
        if node not in self.plan.fills:
            return taken
        inside = windows.inside[self.plan.map(node, box)]
        if inside.complete:
            return taken
        outside = ~cells_inside(taken, Finish(inside=inside.ranges, axes=box.axes))
        return taken.masked_fill_(outside, self.plan.fills[node])  # in place, which keeps the order in memory

    def _paste(self, node: fx.Node, grad: Tensor, x: Tensor, windows: Windows) -> Tensor:
        box = self.plan.boxes[node]
        if node in self.plan.fills:
            grad = _fill(grad, windows.inside[self.plan.map(node, box)], box.axes, 0.0)
        return paste(grad, x, windows, node, box.axes)

    def _chunk(self, windows: int) -> int:
        """How many windows at a time, so that they need no more memory than the forward pass did."""
        dense = max(self.plan.cost(node).numbers for node in self.plan.steps)
        per_window = sum(self.plan.cost(node, 1).numbers for node in self.plan.steps)
        chunks = max(1, math.ceil(windows * per_window / (2 * dense)))
        return -(-windows // chunks)

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            yield


def _fill(x: Tensor, inside: Inside, axes: steps.Axes, value: float) -> Tensor:
    """Set the cells of windows outside the map to `value`."""
    return x if inside.complete else finish(x, None, None, Finish(inside=inside.ranges, axes=axes, fill=value))


def _like(weight: Tensor, grad: Tensor, box: Box) -> list[int]:
    """The shape of weights with the batch and the masked axes spelled out."""
    return [grad.shape[axis] if axis == 0 or axis in box.axes else size for axis, size in enumerate(weight.shape)]


@contextmanager
def _replaced(owners: Sequence[Sequence[tuple[nn.Module, str]]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let modules use other tensors as their parameters for a while."""
    before = [(module, name, module._parameters[name]) for places in owners for module, name in places]
    try:
        for places, tensor in zip(owners, tensors, strict=True):
            for module, name in places:
                module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


class Skipped(torch.autograd.Function):
    """A stretch and its mask, differentiated through windows."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        run.autocast = [
            {"device_type": kind, "enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
            for kind in {"cpu", tensors[0].device.type}
        ]
        return run.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.run.backward(grad, ctx.saved_tensors, ctx.needs_input_grad[1:])
