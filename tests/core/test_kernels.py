"""What the GPU kernels assume of memory, checked without a GPU; test_cuda.py compares the kernels themselves."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backdrop._core import kernels


@st.composite
def gradients_and_weights(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    shared = [draw(st.booleans()) for _ in shape]
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else range(len(shape))
    count = torch.Size(shape).numel()
    in_memory = torch.arange(1.0, count + 1).reshape([shape[axis] for axis in order])
    grad = in_memory.permute([list(order).index(axis) for axis in range(len(shape))])
    weight = torch.rand([1 if is_shared else size for size, is_shared in zip(shape, shared, strict=True)])
    return grad, weight


@given(gradients_and_weights())
@settings(max_examples=500)
def test_layout_gives_every_element_its_weight(gradient_and_weight):
    grad, weight = gradient_and_weight
    layout = kernels._layout(grad, weight)
    if layout is None:
        return
    outer, shared, inner = layout
    order = sorted(range(grad.ndim), key=grad.stride, reverse=True)
    weights_in_memory = weight.permute(order).flatten()
    at = torch.arange(grad.numel())
    expected = (grad * weight).permute(order).flatten()
    factors = weights_in_memory[at // inner // shared % outer * inner + at % inner]
    assert torch.equal(grad.permute(order).flatten() * factors, expected)


def test_the_layouts_of_the_layers_are_covered():
    x = torch.randn(4, 3, 8, 10)
    for grad in (x, x.to(memory_format=torch.channels_last)):
        for shape in ((4, 1, 8, 10), (1, 1, 8, 10), (4, 1, 1, 1), (1, 3, 1, 1)):
            assert kernels._layout(grad, torch.ones(shape)) is not None
    assert kernels._layout(x, torch.ones(4, 3, 8, 10)) is not None
    assert kernels._layout(x.reshape(4, 3, 8, 5, 2), torch.ones(4, 1, 8, 1, 2)) is None
    assert kernels._layout(x[:, :, ::2], torch.ones(4, 1, 4, 10)) is None


def test_kernels_leave_the_cpu_alone():
    assert kernels.multiply(torch.ones(2**23), torch.ones(1)) is None
    assert kernels.weigh(torch.rand(2, 3), 0.5, 1.0, True) is None
