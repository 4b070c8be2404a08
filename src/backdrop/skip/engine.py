"""The engine: a captured graph with every segment that can be skipped run as one call, and the rest as it is."""

from __future__ import annotations

import math
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from backdrop._core.draw import is_zero
from backdrop._core.marks import layer_of
from backdrop._source import Source
from backdrop.graph import cost
from backdrop.graph.capture import LIMIT, Capture
from backdrop.graph.inserted import mask_tensors
from backdrop.graph.running import with_running_statistics
from backdrop.graph.table import Statistics
from backdrop.graph.trace import (
    StandIns,
    Traced,
    TraceError,
    is_mark,
    itself,
    name_of,
    once_differentiable,
    trace,
)
from backdrop.graph.unread import Unread, cannot_read, sources_again, stand_for_sources
from backdrop.layers import Backdrop, drops_samples
from backdrop.skip.budget import TileSize, in_words
from backdrop.skip.positions import Positions
from backdrop.skip.programs import Program, compiled
from backdrop.skip.report import Entry, Report
from backdrop.skip.samples import Samples
from backdrop.skip.segments import Segment, find_segment
from backdrop.skip.sources import all_or_nothing
from backdrop.skip.windows import Demand

When: TypeAlias = Literal["pays", "lean", "always"]
WHEN: tuple[When, ...] = ("pays", "lean", "always")
GAVE_UP = "it gave up after many captures: keep what changes from step to step in tensors or p"
NOT_CALLED = "the model did not call it"
INNER = "a module inside skips on its own, and has its own report"
NOTABLE = 0.01  # of what segments keep, from which on the report speaks of the rest
PLANS = 32  # for sizes seen lately, per graph


class Settings(NamedTuple):
    statistics: Statistics
    when: When
    at_once: int | None
    tile: TileSize = None
    memory: int | None = None

    @property
    def tiled(self) -> bool:
        return self.tile is not None or self.memory is not None

    @property
    def policy(self) -> Statistics:
        """For what couples in a graph; by running statistics nothing does that was not refused."""
        return "exact" if self.statistics == "running" else self.statistics


