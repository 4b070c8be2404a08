"""What layers with batch statistics do when only a part of the batch is differentiated.

In training, batch normalisation couples all samples and positions: y = gamma * x_hat + beta with x_hat = (x - m) * r,
where m and r = 1/sqrt(v + eps) come from all M cells of a channel. Its gradient is

    dx_i = gamma * r * (dy_i - sum_j dy_j / M - x_hat_i * sum_j dy_j x_hat_j / M)

which is dense even where dy is zero almost everywhere. Forward always uses the full statistics. Backward, by name:

- "exact": the formula as it stands. Nothing below such a layer can be skipped.
- "sampled": the formula over the cells that are computed again (W of them instead of M): the two sums are the same,
  and what they subtract falls on the sampled cells alone, an estimate of the exact gradient from the kept part.
- "frozen": m and r are constants: dx_i = gamma * r * dy_i.

"running" is another model: m and r are the running statistics, forward and backward, see `backdrop.graph.running`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from backdrop._core import kernels
from backdrop.graph.running import running_batch_norm
from backdrop.graph.sliding import named
from backdrop.graph.table import Statistics
from backdrop.skip.epilogue import Epilogue, Moments, cells_inside, finish, normalised
from backdrop.skip.totals import Spread
from backdrop.skip.windows import Demand, Inside, Windows, cut

STATISTICS: tuple[Statistics, ...] = ("exact", "sampled", "frozen", "running")
NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
GROUP_NAMES = ("input", "num_groups", "weight", "bias", "eps")
INSTANCE_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")


def check_statistics(statistics: Statistics) -> None:
    if statistics not in STATISTICS:
        raise ValueError(f"statistics has to be one of {', '.join(map(repr, STATISTICS))}, but got {statistics!r}")


def settings(node: fx.Node, values: Mapping[fx.Node, Any] | None = None) -> dict[str, Any]:
    """The arguments of a call of batch_norm by name, with values for nodes where they are given."""
    given = named(node.args, dict(node.kwargs), NAMES)
    given = {"momentum": 0.1, "eps": 1e-5, "training": False, **given}
    if values is None:
        return given
    return {key: values.get(value) if isinstance(value, fx.Node) else value for key, value in given.items()}


def running(node: fx.Node) -> list[Any]:
    given = settings(node)
    return [given.get("running_mean"), given.get("running_var")]


def weights(node: fx.Node) -> tuple[Any, Any]:
    """The nodes of weight and bias of a call of batch_norm."""
    given = settings(node)
    return given.get("weight"), given.get("bias")


def running_moments(node: fx.Node, values: Mapping[fx.Node, Any]) -> Moments:
    """The statistics of a call that does not take them from the batch."""
    given = settings(node, values)
    return Moments(given["running_mean"], (given["running_var"] + given["eps"]).rsqrt())


def keeps_running(node: fx.Node) -> bool:
    """Whether a call takes its running statistics and changes them by those of what it is given."""
    return node.target is running_batch_norm


def from_tiles(
    node: fx.Node, values: Mapping[fx.Node, Any], found: Spread, dtype: torch.dtype
) -> tuple[Moments, Callable[[], None]]:
    """The statistics of a call of batch_norm, found tile by tile, and what makes the running ones take them up."""
    given = settings(node, values)
    mean, variance = given.get("running_mean"), given.get("running_var")
    if found.number <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, but {node} is given one")

    def change() -> None:
        if mean is not None and variance is not None:
            mean.lerp_(found.mean.to(mean.dtype), given["momentum"])
            variance.lerp_(found.variance(unbiased=True).to(variance.dtype), given["momentum"])

    return found.moments(given["eps"], dtype), change


def running_before(node: fx.Node, values: Mapping[fx.Node, Any]) -> Moments:
    """Those of a call that is about to change them."""
    mean, inverse_std = running_moments(node, values)
    return Moments(mean.clone(), inverse_std)


def normalise(
    input: Tensor,  # noqa: A002  # as F.batch_norm has it
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Moments]:
    """What `F.batch_norm` does in training, bit for bit, running statistics included; and the statistics it used."""
    _check_number([input])
    y, mean, inverse_std, _, _ = torch._batch_norm_impl_index(
        input, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
    )
    return y, Moments(mean, inverse_std)


def normalise_by_running(
    input: Tensor,  # noqa: A002
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Moments]:
    """What `running_batch_norm` does, and the statistics it used."""
    used = Moments(running_mean.clone(), (running_var + eps).rsqrt())
    return running_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps), used


def normalise_kept(
    moments: Moments,
    policy: Statistics,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` on some samples of a batch with the statistics of all, which were seen before."""
    y: Tensor = _Kept.apply(input, weight, bias, *moments, policy == "sampled")  # type: ignore[no-untyped-call]
    return y


