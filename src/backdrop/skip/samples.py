"""Samples dropped: run the kept ones with gradients and the others without, and put the rows back in order.

Right for any module whose outputs depend on one sample each; the first call with inputs of a new shape checks that, and
counts what a pass costs. Where layers use batch statistics (see statistics.py) both kinds of samples take every step of
the module together, and the statistics are those of all.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from backdrop import functional
from backdrop.layers import Backdrop
from backdrop.skip import cost, graph, statistics, tree

AT_ONCE = 384  # at least so many samples run together without gradients


class Split(NamedTuple):
    """Which rows run with gradients, and what these are multiplied by."""

    kept: Tensor
    rest: Tensor
    weight: Tensor  # of the kept rows; zero at those that are there for their number alone, and for batch statistics


class Spent(NamedTuple):
    """A step on some samples, by the cost model."""

    kept: float  # samples with gradients
    parts: int  # in which the others run
    step: float  # seconds of a plain step
    skipped: float  # seconds where the others run without gradients
    why: str  # it stays plain, if so


class Samples:
    """A function of samples, the layers in it, and the mask behind it.

    `together` runs the function on several parts of a batch call by call, so that batch statistics see them all.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Sequence[nn.Module],
        mask: Backdrop,
        policy: statistics.Statistics,
        together: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        self.function, self.mask, self.policy, self.together = function, mask, policy, together
        self.layers = layers
        self.norms = [m for m in layers if isinstance(m, _BatchNorm) and statistics.uses_batch_statistics(m)]
        self.costs: dict[Any, cost.Cost | str] = {}
        self.last: tuple[cost.Cost | str, Rows] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, str]:
        """The outputs, and in words how they were computed."""
        given = (args, kwargs)
        rows = batch_size(given)
        self.last = self._probe(given, rows), rows
        plain = self.plain_because()
        if plain:
            return mask_outputs(self.mask, self.function(*args, **kwargs)), plain
        split = self._split(rows)
        outputs = self._together(given, split) if self.norms else self._apart(given, split)
        return outputs, f"{len(split.kept)} of {rows.number} samples ran with gradients"

    def _probe(self, given: Any, rows: Rows) -> cost.Cost | str:
        """What a pass costs, or why samples cannot run apart; found out once for each shape, without gradients."""
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for _, leaf in tree.leaves(given))
        key = (rows, shapes, torch.is_autocast_enabled(rows.device.type))
        if key not in self.costs:
            dropouts = [m for m in self.layers if isinstance(m, _DropoutNd) and m.training]
            try:
                for module in dropouts:
                    module.training = False
                with graph.tried_out(self.layers, [rows.device]):
                    with cost.Meter() as meter:
                        whole = self.function(*given[0], **given[1])
                    self.costs[key] = meter.cost
                    returned = {
                        len(leaf) if leaf.ndim else 1 for _, leaf in tree.leaves(whole) if isinstance(leaf, Tensor)
                    }
                    if self.together is not None and returned != {rows.number}:  # a stretch that begins in between
                        several = " and ".join(map(str, sorted(returned)))
                        self.costs[key] = f"plain: it takes {rows.number} rows and returns {several}"
                    elif not self.norms and rows.number > 1 and not _depends_on_one(self.function, given, whole, rows):
                        self.costs[key] = "plain: its output for one sample depends on the others"
            finally:
                for module in dropouts:
                    module.training = True
        return self.costs[key]

    def plain_because(self) -> str:
        """Why inputs like the last ones are better run with gradients altogether; nothing if they are not."""
        if self.last is None:
            return ""
        known, rows = self.last
        return known if isinstance(known, str) else self.spent(known, rows).why

    def spent(self, known: cost.Cost, rows: Rows) -> Spent:
        """What a step takes by the cost model, from what a pass costs."""
        kept = max(1.0, rows.number * (1 - float(self.mask.p)))
        parts, step = self._number_of_parts(rows.number - kept, kept), known.step(rows.device)

        def skipped() -> float:
            return known.step_of_some(rows.device, kept / rows.number, parts, norms=bool(self.norms))

        while parts > 1 and not cost.pays(skipped(), step):  # fewer take more memory, and the host less time
            parts //= 2
        why = "" if cost.pays(skipped(), step) else f"plain: running all {rows.number} samples with gradients is faster"
        return Spent(kept, parts, step, skipped(), "plain: there is one sample" if rows.number < 2 else why)

    def _split(self, rows: Rows) -> Split:
        (dim,) = (self.mask.dims,) if isinstance(self.mask.dims, int) else self.mask.dims
        axes = (1,) * (-dim - 1)  # behind that of samples, where it is counted from the last one
        p = None if isinstance(self.mask.p, Tensor) or self.mask.group is not None else self.mask.p
        with contextlib.nullcontext() if p is None or self.mask.exact else _beside(rows.device):
            weight = self.mask.draw_weight(
                torch.empty(rows.number, *axes, device=rows.device, dtype=torch.float64)
            ).flatten()
            order = (weight == 0).to(torch.uint8).argsort(stable=True)
            if self.mask.exact and p is not None:
                kept = max(1, round(rows.number * (1 - p)))
            else:
                # One at least: with a mask over many processes, ours may have none, and parameters need their gradient.
                kept = max(1, int(weight.count_nonzero()))
                kept = min(rows.number, cost.few_shapes(kept, rows.device))
        if rows.device.type == "cuda":
            for drawn in (weight, order):
                drawn.record_stream(torch.cuda.current_stream(rows.device))
        index = order[:kept]
        return Split(index, order[kept:], weight.index_select(0, index))

    def _apart(self, given: Any, split: Split) -> Any:
        """The others without gradients, in parts; then the kept ones; then both in order."""
        count = len(split.kept) + len(split.rest)
        merged: list[Tensor] = []
        with torch.no_grad():
            for rows in self._parts(split):
                args, kwargs = _take(given, rows, count)
                _place(merged, self.function(*args, **kwargs), rows, count)
        args, kwargs = _take(given, split.kept, count)
        outputs = self.function(*args, **kwargs)
        with torch.no_grad():
            _place(merged, outputs, split.kept, count)
        return _merge(outputs, merged, split)

    def _together(self, given: Any, split: Split) -> Any:
        """All parts call by call, because layers with batch statistics need them all; the kept ones have gradients."""
        count = len(split.kept) + len(split.rest)
        parts = (split.kept, *self._parts(split))
        assert self.together is not None
        outputs = self.together([_take(given, rows, count)[0] for rows in parts])
        merged: list[Tensor] = []
        with torch.no_grad():
            for rows, output in zip(parts, outputs, strict=True):
                _place(merged, output, rows, count)
        return _merge(outputs[0], merged, split)

    def _parts(self, split: Split) -> Sequence[Tensor]:
        """The rows without gradients that run at a time."""
        if not len(split.rest):
            return ()
        assert self.last is not None
        known, rows = self.last
        assert not isinstance(known, str)  # or it would have stayed plain
        parts = self._number_of_parts(len(split.rest), len(split.kept))
        return split.rest.tensor_split(min(parts, self.spent(known, rows).parts))

    def _number_of_parts(self, rest: float, kept: float) -> int:
        parts = rest / max(AT_ONCE, 4 * kept)
        return max(1, round(parts) if self.norms else math.ceil(parts))  # with norms all parts are there at once anyway


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a GPU, beside the work that is queued there, for which reading a number would wait."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@functools.lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class Rows(NamedTuple):
    """How many samples there are, and where."""

    number: int
    device: torch.device


