"""One stretch of a model and the mask at its end, skipped where that pays and plain where it does not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from backdrop._draw import is_zero
from backdrop.layers import Backdrop
from backdrop.skip import cost, graph, replay, samples, statistics, tree
from backdrop.skip.plan import Plan
from backdrop.skip.report import Entry


class Estimate(NamedTuple):
    """A step of a stretch by the cost model: seconds, and numbers of 4 bytes in memory."""

    plain_time: float
    skip_time: float
    kept: float  # numbers that a plain forward pass keeps for the backward pass
    skip_memory: float  # at the peak
    stays_plain: str  # why, if so


class Skipping(ABC):
    """Computes `mask(stretch(...))` from the values that enter the stretch."""

    def __init__(
        self, root: nn.Module, stretch: graph.Stretch, mask: Backdrop, policy: statistics.Statistics, entry: Entry
    ) -> None:
        self.root, self.stretch, self.mask, self.policy, self.entry = root, stretch, mask, policy, entry
        self.places = _places(root, stretch)

    def __call__(self, values: list[Any]) -> Any:
        if not self._is_wanted(values):
            return samples.mask_outputs(self.mask, graph.run(self.stretch, values))
        return self.run(values)

    @abstractmethod
    def run(self, values: list[Any]) -> Any:
        """With the mask at work, skip what it blocks or say in the report why not."""

    @abstractmethod
    def stays_plain(self) -> bool:
        """Whether it is known in advance that nothing will be skipped; says so in the report."""

    @abstractmethod
    def estimate(self, shapes: Mapping[fx.Node, torch.Size], device: torch.device) -> Estimate:
        """What a step would take with values of these shapes."""

    def _pass(self, shapes: Mapping[fx.Node, torch.Size]) -> cost.Pass:
        """A plain pass, looked at without computing it."""
        return cost.look_at(partial(_run, self.stretch), [shapes[node] for node in self.stretch.entries], self.root)

    def parameters(self) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        """The parameters of the stretch as they are now, and where each of them lives."""
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module, name in self.places:
            parameter = module._parameters.get(name)
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
        return owners

    def _is_wanted(self, values: Sequence[Any]) -> bool:
        """Whether the mask will do something here, and the stretch can be taken apart."""
        if not self.mask.training or is_zero(self.mask.p) or torch._C._are_functorch_transforms_active():
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        tensors = [leaf for value in values for _, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
        if not tensors or not all(tensor.numel() for tensor in tensors):
            return False
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in self.parameters())


class PositionSkip(Skipping):
    """Positions dropped: see replay.py."""

    def __init__(
        self, root: nn.Module, plan: Plan, mask: Backdrop, policy: statistics.Statistics, entry: Entry
    ) -> None:
        super().__init__(root, plan.stretch, mask, policy, entry)
        self.plan = plan
        self.dense = cost.total(plan.cost(node) for node in plan.steps)
        self.window = cost.total(plan.cost(node, 1) for node in plan.steps)
        self.device: torch.device | None = None  # until the first call
        self.decided: tuple[float, str] = (-1.0, "")  # for which p, and why plain

    def stays_plain(self) -> bool:
        if self.device is None:
            return False
        p = float(self.mask.p)
        if p != self.decided[0]:
            self.decided = p, self._plain_because(p, self.device)
        if self.decided[1]:
            self.entry.last = self.decided[1]
        return bool(self.decided[1])

    def _plain_because(self, p: float, device: torch.device) -> str:
        saved, spent = self.dense.backward(device), self.window.windows(device, self._kept(p))
        if cost.pays(spent, saved):
            return ""
        return f"plain: windows would cost {spent / saved:.2f} times the dense backward pass"

    def _kept(self, p: float) -> float:
        return max(1.0, self.plan.units() * (1 - p))

    def estimate(self, shapes: Mapping[fx.Node, torch.Size], device: torch.device) -> Estimate:
        p = float(self.mask.p)
        step, saved, kept = self.dense.step(device), self.dense.backward(device), self._kept(p)
        largest = max(math.prod(shapes[node]) for node in self.plan.steps)
        windows = kept * sum(math.prod(shapes[node]) * self.plan.share(node, 1) for node in self.plan.steps)
        if not (self.plan.coupled and self.policy == "sampled"):
            windows = min(windows, 2 * largest)  # in parts, see replay.py
        given, passed = sum(math.prod(shapes[node]) for node in self.stretch.entries), self._pass(shapes)
        return Estimate(
            step,
            step - saved + self.window.windows(device, kept),
            passed.kept,
            given + max(cost.working(passed.cost, device, largest, gradients=False), windows),
            self._plain_because(p, device),
        )

    def run(self, values: list[Any]) -> Any:
        if self.device != values[0].device:
            self.device, self.decided = values[0].device, (-1.0, "")
        if self.stays_plain():
            return self.mask(graph.run(self.stretch, values))
        owners = self.parameters()
        one = replay.Run(self.root, self.plan, self.mask, self.policy, list(owners.values()), self.entry)
        return replay.Skipped.apply(one, *values, *owners)  # type: ignore[no-untyped-call]


class SampleSkip(Skipping):
    """Samples dropped: see samples.py."""

    def __init__(
        self, root: nn.Module, stretch: graph.Stretch, mask: Backdrop, policy: statistics.Statistics, entry: Entry
    ) -> None:
        super().__init__(root, stretch, mask, policy, entry)
        self.lean = graph.lean(root, stretch)
        self.layers = {
            node: graph.attribute(root, str(node.target)) for node in stretch.calls if node.op == "call_module"
        }
        inside = [module for layer in self.layers.values() for module in layer.modules()]
        self.samples = samples.Samples(self._function, inside, mask, policy, self._together)

    def stays_plain(self) -> bool:
        why = self.samples.plain_because()
        if why:
            self.entry.last = why
        return bool(why)

    def run(self, values: list[Any]) -> Any:
        out, self.entry.last = self.samples(*values)
        return out

    def estimate(self, shapes: Mapping[fx.Node, torch.Size], device: torch.device) -> Estimate:
        rows = samples.Rows(shapes[self.stretch.exit][0], device)
        passed = self._pass(shapes)
        calls, multiplications, numbers = passed.cost
        if device.type == "cuda":  # see graph.lean
            fused = [node for node in self.stretch.calls if node not in self.lean.calls]
            calls, numbers = calls - len(fused), numbers - sum(math.prod(shapes[node]) for node in fused)
        spent = self.samples.spent(cost.Cost(calls, multiplications, numbers), rows)
        kept, part = spent.kept / rows.number, (1 - spent.kept / rows.number) / spent.parts
        largest = max(math.prod(shapes[node]) for node in self.stretch.calls if node in shapes)
        ends = sum(math.prod(shapes[node]) for node in (*self.stretch.entries, self.stretch.exit))
        rest = part * cost.working(passed.cost, device, largest, gradients=False)
        if self.samples.norms:  # all parts are there at once
            rest = rest * spent.parts + kept * passed.kept
        some = kept * (passed.kept + cost.working(passed.cost, device, largest, gradients=True))
        return Estimate(
            spent.step,
            spent.skipped,
            passed.kept,
            ends + max(rest, some),
            spent.why,
        )

    def _function(self, *values: Any) -> Any:
        return graph.run(self.stretch if torch.is_grad_enabled() else self.lean, values)

    def _together(self, parts: list[Any]) -> list[Any]:
        values = [dict(zip(self.stretch.entries, part, strict=True)) for part in parts]
        return graph.run_together(self.stretch, self.lean, values, self._normalise)

    def _normalise(self, node: fx.Node, parts: list[dict[fx.Node, Any]]) -> list[Any] | None:
        layer: Any = self.layers.get(node)
        if layer not in self.samples.norms:
            return None
        (source,) = node.all_input_nodes
        reuse = len(source.users) == 1 and source not in self.stretch.entries
        xs = [values.pop(source) if reuse else values[source] for values in parts]
        return statistics.normalise_together(layer, xs, self.policy, reuse)


def _run(stretch: graph.Stretch, *values: Any) -> Any:
    return graph.run(stretch, values)


def _places(root: nn.Module, stretch: graph.Stretch) -> list[tuple[nn.Module, str]]:
    """Every module of a stretch and every name under which it may have a parameter, once."""
    places: dict[tuple[nn.Module, str], None] = {}
    for node in stretch.calls:
        if node.op == "call_module":
            for module in graph.attribute(root, str(node.target)).modules():
                places |= dict.fromkeys((module, name) for name in module._parameters)
        elif node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            places[graph.attribute(root, path) if path else root, name] = None
    return list(places)
