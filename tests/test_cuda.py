"""What only a GPU can show: no host sync, CUDA graphs, generators on the device. Skipped where there is none."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backdrop import Backdrop, Backdrop2d
from backdrop._core import kernels
from backdrop.functional import draw_mask, draw_weight, mask_gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def seeded(seed=0):
    return torch.Generator(device="cuda").manual_seed(seed)


@contextmanager
def no_sync():
    """Every operation that makes the host wait for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", ["count", "eq1", "probability", None])
@pytest.mark.parametrize("p", ["number", "cpu", "cuda"])
def test_no_host_sync(exact, scale, p):
    value = 0.75 if p == "number" else torch.tensor(0.75, device=p)
    layers = [
        Backdrop(value, exact=exact, scale=scale),
        Backdrop2d(value, patch=3, exact=exact, scale=scale, generator=seeded()),
    ]
    x = torch.randn(8, 4, 32, 32, device="cuda", requires_grad=True)
    upstream = torch.randn_like(x)
    for layer in layers:  # build the kernel
        torch.autograd.grad(layer(x), x, upstream)
    with no_sync():
        gradients = [torch.autograd.grad(layer(x), x, upstream)[0] for layer in layers]
    assert all(0 < gradient.count_nonzero() < x.numel() for gradient in gradients)


def test_sync_debug_mode_would_notice():
    with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("use_generator", [False, True])
def test_graph_capture_draws_fresh_masks_and_follows_p(exact, use_generator):
    generator = seeded() if use_generator else None
    p = torch.tensor(0.5, device="cuda")
    layer = Backdrop2d(p, exact=exact, generator=generator)
    x = torch.randn(2, 3, 16, 16, device="cuda", requires_grad=True)
    upstream = torch.ones_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(layer(x), x, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        (gradient,) = torch.autograd.grad(layer(x), x, upstream)
    seen = []
    for _ in range(5):
        graph.replay()
        seen.append(gradient.clone())
    assert torch.stack(seen).unique(dim=0).shape[0] == 5
    torch.testing.assert_close(torch.stack(seen).sum(), upstream.sum() * 5)
    layer.p = 1 - 3 / 256
    graph.replay()
    kept = (gradient != 0).sum((1, 2, 3)) // 3
    if exact:
        assert kept.tolist() == [3, 3]
    else:
        assert kept.max() < 64


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of torch's own capture
def test_graph_capture_with_p_as_a_number():
    layer = Backdrop2d(0.75, exact=True)
    x = torch.randn(2, 3, 16, 16, device="cuda", requires_grad=True)
    step = torch.cuda.make_graphed_callables(layer, (x,))
    seen = [torch.autograd.grad(step(x).sum(), x)[0].clone() for _ in range(5)]
    assert torch.stack(seen).unique(dim=0).shape[0] == 5
    assert all(torch.equal((g != 0).sum((1, 2, 3)), torch.full((2,), 192, device="cuda")) for g in seen)


def test_generators():
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = draw_mask((64,), 0.5, generator=seeded(5))
    assert first.is_cuda
    assert torch.equal(first, draw_mask((64,), 0.5, generator=seeded(5), device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), cuda)
    torch.cuda.manual_seed(5)
    assert torch.equal(first, draw_mask((64,), 0.5, device="cuda"))
    assert torch.equal(torch.get_rng_state(), cpu)
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match="generator has to be on the device of the mask, cpu, but got one on cuda"):
        Backdrop(generator=seeded())(x)
    with pytest.raises(
        ValueError, match=r"cuda:0, but got one on cpu; make it with torch.Generator\(device='cuda:0'\)"
    ):
        Backdrop(generator=torch.Generator())(x.cuda())
    with pytest.raises(ValueError, match="p has to be on the CPU or on the device of the mask"):
        Backdrop(torch.tensor(0.5, device="cuda"))(x)
    with pytest.raises(ValueError, match="weight has to be on the device of x"):
        mask_gradient(x.cuda(), torch.ones(4))