class _Kept(torch.autograd.Function):
    """By torch's own kernels: those of training, given statistics of other cells, compute the sampled gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, inverse_std: Tensor, sampled: bool
    ) -> Tensor:
        ctx.sampled = sampled
        variance = inverse_std.reciprocal().square()
        ctx.save_for_backward(x, gamma, mean, inverse_std, variance)
        y, _, _ = torch.native_batch_norm(x, gamma, beta, mean, variance, False, 0.0, 0.0)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, inverse_std, variance = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:3]]
        if not any(wanted):
            return (None,) * 6
        dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
            dy, x, gamma, mean, variance, mean, inverse_std, ctx.sampled, 0.0, wanted
        )
        found = (dx, dgamma, dbeta)
        return *(each if want else None for each, want in zip(found, wanted, strict=True)), None, None, None


def normalise_together(
    node: fx.Node, values: Mapping[fx.Node, Any], parts: list[Tensor], policy: Statistics, reuse: bool
) -> list[Tensor]:
    """The same on a batch in parts, to rounding; the first alone has gradients. `reuse` writes over the others."""
    given = settings(node, values)
    weight, bias = given.get("weight"), given.get("bias")
    _check_number(parts)
    used = running_before(node, values) if keeps_running(node) else None
    found = _moments_of_all(given, [x.detach() for x in parts])
    used = found if used is None else used
    cells = parts[0].numel() // parts[0].shape[1] if policy == "sampled" else None
    how = Epilogue(moments=used, cells=cells)
    parts[0] = finish(parts[0], weight, bias, how)
    with torch.no_grad():
        for i, x in enumerate(parts):
            if i:
                out = x if reuse and x.dtype == used.mean.dtype else None
                parts[i] = normalised(x, weight, bias, how, out)
    return parts


def _moments_of_all(given: Mapping[str, Any], parts: list[Tensor]) -> Moments:
    """Of a batch in parts; the running statistics take them up."""
    tracked, momentum, eps = None, given["momentum"], given["eps"]
    if given.get("running_mean") is not None:
        tracked = (given["running_mean"], given["running_var"])
    fast = kernels.moments(parts, eps, tracked, momentum)
    if fast is not None:
        return Moments(*fast)
    sizes = [x.numel() // x.shape[1] for x in parts]
    total = sum(sizes)
    moments = [_moments(x) for x in parts]
    mean = torch.stack([m * (n / total) for (m, _), n in zip(moments, sizes, strict=True)]).sum(0)
    spread = [(v + (m - mean).square()) * (n / total) for (m, v), n in zip(moments, sizes, strict=True)]
    variance = torch.stack(spread).sum(0)
    if tracked is not None:
        for old, new in zip(tracked, (mean, variance * (total / (total - 1))), strict=True):
            old.lerp_(new.to(old.dtype), momentum)
    return Moments(mean, (variance + eps).rsqrt())


def _check_number(parts: Sequence[Tensor]) -> None:
    if sum(x.numel() for x in parts) == parts[0].shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(parts[0].shape)}"
        )


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel, in at least float32."""
    x = x.float() if x.dtype.itemsize < 4 else x
    variance, mean = torch.var_mean(x, [axis for axis in range(x.ndim) if axis != 1], correction=0)
    return mean, variance


