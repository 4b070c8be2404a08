"""The layers, and how they get on with the rest of torch."""

import copy
import io
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import backdrop
from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d
from backdrop.functional import draw_mask, draw_weight
from backdrop.schedules import LinearP
from oracle import weights


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def input_gradient(layer, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    return gradient


SPATIAL = [(Backdrop1d, (3, 2, 7)), (Backdrop2d, (3, 2, 5, 7)), (Backdrop3d, (3, 2, 3, 5, 4))]


@pytest.mark.parametrize(("kind", "shape"), SPATIAL)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("patch", [1, 2, 3])
def test_spatial_layers_mask_positions(kind, shape, shared, exact, patch):
    layer = kind(0.6, patch=patch, shared=shared, exact=exact, generator=seeded())
    gradient = input_gradient(layer, torch.randn(shape, dtype=torch.float64))
    dims = tuple(range(2, len(shape))) if shared else (0, *range(2, len(shape)))
    mask = draw_mask(shape, 0.6, dims, patch=patch, exact=exact, generator=seeded())
    expected, _, _ = weights(mask, shape, dims, patch, 0.6, "count")
    torch.testing.assert_close(gradient, expected, rtol=1e-15, atol=0)
    assert layer.shared is shared
    assert torch.equal(gradient[0], gradient[1]) is shared


def test_patch_sizes_follow_the_order_of_dims():
    a = draw_mask((4, 1, 6, 9), 0.5, (3, 0, 2), patch=(3, 2), generator=seeded())
    b = draw_mask((4, 1, 6, 9), 0.5, (0, 2, 3), patch=(2, 3), generator=seeded())
    assert torch.equal(a, b)
    assert torch.equal(a[..., ::2, ::3].repeat_interleave(2, 2).repeat_interleave(3, 3), a)


@pytest.mark.parametrize("layer", [Backdrop(0.5), Backdrop2d(0.5, patch=2, scale="eq1"), Backdrop2d(0.5, shared=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawing_the_weight_alone_draws_that_of_a_call(layer, dtype):
    x = torch.ones(4, 3, 5, 6, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    weight = layer.draw_weight(x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert weight.dtype == dtype
    assert torch.equal(grad, weight.expand_as(x))


def test_drawing_the_weight_alone_checks_the_input():
    with pytest.raises(ValueError, match="expects input"):
        Backdrop2d().draw_weight(torch.ones(3, 4))


@pytest.mark.parametrize("layer", [Backdrop(0.5), Backdrop(0.5, dims=(0, 1, 2, 3)), Backdrop2d(0.5, exact=True)])
def test_eval_is_the_identity_and_draws_nothing(layer):
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    state = torch.get_rng_state()
    assert layer.eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.train()(x) is not x
    assert not torch.equal(torch.get_rng_state(), state)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Backdrop(), "Backdrop(p=0.5)"),
        (Backdrop(0.999999999), "Backdrop(p=0.999999999)"),
        (Backdrop(0.9, (0, -1), patch=3), "Backdrop(p=0.9, dims=(0, -1), patch=3)"),
        (Backdrop(0.9, exact=True, scale=None), "Backdrop(p=0.9, exact=True, scale=None)"),
        (Backdrop2d(0.99, patch=(2, 4), shared=True), "Backdrop2d(p=0.99, patch=(2, 4), shared=True)"),
        (Backdrop3d(0.5, scale="eq1", generator=seeded()), "Backdrop3d(p=0.5, scale='eq1', generator=<cpu>)"),
        (Backdrop1d(torch.tensor(0.9)), "Backdrop1d(p=tensor(0.9))"),
    ],
)
def test_repr_shows_what_is_not_default(layer, text):
    assert repr(layer) == text


def test_p_may_change_between_steps_and_is_checked():
    layer = Backdrop(0.0, exact=True)
    x = torch.ones(8, 1)
    assert input_gradient(layer, x).count_nonzero() == 8
    layer.p = 0.75
    assert input_gradient(layer, x).count_nonzero() == 2
    for wrong in (1.0, -0.1, float("nan"), torch.tensor(1.5)):
        with pytest.raises(ValueError, match=r"p has to be in \[0, 1\)"):
            layer.p = wrong
    assert layer.p == 0.75


def test_p_as_a_tensor_is_filled_in_place_and_checked_on_every_call():
    p = torch.tensor(0.5)
    layer = Backdrop(p, exact=True)
    layer.p = 0.75
    assert layer.p is p
    assert input_gradient(layer, torch.ones(8, 1)).count_nonzero() == 2
    p.fill_(1.0)
    with pytest.raises(ValueError, match=r"p has to be in \[0, 1\)"):
        input_gradient(layer, torch.ones(8, 1))


def test_state_dict_is_empty_and_copies_are_independent():
    layer = Backdrop2d(0.7, patch=2, generator=seeded())
    assert layer.state_dict() == {}
    x = torch.ones(2, 1, 8, 8)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ]
    expected = input_gradient(layer, x)
    for other in copies:
        assert repr(other) == repr(layer)
        assert torch.equal(input_gradient(other, x), expected)
    # two layers that share a generator still share it after a copy of the model
    generator = seeded()
    model = copy.deepcopy(nn.Sequential(Backdrop(generator=generator), Backdrop(generator=generator)))
    assert model[0].generator is model[1].generator is not generator


# --- dtypes, devices and layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_product_is_rounded_once(dtype):
    x = torch.ones(7, 5, dtype=dtype)
    upstream = torch.randn(7, 5).to(dtype)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(Backdrop(0.5, exact=True, generator=seeded())(x), x, upstream)
    mask = draw_mask((7, 5), 0.5, exact=True, generator=seeded())
    weight = mask.double() * (7 / 4)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, (upstream.double() * weight).to(dtype))


def test_scales_beyond_the_range_of_half_precision():
    # 2 of 200,000 units kept: N/|b| = 100,000 is beyond float16, the weighted gradient is not.
    x = torch.ones(200_000, 1, dtype=torch.float16, requires_grad=True)
    y = Backdrop(0.99999, exact=True)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 0.01))
    assert gradient.count_nonzero() == 2
    assert gradient.max() == torch.tensor(1000.0, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    network = nn.Sequential(nn.Linear(4, 6), Backdrop(0.5, generator=seeded()), nn.Linear(6, 1))
    x = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=dtype):
        hidden = network[0](x)
        hidden.retain_grad()
        masked = network[1](hidden)
        network[2](masked).sum().backward()
    assert masked.dtype == dtype
    assert masked.data_ptr() == hidden.data_ptr()
    weight = draw_weight((8, 6), 0.5, generator=seeded())
    with torch.autocast("cpu", dtype=dtype):
        plain = network[0](x).detach().requires_grad_()
        network[2](plain).sum().backward()
    assert torch.equal(hidden.grad, (plain.grad * weight).to(dtype))


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation_couples_positions_in_training_only(training):
    network = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4).train(training), Backdrop2d(0.75, generator=seeded()))
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    network(x).square().sum().backward()
    dropped = ~draw_mask((2, 4, 8, 8), 0.75, (0, 2, 3), generator=seeded())
    assert x.grad[~dropped].all()
    assert x.grad[dropped].all() if training else not x.grad[dropped].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape", "layout"),
    [(Backdrop2d, (2, 3, 4, 5), torch.channels_last), (Backdrop3d, (2, 3, 4, 5, 6), torch.channels_last_3d)],
)
def test_memory_format_is_kept(kind, shape, layout, dtype):
    x = torch.randn(shape, dtype=dtype).to(memory_format=layout).requires_grad_()
    y = kind(0.5)(x)
    assert y.stride() == x.stride()
    upstream = torch.randn(shape, dtype=dtype).to(memory_format=layout)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert gradient.is_contiguous(memory_format=layout)
    assert not gradient.is_contiguous()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", ["count", None])