@pytest.mark.parametrize("exact", [False, True])
def test_mean_weight(exact):
    # 16 means of a variable in [0, 16] with variance 15 at most; Bernstein's bound at 1e-9 each is 0.06.
    weight = draw_weight((200_000, 16), 0.9, (0, 1), exact=exact, generator=seeded())
    assert (weight.double().mean(0) - 1).abs().max() < 0.06
    assert weight.any(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_channels_last(dtype):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), Backdrop2d(0.5, exact=True, generator=seeded())).cuda()
    network = network.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 12, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype):
        hidden = network[0](x)
        y = network[1](hidden)
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, hidden, upstream)
    weight = draw_weight(hidden.shape, 0.5, (0, 2, 3), exact=True, generator=seeded())
    assert y.dtype == gradient.dtype == dtype
    assert y.data_ptr() == hidden.data_ptr()
    assert torch.equal(gradient, (upstream.float() * weight).to(dtype))
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("use_generator", [False, True])
def test_checkpointing_changes_nothing(use_generator):
    def train(lean):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Backdrop(0.6, generator=seeded() if use_generator else None))
        block.cuda()
        x = torch.randn(12, 5, device="cuda", requires_grad=True)
        gradients = []
        for _ in range(3):
            y = checkpoint(block, x, use_reentrant=False) if lean else block(x)
            gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
        return torch.stack(gradients)

    torch.testing.assert_close(train(lean=True), train(lean=False))


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(exact, mode):
    torch._dynamo.reset()
    layer = Backdrop2d(0.75, patch=2, exact=exact)
    compiled = torch.compile(lambda x: layer(x * 1), fullgraph=True, mode=mode)
    seen = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
        y = compiled(x)
        assert torch.equal(y, x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(x))
        seen.append(gradient.clone())
    assert torch.stack(seen).unique(dim=0).shape[0] == 6
    torch.testing.assert_close(torch.stack(seen).sum((2, 3, 4)), torch.full((6, 2), 192.0, device="cuda"))


@pytest.mark.parametrize("exact", [False, True])
def test_deterministic_algorithms(exact):
    torch.use_deterministic_algorithms(True)
    try:
        masks = [draw_mask((4, 4096), 0.9, (0, 1), exact=exact, generator=seeded(1)) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*masks)


LAYOUTS = [
    ((4, 3, 8, 10), (4, 1, 8, 10), None),
    ((4, 3, 8, 10), (1, 1, 8, 10), None),
    ((4, 3, 8, 10), (4, 1, 1, 1), None),
    ((4, 3, 8, 10), (4, 3, 8, 10), None),
    ((4, 3, 8, 10), (1, 1, 1, 1), None),
    ((4, 3, 8, 10), (1, 3, 1, 1), None),
    ((4, 3, 8, 10), (4, 1, 8, 1), None),
    ((4, 3, 8, 10), (1, 3, 1, 10), None),
    ((4, 3, 8, 10), (4, 1, 8, 10), torch.channels_last),
    ((4, 3, 8, 10), (1, 1, 8, 10), torch.channels_last),
    ((4, 3, 8, 10), (1, 3, 1, 10), torch.channels_last),
    ((2, 3, 4, 5, 6), (2, 1, 4, 5, 6), torch.channels_last_3d),
    ((2, 3, 4, 5, 6), (2, 1, 4, 1, 6), None),
    ((1, 1, 1), (1, 1, 1), None),
    ((0, 3), (0, 1), None),
    ((5000, 7), (5000, 1), None),
    ((3, 1000, 1001), (3, 1, 1001), None),
]


