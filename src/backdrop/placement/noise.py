"""How strong is a mask? The bias and the variance of the masked gradient, measured on one batch.

The gradient g of a batch is computed once without masks and then many times with masks. The mean of the masked
gradients shows whether they are biased, their variance V how noisy they are, and a comparison with the gradients of
single samples says which minibatches would be as noisy: the effective batch size.

>>> import torch
>>> from torch import nn
>>> from backdrop import Backdrop
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(4, 1), Backdrop(0.75, exact=True))
>>> noise = gradient_noise(model, nn.functional.mse_loss, (torch.randn(64, 4), torch.randn(64, 1)), seed=0)
>>> print(noise.sentence)
In total the masked gradient is unbiased within its error; its noise is that of batches of 15.7 of 64 samples.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from backdrop._core.checks import check_int, check_p
from backdrop.graph.untouched import check_model
from backdrop.layers import Backdrop
from backdrop.placement.forecast import HEADINGS as FORECAST_HEADINGS
from backdrop.placement.forecast import Forecast, forecast
from backdrop.placement.gradients import Layer, Step, Sums, tensors, total

__all__ = ["LayerNoise", "Noise", "gradient_noise"]

Progress: TypeAlias = Callable[[Iterable[int]], Iterable[int]]

SIGMAS = 4  # errors that a mean may be away from the truth
ROUNDING = 1e-5  # of the size of a gradient, whatever the draws
REPEATED = 1e-3  # by how much a gradient may change from one time to the next, of its size

HEADINGS = ("layer", "parameters", "bias", "expected", "along", "+-", "variance / |g|^2", "effective batch size")


@dataclass(frozen=True)
class LayerNoise:
    """The masked gradient of one layer, g being the gradient without masks.

    Args:
        name: dotted path of the module that owns the parameters; "" for the model itself, "total" for all.
        parameters: how many numbers have a gradient.
        gradient: |g|.
        bias: |mean of the masked gradients - g| / |g|.
        bias_error: the size to expect of `bias` if there were none, sqrt(V / draws) / |g|.
        along: the mean of the masked gradients along g, <mean, g> / <g, g>: 1 without bias, 1 - p with scale="eq1".
        along_error: its standard error.
        variance: V, the trace of the covariance of the masked gradient.
        relative_variance: V / |g|^2.
        effective_batch_size: of the minibatches that would be as noisy; nan where that is unknown.
    """

    name: str
    parameters: int
    gradient: float
    bias: float
    bias_error: float
    along: float
    along_error: float
    variance: float
    relative_variance: float
    effective_batch_size: float

    @property
    def is_unbiased(self) -> bool:
        """Whether what was seen of a bias can be the noise of the draws."""
        return (
            self.bias <= SIGMAS * self.bias_error + ROUNDING
            and abs(self.along - 1) <= SIGMAS * self.along_error + ROUNDING
        )

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        numbers = (self.bias, self.bias_error, self.along, self.along_error, self.relative_variance)
        size = self.effective_batch_size
        last = "" if math.isnan(size) else f"{size:.1f}" if size >= 1 else f"{size:.2g}"
        return self.name or "(model)", str(self.parameters), *(f"{number:.3g}" for number in numbers), last


@dataclass(frozen=True)
class Noise:
    """The noise that masks make in a gradient; prints as a table.

    Args:
        rows: for each layer, in the order of the model.
        total: for all of them as one vector.
        draws: how many masked gradients were computed.
        batch_size: n.
        notes: what else to know.
        forecasts: for each mask alone, what it would do at other p, if `predict` asked for that.
    """

    rows: tuple[LayerNoise, ...]
    total: LayerNoise
    draws: int
    batch_size: int
    notes: tuple[str, ...] = ()
    forecasts: tuple[Forecast, ...] = ()

    @property
    def sentence(self) -> str:
        """The total in words."""
        row, n = self.total, self.batch_size
        said = "In total the masked gradient is unbiased within its error"
        if not row.is_unbiased:
            said = (
                f"In total the masked gradient is biased: its mean is {row.bias:.1%} away from the gradient without "
                f"masks, where {row.bias_error:.1%} is to be expected from {self.draws} draws, and has "
                f"{row.along:.3g} +- {row.along_error:.2g} times its length along it"
            )
        size = row.effective_batch_size
        if not size > 0:
            return f"{said}; its variance is {row.relative_variance:.3g} times its length squared."
        if size < 1:
            times = 1 / size - 1 / n  # V / S^2; that of single samples is 1 - 1/n
            return f"{said}; its variance is {times / (1 - 1 / n):.3g} times that of single samples."
        return f"{said}; its noise is that of batches of {size:.1f} of {n} samples."

    def __str__(self) -> str:
        lines = _aligned([HEADINGS, *(row.cells() for row in (*self.rows, self.total))])
        rule = "-" * len(lines[0])
        lines = [lines[0], rule, *lines[1:-1], rule, lines[-1], self.sentence]
        if self.forecasts:
            head, *more = _aligned([FORECAST_HEADINGS, *(row for one in self.forecasts for row in one.cells())])
            lines += ["", head, "-" * len(head), *more, *(one.sentence for one in self.forecasts)]
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]) for first, *others in table]


def gradient_noise(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Tensor | Sequence[Any],
    draws: int = 64,
    *,
    samples: int = 64,
    predict: Sequence[float] = (),
    units: int = 64,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Noise:
    """Measure the bias and the variance of the masked gradient of `loss(model(inputs), *targets)`, layer by layer.

    The **effective batch size** is how many samples of the batch, drawn at random without replacement, would give a
    gradient with the same variance. Let g_i be the gradient when only the output gradient of sample i is kept and
    multiplied by n, the size of the batch; their mean is g. Minibatches of b samples have the variance

        S^2/b (1 - b/n),    S^2 = 1/(n-1) sum_i |g_i - g|^2,    hence    b = S^2 / (V + S^2/n)

    for a masked gradient with the variance V. It is n where masks add no noise, `effective_batch_size(n, p)` for an
    exact mask on samples at the output, and below 1 where masks make more noise than a single sample.
    Where kept gradients are not scaled up (scale=None, "eq1"), V and with it the noise are smaller too.

    All is done on a copy of the model: the model, its gradients and buffers, the random state and the generators of
    masks are as before. The copy is put in training mode if the model is not. Dropout layers are off in it, so that
    masks alone make noise; other random layers would be counted with the masks, and a note says so.

    With `predict` it also says what each mask would do alone, at these p: the variance of a uniform mask and of one
    with choose="gradient", each exact or not as the mask is; the **best share** of units to keep, at which noise times
    work is least; and whether that is better than a smaller batch, whose noise times work is always the same. Work is
    that of `Skip`: 1 + 2a forward passes for a share a of the samples, 1 + 3a where gradients choose and for positions,
    3 without a mask. None of these masks is drawn.

    Takes `draws` forward and backward passes, up to `samples` backward passes besides, and memory for a copy of the
    model and two gradients in float64.

    Args:
        model: with at least one Backdrop layer whose p is above 0.
        loss: given the output of the model and the targets, returns a scalar.
        batch: (inputs, *targets), or the inputs alone. Axis 0 of the inputs is the batch. Of the outputs, which may be
            nested, every tensor whose axis 0 has that size holds a row per sample.
        draws: how many masked gradients to compute, at least 2. The error of `bias` falls with their square root.
        samples: the most gradients of single samples to compute; from a larger batch they are chosen at random.
        predict: probabilities at which to say what masks would do.
        units: the most units of a group whose contributions are looked at for that, a backward pass each; of masks on
            positions, of 8 samples at most.
        seed: makes the result repeatable; by default masks are drawn from the random state as it is.
        progress: what to wrap the loop over draws in, `rich.progress.track` or `tqdm` for instance.
    """
    check_model(model)
    if not callable(loss):
        raise TypeError(f"loss has to be a function of the model's output, but got {type(loss).__name__}")
    draws, samples = check_int("draws", draws, 2), check_int("samples", samples, 1)
    ps, units = [float(check_p(p)) for p in predict], check_int("units", units, 2)
    inputs, targets = _split(batch)
    given = tensors("inputs", inputs)
    n = next((len(x) for x in given if x.ndim), 0)
    if not n:
        raise ValueError("inputs have to hold a tensor whose axis 0 is the batch, with at least one sample")
    model, masks = _copied(model)
    devices = {x.device.index for x in (*model.parameters(), *given) if x.device.type == "cuda"}
    with torch.enable_grad(), torch.random.fork_rng(devices):
        if seed is not None:
            _seed(check_int("seed", seed), devices, masks)
        step = Step(model, loss, inputs, targets)
        for mask in masks:
            mask.training = False
        layers, notes = step.layers(), []
        if n < 2:
            notes.append("a batch of one sample has no smaller batches to compare with")
        elif not step.add_spread(layers, torch.randperm(n)[:samples].tolist(), n):
            notes.append("no output of the model has a row for each sample, so there is no effective batch size")
        changed = _changed(layers, step.gradient())
        if changed > REPEATED:
            notes.append(
                f"without masks the gradient changes by {changed:.1%} from one time to the next; that is counted as "
                "noise of the masks"
            )
        forecasts = _forecasts(step, masks, layers, ps, units, n, notes) if ps else []
        for mask in masks:
            mask.training = True
        for _ in (progress or iter)(range(draws)):
            for layer, vector in zip(layers, step.gradient(), strict=True):
                layer.add(vector)
    sums = [layer.sums() for layer in layers]
    rows = [_row(layer.name, part, n) for layer, part in zip(layers, sums, strict=True)]
    return Noise(tuple(rows), _row("total", total(sums), n), draws, n, tuple(notes), tuple(forecasts))


def _forecasts(
    step: Step,
    masks: Sequence[Backdrop],
    layers: Sequence[Layer],
    ps: Sequence[float],
    units: int,
    n: int,
    notes: list[str],
) -> list[Forecast]:
    names = {module: name for name, module in step.model.named_modules()}
    squared = math.fsum(float(layer.gradient @ layer.gradient) for layer in layers)
    spread, found = math.fsum(layer.spread for layer in layers), list[Forecast]()
    for mask in masks:
        told, why_not = forecast(step, names[mask], mask, ps, units, squared, spread / n / squared)
        found += told
        if why_not:
            notes.append(f"nothing is predicted for {names[mask]}: {why_not}")
    return found


def _changed(layers: Sequence[Layer], again: Iterable[Tensor]) -> float:
    squares = [((layer.gradient - x).square().sum(), x.square().sum()) for layer, x in zip(layers, again, strict=True)]
    off, size = (math.fsum(map(float, column)) for column in zip(*squares, strict=True))
    return _ratio(math.sqrt(off), math.sqrt(size))


def _row(name: str, sums: Sums, n: int) -> LayerNoise:
    draws, squared = len(sums.dots), sums.squared
    variance, size = sums.scatter / (draws - 1), math.sqrt(squared)
    return LayerNoise(
        name=name,
        parameters=sums.parameters,
        gradient=size,
        bias=_ratio(math.sqrt(sums.off), size),
        bias_error=_ratio(math.sqrt(variance / draws), size),
        along=_ratio(statistics.fmean(sums.dots), squared),
        along_error=_ratio(statistics.stdev(sums.dots) / math.sqrt(draws), squared),
        variance=variance,
        relative_variance=_ratio(variance, squared),
        effective_batch_size=_ratio(sums.spread, variance + sums.spread / n),
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _split(batch: Tensor | Sequence[Any]) -> tuple[Any, list[Any]]:
    if isinstance(batch, Tensor):
        return batch, []
    if not isinstance(batch, (tuple, list)) or not batch:
        raise TypeError(f"batch has to be (inputs, *targets) or one tensor, but got {type(batch).__name__}")
    inputs, *targets = batch
    return inputs, targets


def _copied(model: nn.Module) -> tuple[nn.Module, list[Backdrop]]:
    """A copy in training mode in which nothing but masks is random, and its masks."""
    copied = copy.deepcopy(model)
    if not model.training:
        copied.train()
    masks = [m for m in copied.modules() if isinstance(m, Backdrop) and m.training and float(m.p) > 0]
    if not masks:
        raise ValueError(
            "model has no Backdrop layer in training mode with p above 0, so its gradient is always the same; insert "
            "one, or raise its p"
        )
    for module in copied.modules():
        if isinstance(module, (_DropoutNd, nn.RReLU)):
            module.training = False
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
    return copied, masks


def _seed(seed: int, devices: Iterable[int], masks: Sequence[Backdrop]) -> None:
    """Every generator that masks may draw from, and no other: torch.manual_seed would change those of all devices."""
    own = {id(mask.generator): mask.generator for mask in masks if mask.generator is not None}
    used = [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices), *own.values()]
    for i, generator in enumerate(used):
        generator.manual_seed(seed + i)