def batch_size(given: Any) -> Rows:
    tensors = [leaf for _, leaf in tree.leaves(given) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        raise ValueError("Skip has to be given at least one tensor whose axis 0 is the batch")
    return Rows(len(tensors[0]), tensors[0].device)


def mixes_samples(module: nn.Module, policy: statistics.Statistics) -> str | None:
    """Why a layer keeps samples from running apart, if it does."""
    if isinstance(module, Backdrop) and module.training and not _is_per_sample(module):
        return "its mask is drawn over all samples; end the stretch there"
    if not statistics.uses_batch_statistics(module):
        return None
    if isinstance(module, nn.SyncBatchNorm):
        return "SyncBatchNorm couples the samples of all processes"
    if not isinstance(module, _BatchNorm):
        return "its running statistics would not see all samples at once" if module.track_running_stats else None
    if policy == "exact":
        return (
            "its batch statistics couple all samples; "
            "statistics='sampled' or 'frozen' skips below it, with an estimated gradient"
        )
    return None


def _is_per_sample(mask: Backdrop) -> bool:
    """Whether every sample is a group of its own."""
    return not isinstance(mask.dims, int) and 0 in mask.dims and len(mask.dims) > 1


def mask_outputs(mask: Backdrop, outputs: Any) -> Any:
    """The plain pair: one mask for all tensors of the output."""
    if isinstance(outputs, Tensor):
        return mask(outputs)
    tensors = [leaf for _, leaf in tree.leaves(outputs) if _is_differentiable(leaf)]
    if not mask.training or not any(t.requires_grad for t in tensors) or (mask.p == 0):
        return outputs
    weight = mask.draw_weight(max(tensors, key=lambda t: t.dtype.itemsize)[:, ...])
    return tree.map_leaves(
        lambda leaf: functional.mask_gradient(leaf, _rank(weight, leaf)) if _is_differentiable(leaf) else leaf, outputs
    )


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _rank(weight: Tensor, leaf: Tensor) -> Tensor:
    return weight.view(-1, *[1] * (leaf.ndim - 1))


def _take(given: Any, rows: Tensor, count: int) -> Any:
    """The rows of every tensor that has one per sample; everything else is shared."""
    return tree.map_leaves(
        lambda leaf: (
            leaf.index_select(0, rows) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count else leaf
        ),
        given,
    )


def _place(merged: list[Tensor], outputs: Any, rows: Tensor, count: int) -> None:
    """Write the rows of outputs where they belong in tensors for all samples, made on the first call."""
    tensors = []
    for path, leaf in tree.leaves(outputs):
        if isinstance(leaf, Tensor):
            if not leaf.ndim or len(leaf) != len(rows):
                raise ValueError(
                    f"Skip puts the rows of outputs back in order, but the output{path} has shape {tuple(leaf.shape)} "
                    f"for {len(rows)} samples; let the module return one row per sample"
                )
            tensors.append(leaf)
    if not merged:
        merged.extend(
            torch.empty_like(leaf[:1].expand(count, *leaf.shape[1:]), requires_grad=False) for leaf in tensors
        )
    for whole, leaf in zip(merged, tensors, strict=True):
        whole.index_copy_(0, rows, leaf)


def _merge(outputs: Any, merged: list[Tensor], split: Split) -> Any:
    """The tensors for all samples, with the gradients of the kept ones."""
    wholes = iter(merged)

    def join(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        whole = next(wholes)
        return _Merge.apply(leaf, [whole], split) if leaf.requires_grad else whole  # type: ignore[no-untyped-call]

    return tree.map_leaves(join, outputs)


class _Merge(torch.autograd.Function):
    """Forward: the values for all samples. Backward: the masked gradient of the kept ones."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, whole: list[Tensor], split: Split) -> Tensor:
        ctx.split = split
        return whole.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows = grad.index_select(0, ctx.split.kept)
        wide = rows.dtype in (torch.float64, torch.complex128)
        weight = ctx.split.weight if wide else ctx.split.weight.float()
        return functional._multiply(rows, _rank(weight, rows)), None, None


def _depends_on_one(function: Callable[..., Any], given: Any, whole: Any, rows: Rows) -> bool:
    """Whether the first half of the samples alone gives the first half of the outputs."""
    half = torch.arange(-(-rows.number // 2), device=rows.device)
    args, kwargs = _take(given, half, rows.number)
    alone = function(*args, **kwargs)
    rough = torch.is_autocast_enabled(rows.device.type)
    for (_, a), (_, b) in zip(tree.leaves(alone), tree.leaves(whole), strict=True):
        if _is_differentiable(a) and a.ndim and len(a) == len(half):
            b = b[: len(half)]
            relative = 0.05 if rough or a.dtype.itemsize < 4 else 10 * torch.finfo(a.dtype).eps ** 0.5
            near = (a - b).abs() <= relative * b.abs().nan_to_num(0, 0, 0).amax()
            if not bool((near | (a == b) | (a.isnan() & b.isnan())).all()):
                return False
    return True
