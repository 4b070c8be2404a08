"""A look at a model: all its calls on an input of one shape as one graph, found without computing anything.

The model is captured (see capture.py) in eval mode with a backend that computes nothing and hands on stand-ins of the
right shape. Where torch stops following it, a *graph break*, there are several graphs: they are joined where one takes
what another gave, and values that come from the code in between are named, with the reason. While the model is looked
at, every module in it has a hook that puts `backdrop::output` into the graph behind what it returns: so it is known
which value is the output of which module, also of one that computes nothing, such as nn.Identity.

Calls inside a layer of torch.nn count as that layer: it is one row, named by its dotted path, whatever it calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from backdrop.graph.capture import Capture, is_captured
from backdrop.graph.cost import Cost
from backdrop.graph.inserted import inserted_mask
from backdrop.graph.trace import SHARED, clean, trace
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

__all__ = ["Look", "look"]

COPIED = "backdrop_copied"  # marks a value from outside in a graph

_library: Any = torch.library.Library("backdrop", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("output(Tensor(a) x, int module, int leaf) -> Tensor(a)")
_current: list[_Looking] = []


def _output(x: Tensor, module: int, leaf: int) -> Tensor:
    """Code that torch does not follow calls it, too."""
    from torch._subclasses.fake_tensor import FakeTensor

    out = x.view_as(x)
    if _current and not isinstance(x, FakeTensor):
        _current[-1].returned(x, out, module, leaf)
    return out


_library.impl("output", _output, "CompositeImplicitAutograd")


@dataclass
class Look:
    """The calls of a model on an input of one shape, in the order of execution.

    Attributes:
        graph: all calls, with placeholders for the input and for what comes from outside.
        input: the placeholder of the model's input.
        values: stand-ins (without memory) for the results.
        costs: of the calls.
        layers: the calls that stand for what a layer of torch.nn, or a mask, returns: its dotted path.
        within: for other calls, that of the layer that makes them, if there is one.
        outputs_of: the modules whose output a value is, by their dotted paths, the innermost first.
        names: of all calls; unique for those that are rows.
        kinds: the class of a layer, or the function.
        lost: values that nothing is known of, and why.
        breaks: where torch stopped following the model, and why.
    """

    graph: fx.Graph
    input: fx.Node
    values: dict[fx.Node, Any] = field(default_factory=dict)
    costs: dict[fx.Node, Cost] = field(default_factory=dict)
    layers: dict[fx.Node, str] = field(default_factory=dict)
    within: dict[fx.Node, fx.Node] = field(default_factory=dict)
    outputs_of: dict[fx.Node, list[str]] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    kinds: dict[fx.Node, str] = field(default_factory=dict)
    lost: dict[fx.Node, str] = field(default_factory=dict)
    breaks: list[str] = field(default_factory=list)

    def shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """Of a tensor, or of the first one where there are several."""
        leaf = next((leaf for leaf in tree_leaves(self.values.get(node)) if isinstance(leaf, Tensor)), None)
        return None if leaf is None else tuple(leaf.shape)

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node), Tensor)

    @property
    def rows(self) -> list[fx.Node]:
        """The calls that return one tensor each, layers of torch.nn as one."""
        calls = (node for node in self.graph.nodes if node.op.startswith("call"))
        return [node for node in calls if node not in self.within and self.is_tensor(node)]


def look(model: nn.Module, input_shape: Sequence[int] | Tensor) -> Look:
    """Follow a model that takes one tensor of this shape; the model is as before afterwards."""
    check_model(model)
    shape = check_input_shape(input_shape)
    check_arguments(model)
    looking = _Looking(model)
    x = zeros_for(model, shape)
    looking.known[id(x)] = looking.found.input
    with (
        unchanged(model),
        mode(model, training=False),
        torch.no_grad(),
        quiet(),
        plainly(recurrent=True),
        looking.hooks(),
    ):
        capture = Capture(model.forward, looking.backend)
        try:
            out = capture(x)
        except Exception as error:
            raise as_value_error(model, shape, error) from error
    return looking.finish(x, out, capture.breaks)


class _Looking:
    """A look that goes on: the graphs so far as one, and which tensor stands for which value of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [(path, module) for path, module in model.named_modules() if path]
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.leaves = _leaves(self.modules)
        graph = fx.Graph()
        self.found = Look(graph, graph.placeholder("input"))
        self.known: dict[int, fx.Node] = {}
        self.alive: list[Any] = []
        self.around = ""  # the layer that is looked at by itself
        self.stacks: dict[fx.Node, list[str]] = {}  # the modules around a call

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Every module marks what it returns: before a mask that was put behind it, and behind all other hooks."""
        handles = [
            module.register_forward_hook(_marker(number), prepend=inserted_mask(module) is not None, with_kwargs=True)
            for number, (_, module) in enumerate(self.modules)
        ]
        _current.append(self)
        try:
            yield
        finally:
            _current.remove(self)
            for handle in handles:
                handle.remove()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While values are computed, nothing is looked at."""
        _current.remove(self)
        try:
            yield
        finally:
            _current.append(self)

    def backend(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Instead of a graph: what hands on stand-ins. What code that is not followed looks at has to be computed."""
        reason = getattr(module, "compile_subgraph_reason", None)
        looked_at = bool(reason is not None and getattr(reason, "graph_break", False))
        compute = module.forward

        def run(*inputs: Any) -> Any:
            self._look_at_layer()
            results = self._add(module, inputs, self._prefix())
            values = [self.found.values.get(node) if isinstance(node, fx.Node) else node for node in results]
            outs: list[Any] = []
            if looked_at and not any(isinstance(value, Tensor) and value.is_meta for value in inputs):
                with self.aside():
                    outs = list(compute(*inputs))
            else:
                outs = [zeros(v.shape, v.stride(), v) if isinstance(v, Tensor) else v for v in values]
            for node, out in zip(results, outs, strict=True):
                if isinstance(node, fx.Node) and isinstance(out, Tensor):
                    self.known[id(out)] = node
            self.alive.append(outs)
            return outs

        return run

    def returned(self, x: Tensor, out: Tensor, number: int, leaf: int) -> None:
        """A module returned a tensor in code that torch does not follow."""
        node = self.known.get(id(x))
        path = self.modules[number][0]
        if node is None:
            node = self._lost(x, "torch does not follow this part of the model")
        if path in self.leaves and self.found.outputs_of.get(node, [])[-1:] != [path]:
            node = self._mark(node, number, leaf, x)
        self._is_output(node, path)
        self.known[id(out)] = node
        self.alive.append((x, out))

    def _look_at_layer(self) -> None:
        """A layer that ran by itself, because torch follows no frames of its own: look at what it does."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "mark" and not is_captured(frame):
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != "mark":
            return
        layer, args, kwargs, output = (frame.f_locals.get(name) for name in ("module", "args", "kwargs", "output"))
        given = [id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = _tensors(output)
        if self.paths.get(id(layer)) not in self.leaves or not all(each in self.known for each in given):
            return
        if all(id(leaf) in self.known for leaf in made):
            return
        before, self.around = self.around, self.paths[id(layer)]
        found = _tensors(Capture(layer.forward, self.backend)(*args, **kwargs))
        self.around = before
        if len(found) == len(made) and all(id(leaf) in self.known for leaf in found):
            self.known.update({id(leaf): self.known[id(own)] for leaf, own in zip(made, found, strict=True)})
            self.alive.append(made)

    def _prefix(self) -> str:
        """The path of the module whose code torch follows by itself, if it is not the whole model's."""
        frame: Any = sys._getframe(2)
        while frame is not None and not is_captured(frame):
            owner = frame.f_locals.get("self")
            path: str | None = self.paths.get(id(owner)) if isinstance(owner, nn.Module) else None
            if path is not None:
                return path
            frame = frame.f_back
        return self.around

    def _lost(self, x: Any, reason: str) -> fx.Node:
        node = self.found.graph.placeholder(f"lost_{len(self.found.lost)}")
        self.found.values[node], self.found.lost[node] = x, reason
        self.known[id(x)] = node
        self.alive.append(x)
        return node

    def _add(self, module: fx.GraphModule, inputs: Sequence[Any], prefix: str) -> list[Any]:
        """Join a graph to those before; what its results are."""
        found, copies = self.found, dict[fx.Node, fx.Node]()
        own = dict(zip((n for n in module.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        for node, value in own.items():
            if isinstance(value, Tensor) and id(value) not in self.own:
                _copy_first(node)  # so that it may be changed in place
        traced = trace(module, inputs)
        given = iter(inputs)
        for node in traced.graph.nodes:
            value = traced.values.get(node)
            if node.op == "output":
                break
            if node.op == "placeholder":
                copies[node] = self._from_outside(node, next(given), value)
                continue
            if COPIED in node.meta:
                copies[node] = copies[node.args[0]]
                continue
            if _is_marker(node):
                (_, number, leaf), source = node.args, copies[node.args[0]]
                path = self.modules[number][0]
                copies[node] = self._mark(source, number, leaf, value) if path in self.leaves else source
                self._is_output(copies[node], path)
                continue
            copy = copies[node] = found.graph.node_copy(node, copies.__getitem__)
            found.values[copy], found.costs[copy] = value, traced.costs[node]
            if traced.pinned.get(node) == SHARED:
                found.lost[copy] = SHARED
            stack = self.stacks[copy] = [prefix, *self._stack(node, prefix)]
            found.kinds[copy] = called = str(getattr(node.target, "__name__", node.target)).strip("_")
            found.names[copy] = _join(stack[-1], called)
        results = traced.graph.output_node().args[0]
        several = results if isinstance(results, (tuple, list)) else [results]
        return [copies[each] if isinstance(each, fx.Node) else each for each in several]

    def _stack(self, node: fx.Node, prefix: str) -> list[str]:
        """The paths of the modules that make a call, the innermost last. Torch knows them by their id, too."""
        found = []
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            number = str(key).partition("@")[0]
            known = self.paths.get(int(number)) if number.isdigit() else None
            found.append(_join(prefix, clean(str(path))) if known is None else known)
        return found

    def _from_outside(self, node: fx.Node, value: Any, stand_in: Any) -> fx.Node:
        if id(value) in self.known and isinstance(value, Tensor):
            source = self.known[id(value)]
            self.found.values.setdefault(source, stand_in)
            return source
        constant = not isinstance(value, Tensor) or id(value) in self.own
        if constant or str(node.target).startswith(("L_self_", "G_", "L_function_")):
            copy = self.found.graph.node_copy(node)
            self.found.values[copy] = stand_in
            return copy
        return self._lost(value, "it comes from code that torch does not follow")

    def _mark(self, source: fx.Node, number: int, leaf: int, value: Any) -> fx.Node:
        """A layer as one call: the identity of what it returns, or of the first where it returns several tensors."""
        found, (path, layer) = self.found, self.modules[number]
        node = found.graph.call_function(torch.ops.backdrop.output, (source, number, leaf))
        if leaf:
            found.within[node] = next(other for other in reversed(found.layers) if found.layers[other] == path)
        found.values[node], found.costs[node] = value, Cost(0, 0, 0)
        found.names[node] = path
        if not leaf:
            found.layers[node] = path
        found.kinds[node] = type(layer).__name__
        return node

    def _is_output(self, node: fx.Node, path: str) -> None:
        self.found.outputs_of.setdefault(node, []).append(path)

    def finish(self, x: Tensor, out: Any, breaks: list[str]) -> Look:
        found = self.found
        found.values.setdefault(found.input, x)
        found.breaks = list(breaks)
        returned = [self.known[id(leaf)] for leaf in _tensors(out) if id(leaf) in self.known]
        found.graph.output(tuple(returned))
        waiting: dict[str, list[fx.Node]] = {}
        for node in found.graph.nodes:
            if node in found.layers:
                for inner in waiting.pop(found.layers[node], ()):
                    found.within[inner] = node
            elif node not in found.within:
                for path in self.stacks.get(node, ()):
                    if path in self.leaves:
                        waiting.setdefault(path, []).append(node)
        if found.breaks:
            where = f"torch does not follow the model here ({found.breaks[0]})"
            found.lost.update({n: where for n, reason in found.lost.items() if reason != SHARED})
        times: Counter[str] = Counter()
        for node in found.rows:
            name = found.names[node]
            times[name] += 1
            if times[name] > 1:
                found.names[node] = f"{name} ({times[name]})"
        for inner, node in found.within.items():
            found.names[inner] = found.names[node]
        return found


def _leaves(modules: Sequence[tuple[str, nn.Module]]) -> set[str]:
    """The layers that are one row: those of torch.nn that hold no others of it, and masks."""
    found: set[str] = set()
    layers: set[str] = set()
    for path, module in modules:
        if isinstance(module, Backdrop):
            found.add(path)
        elif not any(path.startswith(f"{layer}.") for layer in layers) and _is_layer(module):
            layers.add(path)
    return found | layers


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or "forward" in module.__dict__:
        return False
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.")


def _marker(number: int) -> Callable[..., Any]:
    def mark(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return _marked(output, number, [])

    return mark


def _marked(output: Any, number: int, before: list[int]) -> Any:
    if isinstance(output, Tensor):
        before.append(number)
        return torch.ops.backdrop.output(output, number, len(before) - 1)
    if type(output) in (tuple, list):
        return type(output)([_marked(part, number, before) for part in output])
    if type(output) is dict:
        return {key: _marked(part, number, before) for key, part in output.items()}
    return output


def _is_marker(node: fx.Node) -> bool:
    marker = torch.ops.backdrop.output
    return node.op == "call_function" and node.target in (marker, marker.default)


def _copy_first(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        copy = node.graph.call_method("clone", (node,))
    node.replace_all_uses_with(copy, lambda user: user is not copy)
    copy.meta[COPIED] = True


def _join(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))


def _tensors(value: Any) -> list[Tensor]:
    """Also in what torch does not take apart, such as the outputs of Transformers models."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
