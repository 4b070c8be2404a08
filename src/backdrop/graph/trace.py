"""A captured graph for inputs of known sizes: shapes and costs of all values, and no operation in place.

`trace` runs a graph once on tensors that hold nothing and finds out, for every call, the shape of its result, what it
costs, whether it carries a gradient, whose memory it shares and what it writes over. From that it makes a *pure* copy:

1. Sizes are constants: `x.view(x.size(0), -1)` has numbers for arguments.
2. A call that works in place on a value of which nobody else holds a view becomes the call out of place, and whoever
used
   the value afterwards uses the result.
3. What is left is *pinned*, with a reason: calls that write over memory that something else sees, all that read such
   memory before the last of them, and calls under a `no_grad` or `autocast` of their own. They have to run where they
   stand.
"""

from __future__ import annotations

import inspect
import operator
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from backdrop.graph.cost import NORM, Cost, Meter
from backdrop.graph.table import rule_of
from backdrop.graph.unread import Unread

OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.imatmul: operator.matmul,
}


def set_cells(x: Tensor, index: Any, value: Any) -> Tensor:
    """`x[index] = value`, out of place."""
    return write_cells(x.clone(), index, value)


def write_cells(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


OUT_OF_PLACE[operator.setitem] = set_cells
WITHOUT_GRADIENT = "it runs without gradients"
SHARED = "it writes over a value that is used elsewhere too"


class TraceError(Exception):
    """Why a graph cannot be run on tensors that hold nothing."""


@dataclass
class Traced:
    """A pure graph for inputs of one size. `values` holds a stand-in (without memory) for every result."""

    root: fx.GraphModule  # where the graph finds attributes
    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    costs: dict[fx.Node, Cost] = field(default_factory=dict)
    differentiable: set[fx.Node] = field(default_factory=set)
    pinned: dict[fx.Node, str] = field(default_factory=dict)
    contexts: dict[fx.Node, Any] = field(default_factory=dict)  # the modes that a call runs under
    spelled: set[fx.Node] = field(default_factory=set)  # values that were broadcast, for those who need all of them
    storages: dict[fx.Node, set[int]] = field(default_factory=dict)  # whose memory a result lies in
    draws: set[fx.Node] = field(default_factory=set)  # calls that draw random numbers
    in_place: dict[fx.Node, Called] = field(default_factory=dict)  # what pure calls were before
    unread: set[fx.Node] = field(default_factory=set)  # what stands for sources
    sharing: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)  # calls that change the same running statistics

    @cached_property
    def module(self) -> fx.GraphModule:
        """All of it as code."""
        return fx.GraphModule(self.root, self.graph)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Of the tensor, or of the first one where there are several."""
        value = self.values.get(node)
        leaf = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)
        if leaf is None:
            raise KeyError(node)
        return tuple(leaf.shape)

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node), Tensor)

    def draw_ahead(self, node: fx.Node) -> bool:
        """Split a dropout that draws: which cells it keeps becomes a value of its own, drawn where the dropout stands,
        so that the rest can be computed a second time. Whether it could be split."""
        if node.op != "call_function" or node.target not in DROPOUTS:
            return False
        source, p = _first(node), node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        x, dimensions = self.values.get(source), DROPOUTS[node.target]
        if not isinstance(x, Tensor) or not isinstance(p, (int, float)) or not 0 < p < 1:
            return False
        shape, stride = list(x.shape), list(x.stride())
        if dimensions:  # whole channels
            if x.ndim not in dimensions:
                return False
            shape = [*x.shape[:2], *[1] * (x.ndim - 2)]
            stride = list(torch.empty(shape, device="meta").stride())
        with self.graph.inserting_before(node):
            kept = self.graph.call_function(_kept, (shape, stride, x.dtype, x.device, p))
        kept.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        self.values[kept] = torch.empty(shape, dtype=torch.bool, device="meta")
        self.costs[kept], self.contexts[kept], self.storages[kept] = self.costs[node], self.contexts[node], set()
        self.draws ^= {kept, node}
        self.in_place.pop(node, None)
        scale = float(torch.ones((), dtype=x.dtype).div_(1 - p))  # rounded as in dropout itself
        node.target, node.args, node.kwargs = drop, (source, kept, scale), {}
        return True

    def second_name(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """Another node for a value, so that two masks on it are on two values."""
        with self.graph.inserting_before(before):
            name = self.graph.call_function(itself, (value,))
        self.values[name], self.costs[name] = self.values[value], Cost(0, 0, 0)
        self.contexts[name], self.storages[name] = self.contexts[before], self.storages.get(value, set())
        if value in self.differentiable:
            self.differentiable.add(name)
        return name


def _kept(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, p: float) -> Tensor:
    """The cells that dropout of such a tensor keeps, from the random numbers that it would draw."""
    return F.dropout(torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1.0), p) != 0


def itself(x: Any) -> Any:
    return x


def drop(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Dropout, by cells that are known."""
    return (x * kept) * scale


