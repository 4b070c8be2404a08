"""Triton kernels for `backdrop._kernels`, which says when they are used. Imported only where Triton is."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def multiply(product, grad, weight, count, outer, shared, inner, BLOCK: tl.constexpr):  # noqa: N803
    """`product = grad * weight` for `grad` (any, outer, shared, inner) and `weight` (outer, inner)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    factor = tl.load(weight + at // inner // shared % outer * inner + at % inner, mask=inside)
    value = tl.load(grad + at, mask=inside).to(tl.float32) * factor
    tl.store(product + at, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def weigh(u, size, p, numerator, PER_COUNT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Turn each row of uniform numbers into weights, in place: see `backdrop._draw.draw_units`."""
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