# Statistics over the positions of a sample.


class SampleNorm(NamedTuple):
    """How windows are normalised with the statistics of their samples."""

    mean: Tensor  # (samples, groups)
    inverse_std: Tensor
    sample: Tensor  # (windows,)
    inside: Tensor | None  # (windows, axes, 2), see windows.py
    axes: tuple[int, ...]
    policy: Statistics


def _sample_settings(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, int, Any, Any, float]:
    """Input, groups, weight, bias and eps of a call of group_norm or instance_norm."""
    groups = _groups(args, kwargs)
    given = named(args, dict(kwargs), GROUP_NAMES if groups else INSTANCE_NAMES)
    return (
        given["input"],
        groups or given["input"].shape[1],
        given.get("weight"),
        given.get("bias"),
        given.get("eps", 1e-5),
    )


def groups_of(node: fx.Node, channels: int) -> int:
    """Groups of channels of a call of group_norm or instance_norm."""
    return _groups(node.args, node.kwargs) or channels


def eps_of(node: fx.Node) -> float:
    names = GROUP_NAMES if _groups(node.args, node.kwargs) else INSTANCE_NAMES
    return float(named(node.args, dict(node.kwargs), names).get("eps", 1e-5))


def _groups(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """None where every channel is a group, as in instance_norm."""
    found = kwargs.get("num_groups", args[1] if len(args) > 1 else None)
    return found if isinstance(found, int) else None


def normalise_samples(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """group_norm or instance_norm, and the statistics that were used."""
    x, groups, weight, bias, eps = _sample_settings(args, kwargs)
    n, c, cells = x.shape[0], x.shape[1], x[0, 0].numel()
    y, mean, inverse_std = torch.native_group_norm(x.contiguous(), weight, bias, n, c, cells, groups, eps)
    return y, (mean.reshape(n, groups), inverse_std.reshape(n, groups))


def normalise_windows(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], how: SampleNorm) -> Tensor:
    x, groups, weight, bias, _ = _sample_settings(args, kwargs)
    each = x.shape[1] // groups

    def spread(values: Tensor) -> Tensor:
        return values.to(x.dtype)[how.sample].repeat_interleave(each, 1).view(len(x), -1, *[1] * (x.ndim - 2))

    x_hat: Tensor = _SampleNorm.apply(x, spread(how.mean), spread(how.inverse_std), groups, how)  # type: ignore[no-untyped-call]
    shape = (1, -1, *[1] * (x.ndim - 2))
    x_hat = x_hat if weight is None else x_hat * weight.view(shape)
    return x_hat if bias is None else x_hat + bias.view(shape)


class _SampleNorm(torch.autograd.Function):
    """(x - mean) / std with the statistics of each sample and group; backward as in the note at the top, per sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, inverse_std: Tensor, groups: int, how: SampleNorm) -> Tensor:
        ctx.save_for_backward(x, mean, inverse_std)
        ctx.groups, ctx.how = groups, how
        return (x - mean) * inverse_std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse_std = ctx.saved_tensors
        how, groups = ctx.how, ctx.groups
        if how.policy == "frozen":
            return dy * inverse_std, None, None, None, None
        x_hat = (x - mean) * inverse_std
        valid = _inside(x, how.inside, how.axes)
        dy = dy if valid is None else torch.where(valid, dy, 0)
        samples = len(how.mean)

        def summed(values: Tensor) -> Tensor:
            per_window = values.reshape(len(x), groups, -1).sum(2)
            return per_window.new_zeros(samples, groups).index_add_(0, how.sample, per_window)

        counts = summed(torch.ones_like(x) if valid is None else valid.to(x.dtype).expand_as(x)).clamp(min=1)
        each = x.shape[1] // groups

        def spread(values: Tensor) -> Tensor:
            return values[how.sample].repeat_interleave(each, 1).view(len(x), -1, *[1] * (x.ndim - 2))

        dx = dy - spread(summed(dy) / counts) - x_hat * spread(summed(dy * x_hat) / counts)
        dx = dx if valid is None else torch.where(valid, dx, 0)
        return dx * inverse_std, None, None, None, None


def _inside(x: Tensor, inside: Tensor | None, axes: tuple[int, ...]) -> Tensor | None:
    return None if inside is None else cells_inside(x, Epilogue(inside=inside, axes=axes))


def pool_windows(
    x: Tensor, mean: Tensor, sample: Tensor, inside: Tensor | None, demand: Demand, policy: Statistics
) -> Tensor:
    """The mean over all positions of a sample, of the forward pass; its gradient falls on the windows' cells."""
    pooled: Tensor = _Pool.apply(x, mean.detach(), sample, inside, demand, policy)  # type: ignore[no-untyped-call]
    return pooled


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, sample: Tensor, inside: Tensor | None, demand: Demand, policy: Statistics
    ) -> Tensor:
        ctx.save_for_backward(x, sample, inside)
        ctx.demand, ctx.policy = demand, policy
        ctx.keeps = mean.ndim == x.ndim
        return mean.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, sample, inside = ctx.saved_tensors
        if ctx.policy == "frozen":
            return torch.zeros_like(x), None, None, None, None, None
        batch, positions = ctx.demand.axes[0], ctx.demand.positions
        x = x.movedim(batch, 0)
        axes = tuple(axis + (axis < batch) for axis in positions)
        ones, number = _cells_that_count(x, axes, inside, sample, grad.shape[batch])
        if not ctx.keeps:
            for axis in sorted(positions):
                grad = grad.unsqueeze(axis)
        each = grad.movedim(batch, 0)
        each = (each / number.view(-1, *[1] * (each.ndim - 1)))[sample]
        dx = (each * ones).expand(x.shape)
        return dx.movedim(0, batch).to(x.dtype), None, None, None, None, None