DROPOUTS: dict[Any, tuple[int, ...]] = {  # with how many axes they drop whole channels of samples
    F.dropout: (),
    torch.dropout: (),
    F.dropout1d: (3,),
    F.dropout2d: (3, 4),
    F.dropout3d: (5,),
    torch.feature_dropout: (3, 4, 5),
}


def name_of(node: fx.Node) -> str:
    """The dotted path of the layer that makes the call; of a module with its own forward, that and the function."""
    if node.target is itself and isinstance(node.args[0], fx.Node):
        return name_of(node.args[0])
    path, kind = owner_of(node)
    called = getattr(node.target, "__name__", str(node.target)).strip("_")
    if kind.startswith("torch.nn.modules.") or (kind and kind.rpartition(".")[2].startswith("Backdrop")):
        return path or called
    return f"{path}.{called}" if path else called


def input_of(node: fx.Node) -> fx.Node:
    """What a call is about: what it normalises, or takes the mean of."""
    found = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    assert isinstance(found, fx.Node)
    return found


def owner_of(node: fx.Node) -> tuple[str, str]:
    """The dotted path and the class of the innermost module that makes a call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    return clean(str(path)), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def clean(path: str) -> str:
    """A path as `named_modules` has it: Dynamo writes L['function'].__self__._modules['0'] and the like."""
    found = re.sub(r"^L\['\w+'\]", "", path).removeprefix(".__self__").replace("._modules", "")
    found = re.sub(r"_torchdynamo_inline\.__closure__\[\d+\]\.cell_contents", "_orig_mod", found)
    return re.sub(r"\[['\"]?|['\"]?\]", ".", found).replace("..", ".").strip(".")


class StandIns:
    """Tensors that hold nothing in the place of the inputs of a graph; those of what stays serve for every size."""

    def __init__(self) -> None:
        self.mode: Any = None
        self.made: dict[int, tuple[Callable[[], Tensor | None], Tensor]] = {}  # by the number of the input

    def __getitem__(self, number_and_real: tuple[int, Tensor]) -> Tensor:
        number, real = number_and_real
        if isinstance(real, Unread):
            with self.mode:
                return torch.empty(real.shape, dtype=real.dtype, device=real.device)
        number_to_read = real.ndim == 0 and real.dtype == torch.float64 and real.device.type == "cpu"
        lasts = isinstance(real, nn.Parameter) or not number_to_read
        if lasts and number in self.made:
            of, known = self.made[number]
            if of() is real and _looks_alike(known, real):
                return known
        made: Any = self.mode.from_tensor(real.detach(), static_shapes=True)
        if lasts:
            self.made[number] = weakref.ref(real), made
        else:
            made.constant = real.detach().clone()  # a number that a function may read
        return made  # type: ignore[no-any-return]


def _looks_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and (a.dtype, a.device) == (b.dtype, b.device)


def trace(module: fx.GraphModule, inputs: Sequence[Any], stand_ins: StandIns | None = None) -> Traced:
    """The pure graph for such inputs, which are looked at for their sizes alone."""
    for node in module.graph.nodes:
        if str(getattr(node.target, "__name__", "")).endswith("_increment_nesting"):
            raise TraceError("transforms of torch.func are not looked into")
    try:
        passed = _Pass(module, inputs, StandIns() if stand_ins is None else stand_ins)
    except TraceError:
        raise
    except Exception as error:  # tensors without memory or versions of their own: of vmap, of inference mode
        raise TraceError(first_line(error)) from error
    return _purified(module, passed)


class _Pass:
    """A run of a graph on stand-ins, and what can be seen from it."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], stand_ins: StandIns) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.values: dict[fx.Node, Any] = {}
        self.costs: dict[fx.Node, Cost] = {}
        self.draws: set[fx.Node] = set()
        self.runtime: set[fx.Node] = set()  # numbers that are known only when the graph runs
        self.unread: set[fx.Node] = set()  # what stands for a source, and all that is made of it
        self.storages: dict[fx.Node, set[int]] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}  # whose memory a call writes over
        self.contexts: dict[fx.Node, Any] = {}
        self.readers: dict[int, list[fx.Node]] = {}  # the calls that are given something in some memory
        self.alive: list[Any] = []
        context: list[Any] = []
        stand_ins.mode = stand_ins.mode or FakeTensorMode(allow_non_fake_inputs=True)
        made: dict[int, Tensor] = {}
        for i, real in enumerate(inputs):
            if isinstance(real, Tensor) and id(real) not in made:
                made[id(real)] = stand_ins[i, real]
        given = iter(inputs)
        with stand_ins.mode, torch.no_grad(), Meter() as self.meter:
            for node in module.graph.nodes:
                if node.op == "output":
                    break
                if node.op == "placeholder":
                    real = next(given)
                    self.values[node] = made.get(id(real), real)
                    if not isinstance(real, (Tensor, int, bool)):
                        self.runtime.add(node)
                    if isinstance(real, Unread):
                        self.unread.add(node)
                elif node.op == "get_attr":
                    self.values[node] = _attribute(module, str(node.target))
                else:
                    entered = _context(node, context)
                    if not entered:
                        self._run(module, node, inputs)
                self.contexts[node] = tuple(context)
                self._look(node)

    def _run(self, module: fx.GraphModule, node: fx.Node, inputs: Sequence[Any]) -> None:
        sources = node.all_input_nodes
        if node.op == "call_method" and node.target == "item":
            # Numbers that change from step to step come as tensors without axes.
            self.values[node] = 0.5
            self.runtime.add(node)
            return
        if any(source in self.runtime for source in sources) and not any(
            isinstance(leaf, Tensor) for source in sources for leaf in tree_leaves(self.values[source])
        ):
            self.runtime.add(node)
        if getattr(node.target, "__name__", str(node.target)).startswith("register_"):
            raise TraceError(f"{name_of(node)}: a hook on a tensor has to see all of its gradient")
        before = [(leaf, leaf._version) for source in sources for leaf in _tensors(self.values[source])]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            self.meter.cost, self.meter.draws = Cost(0, 0, 0), False
            target: Any = node.target
            in_place = False
            if _keeps_kind(node, args):
                in_place = kwargs.get("inplace", False) is True or any(a is True for a in args[1:5])
                value: Any = args[0] if in_place else torch.empty_like(args[0])  # type: ignore[arg-type]
                if in_place:
                    self.meter.cost = Cost(1, 0, value.numel() * min(1.0, value.itemsize / 4))
                if target is F.batch_norm or target is torch.batch_norm:
                    self.meter.cost = self.meter.cost._replace(numbers=NORM * self.meter.cost.numbers)
            elif node.op == "call_function":
                value = target(*args, **kwargs)
                value = args[0] if target is operator.setitem else value
            elif node.op == "call_method":
                value = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                value = _attribute(module, str(node.target))(*args, **kwargs)
        except Exception as error:
            if isinstance(target, torch._ops.HigherOrderOperator):
                raise TraceError(f"{name_of(node)}: functions that take functions are not looked into") from error
            raise TraceError(f"{name_of(node)}: {first_line(error)}") from error
        self.values[node], self.costs[node] = value, self.meter.cost
        if self.meter.draws and not _is_without_dropout(node):
            self.draws.add(node)
        changed = {id(leaf) for leaf, version in before if leaf._version != version}
        changed |= {id(leaf) for leaf in _running_statistics(node, args, kwargs)}
        if in_place:
            changed.add(id(args[0]))
        if changed:
            self.writes[node] = [
                source for source in sources if any(id(leaf) in changed for leaf in _tensors(self.values[source]))
            ]

    def _look(self, node: fx.Node) -> None:
        value = self.values.get(node)
        if not self.unread.isdisjoint(node.all_input_nodes) and _tensors(value):
            self.unread.add(node)
        self.alive.append(value)
        self.storages[node] = {leaf.untyped_storage()._cdata for leaf in _tensors(value)}
        if node.op not in ("placeholder", "get_attr"):
            for storage in {s for source in node.all_input_nodes for s in self.storages.get(source, ())}:
                self.readers.setdefault(storage, []).append(node)