def test_meta_device(exact, scale):
    x = torch.empty(2, 3, 8, 9, device="meta", requires_grad=True)
    y = Backdrop2d(0.5, patch=2, exact=exact, scale=scale)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert y.shape == gradient.shape == x.shape
    assert gradient.is_meta


def test_in_place_changes_of_either_alias_are_refused():
    # Input and output share their memory; torch turns what would be a wrong gradient into an error.
    for change_input in (False, True):
        x = torch.randn(4, 4, requires_grad=True) * 1
        y = Backdrop(0.5)(x)
        changed = x if change_input else y
        with pytest.raises(RuntimeError, match="modified inplace"):
            changed.relu_(), y.sum().backward()


# --- torch.func -----------------------------------------------------------------------------------------------------


def test_func_grad():
    network = nn.Sequential(nn.Linear(3, 4, bias=False), Backdrop(0.5, generator=seeded()), nn.Linear(4, 1))
    x = torch.randn(6, 3)
    parameters = dict(network.named_parameters())
    gradients = grad(lambda p: functional_call(network, p, x).sum())(parameters)
    weight = draw_weight((6, 4), 0.5, generator=seeded())
    upstream = network[2].weight.expand(6, 4) * weight
    torch.testing.assert_close(gradients["0.weight"], upstream.T @ x)
    torch.testing.assert_close(gradients["2.weight"], network[0](x).sum(0, keepdim=True))


