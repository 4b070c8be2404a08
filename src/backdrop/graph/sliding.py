"""Rules for calls that read other cells than their own: convolutions, pooling, interpolation, padding.

On a window they run without padding, because the window already holds the neighbours; cells of the window that lie
outside the map are set to what the call would have padded with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from backdrop.graph.reach import Taps, adaptive, sampled, transposed, window
from backdrop.graph.table import Call, Slide, Step, UnsupportedError, Where, as_tuple, register_rule


def named(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs


CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def _batched(call: Call, dimensions: int) -> None:
    if len(call.before) != dimensions + 2:
        raise UnsupportedError("its input has no axis of samples")


def _conv(dimensions: int, function: Callable[..., Tensor]) -> Callable[[Call], Step]:
    def rule(call: Call) -> Step:
        _batched(call, dimensions)
        spatial = call.spatial()
        given = named(call.node.args, dict(call.node.kwargs), CONV)
        weight = given["weight"]
        if not isinstance(weight, fx.Node):
            raise UnsupportedError("its weight is no tensor")
        kernel = call.shapes[weight][2:]
        stride, dilation = (as_tuple(given.get(key, 1), dimensions) for key in ("stride", "dilation"))
        before, after = _padding(given.get("padding", 0), kernel, dilation, dimensions)
        left = [0 if axis in spatial else low for axis, low in enumerate(before)]
        if any(before[axis] != after[axis] for axis in range(dimensions) if axis not in spatial):
            if spatial:
                raise UnsupportedError(
                    "padding='same' with an even kernel is not supported along an axis without a mask"
                )
            return call.same()
        slides = [
            Slide(stride[a], -before[a], dilation[a] * (kernel[a] - 1) - before[a], 1, dilation[a]) for a in spatial
        ]

        def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
            given = named(args, kwargs, CONV)
            return function(
                given["input"], given["weight"], given.get("bias"), stride, left, dilation, given.get("groups", 1)
            )

        return call.slides(slides, run=run) if spatial else call.same()

    return rule


def _padding(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int], dimensions: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Before the first cell and behind the last."""
    if padding == "valid":
        return (0,) * dimensions, (0,) * dimensions
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    both = as_tuple(padding, dimensions)
    return both, both


def _transposed(dimensions: int, function: Callable[..., Tensor]) -> Callable[[Call], Step]:
    def rule(call: Call) -> Step:
        _batched(call, dimensions)
        spatial = call.spatial()
        if not spatial:
            return call.same()
        given = named(call.node.args, dict(call.node.kwargs), TRANSPOSED)
        kernel = call.shapes[given["weight"]][2:]
        stride, dilation = (as_tuple(given.get(key, 1), dimensions) for key in ("stride", "dilation"))
        padding, more = (as_tuple(given.get(key, 0), dimensions) for key in ("padding", "output_padding"))
        slides = [
            Slide(1, min(padding[a] - dilation[a] * (kernel[a] - 1) + stride[a] - 1, padding[a]), padding[a], stride[a])
            for a in spatial
        ]
        left = [0 if a in spatial else padding[a] for a in range(dimensions)]
        right = [stride[a] - 1 if a in spatial else more[a] for a in range(dimensions)]

        def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
            given = named(args, kwargs, TRANSPOSED)
            out = function(
                *(given["input"], given["weight"], given.get("bias"), stride, left, right),
                *(given.get("groups", 1), dilation),
            )
            for i, a in enumerate(spatial):
                first_in, first_out = where.first[i]
                out = out.narrow(a + 2, first_out + padding[a] - first_in * stride[a], where.size[i])
            return out

        cells = [transposed(kernel[a], stride[a], padding[a], dilation[a]) for a in spatial]
        return call.slides(slides, run=run, cells=cells)

    return rule