# Functions of one tensor whose result has its shape and dtype; what torch does to find that out takes long.
LIKE_THE_FIRST = {
    *(F.batch_norm, torch.batch_norm, F.relu, F.relu6, F.hardswish, F.hardsigmoid, F.silu, F.gelu, F.mish, F.elu),
    *(F.leaky_relu, F.hardtanh, torch.relu, torch.sigmoid, torch.tanh),
}


def _keeps_kind(node: fx.Node, args: Sequence[Any]) -> bool:
    return (
        node.op == "call_function"
        and node.target in LIKE_THE_FIRST
        and bool(args)
        and isinstance(args[0], Tensor)
        and args[0].is_floating_point()
    )


def _is_without_dropout(node: fx.Node) -> bool:
    """Attention in one call, whose kernels count as drawing numbers even where they have none to draw."""
    if getattr(node.target, "__name__", "") != "scaled_dot_product_attention":
        return False
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return isinstance(dropout, (int, float)) and dropout == 0


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _running_statistics(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Those that a normalisation writes over, which stand-ins do not show."""
    if getattr(node.target, "__name__", "") not in ("batch_norm", "instance_norm"):
        return []
    training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", True))
    given = [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [x for x in given if isinstance(x, Tensor)] if training is not False else []


def _attribute(module: fx.GraphModule, path: str) -> Any:
    return operator.attrgetter(path)(module)


def first_line(error: BaseException) -> str:
    """Of what it says, with its kind."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _context(node: fx.Node, context: list[Any]) -> bool:
    """Keep track of the modes that calls run under; whether this call changes them."""
    name = getattr(node.target, "__name__", str(node.target))
    if node.op != "call_function" or not name.startswith(("_set_grad_enabled", "_enter_", "_exit_", "_saved_tensors")):
        if node.op == "call_function" and name in ("set_grad_enabled", "__enter__", "__exit__"):
            context.append(node)
            return True
        return False
    if name == "_set_grad_enabled":
        enabled = bool(node.args[0])
        context[:] = [mode for mode in context if mode != "no_grad"]
        if not enabled:
            context.append("no_grad")
    elif name.startswith("_exit_"):
        opened = node.all_input_nodes
        context[:] = [mode for mode in context if mode not in opened]
    elif not _changes_nothing(node, context):
        context.append(node)
    return True


def _changes_nothing(node: fx.Node, context: list[Any]) -> bool:
    """`autocast(enabled=False)` where none is on: captures are made anew when that changes outside."""
    if getattr(node.target, "__name__", "") != "_enter_autocast" or len(node.args) < 3 or node.args[2] is not False:
        return False
    opened = (mode for mode in context if isinstance(mode, fx.Node))
    return not any(mode.args[:1] == node.args[:1] for mode in opened) and not torch.is_autocast_enabled(
        str(node.args[0])
    )


def _purified(module: fx.GraphModule, passed: _Pass) -> Traced:
    graph = fx.Graph()
    traced = Traced(module, graph)
    order = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(order)}
    constants = {
        node: value
        for node, value in passed.values.items()
        if node not in passed.runtime and node.op != "get_attr" and _is_size(value)
    }
    pure, dirty = _pure_calls(order, place, passed)
    last_write = _last_writes(place, passed)
    names = _Names(pure, place)
    copies: dict[fx.Node, fx.Node] = {}
    shared: dict[fx.Node, set[fx.Node]] = {}

    for node in order:

        def argument(n: fx.Node, at: fx.Node = node) -> Any:
            return constants[n] if n in constants else copies[names.newest(n, at)]

        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], argument))
            break
        if node in constants and node.op != "placeholder":
            continue
        copy = graph.node_copy(node, argument)
        if node in pure:
            op, target, args, kwargs = pure[node]
            called: Any = write_cells if copy.target is operator.setitem else copy.target  # which returns what it wrote
            traced.in_place[copy] = (copy.op, called, copy.args, copy.kwargs)
            new = fx.map_arg((args, kwargs), argument)
            copy.op, copy.target, copy.args, copy.kwargs = op, target, *new
        _without_source(copy, passed.values.get(node))
        copies[node] = copy
        traced.values[copy] = passed.values.get(node)
        traced.costs[copy] = passed.costs.get(node, Cost(0, 0, 0))
        traced.contexts[copy] = passed.contexts.get(node, ())
        traced.storages[copy] = passed.storages.get(node, set())
        if node in passed.draws:
            traced.draws.add(copy)
        # What is made of a source counts too, with or without weights: there is no tensor that could be computed from.
        made = node in passed.unread and node.op != "placeholder"
        put = copy.target is set_cells and any(source in traced.differentiable for source in copy.all_input_nodes)
        if made or put or any(leaf.requires_grad for leaf in _tensors(node.meta.get("example_value"))):
            traced.differentiable.add(copy)
        if node in passed.unread and node.op == "placeholder":
            traced.unread.add(copy)
        if node.op in ("placeholder", "get_attr"):
            continue
        if node not in passed.values:
            traced.pinned[copy] = "it changes the mode of what follows"
        elif "no_grad" in passed.contexts[node]:
            traced.pinned[copy] = WITHOUT_GRADIENT
        written = passed.writes.get(node, [])
        statistics = _only_statistics(node, written, passed)
        if statistics:
            sharing = {other for each in written for s in passed.storages[each] for other in passed.readers[s]}
            if len(sharing) > 1:
                shared[node] = sharing
        read = {s for source in node.all_input_nodes for s in passed.storages.get(source, ())}
        touched = {s for s in read if last_write.get(s, -1) > place[node]}
        if (touched | passed.storages[node]) & dirty or (node in passed.writes and node not in pure and not statistics):
            traced.pinned.setdefault(copy, SHARED)
    traced.sharing = {copies[node]: {copies[other] for other in others} for node, others in shared.items()}
    kept = {copies[node] for node in passed.writes if node in copies}
    for copy in reversed(list(graph.nodes)):  # what nobody uses would keep its inputs out of segments
        needed = copy.users or copy in kept or copy in traced.pinned or copy in traced.draws or is_mark(copy)
        if not needed and rule_of(copy) is not None:
            graph.erase_node(copy)
    return traced


