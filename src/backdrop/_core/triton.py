"""Triton kernels for `backdrop._core.kernels`, which says when they are used. Imported only where Triton is."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def multiply(product, grad, weight, count, outer, shared, inner, BLOCK: tl.constexpr):
    """`product = grad * weight` for `grad` (any, outer, shared, inner) and `weight` (outer, inner)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    factor = tl.load(weight + at // inner // shared % outer * inner + at % inner, mask=inside)
    value = tl.load(grad + at, mask=inside).to(tl.float32) * factor
    tl.store(product + at, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def weigh(u, size, p, numerator, PER_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Turn each row of uniform numbers into weights, in place: see `backdrop._core.draw.draw_units`."""
    row = u + tl.program_id(0).to(tl.int64) * size
    count = 0
    largest = -1.0
    largest_at = 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < size, other=-1.0)
        count += tl.sum((value >= p).to(tl.int32), 0)
        block_largest, block_at = tl.max(value, 0, return_indices=True)
        largest_at = tl.where(block_largest > largest, start + block_at, largest_at)
        largest = tl.maximum(block_largest, largest)
    factor = tl.full((), 0.0, tl.float32) + numerator
    if PER_COUNT:
        factor = tl.div_rn(factor, tl.maximum(count, 1).to(tl.float32))
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < size, other=-1.0)
        kept = (value >= p) | (at == largest_at)
        tl.store(row + at, tl.where(kept, factor, 0.0), mask=at < size)


@triton.jit
def _cells(r, rows, inside, height, width, INSIDE: tl.constexpr):
    """Whether rows (window, y, x) exist and lie inside the map."""
    valid = r < rows
    if INSIDE:
        k = r // (height * width)
        y = r // width % height
        x = r % width
        at = inside + k * 4
        valid &= (y >= tl.load(at, mask=valid, other=0)) & (y < tl.load(at + 1, mask=valid, other=0))
        valid &= (x >= tl.load(at + 2, mask=r < rows, other=0)) & (x < tl.load(at + 3, mask=r < rows, other=0))
    return valid


@triton.jit
def finish(
    y,
    x,
    scale,
    shift,
    inside,
    rows,
    channels,
    height,
    width,
    fill,
    RELU_FIRST: tl.constexpr,
    NORM: tl.constexpr,
    RELU_LAST: tl.constexpr,
    INSIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """See `backdrop.skip.epilogue`; x and y are (rows, channels), one row per cell."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CHANNELS)
    there = (r < rows)[:, None] & (c < channels)[None, :]
    at = r[:, None].to(tl.int64) * channels + c[None, :]
    v = tl.load(x + at, mask=there).to(tl.float32)
    if RELU_FIRST:
        v = tl.maximum(v, 0.0)
    if NORM:
        v = v * tl.load(scale + c, mask=c < channels)[None, :] + tl.load(shift + c, mask=c < channels)[None, :]
    if RELU_LAST:
        v = tl.maximum(v, 0.0)
    v = tl.where(_cells(r, rows, inside, height, width, INSIDE)[:, None], v, fill)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=there)


@triton.jit
def finish_sums(
    sums,
    dy,
    x,
    mean,
    inverse_std,
    scale,
    shift,
    inside,
    rows,
    channels,
    height,
    width,
    RELU_FIRST: tl.constexpr,
    RELU_LAST: tl.constexpr,
    INSIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of dy and of dy times the normalised x over the rows of each program, (programs, 2, channels)."""
    c = tl.arange(0, CHANNELS)
    known = c < channels
    m = tl.load(mean + c, mask=known)[None, :]
    s = tl.load(inverse_std + c, mask=known)[None, :]
    a = tl.zeros((ROWS, CHANNELS), tl.float32)
    b = tl.zeros((ROWS, CHANNELS), tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in range(tl.program_id(0) * ROWS, rows, step):
        r = start + tl.arange(0, ROWS)
        there = _cells(r, rows, inside, height, width, INSIDE)[:, None] & known[None, :]
        at = r[:, None].to(tl.int64) * channels + c[None, :]
        g = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if RELU_FIRST:
            v = tl.maximum(v, 0.0)
        if RELU_LAST:
            out = v * tl.load(scale + c, mask=known)[None, :] + tl.load(shift + c, mask=known)[None, :]
            g = tl.where(out > 0, g, 0.0)
        a += g
        b += g * (v - m) * s
    to = sums + tl.program_id(0) * 2 * channels + c
    tl.store(to, tl.sum(a, 0), mask=known)
    tl.store(to + channels, tl.sum(b, 0), mask=known)


@triton.jit
def finish_backward(
    dx,
    dy,
    x,
    mean,
    inverse_std,
    scale,
    shift,
    spread,
    inside,
    rows,
    channels,
    height,
    width,
    RELU_FIRST: tl.constexpr,
    NORM: tl.constexpr,
    SPREAD: tl.constexpr,
    RELU_LAST: tl.constexpr,
    INSIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CHANNELS)
    known = c < channels
    there = (r < rows)[:, None] & known[None, :]
    at = r[:, None].to(tl.int64) * channels + c[None, :]
    raw = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    v = tl.maximum(raw, 0.0) if RELU_FIRST else raw
    g = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.load(scale + c, mask=known)[None, :]
        if RELU_LAST:
            out = v * factor + tl.load(shift + c, mask=known)[None, :]
            g = tl.where(out > 0, g, 0.0)
        if SPREAD:
            hat = (v - tl.load(mean + c, mask=known)[None, :]) * tl.load(inverse_std + c, mask=known)[None, :]
            g -= tl.load(spread + c, mask=known)[None, :] + hat * tl.load(spread + channels + c, mask=known)[None, :]
        g *= factor
    elif RELU_LAST:
        g = tl.where(v > 0, g, 0.0)
    if RELU_FIRST:
        g = tl.where(raw > 0, g, 0.0)
    g = tl.where(_cells(r, rows, inside, height, width, INSIDE)[:, None], g, 0.0)
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=there)


@triton.jit
def moments(out, x, samples, channels, cells, ROWS: tl.constexpr, CELLS: tl.constexpr):
    """Count, mean and sum of squared deviations of x (samples, channels, cells), for a share of the samples each."""
    c = tl.program_id(0)
    count = 0.0
    mean = 0.0
    squares = 0.0
    step = tl.num_programs(1) * ROWS
    for first in range(tl.program_id(1) * ROWS, samples, step):
        n = first + tl.arange(0, ROWS)
        for start in range(0, cells, CELLS):
            i = start + tl.arange(0, CELLS)
            there = (n < samples)[:, None] & (i < cells)[None, :]
            at = (n[:, None].to(tl.int64) * channels + c) * cells + i[None, :]
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            more = tl.minimum(samples - first, ROWS).to(tl.float32) * tl.minimum(cells - start, CELLS).to(tl.float32)
            middle = tl.sum(tl.sum(value, 1), 0) / more
            off = tl.where(there, value - middle, 0.0)
            total = count + more
            apart = middle - mean
            squares += tl.sum(tl.sum(off * off, 1), 0) + apart * apart * count * more / total
            mean += apart * more / total
            count = total
    to = out + tl.program_id(1) * 3 * channels + c
    tl.store(to, count)
    tl.store(to + channels, mean)
    tl.store(to + 2 * channels, squares)


@triton.jit
def join_moments(
    mean_out,
    inverse_std_out,
    running_mean,
    running_var,
    parts,
    count_parts,
    channels,
    eps,
    momentum,
    TRACK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """From the moments of parts (parts, 3, channels) to those of all, and into the running statistics."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = c < channels
    count = tl.zeros((CHANNELS,), tl.float32)
    mean = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    for part in range(count_parts):
        at = parts + part * 3 * channels + c
        more = tl.load(at, mask=known, other=0.0)
        middle = tl.load(at + channels, mask=known, other=0.0)
        total = tl.maximum(count + more, 1.0)
        apart = middle - mean
        squares += tl.load(at + 2 * channels, mask=known, other=0.0) + apart * apart * count * more / total
        mean += apart * more / total
        count += more
    tl.store(mean_out + c, mean, mask=known)
    tl.store(inverse_std_out + c, 1.0 / tl.sqrt_rn(squares / count + eps), mask=known)
    if TRACK:
        old = tl.load(running_mean + c, mask=known)
        tl.store(running_mean + c, old + momentum * (mean - old), mask=known)
        old = tl.load(running_var + c, mask=known)
        tl.store(running_var + c, old + momentum * (squares / (count - 1) - old), mask=known)