def _cells_that_count(
    x: Tensor, axes: tuple[int, ...], inside: Tensor | None, sample: Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """One for each cell of a window that lies inside the map; and how many there are in the windows of each sample."""
    valid = _inside(x, inside, axes)
    shape = [x.shape[axis] if axis == 0 or axis in axes else 1 for axis in range(x.ndim)]
    ones = x.new_ones(shape) if valid is None else valid.expand(shape).to(x.dtype)
    per_window = ones.flatten(1).sum(1)
    return ones, per_window.new_zeros(samples).index_add_(0, sample, per_window).clamp(min=1)


def read_whole(x: Tensor, whole: Tensor, windows: Windows, inside: Inside, demand: Demand) -> Tensor:
    """All of the map that x are windows of, as it was in the forward pass.

    The gradient that arrives at it is that of all M cells of a sample. What falls on the W cells of its windows counts
    M / W times, so that it stands for all of it, as it does for a mean.
    """
    found: Tensor = _Whole.apply(x, whole.detach(), windows, inside, demand)  # type: ignore[no-untyped-call]
    return found


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, windows: Windows, inside: Inside, demand: Demand) -> Tensor:
        ctx.windows, ctx.inside, ctx.demand = windows, inside, demand
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        windows, demand = ctx.windows, ctx.demand
        taken = cut(grad, windows, demand)
        ranges = None if ctx.inside.complete else ctx.inside.ranges
        ones, number = _cells_that_count(taken, demand.positions, ranges, windows.sample, len(grad))
        times = math.prod(grad.shape[axis] for axis in demand.positions) / number
        return taken * ones * times[windows.sample].view(-1, *[1] * (taken.ndim - 1)), None, None, None, None