def is_mark(node: fx.Node) -> bool:
    """Whether a node stands for a mask."""
    return node.op == "call_function" and node.target in (torch.ops.backdrop.mask, torch.ops.backdrop.mask.default)


Called: TypeAlias = tuple[Any, Any, Any, Any]  # op, target, args, kwargs


def _pure_calls(
    order: list[fx.Node], place: dict[fx.Node, int], passed: _Pass
) -> tuple[dict[fx.Node, Called], set[int]]:
    """The calls in place that can run out of place, and how; and the memory that others write over all the same."""
    members: dict[int, list[fx.Node]] = {}
    for node in order:
        for storage in passed.storages.get(node, ()):
            members.setdefault(storage, []).append(node)
    pure: dict[fx.Node, Called] = {}
    roots: dict[fx.Node, fx.Node] = {}
    dirty: set[int] = set()
    for node, written in passed.writes.items():
        if _only_statistics(node, written, passed):
            continue
        first, called = _first(node), _out_of_place(node)
        storages = {s for each in written for s in passed.storages[each]}
        possible = called is not None and written == [first] and len(storages) == 1
        possible = possible and not passed.contexts[node]  # out of place, no_grad would cut the graph
        if possible and called is not None:
            (storage,) = storages
            root = roots.get(first, first)
            holders = [m for m in members[storage] if roots.get(m, m) is not root and m is not node]
            possible = not any(m.op in ("placeholder", "get_attr") for m in members[storage]) and not any(
                place[user] > place[node] for m in holders if place[m] < place[node] for user in m.users
            )
            if possible and _same_kind(node, called, passed):
                pure[node], roots[node] = called, root
                continue
        dirty |= storages
    return {node: called for node, called in pure.items() if not passed.storages[node] & dirty}, dirty


