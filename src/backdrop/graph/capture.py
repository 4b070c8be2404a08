"""A model as torch.compile's front end (Dynamo) sees it: graphs of torch functions, captured anew on any change.

Dynamo follows the Python code of a model and hands a *backend* the torch functions that it calls, as a graph whose
inputs are all tensors that come from outside: arguments, parameters, buffers. It writes down what it relied on
(attributes, modes, flags, hooks, types) and captures again when that changes; what it cannot follow it runs as it is,
and captures what comes after as another graph: a *graph break*. We use this front end alone: the graph that we return
runs in plain autograd, call by call, and nothing is compiled."""

from __future__ import annotations

import functools
import itertools
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from backdrop._core import marks

_numbers = itertools.count()
FAILURES = 8  # calls with an error after which it is captured anew
LEFT_OUT = "it left out code around this; TORCH_LOGS=graph_breaks shows where"
LIMIT = 64  # captures of one piece of code before torch gives up and runs it as it is


class Capture:
    """A function that runs as the graphs that Dynamo finds in it, each turned into something to call by `backend`.

    The function gets code of its own, because torch counts captures, and looks through them, by code; and a name of its
    own, because by name it remembers which numbers have changed from call to call.
    """

    def __init__(self, function: Callable[..., Any], backend: Callable[[fx.GraphModule], Callable[..., Any]]) -> None:
        self.function, self.backend = function, backend
        self.breaks: list[str] = []  # why graphs ended before the function did, newest last
        self.ran = False  # whether the last call ran a graph, instead of the code as it is
        self._now: list[str] = []  # those of this call
        self._known_breaks: dict[str, int] = {}  # those that torch counted before this call
        self._made: list[Callable[..., Any]] = []  # from graphs, for as long as this lives
        self._failures = 0  # calls that ended in an error while torch looked at the code
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            name = f"captured_{next(_numbers)}"
            code = _call.__code__.replace(co_name=name)
            copy = types.FunctionType(code, _call.__globals__, name, None, _call.__closure__)
            self._compiled = torch.compile(copy, backend=_weakly(self._convert))
            with warnings.catch_warnings():  # torch looks at the gradient of what it is given
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                return self(*args, **kwargs)
        from torch._dynamo.utils import counters

        self._now.clear()
        self.ran = False
        self._known_breaks = dict(counters["graph_break"])
        frames = counters["frames"]["total"]
        try:
            with _settings(), marks.capturing():
                return self._compiled(self.function, args, kwargs)
        except Exception:
            if counters["frames"]["total"] != frames and self._failures < FAILURES:
                self._failures += 1  # torch would never follow this code again
                self._compiled = None
            raise

    def _convert(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        module.meta["break"] = self._now[-1] if self._now else ""  # after which it begins
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and getattr(reason, "graph_break", False):
            place = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]]
            text = str(reason.reason).strip().splitlines()[0]
            self._note(" at ".join([text, *place]))
        names = _sources(module)
        if not module.meta["break"] and any(name.startswith("___stack") for name in names):
            module.meta["break"] = self._newest_break()
        if not module.meta["break"] and not all(
            name in ("function", "args", "kwargs") or name.startswith("___") for name in names
        ):
            module.meta["break"] = self._newest_break()
        reason = next(filter(None, map(_cannot_run, module.graph.nodes)), "")
        if reason:
            from torch._dynamo.exc import SkipFrame

            self._note(reason)
            raise SkipFrame(reason)
        self._made.append(self.backend(module))
        return functools.partial(_weakly(self._run), len(self._made) - 1)

    def _run(self, number: int, *inputs: Any) -> Any:
        self.ran = True
        return self._made[number](*inputs)

    def _newest_break(self) -> str:
        """Why torch went on behind a break that left no graph before it."""
        from torch._dynamo.utils import counters

        new = [text for text, count in counters["graph_break"].items() if count > self._known_breaks.get(text, 0)]
        return new[-1].strip().splitlines()[0] if new else LEFT_OUT

    def _note(self, text: str) -> None:
        self._now.append(text)
        self.breaks = [*self.breaks[-7:], text]


