"""A segment as a function of its entries: on the whole of them, on some samples, or on several parts in step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from backdrop.graph.table import Statistics, Step, Where
from backdrop.skip import statistics
from backdrop.skip.epilogue import Moments
from backdrop.skip.segments import Segment


def drops(reads: Mapping[fx.Node, Iterable[fx.Node]], keep: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Which values nobody needs any more after each node, from what each reads; those of `keep` stay."""
    last_use = {source: node for node, sources in reads.items() for source in sources}
    dropped: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last_use.items():
        if source not in keep:
            dropped.setdefault(node, []).append(source)
    return dropped


class _Apply(nn.Module):
    """A function that the code of a graph may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Program:
    """The calls of a segment as code. With `keep_statistics` it returns those of its normalisations and means too, and
    the values of `segment.whole`. With a policy, normalisations take statistics that were `seen` before."""

    def __init__(
        self,
        segment: Segment,
        *,
        keep_statistics: bool = False,
        fused: bool = False,
        plain: bool = False,
        policy: Statistics | None = None,
    ) -> None:
        self.segment, self.keep_statistics, self.fused = segment, keep_statistics, fused
        self.is_plain, self.policy = plain, policy
        self.code: Callable[..., Any] | None = None  # which is made when it is called for the first time
        self.compiles = False

    def compile(self) -> None:
        """From now on as Inductor makes it."""
        self.compiles, self.code = True, None

    def _made(self) -> Callable[..., Any]:
        segment, keep_statistics, policy = self.segment, self.keep_statistics, self.policy
        graph, root, copies = fx.Graph(), nn.Module(), dict[fx.Node, Any]()
        for node in segment.entries:
            copies[node] = graph.placeholder(node.name)
        rows = graph.placeholder("number_of_rows", default_value=0)
        given = graph.placeholder("seen", default_value=())
        outside = {s for node in segment.entries for s in segment.traced.storages.get(node, ())}
        whole = segment.whole if keep_statistics else []
        outside |= {s for node in whole for s in segment.traced.storages.get(node, ())}
        self.kept: list[fx.Node] = []
        for number, (node, step) in enumerate(segment.steps.items()):
            statistic = step.couples if keep_statistics else ""
            if policy is not None and step.couples == "batch":
                setattr(root, f"step_{number}", _Apply(_with_moments(policy)))
                args = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                moments = graph.call_function(_item, (given, len(self.kept)))
                copies[node] = graph.call_module(f"step_{number}", (moments, *args))
                self.kept.append(node)
                continue
            if statistic in ("batch", "sample"):
                function = statistics.normalise if statistic == "batch" else statistics.normalise_samples
                function = statistics.normalise_by_running if statistics.keeps_running(node) else function
                setattr(root, f"step_{number}", _Apply(_spread(function)))
                args = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                both = graph.call_module(f"step_{number}", args)
                copies[node] = graph.call_function(_item, (both, 0))
                copies[node, "seen"] = graph.call_function(_item, (both, 1))  # type: ignore[index]
                self.kept.append(node)
                continue
            if step.run is not None and not keep_statistics and not self.is_plain:
                setattr(root, f"step_{number}", _Apply(_on_rows(step)))
                args = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = graph.call_module(f"step_{number}", (*args, rows))
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if statistic == "pool":
                self.kept.append(node)
            was = segment.traced.in_place.get(node)
            first = node.args[0] if node.args else None
            own = isinstance(first, fx.Node) and first in segment.steps
            if was is not None and own and not segment.traced.storages.get(first, set()) & outside:  # type: ignore[arg-type]
                op, target, args, kwargs = was
                copies[node].op, copies[node].target = op, target
                copies[node].args, copies[node].kwargs = fx.map_arg((args, kwargs), copies.__getitem__)
        seen = [copies.get((node, "seen"), copies[node]) for node in self.kept if policy is None]  # type: ignore[call-overload]
        seen += [copies[node] for node in whole]
        self.keys: list[Any] = [*self.kept, *((node, "whole") for node in whole)]
        graph.output(([copies[node] for node in segment.exits], seen))
        if self.fused:
            _fuse(graph, root)
        module = fx.GraphModule(root, graph)
        made: Callable[..., Any] = compiled(module) if self.compiles else module.forward
        return made

    def __call__(self, entries: Sequence[Any], rows: int = 0, seen: Mapping[fx.Node, Moments] | None = None) -> Any:
        """The exits' values; with `keep_statistics` also what was seen, by node."""
        if self.code is None:
            self.code = self._made()
        if seen is not None:
            outputs, _ = self.code(*entries, rows, [seen[node] for node in self.kept])
            return outputs
        outputs, found = self.code(*entries, rows)
        return (outputs, dict(zip(self.keys, found, strict=True))) if self.keep_statistics else outputs


