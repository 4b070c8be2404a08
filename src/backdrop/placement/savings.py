"""What Skip would save, by its cost model: nothing is run.

>>> from torch import nn
>>> from backdrop import Backdrop2d
>>> stage = [nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=8), nn.ReLU()]
>>> model = nn.Sequential(*stage, Backdrop2d(0.99), nn.AdaptiveAvgPool2d(1), nn.Flatten())
>>> saving = savings(model, (4, 1, 1024, 1024))["4"]
>>> saving.time < 0.5
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from backdrop._core.draw import is_zero
from backdrop.graph import cost
from backdrop.graph.capture import Capture
from backdrop.graph.table import Statistics
from backdrop.graph.untouched import (
    as_value_error,
    check_arguments,
    check_input_shape,
    check_model,
    mode,
    plainly,
    quiet,
    unchanged,
    zeros,
    zeros_for,
)
from backdrop.layers import Backdrop
from backdrop.skip.budget import Memory, TileSize, check_memory, check_tile
from backdrop.skip.engine import Engine, Part, Plan, Settings
from backdrop.skip.positions import Positions
from backdrop.skip.report import Report
from backdrop.skip.samples import Samples
from backdrop.skip.statistics import check_statistics

__all__ = ["Saving", "savings"]


@dataclass(frozen=True)
class Saving:
    """A training step of the whole model in which Skip spares what one mask blocks, over a plain step.

    Args:
        time: forward and backward; 1 where Skip would leave the step as it is.
        memory: of activations at the peak.
        note: what is skipped, what not, and why.
    """

    time: float
    memory: float
    note: str


def savings(
    model: nn.Module,
    input_shape: Sequence[int] | Tensor,
    *,
    statistics: Statistics = "exact",
    device: torch.device | str = "cpu",
    tile: TileSize = None,
    memory: Memory = None,
) -> dict[str, Saving]:
    """What `skip_blocked` would save, for every mask by its dotted path.

    Args:
        model: takes one tensor.
        input_shape: of a batch.
        statistics: as for `skip_blocked`.
        device: to estimate for.
        tile: as for `skip_blocked`.
        memory: as for `skip_blocked`.
    """
    check_model(model)
    check_statistics(statistics)
    settings = Settings(statistics, "pays", None, check_tile(tile, memory), check_memory(memory))
    shape = check_input_shape(input_shape)
    check_arguments(model)
    device = torch.device(device)
    engine = Engine(model, settings, Report())
    graphs: list[_Planned] = []
    with unchanged(model), mode(model, training=True), torch.enable_grad(), quiet(), plainly(recurrent=False):
        capture = Capture(model.forward, lambda module: _backend(engine, module, graphs))
        x = zeros_for(model, shape)
        try:
            capture(x)
        except Exception as error:
            raise as_value_error(model, shape, error) from error
    with unchanged(model), quiet():
        step, kept, largest = 0.0, 0.0, 0
        for graph in graphs:
            passed, traced = _pass(model, graph, None), graph.plan.traced
            step, kept = step + passed.cost.step(device), kept + passed.kept
            calls = [node for node in traced.costs if node.op.startswith("call") and traced.is_tensor(node)]
            largest = max([largest, *(math.prod(traced.shape(node)) for node in calls)])
        whole = cost.total([c for graph in graphs for c in graph.plan.traced.costs.values()] or [cost.Cost(0, 0, 0)])
        working = cost.working(whole, device, largest, gradients=True)
        parts = [(graph, part) for graph in graphs for part in graph.plan.parts]
        estimates = [_estimate(model, graph, part, device) for graph, part in parts]
    step = max(step, sum(estimate.plain_time for estimate in estimates))
    found = {}
    for (_, part), estimate in zip(parts, estimates, strict=True):
        stays = [f"not from {path} down: {reason}" for path, reason in part.entries[0].kept]
        if all(is_zero(layer.p) for layer in part.layers) and not estimate.tiles:
            saving = Saving(1.0, 1.0, "p is 0, so nothing is blocked")
        elif estimate.stays_plain:
            saving = Saving(1.0, 1.0, "; ".join([estimate.stays_plain, *stays]))
        else:
            time = 1 - (estimate.plain_time - estimate.skip_time) / step
            taken = (kept - estimate.kept + max(working, estimate.skip_memory)) / (kept + working)
            tiles = [f"in tiles: {estimate.tiles}"] if estimate.tiles else []
            saving = Saving(time, taken, "; ".join([f"skips {_summary(part.segment.skipped)}", *tiles, *stays]))
        for entry in part.entries:
            found[entry.mask] = saving
    for path, module in model.named_modules():
        if isinstance(module, Backdrop) and path not in found:
            said = capture.breaks[-1:] or ["no call of it was seen"]
            found[path] = Saving(1.0, 1.0, f"torch does not follow the model here ({said[0]})")
    return found


class _Planned(NamedTuple):
    """A captured graph, what the engine makes of it, and what it was given."""

    plan: Plan
    given: dict[fx.Node, Any]


class _Estimate(NamedTuple):
    """A step of a segment by the cost model: seconds, and numbers of 4 bytes in memory."""

    plain_time: float
    skip_time: float
    kept: float  # numbers that a plain forward pass keeps for the backward pass
    skip_memory: float  # at the peak
    stays_plain: str  # why, if so
    tiles: str = ""  # how many there are and what they take, in words


def _backend(engine: Engine, module: fx.GraphModule, graphs: list[_Planned]) -> Callable[..., Any]:
    """Plan, and hand on stand-ins."""

    def run(*inputs: Any) -> Any:
        plan = Plan(engine, module, inputs)
        nodes = [node for node in plan.traced.graph.nodes if node.op == "placeholder"]
        graphs.append(_Planned(plan, dict(zip(nodes, inputs, strict=True))))
        (results,) = module.graph.output_node().args
        outs: list[Any] = []
        for node in results if isinstance(results, (tuple, list)) else [results]:
            value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
            if isinstance(value, Tensor):
                like = torch.empty(0, dtype=value.dtype, device=value.device)
                made = zeros([int(n) for n in value.shape], [int(n) for n in value.stride()], like)
                outs.append(made.requires_grad_(value.requires_grad))
            else:
                outs.append(value)
        return outs

    return run


def _pass(model: nn.Module, graph: _Planned, part: Part | None) -> cost.Pass:
    """A plain pass of a graph, or of a segment, looked at without computing it."""
    traced, own = graph.plan.traced, {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    entries = list(graph.given) if part is None else part.segment.entries
    known: dict[fx.Node, Any] = {}
    free: list[fx.Node] = []
    for node in entries:
        value = graph.given.get(node, traced.values.get(node))
        if isinstance(value, Tensor) and id(value) not in own and value.is_floating_point():
            free.append(node)
        elif isinstance(value, Tensor) and value.is_meta:  # which cells dropout keeps
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            known[node] = zeros(value.shape, None, torch.empty(0, dtype=value.dtype, device=device))
        else:
            known[node] = value

    def function(*values: Tensor) -> Any:
        given = known | dict(zip(free, values, strict=True))
        everything = [given[node] for node in entries]
        return traced.module(*everything) if part is None else part.plain(everything)

    return cost.look_at(function, [torch.Size(traced.shape(node)) for node in free], model)


def _estimate(model: nn.Module, graph: _Planned, part: Part, device: torch.device) -> _Estimate:
    """What a step of a segment would take."""
    if part.way is None:
        return _Estimate(0.0, 0.0, 0.0, 0.0, part.never)
    traced, known = graph.plan.traced, part.cost
    ps = tuple(float(layer.p) for layer in part.layers)
    passed = _pass(model, graph, part)
    sizes = {node: math.prod(traced.shape(node)) for node in part.segment.steps if traced.is_tensor(node)}
    largest = max(sizes.values(), default=0)
    given = [node for node in part.segment.entries if not isinstance(graph.given.get(node), nn.Parameter)]
    ends = sum(math.prod(traced.shape(node)) for node in given if traced.is_tensor(node))
    if isinstance(part.way, Positions):
        plain_time, saved = known.step(device), known.backward(device)
        skip_time = plain_time - saved + part.way.windows_cost(1).windows(device, part.way.kept_units(ps[0]))
        working = cost.working(known, device, largest, gradients=False)
        memory = ends + max(working, part.way.memory(ps[0])[1])
        tiling = part.way.tiling
        if tiling is not None:
            back = part.way.tiles_time(device) if part.way.tiles_pay(device) else skip_time - plain_time + saved
            skip_time = (plain_time - saved) * tiling.forward.work + back
            return _Estimate(plain_time, skip_time, passed.kept, ends + tiling.most / 4, "", tiling.describe())
    else:
        assert isinstance(part.way, Samples)
        spent = part.way.spent(known, device)
        plain_time, skip_time = spent.step, spent.skipped
        kept, rest = spent.kept / part.way.number, 1 - spent.kept / part.way.number
        ends += sum(math.prod(traced.shape(node)) for node in part.segment.exits)
        without = rest / spent.parts * cost.working(known, device, largest, gradients=False)
        if part.way.norms:  # all parts are there at once
            without = without * spent.parts + kept * passed.kept
        memory = ends + max(without, kept * (passed.kept + cost.working(known, device, largest, gradients=True)))
    return _Estimate(plain_time, skip_time, passed.kept, memory, part.estimate(ps, device)[0])


def _summary(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}, {len(names)} calls"