def _last_writes(place: dict[fx.Node, int], passed: _Pass) -> dict[int, int]:
    """Behind which call memory is not written over any more; what comes from outside may be changed there later."""
    last: dict[int, int] = {}
    for node, written in passed.writes.items():
        for storage in (s for each in written for s in passed.storages[each]):
            last[storage] = max(last.get(storage, -1), place[node])
    outside = {s for node in place if node.op in ("placeholder", "get_attr") for s in passed.storages.get(node, ())}
    return {storage: len(place) if storage in outside else at for storage, at in last.items()}


class _Names:
    """A value that was changed in place goes by the name of the last call that changed it."""

    def __init__(self, pure: Mapping[fx.Node, Called], place: Mapping[fx.Node, int]) -> None:
        self.place = place
        self.roots: dict[fx.Node, fx.Node] = {}
        self.versions: dict[fx.Node, list[fx.Node]] = {}
        for node in sorted(pure, key=place.__getitem__):
            root = self.roots.get(_first(node), _first(node))
            self.roots[node] = root
            self.versions.setdefault(root, []).append(node)

    def newest(self, n: fx.Node, at: fx.Node) -> fx.Node:
        root = self.roots.get(n, n)
        before = [node for node in self.versions.get(root, ()) if self.place[node] < self.place[at]]
        return before[-1] if before else root