@pytest.mark.parametrize(("shape", "weight_shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_backward_multiply_equals_the_plain_product_bit_for_bit(shape, weight_shape, layout, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "MULTIPLY_LEAST", 0)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    upstream = torch.randn(shape, device="cuda", dtype=dtype)
    if layout is not None:
        x, upstream = (t.to(memory_format=layout) for t in (x, upstream))
    x.requires_grad_()
    weight = torch.rand(weight_shape, device="cuda") * 3
    for given in (upstream, upstream.transpose(0, -1).contiguous().transpose(0, -1), upstream[:1].expand(shape)):
        (gradient,) = torch.autograd.grad(mask_gradient(x, weight), x, given)
        assert torch.equal(
            gradient, (given.double() * weight).to(dtype if dtype == torch.float64 else torch.float32).to(dtype)
        )
        (again,) = torch.autograd.grad(mask_gradient(x, weight), x, given, create_graph=True)
        assert torch.equal(gradient, again)
        assert gradient.stride() == again.stride()


@pytest.mark.parametrize("scale", ["count", "eq1", "probability", None])
@pytest.mark.parametrize("p", [1e-6, 0.5, 0.9, 0.999, 1 - 2**-24])
@pytest.mark.parametrize(
    ("groups", "size"), [(7, 1), (5, 3), (16, 4095), (3, 4096), (3, 4097), (2, 2**16), (1, 30_000)]
)
def test_drawing_kernel_equals_the_plain_operations_bit_for_bit(groups, size, p, scale, monkeypatch):
    drawn = draw_weight((groups, size), p, (0, 1), scale=scale, generator=seeded(3))
    monkeypatch.setattr(kernels, "weigh", lambda *_: None)
    plain = draw_weight((groups, size), p, (0, 1), scale=scale, generator=seeded(3))
    assert torch.equal(drawn, plain)
    assert drawn.any(1).all()


def test_kernels_are_used_where_they_apply(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "MULTIPLY_LEAST", 0)
    grad, weight = torch.randn(4, 3, 8, 8, device="cuda"), torch.rand(4, 1, 8, 8, device="cuda")
    with torch.no_grad():
        assert kernels.multiply(grad, weight) is not None
        assert kernels.multiply(grad.to(memory_format=torch.channels_last), weight) is not None
        assert kernels.multiply(grad, torch.rand(4, 1, 1, 1, device="cuda")) is not None
        assert kernels.multiply(grad, torch.rand(1, 3, 1, 8, device="cuda")) is not None
        assert kernels.multiply(grad[:, :, ::2], weight[:, :, ::2]) is None
    assert kernels.weigh(torch.rand(2, 3, device="cuda"), 0.5, 1.0, True) is not None
    assert kernels.weigh(torch.rand(1, 2**16 + 1, device="cuda"), 0.5, 1.0, True) is None


def test_beyond_32_bit_indices():
    shape = (3, 2, 20_000, 20_000)  # 2.4e9 elements
    upstream = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x = torch.empty(1, device="cuda", dtype=torch.bfloat16).expand(shape).requires_grad_()
    weight = draw_weight(shape, 0.5, (0, 2, 3), device="cuda")
    (gradient,) = torch.autograd.grad(mask_gradient(x, weight), x, upstream)
    for sample in range(3):
        for channel in range(2):
            assert torch.equal(gradient[sample, channel], weight[sample, 0].to(torch.bfloat16))


def test_backward_through_vmap():
    # The multiply kernel sees the batch that vmap hides from the layer, and weights without it.
    x = torch.randn(4, 64, 40_000, device="cuda", requires_grad=True)
    torch.func.vmap(Backdrop(0.5, exact=True), randomness="same")(x).sum().backward()
    assert torch.equal((x.grad == 2).sum((1, 2)), torch.full((4,), 32 * 40_000, device="cuda"))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("p", ["number", "cuda"])
def test_masks_that_choose_do_not_wait_and_can_be_captured(exact, p):
    """Chosen in the backward pass: no host sync, fixed shapes, another choice at every replay of a graph."""
    layer = Backdrop2d(0.75 if p == "number" else torch.tensor(0.75, device="cuda"), exact=exact, choose="gradient")
    x = torch.randn(2, 3, 16, 16, device="cuda", requires_grad=True)
    upstream = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), no_sync():
        for _ in range(3):
            torch.autograd.grad(layer(x), x, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (gradient,) = torch.autograd.grad(layer(x), x, upstream)
    seen = []
    for _ in range(5):
        graph.replay()
        seen.append(gradient.clone())
    kept = torch.stack(seen)[:, :, 0] != 0
    assert kept.unique(dim=0).shape[0] == 5
    if exact:
        assert (kept.sum((2, 3)) == 64).all()
