"""What layers with batch statistics do when only a part of the batch is differentiated.

In training, batch normalisation couples all samples and positions: y = gamma * x_hat + beta with x_hat = (x - m) * r,
where m and r = 1/sqrt(v + eps) come from all M cells of a channel. Its gradient is

    dx_i = gamma * r * (dy_i - sum_j dy_j / M - x_hat_i * sum_j dy_j x_hat_j / M)

which is dense even where dy is zero almost everywhere. Forward always uses the full statistics. Backward, by name:

- "exact": the formula as it stands. Nothing below such a layer can be skipped.
- "sampled": the formula over the cells that are computed again (W of them instead of M): the two sums are the same,
  and what they subtract falls on the sampled cells alone, an estimate of the exact gradient from the kept part.
- "frozen": m and r are constants: dx_i = gamma * r * dy_i.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from backdrop import _kernels
from backdrop.skip.finish import Finish, Moments, finish, normalised

Statistics: TypeAlias = Literal["exact", "sampled", "frozen"]
STATISTICS: tuple[Statistics, ...] = ("exact", "sampled", "frozen")


def check_statistics(statistics: Statistics) -> None:
    if statistics not in STATISTICS:
        raise ValueError(f"statistics has to be one of {', '.join(map(repr, STATISTICS))}, but got {statistics!r}")


def uses_batch_statistics(module: nn.Module) -> bool:
    if not isinstance(module, (_BatchNorm, _InstanceNorm)):
        return False
    return module.training or (module.running_mean is None and module.running_var is None)


def running_moments(layer: _BatchNorm) -> Moments:
    """The statistics of a layer that does not take them from the batch."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return Moments(layer.running_mean, (layer.running_var + layer.eps).rsqrt())


def normalise(layer: _BatchNorm, x: Tensor) -> tuple[Tensor, Moments]:
    """What `layer` does in training, bit for bit, running statistics included; and the statistics it used."""
    momentum = _count_batch(layer, x)
    tracked = layer.training and layer.track_running_stats
    running = (layer.running_mean, layer.running_var) if tracked else (None, None)
    # What F.batch_norm calls, but with the statistics among its results.
    y, mean, inverse_std, _, _ = torch._batch_norm_impl_index(
        x, layer.weight, layer.bias, *running, True, momentum, layer.eps, torch.backends.cudnn.enabled
    )
    return y, Moments(mean, inverse_std)


def normalise_together(layer: _BatchNorm, parts: list[Tensor], policy: Statistics, reuse: bool) -> list[Tensor]:
    """The same on a batch in parts, to rounding; the first alone has gradients. `reuse` writes over the others."""
    momentum = _count_batch(layer, *parts)
    used = _moments_of_all(layer, [x.detach() for x in parts], momentum)
    cells = parts[0].numel() // parts[0].shape[1] if policy == "sampled" else None
    how = Finish(moments=used, cells=cells)
    parts[0] = finish(parts[0], layer.weight, layer.bias, how)
    with torch.no_grad():
        for i, x in enumerate(parts):
            if i:
                out = x if reuse and x.dtype == used.mean.dtype else None
                parts[i] = normalised(x, layer.weight, layer.bias, how, out)
    return parts


def _moments_of_all(layer: _BatchNorm, parts: list[Tensor], momentum: float) -> Moments:
    """Of a batch in parts; the running statistics take them up."""
    running = None
    if layer.training and layer.track_running_stats:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        running = (layer.running_mean, layer.running_var)
    fast = _kernels.moments(parts, layer.eps, running, momentum)
    if fast is not None:
        return Moments(*fast)
    sizes = [x.numel() // x.shape[1] for x in parts]
    total = sum(sizes)
    moments = [_moments(x) for x in parts]
    mean = torch.stack([m * (n / total) for (m, _), n in zip(moments, sizes, strict=True)]).sum(0)
    spread = [(v + (m - mean).square()) * (n / total) for (m, v), n in zip(moments, sizes, strict=True)]
    variance = torch.stack(spread).sum(0)
    if running is not None:
        for old, new in zip(running, (mean, variance * (total / (total - 1))), strict=True):
            old.lerp_(new.to(old.dtype), momentum)
    return Moments(mean, (variance + layer.eps).rsqrt())


def _count_batch(layer: _BatchNorm, *parts: Tensor) -> float:
    """Check the input as the layer would, count one batch, and say how much it weighs in the running statistics."""
    for x in parts:
        layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    if sum(x.numel() for x in parts) == parts[0].shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(parts[0].shape)}"
        )
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            return 1.0 / float(layer.num_batches_tracked)
    return 0.0 if layer.momentum is None else layer.momentum


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel, in at least float32."""
    x = x.float() if x.dtype.itemsize < 4 else x
    variance, mean = torch.var_mean(x, [axis for axis in range(x.ndim) if axis != 1], correction=0)
    return mean, variance
