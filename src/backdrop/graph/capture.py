"""A model as torch.compile's front end (Dynamo) sees it: graphs of torch functions, captured anew on any change.

Dynamo follows the Python code of a model and hands a *backend* the torch functions that it calls, as a graph whose
inputs are all tensors that come from outside: arguments, parameters, buffers. It writes down what it relied on
(attributes, modes, flags, hooks, types) and captures again when that changes; what it cannot follow it runs as it is,
and captures what comes after as another graph: a *graph break*. We use this front end alone: the graph that we return
runs in plain autograd, call by call, and nothing is compiled."""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from backdrop import _marks

_numbers = itertools.count()
LIMIT = 64  # captures of one piece of code before torch gives up and runs it as it is


class Capture:
    """A function that runs as the graphs that Dynamo finds in it, each turned into something to call by `backend`.

    The function gets code of its own, because torch counts captures, and looks through them, by code; and a name of its
    own, because by name it remembers which numbers have changed from call to call.
    """

    def __init__(self, function: Callable[..., Any], backend: Callable[[fx.GraphModule], Callable[..., Any]]) -> None:
        self.function, self.backend = function, backend
        self.breaks: list[str] = []  # why graphs ended before the function did, newest last
        self._now: list[str] = []  # those of this call
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            name = f"captured_{next(_numbers)}"
            code = _call.__code__.replace(co_name=name)
            copy = types.FunctionType(code, _call.__globals__, name, None, _call.__closure__)
            self._compiled = torch.compile(copy, backend=self._convert)
            with warnings.catch_warnings():  # torch looks at the gradient of what it is given
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                return self(*args, **kwargs)
        self._now.clear()
        with _settings(), _marks.capturing():
            return self._compiled(self.function, args, kwargs)

    def _convert(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        module.meta["break"] = self._now[-1] if self._now else ""  # after which it begins
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and getattr(reason, "graph_break", False):
            place = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]]
            text = str(reason.reason).strip().splitlines()[0]
            self._note(" at ".join([text, *place]))
        if not module.meta["break"] and not _is_of_captured(module):
            module.meta["break"] = "it left out code around this; TORCH_LOGS=graph_breaks shows where"
        checkpoints = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
        if any(getattr(node.target, "__name__", "") in checkpoints for node in module.graph.nodes):
            # It would run a second time, and what it changes or hooks in on is not in the graph.
            from torch._dynamo.exc import SkipFrame

            self._note("a part of it is checkpointed; skipping saves what that saves, so switch checkpointing off")
            raise SkipFrame("checkpointed")
        return self.backend(module)

    def _note(self, text: str) -> None:
        self._now.append(text)
        self.breaks = [*self.breaks[-7:], text]


def is_captured(frame: types.FrameType) -> bool:
    """Whether a frame is that of a function under capture."""
    return frame.f_code.co_name.startswith("captured_") and frame.f_code.co_filename == __file__


def _is_of_captured(module: fx.GraphModule) -> bool:
    """Whether a graph is one of the function's own, and not of something that it calls, which torch follows alone."""
    names = []
    for node in module.graph.nodes:
        argument = node.meta.get("grapharg") if node.op == "placeholder" else None
        source: Any = getattr(argument, "source", None)
        while getattr(source, "base", None) is not None:
            source = source.base
        names.append(getattr(source, "local_name", None))
    return all(name is None or name in ("function", "args", "kwargs") or name.startswith("___") for name in names)


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