def _cannot_run(node: fx.Node) -> str:
    """Why a graph with this call in it does not do what the code does."""
    called = getattr(node.target, "__name__", "")
    if called in ("tag_activation_checkpoint", "wrap_activation_checkpoint"):
        # It would run a second time, and what it changes or hooks in on is not in the graph.
        return "a part of it is checkpointed; skipping saves what that saves, so switch checkpointing off"
    if called == "autograd_function_apply" and isinstance(node.args[0], fx.Node):
        body = getattr(node.graph.owning_module, str(node.args[0].target), None)
        if isinstance(body, fx.GraphModule) and any(map(_writes_over_input, body.graph.nodes)):
            return "an autograd.Function writes over what it is given"
    if node.op == "call_function" and isinstance(node.target, (types.FunctionType, types.BuiltinFunctionType)):
        name = _get_qualified_name(node.target)  # by which the code of a graph calls it
        try:
            found = (
                operator.attrgetter(name.removeprefix("torch."))(torch) if name.startswith("torch.") else node.target
            )
        except AttributeError:
            found = node.target
        if isinstance(found, types.FunctionType) and found is not node.target:
            return f"{name} was replaced by another function"
    return ""


def _writes_over_input(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    if not (name.endswith("_") and not name.endswith("__")) and name not in ("setitem", *_IN_PLACE):
        return False
    first = node.args[0]
    while isinstance(first, fx.Node) and getattr(first.target, "__name__", first.target) in _VIEWS:
        first = first.args[0] if first.args else None
    return isinstance(first, fx.Node) and first.op == "placeholder"


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "ifloordiv", "imod")
_VIEWS = (
    "view",
    "view_as",
    "reshape",
    "flatten",
    "detach",
    "getitem",
    "t",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same without keeping its owner alive: torch holds what it is given for as long as the code exists."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        owned = found()
        assert owned is not None
        return owned(*args, **kwargs)

    return call


def is_captured(frame: types.FrameType) -> bool:
    """Whether a frame is that of a function under capture."""
    return frame.f_code.co_name.startswith("captured_") and frame.f_code.co_filename == __file__


def _sources(module: fx.GraphModule) -> list[str]:
    """What the inputs of a graph are called in the code that it is of; ___stack... are what was there at a break."""
    names = []
    for node in module.graph.nodes:
        argument = node.meta.get("grapharg") if node.op == "placeholder" else None
        source: Any = getattr(argument, "source", None)
        while getattr(source, "base", None) is not None:
            source = source.base
        if getattr(source, "local_name", None) is not None:
            names.append(str(source.local_name))
    return names


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


@contextmanager
def _settings() -> Iterator[None]:
    """What captures rely on, for as long as one may be made."""
    from torch._dynamo import config
    from torch.fx.experimental import _config as shapes

    wanted = {
        "recompile_limit": LIMIT,
        "cache_size_limit": LIMIT,  # its name before torch 2.7
        "accumulated_recompile_limit": 8 * LIMIT,
        "accumulated_cache_size_limit": 8 * LIMIT,
        "allow_unspec_int_on_nn_module": True,  # numbers that count steps
        "skip_nnmodule_hook_guards": False,  # hooks may be added later
        "optimize_ddp": False,  # which would cut graphs at buckets
        "allow_rnn": True,
        "suppress_errors": True,  # what torch fails at runs as it is
        "verbose": False,
    }
    global _known
    if _known is None:
        _known = {name: value for name, value in wanted.items() if name in config._config}  # type: ignore[attr-defined]
        for new, old in (
            ("recompile_limit", "cache_size_limit"),
            ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
        ):
            if new in _known:
                _known.pop(old, None)
    duck: Any = nullcontext()
    if hasattr(shapes, "use_duck_shape"):
        duck = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with config.patch(**_known), duck:
        yield


_known: dict[str, Any] | None = None