def _is_size(value: Any) -> bool:
    if isinstance(value, (bool, int, torch.dtype, torch.device, torch.layout, torch.Size)):
        return True
    return type(value) is tuple and bool(value) and all(isinstance(part, (int, bool)) for part in value)


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))


def _only_statistics(node: fx.Node, written: list[fx.Node], passed: _Pass) -> bool:
    """Whether all it writes are running statistics that nobody looks at but calls of the same layer, which change them
    too."""
    called = getattr(node.target, "__name__", "")
    if called not in ("batch_norm", "instance_norm", "running_batch_norm") or not written or _first(node) in written:
        return False
    readers = {reader for each in written for s in passed.storages[each] for reader in passed.readers[s]}
    return readers == {node} or all(
        reader.target is node.target and called != "instance_norm" and passed.writes.get(reader) == written
        for reader in readers
    )


def _out_of_place(node: fx.Node) -> Called | None:
    """The same call without writing over its first argument: op, target, args, kwargs."""
    if node.kwargs.get("out") is not None:
        return None
    if node.op == "call_method":
        name = str(node.target)
        plain = name.rstrip("_")
        if name.endswith("_") and not name.endswith("__") and plain not in NO_COUNTERPART and hasattr(Tensor, plain):
            return node.op, plain, node.args, node.kwargs
        return None
    target: Any = node.target
    if target in OUT_OF_PLACE:
        return node.op, OUT_OF_PLACE[target], node.args, node.kwargs
    if "inplace" in node.kwargs:
        return node.op, target, node.args, {**node.kwargs, "inplace": False}
    name = getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        for home in (torch, torch.nn.functional, torch._C._nn):
            if getattr(home, name, None) is target and name.rstrip("_") not in NO_COUNTERPART:
                function = getattr(home, name.rstrip("_"), None)
                return (node.op, function, node.args, node.kwargs) if function is not None else None
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return None
    if bound.arguments.get("inplace") is True:
        bound.arguments["inplace"] = False
        return node.op, target, bound.args, bound.kwargs
    return None