def _pool(name: str) -> Callable[[Call], Step]:
    """Max and average pooling in any dimension."""
    largest, dimensions = name.startswith("max"), int(name[-2])
    function = getattr(F, name)
    names = ("input", "kernel_size", "stride", "padding")
    rest = ("dilation", "ceil_mode", "return_indices") if largest else ("ceil_mode", "count_include_pad")
    order = (*names, *rest, *(() if largest or dimensions == 1 else ("divisor_override",)))

    def rule(call: Call) -> Step:
        _batched(call, dimensions)
        settings = named(call.node.args, dict(call.node.kwargs), order)
        spatial = call.spatial()
        if not spatial:
            return call.same()
        if settings.get("return_indices"):
            raise UnsupportedError("return_indices=True is not supported")
        kernel = as_tuple(settings["kernel_size"], dimensions)
        stride = settings.get("stride")
        stride = kernel if stride is None or stride == () or stride == [] else as_tuple(stride, dimensions)
        padding = as_tuple(settings.get("padding", 0), dimensions)
        dilation = as_tuple(settings.get("dilation", 1), dimensions)
        ceil = bool(settings.get("ceil_mode", False))
        if ceil and len(spatial) < dimensions:
            raise UnsupportedError("ceil_mode=True is not supported along an axis without a mask")
        left = [0 if axis in spatial else size for axis, size in enumerate(padding)]
        ragged = ceil or any(padding[axis] for axis in spatial)
        count_padding, override = settings.get("count_include_pad", True), settings.get("divisor_override")

        def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
            x: Tensor = args[0] if args else kwargs["input"]
            pooled: Tensor
            if largest:
                pooled = function(x, kernel, stride, left, dilation)
                return pooled
            if override is not None:
                pooled = function(x, kernel, stride, left, False, True, override)
                return pooled
            pooled = function(x, kernel, stride, left, False, count_padding)
            if not ragged:
                return pooled
            for i, (axis, position) in enumerate(zip(spatial, where.positions(), strict=True)):
                size, first = where.sizes[i], position * stride[axis] - padding[axis]
                low, high = (-padding[axis], size + padding[axis]) if count_padding else (0, size)
                count = (first + kernel[axis]).clamp(max=high) - first.clamp(min=low)
                share = kernel[axis] / count.clamp(min=1).to(pooled.dtype)
                pooled = pooled * along(share, axis + 2, pooled.ndim)
            return pooled

        slides = [
            Slide(stride[a], -padding[a], dilation[a] * (kernel[a] - 1) - padding[a], 1, dilation[a]) for a in spatial
        ]
        return call.slides(slides, fill=-math.inf if largest else 0.0, run=run)

    return rule


def along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """(windows, cells) as a tensor that broadcasts along axis 0 and `axis`."""
    return values.view(values.shape[0], *(values.shape[1] if i == axis else 1 for i in range(1, ndim)))


def _adaptive(name: str) -> Callable[[Call], Step]:
    """Where every position has as many cells as every other; to one position only where samples are followed."""
    dimensions, plain = int(name[-2]), getattr(F, name.removeprefix("adaptive_"))

    def rule(call: Call) -> Step:
        _batched(call, dimensions)
        if not isinstance(call.shape, tuple) or call.argument(2, "return_indices", False):
            raise UnsupportedError("return_indices=True is not supported")
        spatial = call.spatial()
        if not spatial:
            return call.same()
        before, after = call.before[2:], call.shape[2:]
        if call.reading:
            if any(after[a] == 1 for a in spatial):
                raise UnsupportedError("it pools over all positions")
            return call.slides([None] * len(spatial), cells=[adaptive(before[a], after[a]) for a in spatial])
        return _evenly(call, spatial, plain)

    return rule