def called(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a node calls, with these arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return target(*args, **kwargs)


def compiled(module: fx.GraphModule) -> Callable[..., Any]:
    """As Inductor makes it, with the random numbers that torch draws without it."""
    made: Callable[..., Any] = torch.compile(module, options={"fallback_random": True})
    return made


def _item(pair: Sequence[Any], index: int) -> Any:
    return pair[index]


def _spread(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda args, kwargs: function(*args, **kwargs)


def _with_moments(policy: Statistics) -> Callable[..., Any]:
    return lambda moments, args, kwargs: statistics.normalise_kept(moments, policy, *args, **kwargs)


def _on_rows(step: Step) -> Callable[..., Any]:
    run = step.run
    assert run is not None
    return lambda args, kwargs, rows: run(args, kwargs, Where(tuple, (), (), (), rows))


class InStep:
    """The calls of a segment on several parts of a batch, each call for all parts; the first part has gradients.

    Statistics are those of all parts together.
    """

    def __init__(self, segment: Segment, policy: Statistics) -> None:
        self.segment, self.policy = segment, policy
        reads = {node: node.all_input_nodes for node in segment.steps}
        self.drops = drops(reads, set(segment.exits))
        # Without gradients, a convolution and its rectifier are one call.
        self.fused: dict[fx.Node, tuple[fx.Node, _Rectified]] = {}
        for node in segment.steps:
            conv = _convolution_before(node)
            if conv is not None and conv in segment.steps and conv not in segment.exits:
                self.fused[node] = conv, _Rectified()
                reads[node] = reads.pop(conv)
        self.merged = {conv for conv, _ in self.fused.values()}
        self.lean_drops = drops(reads, set(segment.exits))

    def __call__(self, parts: list[list[Any]], rows: list[int]) -> list[list[Tensor]]:
        segment = self.segment
        values = [dict(zip(segment.entries, part, strict=True)) for part in parts]
        for node, step in segment.steps.items():
            if step.couples == "batch":
                self._normalise(node, values)
            else:
                for i, known in enumerate(values):
                    if i and node in self.merged:
                        continue
                    with torch.set_grad_enabled(i == 0):
                        if i and node in self.fused:
                            conv, both = self.fused[node]
                            args: Any = fx.map_arg(conv.args, known.__getitem__)
                            known[node] = both(*args)
                        else:
                            known[node] = self._run(node, step, known, rows[i])
            for i, known in enumerate(values):
                for source in (self.lean_drops if i else self.drops).get(node, ()):
                    known.pop(source, None)
        return [[known[node] for node in segment.exits] for known in values]

    def _run(self, node: fx.Node, step: Step, known: dict[fx.Node, Any], rows: int) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        if step.run is not None:
            return step.run(args, kwargs, Where(tuple, (), (), (), rows))
        return called(node, args, kwargs)

    def _normalise(self, node: fx.Node, values: list[dict[fx.Node, Any]]) -> None:
        source = node.args[0] if node.args else node.kwargs["input"]
        assert isinstance(source, fx.Node)
        reuse = len(source.users) == 1 and source in self.segment.steps
        xs = [known[source] for known in values]
        done = statistics.normalise_together(node, values[0], xs, self.policy, reuse)
        for known, y in zip(values, done, strict=True):
            known[node] = y


def _rectifies(node: fx.Node) -> bool:
    return node.target in (F.relu, torch.relu) or (node.op == "call_method" and node.target == "relu")


def _convolution_before(node: fx.Node) -> fx.Node | None:
    """The convolution that only this call uses, if it rectifies it."""
    conv = node.args[0] if node.args and _rectifies(node) else None
    if not isinstance(conv, fx.Node) or conv.target is not torch.conv2d or len(conv.users) != 1 or conv.kwargs:
        return None
    return conv if len(conv.args) == 7 and not isinstance(conv.args[4], str) else None


def _fuse(graph: fx.Graph, root: nn.Module) -> None:
    """Without gradients, a convolution and its rectifier are one call on a GPU."""
    for node in list(graph.nodes):
        conv = _convolution_before(node)
        if conv is None:
            continue
        name = f"both_{node.name}"
        setattr(root, name, _Apply(_Rectified()))
        with graph.inserting_before(node):
            both = graph.call_module(name, conv.args)
        node.replace_all_uses_with(both)
        graph.erase_node(node)
        graph.erase_node(conv)


class _Rectified:
    def __init__(self) -> None:
        self.refused = False

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor:
        if not self.refused and not torch.is_grad_enabled() and _cudnn_rectifies(x, weight):
            try:
                return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # cuDNN has no such kernel for this layer
                self.refused = True
        return torch.relu_(torch.conv2d(x, weight, bias, stride, padding, dilation, groups))


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