def _without_source(copy: fx.Node, value: Any) -> None:
    """`x.new_empty(size)` takes nothing from x but its kind, which is known: so nothing has to wait for x."""
    if copy.target in LIKE and isinstance(value, Tensor) and value.is_contiguous() and len(copy.args) == 1:
        copy.kwargs = {"dtype": value.dtype, "device": value.device, **copy.kwargs}
        copy.target, copy.args = LIKE[copy.target], (tuple(value.shape),)
        return
    function = NEW.get(str(copy.target)) if copy.op == "call_method" else None
    if copy.op == "call_method" and copy.target in ("to", "type_as") and isinstance(value, Tensor):
        if len(copy.args) > 1 and isinstance(copy.args[1], fx.Node):  # another tensor, for its kind alone
            copy.target, copy.args = "to", (copy.args[0], value.device, value.dtype, *copy.args[2:])
        return
    if function is None or not isinstance(value, Tensor):
        return
    given = copy.args[1:]
    if function is not torch.full and given and not isinstance(given[0], (tuple, list)):
        given = (given,)
    copy.op, copy.target, copy.args = "call_function", function, given
    copy.kwargs = {"dtype": value.dtype, "device": value.device, **copy.kwargs}


NEW: dict[str, Any] = {
    "new_empty": torch.empty,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_full": torch.full,
}
LIKE: dict[Any, Any] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
NO_COUNTERPART = (
    *("zero", "fill", "copy", "set", "resize", "normal", "uniform", "random", "exponential", "geometric", "cauchy"),
    *("log_normal", "bernoulli", "requires_grad", "detach", "swapaxes", "swapdims", "t", "transpose", "squeeze"),
    *("unsqueeze", "as_strided", "rename", "share_memory", "apply", "map", "rrelu"),
)


def _same_kind(node: fx.Node, pure: Called, passed: _Pass) -> bool:
    """Whether the call out of place would give the same shape and dtype."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    op, target, args, kwargs = pure
    own = passed.values[_first(node)]
    if op == "call_function" and target in LIKE_THE_FIRST:
        return bool(own.is_floating_point())
    modes = [leaf.fake_mode for leaf in _tensors(own) if hasattr(leaf, "fake_mode")]
    try:
        with modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            given, named = fx.map_arg((args, kwargs), passed.values.__getitem__)
            result = getattr(given[0], target)(*given[1:], **named) if op == "call_method" else target(*given, **named)
    except Exception:
        return False
    return isinstance(result, Tensor) and result.shape == own.shape and result.dtype == own.dtype


def once_differentiable(module: fx.GraphModule) -> fx.GraphModule:
    """With an error for second derivatives through functions with a backward of their own.

    In a captured graph what such a function saves for its backward pass is a constant there, so that second derivatives
    would be wrong without a word.
    """
    found = [node for node in module.graph.nodes if getattr(node.target, "__name__", "") == "autograd_function_apply"]
    for node in found:
        node.target = autograd_function_apply
    if found:
        module.recompile()
    return module


def autograd_function_apply(*args: Any, **kwargs: Any) -> Any:
    args = tuple(
        _Once.apply(x) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]
        for x in args
    )
    return torch.ops.higher_order.autograd_function_apply(*args, **kwargs)


class _Once(torch.autograd.Function):
    """The identity, whose gradient has an error for a gradient, whether or not what arrives has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return grad
        error = torch._C._functions.DelayedError(
            b"second derivatives through an autograd.Function are not followed by Skip; use the plain model for them", 1
        )
        return error(grad.detach().requires_grad_())