def _evenly(call: Call, spatial: Sequence[int], plain: Callable[..., Tensor]) -> Step:
    """Pooling where every position has as many cells, none of them twice."""
    before, after = call.before[2:], call.shape[2:]
    if any(n % m for n, m in zip(before, after, strict=True)):
        raise UnsupportedError("its positions have different numbers of cells")
    kernel = tuple(n // m for n, m in zip(before, after, strict=True))
    slides = [Slide(kernel[a], 0, kernel[a] - 1) for a in spatial]

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Any:
        return plain(args[0] if args else kwargs["input"], kernel)

    return call.slides(slides, fill=None, run=run)


def _lp_pool(dimensions: int) -> Callable[[Call], Step]:
    def rule(call: Call) -> Step:
        _batched(call, dimensions)
        spatial = call.spatial()
        if not spatial:
            return call.same()
        given = named(
            call.node.args, dict(call.node.kwargs), ("input", "norm_type", "kernel_size", "stride", "ceil_mode")
        )
        kernel = as_tuple(given["kernel_size"], dimensions)
        stride = kernel if given.get("stride") in (None, (), []) else as_tuple(given["stride"], dimensions)
        if any((call.shape[a + 2] - 1) * stride[a] + kernel[a] > call.before[a + 2] for a in range(dimensions)):
            raise UnsupportedError("ceil_mode=True is not supported")
        return call.slides([Slide(stride[a], 0, kernel[a] - 1) for a in spatial], fill=None)

    return rule


INTERPOLATE = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")


def _interpolate(call: Call) -> Step:
    given = named(call.node.args, dict(call.node.kwargs), INTERPOLATE)
    mode = given.get("mode", "nearest")
    spatial = call.spatial()
    if not spatial:
        return call.same()
    if call.reading:
        return call.slides([None] * len(spatial), cells=[_interpolated(call, given, mode, a) for a in spatial])
    if mode == "area":
        return _evenly(call, spatial, (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(call.before) - 3])
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear"):
        raise UnsupportedError(f"mode={mode!r} is not supported")
    if given.get("antialias"):
        raise UnsupportedError("antialias=True is not supported")
    before, after = call.before[2:], call.shape[2:]
    scales = None if given.get("align_corners") else given.get("scale_factor")  # which counts for nothing there
    for i, a in enumerate(range(len(before))):
        scale = None if scales is None else as_tuple(scales, len(before))[i]
        if scale is not None and not given.get("recompute_scale_factor") and before[a] * scale != after[a]:
            raise UnsupportedError("its scale is not that of its sizes")
    shrinks = any(after[a] < before[a] for a in spatial)
    if mode == "nearest" and shrinks and all(before[a] % after[a] == 0 for a in spatial):
        downs = {a: before[a] // after[a] for a in spatial}
        if len(spatial) < len(before):
            raise UnsupportedError("sizes along axes without a mask change too")

        def stride(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
            x: Tensor = args[0] if args else kwargs["input"]
            return x[(slice(None), slice(None), *(slice(None, None, downs[a]) for a in spatial))]

        return call.slides([Slide(downs[a], 0, 0) for a in spatial], fill=None, run=stride)
    if given.get("align_corners") or any(after[a] % before[a] for a in spatial):
        if any(before[a] != after[a] for a in range(len(before)) if a not in spatial):
            raise UnsupportedError("sizes along axes without a mask change too")
        return _resampled(call, mode, bool(given.get("align_corners")), spatial)
    ups = {a: after[a] // before[a] for a in spatial}
    if mode.startswith("nearest"):
        _check_cells(call, mode, spatial)
        slides, fill = [Slide(up=ups[a]) for a in spatial], None
    else:
        slides = [Slide(2, 1 - ups[a], 1 + ups[a], 2 * ups[a]) for a in spatial]
        fill = "replicate"

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        size = [x.shape[a + 2] * ups[a] if a in ups else after[a] for a in range(len(after))]
        out = F.interpolate(x, size, mode=mode)
        return crop(out, where, [(a + 2, ups[a]) for a in spatial])

    return call.slides(slides, fill=fill, run=run)  # type: ignore[arg-type]


def _resampled(call: Call, mode: str, aligned: bool, spatial: Sequence[int]) -> Step:
    """Interpolation to any size: cell i of n, of m that there are, reads those around i m / n, or less than
    |1 - m / n| away from there where corners are aligned. Weights differ from cell to cell, so each axis is a product
    with a matrix for each window."""
    ratios = [Fraction(call.before[a + 2], call.shape[a + 2]) for a in spatial]
    if mode.startswith("nearest"):
        _check_cells(call, mode, spatial)
    slides = []
    for ratio in ratios:
        down, up = ratio.numerator, ratio.denominator
        if mode == "nearest":
            slides.append(Slide(down, 0, 0, up))
        elif mode == "nearest-exact":
            slides.append(Slide(2 * down, down, down, 2 * up))
        elif aligned:
            slides.append(Slide(down, min(0, down - up), max(0, down - up) + up, up))
        else:
            slides.append(Slide(2 * down, down - up, down + up, 2 * up))

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        with torch.autocast(x.device.type, enabled=False):
            for i, (a, position) in enumerate(zip(spatial, where.positions(), strict=True)):
                (first_in, first_out), cells = where.first[i], where.sizes[i]
                low, high, share = _sources(position, mode, aligned, cells, call.shape[a + 2])
                start = (position[:, :1] - first_out) * ratios[i].numerator // ratios[i].denominator + first_in
                column = torch.arange(x.shape[a + 2], device=x.device)
                matrix = (1 - share) * ((low - start)[..., None] == column)
                matrix = (matrix + share * ((high - start)[..., None] == column)).to(x.dtype)
                x = x.movedim(a + 2, -1)
                x = (x @ matrix.mT.reshape(len(matrix), *[1] * (x.ndim - 3), *matrix.mT.shape[1:])).movedim(-1, a + 2)
        return x

    return call.slides(slides, fill=0.0, run=run)


def _check_cells(call: Call, mode: str, spatial: Sequence[int]) -> None:
    """The nearest cells as torch finds them, with float32, have to be those of whole numbers."""
    for a in spatial:
        cells, positions = call.before[a + 2], call.shape[a + 2]
        at = torch.arange(positions)
        exact = (at * cells // positions) if mode == "nearest" else ((2 * at + 1) * cells // (2 * positions))
        if not torch.equal(_sources(at, mode, False, cells, positions)[0], exact):
            raise UnsupportedError("torch rounds the cells that it takes")


def _sources(position: Tensor, mode: str, aligned: bool, cells: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which cells a position reads, and the share of the second one."""
    at = position.clamp(0, positions - 1)
    if mode.startswith("nearest"):
        half = 0.5 if mode == "nearest-exact" else 0.0
        scale = torch.tensor(cells / positions, dtype=torch.float32, device=at.device)  # as torch itself
        low = ((at.float() + half) * scale).long().clamp(max=cells - 1)
        return low, low, torch.zeros((), dtype=torch.float64, device=at.device)
    if aligned:
        source = at.double() * ((cells - 1) / (positions - 1) if positions > 1 else 0.0)
    else:
        source = ((at.double() + 0.5) * (cells / positions) - 0.5).clamp(min=0)
    low = source.long().clamp(max=cells - 1)
    return low, (low + 1).clamp(max=cells - 1), (source - low)[..., None]


def _interpolated(call: Call, given: dict[str, Any], mode: str, axis: int) -> Taps:
    """The cells that interpolation reads along a spatial axis."""
    cells, positions = call.before[axis + 2], call.shape[axis + 2]
    if given.get("antialias"):
        raise UnsupportedError("there is no rule for interpolation with antialias=True")
    if mode == "area":
        return adaptive(cells, positions)
    scales = None if given.get("recompute_scale_factor") else given.get("scale_factor")
    ratio = Fraction(cells, positions)
    if scales is not None:
        factor = float(as_tuple(scales, len(call.before) - 2)[axis])
        ratio = 1 / Fraction(factor).limit_denominator(1000)
        if not math.isclose(1 / ratio, factor, rel_tol=1e-9):
            raise UnsupportedError(f"its factor {factor} is not a simple ratio")
    if given.get("align_corners") and cells > 1:  # torch takes the first cell for a single position
        ratio, start = Fraction(cells - 1, positions - 1) if positions > 1 else Fraction(cells), Fraction(0)
    else:
        start = {"nearest": Fraction(0), "nearest-exact": ratio / 2}.get(mode, (ratio - 1) / 2)
    around = {"nearest": (0, 0), "nearest-exact": (0, 0), "bicubic": (1, 2)}.get(mode, (0, 1))
    return sampled(ratio, start, *around)


def crop(out: Tensor, where: Where, axes: Sequence[tuple[int, int]]) -> Tensor:
    """What was asked for of an upsampled window, which begins where its input begins, times the scale."""
    for i, (axis, scale) in enumerate(axes):
        first_in, first_out = where.first[i]
        out = out.narrow(axis, first_out - first_in * scale, where.size[i])
    return out


PAD = ("input", "pad", "mode", "value")


def _pad(call: Call) -> Step:
    given = named(call.node.args, dict(call.node.kwargs), PAD)
    pads, mode, value = list(given["pad"]), given.get("mode", "constant"), given.get("value")
    if not all(isinstance(size, int) for size in pads):
        raise UnsupportedError("its arguments depend on the data")
    ndim = call.ndim
    sides = {ndim - 1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)}
    if any(sides.get(call.axes[0], (0, 0))):
        raise UnsupportedError("it mixes samples")
    followed = [axis for axis in call.axes[1:] if any(sides.get(axis, (0, 0)))]
    if not followed:
        return call.same()
    ends = [sides.get(axis, (0, 0)) for axis in call.axes[1:]]
    if call.reading:
        return call.slides([None] * len(ends), cells=[window(1, padding=low, outside=mode) for low, _ in ends])
    if mode == "circular":
        raise UnsupportedError("mode='circular' is not supported")
    rest = [0 if ndim - 1 - i // 2 in followed else size for i, size in enumerate(pads)]
    if mode != "constant" and any(rest):
        raise UnsupportedError(f"mode={mode!r} along axes without a mask is not supported")
    fill: Any = {"constant": 0.0 if value is None else value, "replicate": "replicate", "reflect": "reflect"}[mode]
    if not isinstance(fill, (int, float, str)):
        raise UnsupportedError("its arguments depend on the data")

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        if mode == "reflect":
            for i, axis in enumerate(call.axes[1:]):
                first_in, first_out = where.first[i]
                x = x.narrow(axis, first_out - ends[i][0] - first_in, where.size[i])
        return F.pad(x, rest, "constant", 0.0 if value is None else value) if any(rest) else x

    slides = [
        Slide(1, -low - 2 * max(0, high), -low + 2 * max(0, low)) if mode == "reflect" else Slide(1, -low, -low)
        for low, high in ends
    ]
    return call.slides(slides, fill=fill, run=run)  # type: ignore[arg-type]


def _pixel_shuffle(call: Call) -> Step:
    _batched(call, 2)
    spatial = call.spatial()
    factor = call.argument(1, "upscale_factor")
    if not spatial:
        return call.same()

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        out = F.pixel_shuffle(args[0] if args else kwargs["input"], factor)
        return crop(out, where, [(a + 2, factor) for a in spatial])

    if len(spatial) < 2:
        raise UnsupportedError("it moves channels along an axis without a mask")
    return call.slides([Slide(up=factor) for _ in spatial], fill=None, run=run)


def _pixel_unshuffle(call: Call) -> Step:
    _batched(call, 2)
    spatial = call.spatial()
    factor = call.argument(1, "downscale_factor")
    if not spatial:
        return call.same()
    if len(spatial) < 2:
        raise UnsupportedError("it moves positions along an axis without a mask")
    return call.slides([Slide(factor, 0, factor - 1) for _ in spatial], fill=None)


for _n in (1, 2, 3):
    register_rule(getattr(torch, f"conv{_n}d"))(_conv(_n, getattr(torch, f"conv{_n}d")))
    register_rule(getattr(torch, f"conv_transpose{_n}d"))(_transposed(_n, getattr(torch, f"conv_transpose{_n}d")))
    for _kind in ("max", "avg"):
        _name = f"{_kind}_pool{_n}d"
        for _home in (F, torch, torch._C._nn):
            for _function in (getattr(_home, _name, None), getattr(_home, f"_{_name}", None)):
                if _function is not None:
                    register_rule(_function)(_pool(_name))
        _name = f"adaptive_{_kind}_pool{_n}d"
        for _home in (F, torch, torch._C._nn):
            for _function in (getattr(_home, _name, None), getattr(_home, f"_{_name}", None)):
                if _function is not None:
                    register_rule(_function)(_adaptive(_name))
    register_rule(getattr(F, f"lp_pool{_n}d"))(_lp_pool(_n))
register_rule(F.interpolate)(_interpolate)
register_rule(F.pad)(_pad)
register_rule(torch._C._nn.pad)(_pad)
register_rule(torch.constant_pad_nd)(_pad)
for _function in (F.pixel_shuffle, torch.pixel_shuffle):
    register_rule(_function)(_pixel_shuffle)
for _function in (F.pixel_unshuffle, torch.pixel_unshuffle):
    register_rule(_function)(_pixel_unshuffle)