class Engine:
    """What a module does instead of its own forward: the same, without computing what masks block."""

    def __init__(self, root: nn.Module, settings: Settings, report: Report, method: str = "forward") -> None:
        self.root, self.settings, self.report, self.method = root, settings, report, method
        self.own = root.__dict__.get(method)  # a forward that somebody put on the instance
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """What was captured is never copied or stored."""
        return {name: self.__dict__[name] for name in ("root", "settings", "report", "method", "own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.capture: Capture | None = None
        self.written: dict[Any, Any] = {}  # the code that it was made from
        self.graphs: list[Graph] = []  # those with masks in them, newest last
        self.visited: set[Backdrop] = set()  # masks whose graphs ran in this call
        self.compiled = False  # whether this call stands in code that is compiled
        self._compiled_plain: Callable[..., Any] | None = None
        # A graph break under torch.compile, because the mask decides what is computed. Not as a decorator: that would
        # import the compiler along with the library.
        self._outside = torch.compiler.disable(self._call)  # type: ignore[no-untyped-call]

    @property
    def plain(self) -> Callable[..., Any]:
        """What the module does by itself."""
        if self.own is not None:
            own: Callable[..., Any] = self.own
            return own
        method: Callable[..., Any] = getattr(type(self.root), self.method).__get__(self.root)
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Under torch.compile this is seen as constant. What runs outside then compiles its own parts.
        return self._outside(torch.compiler.is_compiling(), *args, **kwargs)

    def masks(self) -> dict[Backdrop, str]:
        """The masks of the model and their dotted paths."""
        return {module: path for path, module in self.root.named_modules() if isinstance(module, Backdrop)}

    def _call(self, compiled: bool, *args: Any, **kwargs: Any) -> Any:
        masks = self.masks()
        self.compiled = compiled or _holds_compiled(self.root)
        unread: list[Unread] = []
        if any(isinstance(value, Source) for value in tree_leaves((args, kwargs))):
            (args, kwargs), unread = stand_for_sources((args, kwargs), _device_of(self.root))
        reason = self._plain_because(masks, bool(unread))
        if reason is not None:
            self._check_plain(reason)
            if reason:
                self._say(masks, reason)
            if unread:
                raise RuntimeError(cannot_read(unread[0], reason))
            return self._plainly()(*args, **kwargs)
        if not unread:
            return self._captured(masks, args, kwargs)
        wanted = torch.is_grad_enabled()  # not in inference mode, in which torch follows nothing
        with torch.inference_mode(False), torch.set_grad_enabled(wanted), all_or_nothing(self.root):
            return sources_again(self._captured(masks, args, kwargs))

    def _captured(self, masks: dict[Backdrop, str], args: Any, kwargs: Any) -> Any:
        written = _written(self.root)
        if self.capture is None or any(self.written.get(kind, code) != code for kind, code in written.items()):
            self.capture = Capture(self.plain, self._convert)
        self.written |= written
        self.visited = set()
        out = self.capture(*args, **kwargs)
        if self.capture.breaks:
            self._check_plain(self._not_followed())
        missed = {mask: path for mask, path in masks.items() if mask not in self.visited and _is_active(mask)}
        within = {mask for engine in self._inner() for mask in engine.masks()} if missed else set()
        followed = self.capture.ran and not self.capture.breaks
        if missed.keys() - within and not followed:
            self._check_plain(self._not_followed())
        outside = NOT_CALLED if followed else self._not_followed()
        for those, reason in ((missed.keys() & within, INNER), (missed.keys() - within, outside)):
            if those:
                self._say({mask: missed[mask] for mask in missed if mask in those}, reason)
        return out

    def _inner(self) -> list[Engine]:
        """Those of modules in this one that skip on their own."""
        owned = [value for module in self.root.modules() for value in module.__dict__.values()]
        return [value for value in owned if isinstance(value, Engine) and value is not self]

    def _check_plain(self, reason: str) -> None:
        """Refuse to run a model as it is where that would not be the same."""
        if self.settings.statistics == "running" and self._keeps_running():
            raise RuntimeError(
                "statistics='running' needs a model that torch follows from end to end, because it runs by other "
                f"statistics than the plain one, but here {reason}"
            )

    def _keeps_running(self) -> bool:
        """Whether a batch normalisation is in training, and runs by its running statistics."""
        norms = (module for module in self.root.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        return self.settings.statistics == "running" and any(module.training for module in norms)

    def _plain_because(self, masks: dict[Backdrop, str], sources: bool = False) -> str | None:
        """Why the model runs as it is, without a look at its graph; nothing to say where no gradient is wanted."""
        tiled = self.settings.tiled and any(not drops_samples(mask) for mask in masks)
        if sources and not self.settings.tiled and not any(map(drops_samples, masks)):
            raise ValueError(
                "a Source is read in tiles: give tile=, or tile='auto' and memory=, to Skip or skip_blocked"
            )
        if not (tiled or sources or self._keeps_running()):
            if not torch.is_grad_enabled():
                return ""
            if not any(mask.training for mask in masks):
                return "in eval mode masks do nothing"
            if not any(_is_active(mask) for mask in masks) and self.settings.at_once is None:
                return "no mask drops anything: p is 0"
        if self.capture is None and any(map(nn.parameter.is_lazy, self.root.parameters())):
            return "lazy layers have no parameters yet"
        if torch._C._are_functorch_transforms_active():
            return "under torch.func's transforms"
        if _changes_functions():
            return "under a mode that changes what torch functions do (TorchFunctionMode)"
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            return "under a TorchDispatchMode, where torch does not follow models"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "while a CUDA graph is recorded"
        hooks = torch.nn.modules.module
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks or hooks._global_backward_hooks:
            return "hooks for all modules are registered"
        if hooks._global_backward_pre_hooks:
            return "hooks for all modules are registered"
        return None

    def _plainly(self) -> Callable[..., Any]:
        """What runs where nothing is to be skipped."""
        if not self.compiled or torch._C._are_functorch_transforms_active():
            return self.plain
        if self._compiled_plain is None:
            self._compiled_plain = torch.compile(self.plain)
        return self._compiled_plain

    def _say(self, masks: dict[Backdrop, str], reason: str) -> None:
        entries = []
        for mask, path in masks.items():
            entry = Entry(path, "samples" if drops_samples(mask) else "positions")
            entry.ran_plain(reason)
            entries.append(entry)
        self.report.update(entries)

    def _not_followed(self) -> str:
        assert self.capture is not None
        said = self.capture.breaks[-1:] or [GAVE_UP]
        return f"torch did not follow the model here ({said[0]})"

    def _convert(self, module: fx.GraphModule) -> Callable[..., Any]:
        module = once_differentiable(module)
        if self.settings.statistics == "running":
            try:
                module = with_running_statistics(module)
                if module.meta.get("break"):
                    self._check_plain(f"torch did not follow it ({module.meta['break']})")
            except (ValueError, RuntimeError) as error:
                return _raising(error)  # when it is run: torch would go on without it now
        if not any(is_mark(node) for node in _all_nodes(module)):
            return module.forward
        self.graphs = [*self.graphs[1 - LIMIT :], Graph(self, module)]
        return self.graphs[-1]


def _device_of(root: nn.Module) -> torch.device:
    return next((x.device for x in (*root.parameters(), *root.buffers())), torch.device("cpu"))


def _raising(error: Exception) -> Callable[..., Any]:
    def refuse(*inputs: Any) -> Any:
        raise error

    return refuse


def _holds_compiled(root: nn.Module) -> bool:
    """Whether a module in it, or around it, was given to torch.compile: captured graphs hold its calls as they were."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in root.modules())


def _changes_functions() -> bool:
    """Whether a TorchFunctionMode is open, other than a default device."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _written(root: nn.Module) -> dict[Any, Any]:
    """The functions of the classes of its modules, which may be replaced, and their code, which may be, too.

    torch does not look at those that it has captured again, nor at its own functions.
    """
    kinds: dict[Any, Any] = {"functional": dict(vars(torch.nn.functional))}
    for module in root.modules():
        if type(module) not in kinds:
            kinds[type(module)] = _functions(type(module))
    return kinds


def _functions(kind: type) -> list[Any]:
    if kind.__module__.startswith("torch.nn.modules."):
        return [kind.forward, getattr(kind.forward, "__code__", None)]  # type: ignore[attr-defined]
    values = [value for each in kind.__mro__ if each not in (nn.Module, object) for value in vars(each).values()]
    functions = [getattr(value, "__func__", value) for value in values]
    return [[function, function.__code__] for function in functions if isinstance(function, types.FunctionType)]


def _is_active(mask: Backdrop) -> bool:
    return mask.training and not is_zero(mask.p)


def _all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            yield from each.graph.nodes


class Graph:
    """One captured graph with masks in it, and the plans for the sizes it was run with."""

    def __init__(self, engine: Engine, module: fx.GraphModule) -> None:
        self.engine, self.module = engine, module
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.stand_ins = StandIns()
        self.numbers: list[int] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self.numbers is None:
            self.numbers = [i for i, value in enumerate(inputs) if not isinstance(value, Tensor)]
        key = (self.engine.compiled, *(inputs[i] for i in self.numbers))
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = Plan(self.engine, self.module, inputs, self.stand_ins)
            if len(self.plans) > PLANS:
                self.plans.popitem(last=False)
        else:
            self.plans.move_to_end(key)
        return plan(*inputs)


class Event(NamedTuple):
    """A mask at work: its layer, and the nodes that mark what it masks, one for each tensor."""

    layer: Backdrop
    nodes: list[fx.Node]

    @property
    def exits(self) -> list[fx.Node]:
        return [_marked(node) for node in self.nodes]


def _marked(node: fx.Node) -> fx.Node:
    value = node.args[0]
    assert isinstance(value, fx.Node)
    return value


class Plan:
    """A graph for inputs of one size: what is skipped in it, and code for all of it."""

    def __init__(
        self, engine: Engine, module: fx.GraphModule, inputs: Sequence[Any], stand_ins: StandIns | None = None
    ) -> None:
        self.engine = engine
        self.failed = ""
        self.parts: list[Part] = []
        try:
            self.traced = trace(module, inputs, stand_ins)
        except TraceError as error:
            self.failed = f"it cannot be planned ahead ({error})"
            self.traced = _as_it_is(module)
        events = _events(self.traced, inputs)
        paths = engine.masks()
        names = _names([paths.get(event.layer, "") for event in events])
        drops = ["samples" if drops_samples(event.layer) else "positions" for event in events]
        entries = dict(zip(map(id, events), map(Entry, names, drops), strict=True))
        for group in self._groups(events):
            self.parts.append(Part(engine, self.traced, group, [entries[id(event)] for event in group], self.failed))
        self.entries = [entries[id(event)] for event in events]
        self.layers = [event.layer for event in events]
        self.read_whole = self._read_whole()
        self._share_memory()
        if module.meta.get("break"):
            for part in self.parts:
                part.say_break(module.meta["break"])
        self.code: Callable[..., Any] = self._code().forward
        if engine.compiled:
            self._compile()

    def __call__(self, *inputs: Any) -> Any:
        self.engine.visited.update(self.layers)
        if not all(any(entry is known for known in self.engine.report) for entry in self.entries):
            self.engine.report.update(self.entries)
        if self.read_whole:
            unread = next(value for value in inputs if isinstance(value, Unread))
            raise RuntimeError(cannot_read(unread, self.read_whole))
        return self.code(*inputs)

    def _read_whole(self) -> str:
        """What reads all of a source, outside of what is run in parts, and why it is there."""
        members = {node for part in self.parts for node in part.segment.steps}
        for source in self.traced.unread:
            for user in source.users:
                if user not in members and not is_mark(user) and user.op != "output":
                    ends = [f"{path}: {reason}" for entry in self.entries for path, reason in entry.kept]
                    because = f" (what is run in parts ends at {'; '.join(ends)})" if ends else ""
                    return f"{name_of(user)} needs all of it at once{because}"
        return ""

    def _share_memory(self) -> None:
        """What one segment keeps is not there for the others; and in words what the rest of the graph keeps."""
        tilings = [p.way.tiling for p in self.parts if isinstance(p.way, Positions) and p.way.tiling is not None]
        if not tilings:
            return
        for tiling in tilings if len(tilings) > 1 else ():
            tiling.leave(sum(other.kept for other in tilings if other is not tiling))
        members = {node for part in self.parts for node in (*part.segment.steps, *part.marks, *part.segment.exits)}
        rest: dict[int, float] = {}
        for node in self.traced.differentiable - members:
            if node.op not in ("placeholder", "get_attr", "output"):
                for value in tree_leaves(self.traced.values.get(node)):
                    if isinstance(value, Tensor):
                        rest[value.untyped_storage()._cdata] = value.numel() * value.itemsize
        outside = sum(rest.values())
        if outside > NOTABLE * sum(tiling.kept for tiling in tilings):
            for part in self.parts:
                part.rest = f"; what lies outside of segments keeps about {in_words(outside)}"

    def _compile(self) -> None:
        """The parts and what lies around them, as Inductor makes it."""
        for part in self.parts:
            part.compile_programs()
        self.code = compiled(self._code())

    def _groups(self, events: list[Event]) -> list[list[Event]]:
        """Masks of samples that lie beside each other are one group: what both block need not be computed."""
        groups: list[list[Event]] = []
        for event in events:
            beside = next((group for group in groups if self._beside(group, event)), None)
            if beside is None:
                groups.append([event])
            else:
                taken = {node for each in beside for node in each.exits}
                for mark, value in zip(event.nodes, event.exits, strict=True):
                    if value in taken:  # a segment knows its masks by what they take
                        mark.replace_input_with(value, self.traced.second_name(value, mark))
                beside.append(event)
        return groups

    def _beside(self, group: list[Event], event: Event) -> bool:
        traced = self.traced
        if self.failed or event.layer in [other.layer for other in group]:
            return False
        sizes = set()
        for each in (*group, event):
            for node in each.exits:
                shape = traced.shape(node)
                if not shape or not drops_samples(each.layer, len(shape)):
                    return False
                sizes.add(shape[0])
        if len(sizes) != 1 or len({traced.contexts[each.nodes[0]] for each in (*group, event)}) != 1:
            return False
        # All run where the last of them stands: nothing may need the others before.
        order = {node: i for i, node in enumerate(traced.graph.nodes)}
        place = order[event.nodes[-1]]
        marks = {node for each in (*group, event) for node in each.nodes}
        if any(node in marks for each in (*group, event) for node in each.exits):
            return False
        return all(order[user] > place or user in marks for mark in marks for user in mark.users)

    def _code(self) -> fx.GraphModule:
        """The graph with each part as one call, where its last mask stands."""
        traced, graph, root = self.traced, fx.Graph(), nn.Module()
        copies: dict[fx.Node, fx.Node] = {}
        members = {node for part in self.parts for node in part.segment.steps}
        marks = {node: (part, i) for part in self.parts for i, node in enumerate(part.marks)}
        last = {part.marks[-1]: number for number, part in enumerate(self.parts)}
        touched = {
            storage
            for part in self.parts
            for node in (*part.segment.steps, *part.segment.entries, *part.segment.exits)
            for storage in traced.storages.get(node, ())
        }
        for node in traced.graph.nodes:
            if node in members or node in marks:
                if node in last:
                    part = self.parts[last[node]]
                    name = f"part_{last[node]}"
                    setattr(root, name, part)
                    called = graph.call_module(name, tuple(copies[entry] for entry in part.segment.entries))
                    for i, mark in enumerate(part.marks):
                        copies[mark] = graph.call_function(_item, (called, i))
                continue
            if node.op == "get_attr":
                _set(root, str(node.target), traced.root)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            was = traced.in_place.get(node)
            if was is not None and not traced.storages[node] & touched:
                op, target, args, kwargs = was
                copies[node].op, copies[node].target = op, target
                copies[node].args, copies[node].kwargs = fx.map_arg((args, kwargs), copies.__getitem__)
        return fx.GraphModule(root, graph)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _set(root: nn.Module, path: str, module: nn.Module) -> None:
    """What a graph finds under a path."""
    name = path.partition(".")[0]
    if not hasattr(root, name):
        value = getattr(module, name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            root.register_buffer(name, value)
        else:
            setattr(root, name, value)


def _as_it_is(module: fx.GraphModule) -> Traced:
    traced = Traced(module, module.graph)
    for node in module.graph.nodes:
        traced.values[node] = node.meta.get("example_value")
        traced.costs[node] = cost.Cost(0, 0, 0)
        traced.contexts[node] = ()
    return traced


def _events(traced: Traced, inputs: Sequence[Any]) -> list[Event]:
    events: list[Event] = []
    given = dict(zip((node for node in traced.graph.nodes if node.op == "placeholder"), inputs, strict=True))
    for node in traced.graph.nodes:
        if is_mark(node):
            number, leaf = (given.get(value, value) for value in node.args[1:])
            if leaf == 0:
                events.append(Event(layer_of(number), [node]))
            else:
                next(event for event in reversed(events) if event.layer is layer_of(number)).nodes.append(node)
    return events


def _names(paths: Sequence[str]) -> list[str]:
    """A mask that is called several times has an entry for each."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path} ({seen[path]})")
    return names


class Part(nn.Module):
    """A segment and its masks, or several beside each other: skipped where that pays and plain where it does not."""

    def __init__(self, engine: Engine, traced: Traced, events: list[Event], entries: list[Entry], failed: str) -> None:
        super().__init__()
        self.settings, self.events, self.entries = engine.settings, events, entries
        self.layers = [event.layer for event in events]
        self.__dict__["layers"] = self.layers  # not as children
        self.marks = [node for event in events for node in event.nodes]
        self.segment = Segment(traced, {_marked(node): Demand((0,)) for node in self.marks})
        self.segment.entries = list(self.segment.exits)
        self.way: Positions | Samples | None = None
        self.never = failed
        if not failed:
            self._find(traced)
        self.plain = Program(self.segment, plain=True)
        self.cost = self.segment.cost
        self.rest = ""  # what lies outside of segments keeps, in words
        self.decided: tuple[Any, str, int] | None = None  # for which p, why plain, in how many parts

    def _find(self, traced: Traced) -> None:
        first, policy = self.events[0], self.settings.policy
        tiled = self.settings.tiled and not drops_samples(first.layer)
        if any(node not in traced.differentiable for node in self.segment.exits) and not tiled:
            self.never = "no gradient is wanted"
            return
        if any("no_grad" in traced.contexts[mark] for mark in self.marks):
            self.never = "the mask runs without gradients"
            return
        shapes = {node: traced.shape(node) for node in self.segment.exits}
        if not all(shapes.values()):
            self.never = "there is no axis to mask along"
            return
        by_samples = all(drops_samples(event.layer, len(shapes[node])) for event in self.events for node in event.exits)
        for entry in self.entries:
            entry.drops = "samples" if by_samples else "positions"
        if by_samples:
            exits = {node: Demand((0,)) for node in shapes}
            if next(iter(shapes.values()))[0] < 2 and not traced.unread:
                self.never = "there is one sample"
        else:
            ((value, shape),) = shapes.items()
            axes = _axes(first.layer, len(shape))
            patch = first.layer.patch
            sizes = (patch,) * len(axes) if isinstance(patch, int) else tuple(patch)
            sizes = tuple(min(size, shape[axis]) for size, axis in zip(sizes, axes, strict=True))
            exits = {value: Demand((0, *axes), 1, sizes, (0,) * len(axes), sizes)}
        if not all(math.prod(shape) for shape in shapes.values()):
            self.never = "there is nothing to mask"
        segment = find_segment(traced, exits, self.marks, policy, everything=tiled and not by_samples)
        for entry in self.entries:
            entry.kept = segment.kept
        if all(node.target is itself for node in segment.steps):
            self.never = self.never or (segment.kept[0][1] if segment.kept else "nothing lies before the mask")
        if self.never:
            return
        self.segment = segment
        if by_samples:
            layers = {node: event.layer for event in self.events for node in event.exits}
            self.way = Samples(segment, layers, policy, self.settings.at_once)
        else:
            self.way = Positions(segment, first.layer, policy, self.settings.tile, self.settings.memory)
            self.way.always, self.way.lean = self.settings.when == "always", self.settings.when == "lean"

    def compile_programs(self) -> None:
        """All code as Inductor makes it; the part itself, which decides what runs, is not followed."""
        self.plain.compile()
        if self.way is not None:
            self.way.compile()
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign, no-untyped-call]

    def say_break(self, where: str) -> None:
        """That it begins behind a graph break, if something before that may have a gradient."""
        traced = self.segment.traced
        outside = [node for node in self.segment.entries if node.op == "placeholder" and node in traced.differentiable]
        if any(not isinstance(node.meta.get("example_value"), nn.Parameter) for node in outside):
            if self.never:
                self.never = f"torch did not follow what lies before the mask ({where})"
                return
            for entry in self.entries:
                entry.kept = [*entry.kept, ("a graph break", f"torch did not follow the model there ({where})")]

    def forward(self, *values: Any) -> list[Any]:
        active = any(_is_active(layer) for layer in self.layers)
        sources = any(isinstance(value, Unread) for value in values)
        if isinstance(self.way, Positions) and self.way.tiling is not None:
            tiling = self.way.tiling
            if active or tiling.in_tiles or sources:
                (entry,) = self.entries
                entry.skipped, entry.share = self.segment.skipped, self.segment.share
                entry.tiles, entry.last = f"{tiling.describe()}{self.rest}", "backward has not run yet"
                return [self.way.run(values, entry, active=active)]
        if sources:
            return self._from_sources(values)
        caches = isinstance(self.way, Samples) and self.settings.at_once is not None
        if not active and not (caches and all(layer.training for layer in self.layers)):
            return self._plainly(values, "no mask drops anything" if self.way is not None else self.never)
        if self.way is None:
            return self._plainly(values, self.never)
        reason, parts = self._decide(values)
        if isinstance(self.way, Samples):
            reason = self.way.refuses() or reason
        if reason:
            return self._plainly(values, reason)
        return self._skipping(values, parts)

    def _from_sources(self, values: Sequence[Any]) -> list[Any]:
        """Samples, where plain is no way: whatever p is, and also where no gradient is wanted."""
        if self.way is None:
            return self._plainly(values, self.never)
        if isinstance(self.way, Positions):
            return self._plainly(values, "positions are computed in tiles only with tile= or memory=")
        reason = self.way.refuses() or self.way.refuses_sources(values)
        return self._plainly(values, reason) if reason else self._skipping(values, self._decide(values)[1])

    def _skipping(self, values: Sequence[Any], parts: int) -> list[Any]:
        for entry in self.entries:
            entry.skipped, entry.share = self.segment.skipped, self.segment.share
        if isinstance(self.way, Positions):
            self.entries[0].last = "backward has not run yet"
            return [self.way.run(values, self.entries[0])]
        assert self.way is not None
        outputs, said = self.way.run(values, parts, self.entries)
        for entry in self.entries:
            entry.last = said
        found = dict(zip(self.way.exits, outputs, strict=True))
        return [found[_marked(mark)] for mark in self.marks]

    def _plainly(self, values: Sequence[Any], reason: str) -> list[Any]:
        for entry in self.entries:
            entry.ran_plain(reason)
        unread = next((value for value in values if isinstance(value, Unread)), None)
        if unread is not None:
            raise RuntimeError(cannot_read(unread, f"the mask {self.entries[0].mask} runs plain: {reason}"))
        found = dict(zip(self.segment.exits, self.plain(values), strict=True))
        outputs: list[Any] = []
        for event in self.events:
            outputs += mask_tensors(event.layer, [found[node] for node in event.exits])
        return outputs

    def _decide(self, values: Sequence[Any]) -> tuple[str, int]:
        """Why it is better to run plain, if so; and in how many parts samples without gradients run."""
        ps = tuple(float(layer.p) if layer.training else 0.0 for layer in self.layers)
        device = next(value.device for value in values if isinstance(value, Tensor))
        key = (ps, device, [layer.choose for layer in self.layers])
        if self.decided is None or self.decided[0] != key:
            self.decided = (key, *self.estimate(ps, device))
        return self.decided[1], self.decided[2]

    def estimate(self, ps: Sequence[float], device: torch.device) -> tuple[str, int]:
        when, known = self.settings.when, self.cost
        if isinstance(self.way, Samples):
            spent = self.way.spent(known, device)
            if when != "pays" or self.settings.at_once is not None or cost.pays(spent.skipped, spent.step):
                return "", spent.parts
            reason = f"running all {self.way.number} samples with gradients is faster"
            return f"{reason}; {self._pays_from(device)}", spent.parts
        assert isinstance(self.way, Positions)
        needed, saved = self._windows_and_dense(self.way, ps[0], device)
        if when == "always" or cost.pays(needed, saved):
            return "", 1
        kept, working = self.way.memory(ps[0])
        if when == "lean" and working < kept:
            return "", 1
        if not saved:
            return "there is nothing to compute before the mask", 1
        return f"windows would cost {needed / saved:.2f} times the dense backward pass; {self._pays_from(device)}", 1

    def _windows_and_dense(self, way: Positions, p: float, device: torch.device) -> tuple[float, float]:
        """Seconds of the backward pass through windows, and of the plain one."""
        needed = way.windows_cost(1).windows(device, way.kept_units(p)) + self.cost.watching(device, way.watched)
        return needed, self.cost.backward(device)

    def _pays_from(self, device: torch.device) -> str:
        """From which p on skipping would save time, in words."""

        def pays(p: float) -> bool:
            if isinstance(self.way, Samples):
                spent = self.way.spent(self.cost, device, p)
                return cost.pays(spent.skipped, spent.step)
            assert isinstance(self.way, Positions)
            return cost.pays(*self._windows_and_dense(self.way, p, device))

        shares = [digits * 10.0**-decade for decade in range(1, 5) for digits in (9, 8, 7, 6, 5, 4, 3, 2, 1)]
        found = next((1 - share for share in shares if pays(1 - share)), None)
        return f"it pays from p = {found:.4g} on" if found is not None else "it pays at no p"


def _axes(mask: Backdrop, ndim: int) -> tuple[int, ...]:
    dims = [mask.dims] if isinstance(mask.dims, int) else list(mask.dims)
    return tuple(axis for axis in (dim % ndim for dim in dims) if axis != 0)
