"""Where windows lie: the walk back from a mask to the cells that each kept unit is computed from.

See the note in replay.py for why this gives the exact gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from backdrop.layers import Backdrop
from backdrop.skip import cost, graph, rules, statistics
from backdrop.skip.steps import Axes, Call, Step, UnsupportedError

CHAINS = (["relu", "norm"], ["norm", "relu"], ["relu", "norm", "relu"])


class Box(NamedTuple):
    """The cells of a value that belong to unit u: `size` of them from `step * u + start`, along each masked axis."""

    axes: Axes
    step: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass
class Chain:
    """Steps that follow each other and run as one, see finish.py: a normalisation, and rectifiers around it."""

    steps: list[Step]

    @property
    def kinds(self) -> list[str | None]:
        return [step.finishes for step in self.steps]

    @property
    def norm(self) -> Step | None:
        return next((step for step in self.steps if step.finishes == "norm"), None)


@dataclass
class Plan:
    """A stretch on inputs of known shape: what runs on windows, and where each value's windows lie."""

    stretch: graph.Stretch
    steps: dict[fx.Node, Step]
    boxes: dict[fx.Node, Box]
    shapes: dict[fx.Node, torch.Size]
    refused: list[tuple[fx.Node, UnsupportedError]] = field(default_factory=list)
    # Steps that run as one, by the last of them.
    chains: dict[fx.Node, Chain] = field(default_factory=dict)
    # What values hold outside the map, where all that read them agree.
    fills: dict[fx.Node, float] = field(default_factory=dict)
    # What runs on windows in order, a chain by its last step, and which values to let go of after each.
    nodes: list[fx.Node] = field(default_factory=list)
    drops: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    # Boxes for which it matters what lies inside the map, and the sizes of that.
    maps: list[tuple[Box, tuple[int, ...]]] = field(default_factory=list)
    on_devices: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict)
    # The share of kept units that had an incoming gradient when this was last looked at; steps so far.
    alive: float = 0.0
    looks: int = 0

    @property
    def coupled(self) -> bool:
        """Whether windows have to be computed all at once."""
        return any(step.moments for step in self.steps.values())

    def need(self, node: fx.Node, source: fx.Node) -> Box:
        """The cells of `source` that `node` reads for its own box."""
        step, box = self.steps[node], self.boxes[node]
        return _input_box(box, step, step.inputs[source])

    def units(self) -> int:
        """How many units the mask draws, all samples together."""
        shape, box = self.shapes[self.stretch.exit], self.boxes[self.stretch.exit]
        return shape[0] * math.prod(-(-shape[axis] // step) for axis, step in zip(box.axes, box.step, strict=True))

    def share(self, node: fx.Node, windows: int) -> float:
        """The numbers in so many windows of a value over those of the whole map."""
        shape, box = self.shapes[node], self.boxes[node]
        return windows * math.prod(box.size) / (shape[0] * math.prod(shape[axis] for axis in box.axes))

    def cost(self, node: fx.Node, windows: int | None = None) -> cost.Cost:
        """Of one step on the whole map, or on so many windows."""
        numbers: float = math.prod(self.shapes[node])
        if windows is not None:
            numbers *= self.share(node, windows)
        step = self.steps[node]
        return cost.Cost(1, numbers * step.multiplications, numbers * (cost.NORM if step.moments else 1))

    def map(self, value: fx.Node, box: Box) -> tuple[Box, tuple[int, ...]]:
        return box, tuple(self.shapes[value][axis] for axis in box.axes)

    def maps_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Step, start and size of the boxes in `maps` and the sizes of what they lie in: (maps, 1, axes) each."""
        if device not in self.on_devices:
            every = torch.tensor([[*box[1:], sizes] for box, sizes in self.maps], device=device)
            self.on_devices[device] = every[:, :, None].unbind(1)
        return self.on_devices[device]


def make_plan(
    root: nn.Module,
    stretch: graph.Stretch,
    mask: Backdrop,
    shapes: dict[fx.Node, torch.Size],
    order: list[fx.Node],
    policy: statistics.Statistics,
) -> Plan:
    """Walk back from the mask as far as rules reach; what lies behind a call without one is left out of the stretch."""
    shape = shapes[stretch.exit]
    axes = tuple(axis % len(shape) for axis in ([mask.dims] if isinstance(mask.dims, int) else mask.dims))
    axes = tuple(axis for axis in axes if axis != 0)
    patch = (mask.patch,) * len(axes) if isinstance(mask.patch, int) else tuple(mask.patch)
    constants = _constants(stretch)
    boxes = {stretch.exit: Box(axes, patch, (0,) * len(axes), patch)}
    steps: dict[fx.Node, Step] = {}
    refused: list[tuple[fx.Node, UnsupportedError]] = []
    behind: set[fx.Node] = set()  # calls without a rule, and all that they are computed from
    for node in reversed(stretch.calls):
        if node in constants:
            continue
        if any(user in behind for user in node.users):
            behind.add(node)
            continue
        try:
            layer = graph.attribute(root, str(node.target)) if node.op == "call_module" else None
            overwrites = graph.overwrites_shared(root, node)
            step = rules.find(Call(node, layer, shapes, boxes[node].axes, policy, constants, overwrites))
            joined = {
                source: _join(boxes.get(source), _input_box(boxes[node], step, axes))
                for source, axes in step.inputs.items()
            }
        except UnsupportedError as reason:
            refused.append((node, reason))
            behind.add(node)
            continue
        steps[node] = step
        boxes.update(joined)
    needed = set(steps)
    for node in reversed(stretch.calls):
        if node in constants and any(user in needed for user in node.users):
            needed.add(node)
    reduced = graph.closed(root, stretch.mask, needed, order)
    plan = Plan(reduced, {node: steps[node] for node in reduced.calls if node in steps}, boxes, shapes, refused)
    _find_chains(plan)
    _find_fills(plan)
    inner = {step.node for chain in plan.chains.values() for step in chain.steps[:-1]}
    plan.nodes = [node for node in reduced.calls if node not in inner]
    firsts = {chain.steps[0].node: node for node, chain in plan.chains.items()}
    for node, sources in reduced.drops.items():
        if node not in inner or node in firsts:
            plan.drops[firsts.get(node, node)] = sources
    plan.maps = list(dict.fromkeys(_maps(plan)))
    return plan


def _find_chains(plan: Plan) -> None:
    for node, step in plan.steps.items():
        if step.finishes is None:
            continue
        (source,) = step.inputs
        before = plan.chains.get(source)
        if before is not None and len(source.users) == 1 and [*before.kinds, step.finishes] in CHAINS:
            plan.chains[node] = Chain([*plan.chains.pop(source).steps, step])
        else:
            plan.chains[node] = Chain([step])


def _find_fills(plan: Plan) -> None:
    """What values are to hold outside the map.

    The padding, where all that read a value slide over the same cells and pad alike, so that it is done once. And
    zero behind a layer that pads with infinity: such cells may hold anything, but zero times it has to be zero.
    """
    inner = {step.node for chain in plan.chains.values() for step in chain.steps[:-1]}
    for value in (*plan.stretch.entries, *plan.steps):
        users = [user for user in value.users if user is not plan.stretch.mask]
        readers = [plan.steps[user] for user in users if user in plan.steps]
        fills = {step.sliding.fill if step.sliding else None for step in readers}
        alike = value in plan.stretch.entries or len(readers) == len(users)
        fill = fills.pop() if len(fills) == 1 and alike else None
        if value in inner:
            continue
        if fill is not None and all(plan.need(step.node, value) == plan.boxes[value] for step in readers):
            plan.fills[value] = fill
        elif value in plan.steps and _pads_with_infinity(plan.steps[value]):
            plan.fills[value] = 0.0


def _pads_with_infinity(step: Step) -> bool:
    return step.sliding is not None and math.isinf(step.sliding.fill)


def _maps(plan: Plan) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Wherever it matters which cells of a window lie inside the map."""
    for node, step in plan.steps.items():
        for source in step.inputs if step.sliding else ():
            yield plan.map(source, plan.need(node, source))
        if step.moments or node in plan.fills:
            yield plan.map(node, plan.boxes[node])
    yield plan.map(plan.stretch.exit, plan.boxes[plan.stretch.exit])


def _constants(stretch: graph.Stretch) -> frozenset[fx.Node]:
    """Values that no entry of the stretch reaches."""
    reached = set(stretch.entries)
    for node in stretch.calls:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return frozenset(stretch.calls) - reached


def _input_box(box: Box, step: Step, axes: Axes) -> Box:
    sliding = step.sliding
    if sliding is None:
        return box._replace(axes=axes)
    along = zip(box.step, box.start, box.size, *sliding[:4], strict=True)
    cells = [(a * s, b * s - p, (n - 1) * s + d * (k - 1) + 1) for a, b, n, k, s, p, d in along]
    return Box(axes, *zip(*cells, strict=True))


def _join(a: Box | None, b: Box) -> Box:
    if a is None:
        return b
    if (a.axes, a.step) != (b.axes, b.step):
        raise UnsupportedError("its input also goes another way with another stride or order of axes")
    start = tuple(min(pair) for pair in zip(a.start, b.start, strict=True))
    ends = (max(x + m, y + n) for x, m, y, n in zip(a.start, a.size, b.start, b.size, strict=True))
    return Box(a.axes, a.step, start, tuple(end - first for end, first in zip(ends, start, strict=True)))
