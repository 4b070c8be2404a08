"""From a model to a graph of calls, and from the graph to stretches: what lies between one mask and the next.

A stretch belongs to the mask at its end. It holds every call whose result reaches the rest of the model through that
mask alone, so the gradient that arrives there is all the gradient it gets. The trace is made by torch.fx; a module that
torch.fx cannot follow stays one call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from backdrop._inserted import HOOKS, NAME, apply_mask, has_other_hooks, inserted_mask
from backdrop.layers import Backdrop

OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
ENDS_IN_MASK = "_backdrop_ends_in_mask"  # an attribute of modules whose own program runs the mask inserted behind them
METADATA_METHODS = ("size", "dim", "numel", "ndimension")


class Stretch(NamedTuple):
    """Calls in the order of execution that end in a mask, and the values they start from."""

    mask: fx.Node
    exit: fx.Node  # the value that the mask takes
    calls: dict[fx.Node, Callable[[Mapping[fx.Node, Any]], Any]]  # by the node of each
    entries: tuple[fx.Node, ...]
    drops: dict[fx.Node, list[fx.Node]]  # which values to let go of after each call


class _Tracer(fx.Tracer):
    """Follows every module it can; one that it cannot follow, or that has hooks, stays one call.

    A mask that was inserted behind a module is a call of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        skips = hasattr(m, "_backdrop_plain")
        return (
            isinstance(m, Backdrop) or skips or has_other_hooks(m) or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        last = next(iter(reversed(self.graph.nodes)))
        stack = self.module_stack.copy()
        path = self.path_of_module(m)
        try:
            out = super().call_module(m, forward, args, kwargs)
        except Exception as error:
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            self.module_stack = stack
            self.reasons[path] = f"torch.fx cannot follow it ({first_line(error)})"
            out = self.create_proxy("call_module", path, args, kwargs)
        if not isinstance(out, fx.Proxy):
            return out
        out.node.meta.setdefault("outputs_of", []).append(path)
        if out.node.op == "call_module" and out.node.target == path:  # else its hook was followed like its calls
            for hook in m._forward_hooks.values():
                out = hook(m, args, out) if hook in HOOKS else out
        return out


def trace(root: nn.Module, constants: Mapping[str, Any]) -> tuple[fx.Graph, dict[str, str]]:
    """The calls that `root` makes, and why some modules could not be followed."""
    tracer = _Tracer()
    tracer.traced_func_name = _plain_name(root)
    calls = tracer.trace(root, dict(constants) or None)
    if ENDS_IN_MASK in root.__dict__:
        output = calls.output_node()
        with calls.inserting_before(output):
            output.args = (calls.call_module(NAME, output.args),)
    return calls, tracer.reasons


def name_of(node: fx.Node) -> str:
    """The dotted path of the layer, or of the module that makes the call, and the call."""
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    owner = f"{stack[-1][0]}." if stack and stack[-1][0] else ""
    return f"{owner}{getattr(node.target, '__name__', node.target)}"


def returns_one_value(root: nn.Module) -> bool:
    """And not several in a tuple or a dictionary."""
    return isinstance(trace(root, {})[0].output_node().args[0], fx.Node)


def first_line(error: Exception) -> str:
    """Of what it says, with its kind."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def plain(root: nn.Module) -> Callable[..., Any]:
    """What a module does by itself."""
    forward: Callable[..., Any] = getattr(type(root), _plain_name(root)).__get__(root)
    if ENDS_IN_MASK not in root.__dict__:
        return forward

    @wraps(forward)
    def both(*args: Any, **kwargs: Any) -> Any:
        return root._modules[NAME](forward(*args, **kwargs))  # type: ignore[misc]

    return both


def _plain_name(root: nn.Module) -> str:
    return "_backdrop_plain" if hasattr(type(root), "_backdrop_plain") else "forward"


def overwrites_shared(root: nn.Module, node: fx.Node) -> bool:
    """Whether a call writes over a value that others read too: then the order of calls matters."""
    return writes_in_place(root, node) and len(node.all_input_nodes[0].users) > 1


def writes_in_place(root: nn.Module, node: fx.Node) -> bool:
    if not node.all_input_nodes:
        return False
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return bool(node.kwargs.get("inplace") or getattr(_layer(root, node), "inplace", False))


def attribute(root: nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(root)


def call(root: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any], in_place: bool = False) -> Any:
    args, kwargs = arguments(node, values)
    if in_place and node.op == "call_module":
        return _alone(attribute(root, str(node.target)))(*args, **kwargs)
    return invoke(root, node, args, kwargs)


def invoke(root: nn.Module, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do what one node says, out of place: a stretch needs its input again."""
    target: Any = node.target
    if node.op == "call_module":
        return _alone(out_of_place(attribute(root, target)))(*args, **kwargs)
    if node.op == "call_function":
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        return OUT_OF_PLACE.get(target, target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return attribute(root, target)  # get_attr


def prepare(root: nn.Module, node: fx.Node) -> Callable[[Mapping[fx.Node, Any]], Any]:
    """`call` for one node with everything looked up in advance: calls are many, and some are short."""
    if node.op == "call_module" and len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs:
        layer, source = _alone(out_of_place(attribute(root, str(node.target)))), node.args[0]
        return lambda values: layer(values[source])
    return lambda values: call(root, node, values)


def arguments(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    if not node.kwargs and all(type(argument) is fx.Node for argument in node.args):
        return [values[argument] for argument in node.args], {}  # type: ignore[index]
    return fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)


def out_of_place(module: nn.Module) -> nn.Module:
    """The same layer, sharing everything, but leaving its input alone."""
    if not getattr(module, "inplace", False):
        return module
    twin = module.__new__(type(module))
    twin.__dict__ = {**module.__dict__, "inplace": False}
    return twin


def _alone(module: nn.Module) -> Callable[..., Any]:
    """A module without the mask that was inserted behind it, which is a node of its own; for a mask, whatever the
    module before it gives."""
    if isinstance(module, Backdrop):
        return partial(apply_mask, module)
    return module if inserted_mask(module) is None else module.forward


def drops(reads: Mapping[fx.Node, Iterable[fx.Node]], keep: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """Which values nobody needs any more after each node, from what each reads; that of `keep` stays."""
    last_use = {source: node for node, sources in reads.items() for source in sources}
    dropped: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last_use.items():
        if source is not keep:
            dropped.setdefault(node, []).append(source)
    return dropped


def lean(root: nn.Module, stretch: Stretch) -> Stretch:
    """The same stretch for running without gradients: on a GPU a convolution and its rectifier are one call."""
    calls, reads = dict(stretch.calls), {node: node.all_input_nodes for node in stretch.calls}
    for node in stretch.calls:
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        if first not in calls or len(first.users) != 1:
            continue
        if not isinstance(_layer(root, node), nn.ReLU) and node.target not in (F.relu, torch.relu):
            continue
        layer = _layer(root, first)
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            calls[node] = _rectified(layer, first.all_input_nodes[0], calls[first], calls[node], first)
            reads[node] = reads.pop(first)
            del calls[first]
    return stretch._replace(calls=calls, drops=drops(reads, stretch.exit))


def _layer(root: nn.Module, node: fx.Node) -> nn.Module | None:
    return attribute(root, str(node.target)) if node.op == "call_module" else None


def _rectified(
    layer: nn.Conv2d, source: fx.Node, conv: Callable[..., Any], relu: Callable[..., Any], between: fx.Node
) -> Callable[[Mapping[fx.Node, Any]], Any]:
    padding: Any = layer.padding
    refused = False

    def both(values: Mapping[fx.Node, Any]) -> Any:
        nonlocal refused
        x = values[source]
        if not refused and not torch.is_grad_enabled() and _cudnn_rectifies(x, layer.weight):
            try:
                return torch.cudnn_convolution_relu(
                    x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # cuDNN has no such kernel for this layer
                refused = True
        return relu({between: conv(values)})

    return both


def _cudnn_rectifies(x: Any, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and x.ndim == 4
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cudnn.enabled
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float16)
        and not torch.is_autocast_enabled("cuda")
        and torch.version.hip is None
        and len(x) > 0
    )


def run(stretch: Stretch, entries: Iterable[Any]) -> Any:
    """Run a stretch as it is."""
    values: dict[fx.Node, Any] = dict(zip(stretch.entries, entries, strict=True))
    for node, do in stretch.calls.items():
        values[node] = do(values)
        for source in stretch.drops.get(node, ()):
            values.pop(source, None)
    return values[stretch.exit]


def run_together(
    stretch: Stretch,
    lean: Stretch,
    parts: list[dict[fx.Node, Any]],
    joint: Callable[[fx.Node, list[dict[fx.Node, Any]]], list[Any] | None],
) -> list[Any]:
    """Run a stretch on several parts of a batch in step, the first with gradients; `joint` may do a node for all."""
    for node in stretch.calls:
        done = joint(node, parts)
        for i, values in enumerate(parts):
            part = lean if i else stretch
            if done is not None:
                values[node] = done[i]
            elif node in part.calls:
                with torch.set_grad_enabled(i == 0):
                    values[node] = part.calls[node](values)
            for source in part.drops.get(node, ()):
                values.pop(source, None)
    return [values[stretch.exit] for values in parts]


def stretches(root: nn.Module, graph: fx.Graph) -> list[Stretch]:
    """Every mask's stretch; disjoint, because a mask ends the one and starts the next."""
    masks = [node for node in graph.nodes if is_mask(root, node)]
    return [_stretch(root, mask, list(graph.nodes), set(masks)) for mask in masks]


def is_mask(root: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(attribute(root, str(node.target)), Backdrop)


def _stretch(root: nn.Module, mask: fx.Node, order: list[fx.Node], masks: set[fx.Node]) -> Stretch:
    """The calls all of whose users lead to `mask` and to nothing else, plus copies of what carries no gradient."""
    owned: set[fx.Node] = {mask}
    for node in reversed(order[: order.index(mask)]):
        if node.op in ("placeholder", "output") or node in masks or not node.users:
            continue
        if all(user in owned for user in node.users):
            owned.add(node)
    return closed(root, mask, owned - {mask}, order)


def closed(root: nn.Module, mask: fx.Node, owned: set[fx.Node], order: list[fx.Node]) -> Stretch:
    """Add what carries no gradient (sizes, constants) and is needed inside; the other inputs are the entries."""
    owned, entries = set(owned), []
    for node in reversed(order):
        if node in owned or not any(user in owned for user in node.users):
            continue
        if _carries_no_gradient(node):
            owned.add(node)
        else:
            entries.append(node)
    last = mask.all_input_nodes[0]
    calls = {node: prepare(root, node) for node in order if node in owned}
    reads = {node: node.all_input_nodes for node in calls}
    return Stretch(mask, last, calls, tuple(reversed(entries)), drops(reads, last))


def _carries_no_gradient(node: fx.Node) -> bool:
    """Whether it is cheap to compute again and independent of any tensor's values: a size, or an attribute."""
    if node.op == "get_attr" or (node.op == "call_method" and node.target in METADATA_METHODS):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    if node.op == "call_function" and node.target in (operator.getitem, operator.mul, operator.floordiv, operator.add):
        return bool(node.all_input_nodes) and all(_carries_no_gradient(source) for source in node.all_input_nodes)
    return False


@contextmanager
def tried_out(modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> Iterator[None]:
    """Run modules without gradients and without a trace: random state and buffers are as before afterwards."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    with torch.no_grad(), torch.random.fork_rng({device.index for device in devices if device.type == "cuda"}):
        try:
            yield
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # others are left alone: they may be saved for a backward pass
                    buffer.copy_(before)


def shapes(root: nn.Module, graph: fx.Graph, inputs: Iterable[Any]) -> dict[fx.Node, torch.Size]:
    """The shapes of all values, from running the model once."""
    with tried_out(root.modules(), {parameter.device for parameter in root.parameters()}):
        return {node: value.shape for node, value in walk(root, graph, inputs) if isinstance(value, Tensor)}


def walk(root: nn.Module, graph: fx.Graph, inputs: Iterable[Any]) -> Iterator[tuple[fx.Node, Any]]:
    """Run a model call by call, without its masks."""
    values: dict[fx.Node, Any] = {}
    remaining = {node: len(node.users) for node in graph.nodes}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = next(given, *node.args)
        else:
            values[node] = values[node.all_input_nodes[0]] if is_mask(root, node) else call(root, node, values)
        yield node, values[node]
        for source in node.all_input_nodes:
            remaining[source] -= 1
            if not remaining[source]:
                del values[source]
