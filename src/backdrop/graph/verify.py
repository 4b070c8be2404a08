"""Whether a call that no rule knows treats samples apart: tried out on random numbers, values and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from backdrop.graph.table import Call, Step, Tap, UnsupportedError
from backdrop.graph.trace import Traced

ROWS = 5
SUBSETS = ((0, 2), (3, 1, 4), (4, 2))
SCALES = (1.0, 4.0)


def verified(call: Call, traced: Traced) -> Step:
    """A step for the call, if rows of its result depend on the same rows of those inputs that have as many.

    Values and gradients on a few rows of random numbers have to be those of subsets of them. What draws random numbers,
    reads whole numbers or couples rows in its backward pass does not pass. Complex numbers may be read.
    """
    unknown = UnsupportedError(f"there is no rule for {call.name}, and samples do not pass through it apart")
    number = call.shape[0]
    inputs = {source: Tap((0,) if shape and shape[0] == number else (None,)) for source, shape in call.shapes.items()}
    rows = [source for source, tap in inputs.items() if tap.axes[0] is not None]
    values = {source: traced.values[source] for source in inputs}
    if call.tuples or not all(value.is_floating_point() or value.is_complex() for value in values.values()):
        raise UnsupportedError(f"there is no rule for {call.name}, and with such inputs it is not tried out")
    if not rows:
        raise unknown
    state = torch.get_rng_state()
    try:
        if not all(_passes(call.node, traced, values, set(rows), scale) for scale in SCALES):
            raise unknown
    except UnsupportedError:
        raise
    except Exception:  # whatever it says about other sizes than those it was called with
        raise unknown from None
    finally:
        torch.set_rng_state(state)
    return Step(inputs)


def _passes(node: fx.Node, traced: Traced, values: dict[fx.Node, Tensor], rows: set[fx.Node], scale: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    given = {}
    for source, value in values.items():
        shape = (ROWS, *value.shape[1:]) if source in rows else value.shape
        kind = torch.complex128 if value.is_complex() else torch.float64
        drawn = scale * torch.randn(shape, generator=generator, dtype=kind)
        given[source] = drawn.to(value.device, value.dtype)
    whole, upstream, gradients = _run(node, traced, given, None, generator)
    if whole.shape[:1] != (ROWS,):
        return False
    for subset in SUBSETS:
        index = torch.tensor(subset, device=whole.device)
        part = {source: x[index] if source in rows else x for source, x in given.items()}
        some, _, found = _run(node, traced, part, upstream[index], generator)
        alone = torch.zeros_like(upstream).index_copy(0, index, upstream[index])
        _, _, expected = _run(node, traced, given, alone, generator)
        pairs = [(some, whole[index])]
        for source, grad in found.items():
            if grad is None or expected[source] is None or gradients[source] is None:
                if not (grad is None and expected[source] is None and gradients[source] is None):
                    return False
                continue
            pairs.append((grad, expected[source][index] if source in rows else expected[source]))
            if source in rows:
                pairs.append((grad, gradients[source][index]))
        if not all(_near(a, b) for a, b in pairs):
            return False
    return True


def _run(
    node: fx.Node, traced: Traced, given: dict[fx.Node, Tensor], upstream: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor, dict[fx.Node, Any]]:
    leaves = {source: x.clone().requires_grad_() for source, x in given.items()}
    known = {**{source: traced.values[source] for source in node.all_input_nodes if source not in leaves}, **leaves}
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    target: Any = node.target
    with torch.enable_grad():
        out = getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
        flat: list[Tensor] = []
        tree_map(lambda x: flat.append(x) if isinstance(x, Tensor) else None, out)
        (result,) = flat  # several results have no one set of rows
        if upstream is None:
            kind = torch.complex128 if result.is_complex() else torch.float64
            upstream = torch.randn(result.shape, generator=generator, dtype=kind).to(result)
        grads = torch.autograd.grad(result, list(leaves.values()), upstream, allow_unused=True)
    return result.detach(), upstream, dict(zip(leaves, grads, strict=True))


def _near(a: Tensor, b: Tensor) -> bool:
    limit = 10 * torch.finfo(a.dtype).eps ** 0.75
    return a.shape == b.shape and bool((a - b).abs().max() <= limit * b.abs().max() + torch.finfo(a.dtype).tiny)