@pytest.mark.parametrize("order", ["vmap(grad)", "grad(vmap)"])
def test_vmap_with_randomness(order):
    layer = Backdrop(0.5, exact=True)

    def gradients(x, randomness):
        def loss(row):
            return layer(row).sum()

        if order == "vmap(grad)":
            return vmap(grad(loss), randomness=randomness)(x)
        return grad(lambda x: vmap(loss, randomness=randomness)(x).sum())(x)

    x = torch.randn(40, 8)  # 40 samples of 8 units each
    different = gradients(x, "different")
    assert torch.equal((different == 2).sum(1), torch.full((40,), 4))
    assert (different == 0).sum() == 160
    assert different.unique(dim=0).shape[0] > 20
    same = gradients(x, "same")
    assert torch.equal((same == 2).sum(1), torch.full((40,), 4))
    assert same.unique(dim=0).shape[0] == 1
    with pytest.raises(RuntimeError, match="randomness"):
        gradients(x, "error")


def test_vmap_without_gradient_draws_nothing():
    state = torch.get_rng_state()
    x = torch.randn(4, 3, generator=seeded())
    assert torch.equal(vmap(Backdrop(0.5))(x), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_vmap_over_inputs_and_weights():
    x, w = torch.randn(5, 2, 3), torch.rand(5, 1, 3)

    def gradient(x, w):
        return grad(lambda x: backdrop.functional.mask_gradient(x, w).square().sum())(x)

    torch.testing.assert_close(vmap(gradient)(x, w), 2 * x * w)
    torch.testing.assert_close(vmap(gradient, in_dims=(2, None))(x, w[0, 0, :1]), 2 * x.movedim(2, 0) * w[0, 0, 0])
    torch.testing.assert_close(vmap(gradient, in_dims=(None, 0))(x[0], w), 2 * x[0] * w)
    torch.testing.assert_close(vmap(gradient, in_dims=(1, None))(x, w[0, 0]), 2 * x.movedim(1, 0) * w[0, 0])
    torch.testing.assert_close(vmap(gradient, in_dims=(0, 2))(x, w.movedim(0, 2)), 2 * x * w)


@pytest.mark.parametrize(("randomness", "masks"), [("same", 1), ("different", 30)])
def test_backward_through_vmap(randomness, masks):
    x = torch.randn(30, 16, 2, requires_grad=True)
    vmap(Backdrop(0.5, exact=True), randomness=randomness)(x).sum().backward()
    assert torch.equal((x.grad == 2).sum((1, 2)), torch.full((30,), 16))
    assert x.grad.unique(dim=0).shape[0] == masks


# --- activation checkpointing ---------------------------------------------------------------------------------------


def train(use_checkpoint, generator, *, reentrant=False, steps=4):
    """Weight gradients over a few steps of a network with two masked blocks."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Backdrop(0.6, generator=generator), nn.Linear(5, 5))
    x = torch.randn(12, 5, requires_grad=True)
    history = []
    for _ in range(steps):
        y = x
        for _ in range(2):
            y = checkpoint(block, y, use_reentrant=reentrant) if use_checkpoint else block(y)
        block.zero_grad()
        y.square().sum().backward()
        history.append(torch.cat([w.grad.flatten() for w in block.parameters()]))
    return torch.stack(history)


@pytest.mark.parametrize("use_generator", [False, True])
def test_checkpointing_changes_nothing(use_generator):
    plain = train(False, seeded() if use_generator else None)
    lean = train(True, seeded() if use_generator else None)
    torch.testing.assert_close(lean, plain, rtol=1e-6, atol=1e-6)
    assert plain.unique(dim=0).shape[0] == 4  # a fresh mask at every step


def test_reentrant_checkpointing_draws_fresh_masks_from_a_generator_and_is_refused_without():
    assert train(True, seeded(), reentrant=True).unique(dim=0).shape[0] == 4
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train(True, None, reentrant=True)


# --- torch.compile and torch.export ---------------------------------------------------------------------------------

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
        ),
    ),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("patch", "group"), [(1, None), (2, None), (1, "world")])  # of one process
def test_compiled_layers_draw_fresh_masks_and_never_recompile(backend, exact, patch, group):
    layer = Backdrop2d(0.6, patch=patch, exact=exact, group=group)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    seen = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            x = torch.randn(2, 3, 5, 7, requires_grad=True)
            y = compiled(x)
            assert torch.equal(y, x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            mask = (gradient[:, :1] != 0).detach()
            expected, _, count = weights(mask, x.shape, (0, 2, 3), patch, 0.6, "count")
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)
            if exact:
                assert set(count.values()) == {{1: 14, 2: 5}[patch]}
            seen.append(gradient)
    assert torch.stack(seen).unique(dim=0).shape[0] == 5


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", ["count", "eq1", "probability", None])
@pytest.mark.parametrize(("tensor", "graphs"), [(True, 1), (False, 3)])
def test_a_schedule_does_not_recompile_at_every_step(exact, scale, tensor, graphs):
    # A tensor is one graph for all p. A number is compiled once as a constant and once for any value, plus p = 0.
    layer = Backdrop(torch.tensor(0.9) if tensor else 0.9, exact=exact, scale=scale)
    compilations = []

    def backend(graph, example_inputs):  # one that takes the backward pass too, and makes constants of what it must
        compilations.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(lambda x: layer(x * 1).sum(), fullgraph=True, backend=backend)
    schedule = LinearP(layer, start=0.0, end=0.95, steps=19)
    for _ in range(20):
        x = torch.randn(40, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x), x)
        kept, p = gradient[:, 0].count_nonzero().item(), schedule.get_last_p()[0]
        if exact:
            assert kept == max(1, round(40 * (1 - p)))
        weight = {"count": 40 / kept, "eq1": (1 - p) * 40 / kept, "probability": 1 / (1 - p), None: 1.0}[scale]
        assert gradient.sum().item() == pytest.approx(2 * kept * (weight if p else 1.0), rel=1e-5)
        schedule.step()
    assert len(compilations) <= graphs


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("exact", [False, True])
def test_compiled_layers_take_batches_of_any_size(exact):
    compiled = torch.compile(Backdrop(0.75, exact=exact), fullgraph=True, backend="aot_eager")
    for size in (8, 12, 40, 100, 64):
        x = torch.randn(size, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        assert gradient.sum().item() == pytest.approx(2 * size, rel=1e-5)
        if exact:
            assert gradient[:, 0].count_nonzero() == size // 4


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("order", ["grad", "vmap(grad)", "grad(vmap)"])
def test_compiled_transforms_are_right_or_refused(order):
    layer = Backdrop(0.5, exact=True)

    def loss(x):
        return layer(x).sum()

    function = {
        "grad": lambda x: vmap(lambda row: row)(grad(loss)(x.T).T),
        "vmap(grad)": vmap(grad(loss), randomness="different"),
        "grad(vmap)": grad(lambda x: vmap(loss, randomness="different")(x).sum()),
    }[order]
    try:
        gradient = torch.compile(function, fullgraph=True, backend="aot_eager")(torch.randn(3, 8))
    except torch._dynamo.exc.TorchDynamoException:
        return  # this version of torch cannot trace it, and says so
    assert torch.equal((gradient == 2).sum(1), torch.full((3,), 4))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_with_a_generator_takes_its_masks_from_it():
    layer = Backdrop(0.5, generator=seeded())
    compiled = torch.compile(layer, backend="aot_eager")  # torch cannot trace a generator: no fullgraph
    state = torch.get_rng_state()
    x = torch.ones(16, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(gradient, draw_weight((16, 2), 0.5, generator=seeded()).expand(16, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_export_in_eval_leaves_no_trace_of_the_layer():
    network = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5), nn.ReLU()).eval()
    plain = nn.Sequential(network[0], network[2]).eval()
    x = torch.randn(2, 3)
    graphs = [torch.export.export(model, (x,)) for model in (network, plain)]
    targets = [[node.target for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs]
    assert targets[0] == targets[1]
    assert torch.equal(graphs[0].module()(x), plain(x))


@pytest.mark.parametrize("choose", ["uniform", "gradient"])
def test_what_changes_the_output_in_place_is_told_that_it_is_a_mask_and_what_to_do(choose):
    model = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5, choose=choose), nn.ReLU(inplace=True))
    with pytest.raises(RuntimeError, match=r"Backdrop, which shares the memory of its input \(say inplace=False"):
        model(torch.randn(4, 3))
    model.eval()(torch.randn(4, 3))
