"""A model as a program: its calls in order, with every stretch that can be skipped run as one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from backdrop._inserted import has_other_hooks, inserted_mask
from backdrop.layers import Backdrop, drops_samples
from backdrop.skip import graph, samples, statistics, steps, stretches, tree
from backdrop.skip.plan import make_plan
from backdrop.skip.report import Entry, Report


class Programs:
    """What a module does instead of its own forward: the program for its state, made when it is first needed."""

    def __init__(
        self, root: nn.Module, path: str, policy: statistics.Statistics, report: Report, strict: bool = False
    ) -> None:
        self.root, self.path, self.policy, self.report, self.strict = root, path, policy, report, strict
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """A program is never copied or stored."""
        names = ("root", "path", "policy", "report", "strict")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.signature = inspect.signature(graph.plain(self.root))
        self.made: dict[Any, Any] = {}  # a Program, or Samples where the module is one call
        self.current: tuple[State, tuple[Any, ...], Program | None] | None = None  # what the last call was made with
        self.settled: Settled | None = None
        # A graph break under torch.compile, because the mask decides what is computed. Not as decorators: these would
        # import the compiler along with the library.
        self._outside = torch.compiler.disable(self._call)  # type: ignore[no-untyped-call]
        self._samples_outside = torch.compiler.disable(self._call_on_samples)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outside(*args, **kwargs)

    def on_samples(self, module: nn.Module, mask: Backdrop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`mask(module(...))` as one call, with any arguments."""
        return self._samples_outside(module, mask, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        plain = graph.plain(self.root)
        if self.settled is not None and not kwargs and self.settled.holds_for(args):
            return plain(*args)
        self.settled = None
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        inputs, constants = args, {}
        if kwargs or len(args) < len(self.signature.parameters) or not all(isinstance(x, Tensor) for x in args):
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            inputs = tuple(bound.arguments.values())
            constants = {name: value for name, value in bound.arguments.items() if isinstance(value, tree.PLAIN)}
        program = self._program(constants)
        if program is None:
            return plain(*args, **kwargs)
        if program.stays_plain(inputs):
            if inputs is args and self.current is not None:
                self.settled = Settled(self.current[0], args)
            return plain(*args, **kwargs)
        return program.run(inputs)

    def _program(self, constants: dict[str, Any]) -> Program | None:
        """The program for the model as it is now; None where no mask is at work."""
        given = tuple((name, type(value), value) for name, value in constants.items())
        if self.current is not None:
            state, known, program = self.current
            if known == given and state.is_unchanged():
                return program
        state, program = State(self.root), None
        if any(_is_active(m) for m in state.modules):
            key = (state.key, given)
            if key not in self.made:
                self.made[key] = Program(self.root, constants, self.policy, self.path, self.strict)
            program = self.made[key]
            self.report.update(program.entries)
        self.current = state, given, program
        return program

    def _call_on_samples(self, module: nn.Module, mask: Backdrop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or not _is_active(mask):
            return module(*args, **kwargs)
        if not drops_samples(mask):
            raise ValueError(
                f"Skip takes one tensor where positions are dropped, but got {len(args)} positional and {len(kwargs)} "
                "named arguments; use skip_blocked on a model that holds the module and the mask"
            )
        entry = Entry("mask", "samples")
        self.report.update([entry])
        for path, layer in module.named_modules():
            reason = samples.mixes_samples(layer, "exact")
            if reason:
                entry.kept.append((f"module.{path}", reason))
                entry.last = "plain: nothing can be skipped"
                return samples.mask_outputs(mask, module(*args, **kwargs))
        key = State(module).key
        if key not in self.made:
            self.made[key] = samples.Samples(module, list(module.modules()), mask, self.policy)
        entry.skipped = ["module"]
        out, entry.last = self.made[key](*args, **kwargs)
        return out


class State:
    """What a program depends on and users may change between calls: modules, their modes and hooks, dropout's p."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())
        self.containers = [m for m in self.modules if m._modules]
        self.dropouts = [m for m in self.modules if isinstance(m, _DropoutNd)]
        self.found = self._look()
        self.key = (tuple(map(id, self.modules)), *map(tuple, self.found[1:]))

    def is_unchanged(self) -> bool:
        return self._look() == self.found

    def _look(self) -> tuple[list[Any], ...]:
        children: list[Any] = [list(m._modules.values()) for m in self.containers]
        modes = [m.training for m in self.modules]
        hooks = [has_other_hooks(m) for m in self.modules]
        return children, modes, hooks, [m.p for m in self.dropouts]


class Settled:
    """What a model is known to run plain for, so that small steps need not find that out every time."""

    def __init__(self, state: State, inputs: Sequence[Tensor]) -> None:
        self.state = state
        self.masks = [m for m in state.modules if isinstance(m, Backdrop)]
        self.known = not any(isinstance(m.p, Tensor) for m in self.masks)  # may change without notice
        self.found = self._look(inputs)

    def holds_for(self, inputs: Sequence[Any]) -> bool:
        return self.known and self._look(inputs) == self.found and self.state.is_unchanged()

    def _look(self, inputs: Sequence[Any]) -> list[Any]:
        given: list[Any] = [(x.shape, x.device) if isinstance(x, Tensor) else None for x in inputs]
        return given + [m.p for m in self.masks]


def _is_active(module: nn.Module) -> bool:
    return isinstance(module, Backdrop) and module.training


def untraceable(module: nn.Module) -> str | None:
    """Why torch.fx cannot follow a module's own forward, if so."""
    try:
        graph.trace(module, {})
    except Exception as error:
        return graph.first_line(error)
    return None


class Program:
    """The calls of a model for one setting of its training flags and of its arguments that are not tensors."""

    def __init__(
        self, root: nn.Module, constants: dict[str, Any], policy: statistics.Statistics, path: str, strict: bool
    ) -> None:
        self.root, self.policy, self.path, self.strict = root, policy, path, strict
        self.graph, self.opaque = graph.trace(root, constants)
        self.order = list(self.graph.nodes)
        self.stretches = graph.stretches(root, self.graph)
        self.entries = [Entry(path + str(stretch.mask.target)) for stretch in self.stretches]
        self.plans: dict[Any, Plan] = {}

    def stays_plain(self, inputs: Sequence[Any]) -> bool:
        """Whether nothing is to be skipped this time."""
        found = [skip.stays_plain() for skip in self._plan_for(inputs).skips.values()]  # each tells the report why
        return all(found)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run the calls on these inputs."""
        plan = self._plan_for(inputs)
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in plan.order:
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(given)
            elif node in plan.skips:
                values[node] = plan.skips[node]([values[source] for source in plan.entries[node]])
            else:
                values[node] = graph.call(self.root, node, values, in_place=True)
            for source in plan.last_use.get(node, ()):
                values.pop(source, None)
        raise AssertionError("a graph ends in its output")

    def _plan_for(self, inputs: Sequence[Any]) -> Plan:
        key = tuple(_shapes(value) for value in inputs)
        if key not in self.plans:
            self.plans[key] = self._plan(inputs)
        return self.plans[key]

    def _plan(self, inputs: Sequence[Any]) -> Plan:
        if any(isinstance(m, nn.SyncBatchNorm) and m.training for m in self.root.modules()):
            for entry in self.entries:  # a pass for the shapes on one process would wait for the others
                entry.last = "plain: SyncBatchNorm couples the samples of all processes"
            return Plan()
        by_samples = all(
            drops_samples(graph.attribute(self.root, str(stretch.mask.target))) for stretch in self.stretches
        )
        return self.plan({} if by_samples else graph.shapes(self.root, self.graph, inputs))

    def plan(self, shapes: dict[fx.Node, torch.Size]) -> Plan:
        """What to skip where values have these shapes; those before masks that drop samples need not be known."""
        plan = Plan()
        inside: set[fx.Node] = set()
        for stretch, entry in zip(self.stretches, self.entries, strict=True):
            mask = self._layer(stretch.mask)
            assert isinstance(mask, Backdrop)
            entry.kept.clear()
            if stretch.exit not in stretch.calls:
                entry.last = "plain: its input comes from outside, or is also used past the mask"
                continue
            if self._is_overtaken(stretch):
                entry.last = "plain: something else is changed in place while it runs"
                continue
            if drops_samples(mask) or drops_samples(mask, len(shapes[stretch.exit])):
                run, owned = self._skip_samples(stretch, mask, entry)
            else:
                run, owned = self._skip_positions(stretch, mask, entry, shapes)
            if run is not None:
                plan.skips[stretch.mask], plan.entries[stretch.mask] = run, owned.entries
                inside.update(owned.calls)
                entry.skipped = [self._name(node) for node in owned.calls if node.op != "get_attr"]
        masks = set(plan.skips)
        plan.order = [
            node
            for node in self.order
            if node not in inside or any(user not in inside and user not in masks for user in node.users)
        ]
        last: dict[fx.Node, fx.Node] = {}
        for node in plan.order:
            for source in plan.entries.get(node, node.all_input_nodes):
                last[source] = node
        for source, node in last.items():
            plan.last_use.setdefault(node, []).append(source)
        return plan

    def _is_overtaken(self, stretch: graph.Stretch) -> bool:
        """Whether another call writes in place between the stretch's first call and its mask, where it runs."""
        first = self.order.index(next(iter(stretch.calls)))
        between = self.order[first : self.order.index(stretch.mask)]
        return any(graph.writes_in_place(self.root, node) for node in between if node not in stretch.calls)

    def _skip_samples(
        self, stretch: graph.Stretch, mask: Backdrop, entry: Entry
    ) -> tuple[stretches.Skipping | None, graph.Stretch]:
        entry.drops = "samples"
        behind: set[fx.Node] = set()
        for node in reversed(stretch.calls):
            layer = self._layer(node)
            reason = samples.mixes_samples(layer, self.policy) if layer else None
            if graph.overwrites_shared(self.root, node):
                reason = "it writes over a value that is used elsewhere too"
            if reason is None and layer is not None:
                own = (layer, inserted_mask(layer))  # which is a call of its own
                inner = (samples.mixes_samples(m, "exact") for m in layer.modules() if m not in own)
                reason = next(filter(None, inner), None)
            if any(user in behind for user in node.users):
                behind.add(node)
            elif reason:
                entry.kept.append((self._name(node), reason))
                behind.add(node)
        owned = graph.closed(self.root, stretch.mask, set(stretch.calls) - behind, self.order)
        if not any(node.op.startswith("call") for node in owned.calls):
            entry.last = "plain: nothing can be skipped"
            return None, owned
        return stretches.SampleSkip(self.root, owned, mask, self.policy, entry), owned

    def _skip_positions(
        self, stretch: graph.Stretch, mask: Backdrop, entry: Entry, shapes: dict[fx.Node, torch.Size]
    ) -> tuple[stretches.Skipping | None, graph.Stretch]:
        entry.drops = "positions"
        plan = make_plan(self.root, stretch, mask, shapes, self.order, self.policy)
        for node, reason in plan.refused:
            why = self.opaque.get(str(node.target), str(reason))
            if self.strict and not isinstance(reason, steps.BatchStatisticsError):
                raise NotImplementedError(
                    f"Skip cannot compute {self._name(node)} for positions alone: {why}. Leave it out of the module, "
                    "or use skip_blocked, which skips what lies between it and the mask"
                )
            entry.kept.append((self._name(node), why))
        owned = plan.stretch
        if not plan.steps or not owned.entries or not plan.units():
            entry.last = "plain: nothing can be skipped"
            return None, owned
        return stretches.PositionSkip(self.root, plan, mask, self.policy, entry), owned

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return graph.attribute(self.root, str(node.target)) if node.op == "call_module" else None

    def _name(self, node: fx.Node) -> str:
        return self.path + graph.name_of(node)


@dataclass
class Plan:
    """A program for inputs of known shapes."""

    order: list[fx.Node] = field(default_factory=list)
    skips: dict[fx.Node, stretches.Skipping] = field(default_factory=dict)  # by the mask at the end
    entries: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    last_use: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return tuple((path, _shapes(leaf)) for path, leaf in tree.leaves(value) if isinstance(leaf, Tensor))
