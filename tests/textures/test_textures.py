"""Textures as users meet them: their statistics, their seeds, their data sets.

`test_fields.py` has the exact covariances; here whole samples are drawn and measured. A statistical check compares the
mean of independent per-sample estimates with what is expected, and allows `SIGMA` standard errors: by chance one check
in 1e10 fails, all of them together (about 3,000) with a probability below 1e-6. Seeds are fixed.
"""

import itertools
import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

from backdrop import textures
from backdrop.textures import Matern, SquaredExponential, Texture, TextureDataset, patchwork_length, sampler
from backdrop.textures.sampler import Sampler

SIGMA = 6.5
SIZES = {1: (64,), 2: (24, 32), 3: (12, 10, 8)}
LAGS = {
    1: [(0,), (1,), (2,), (3,), (5,), (8,), (13,), (21,), (32,), (48,), (63,)],
    2: [(0, 0), (0, 1), (1, 0), (1, 1), (1, -1), (5, 0), (0, 5), (3, 4), (4, 3), (-4, 3), (12, 0), (0, 16), (23, 31)],
    3: [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 1, 2), (2, -1, 2), (0, 0, 3), (6, 0, 0), (11, 9, 7)],
}


def products(samples, lag):
    """For each sample the mean over positions x of f(x) f(x + lag): (n,)."""
    here, there = samples, samples
    for axis, step in enumerate(lag, start=1):
        n = samples.shape[axis] - abs(step)
        here, there = here.narrow(axis, max(0, -step), n), there.narrow(axis, max(0, step), n)
    return (here * there).flatten(1).double().mean(1)


def check_mean(values, expected):
    error = values.std().item() / math.sqrt(len(values))
    assert abs(values.mean().item() - expected) < SIGMA * error + 1e-6, (values.mean().item(), expected, error)


def wrapped(kernel, lag, size):
    """The covariance of periodic fields: the sum over all images."""
    counts = [range(-math.ceil(kernel.reach(1e-9) / n) - 1, math.ceil(kernel.reach(1e-9) / n) + 2) for n in size]
    shifts = torch.cartesian_prod(*(torch.tensor(count) for count in counts)).view(-1, len(size))
    apart = torch.tensor(lag) + shifts * torch.tensor(size)
    return kernel.covariance(apart.double().norm(dim=1)).sum().item()


# One kernel with every shape, length and border. Others differ in how far they reach, which matters most for long ones.
EMPIRICAL = [
    *itertools.product([None], [1, 2, 3], [None, 8, 2], [False, True]),
    *itertools.product([0.5, 2.5], [2], [None, 8], [False, True]),
    *itertools.product([0.5], [1, 2, 3], [2], [False]),
    (2.5, 1, 2, True),
]


@pytest.mark.parametrize(("nu", "dims", "share", "periodic"), EMPIRICAL)
def test_the_empirical_covariance_is_the_kernels(nu, dims, share, periodic):
    size = SIZES[dims]
    length = 1 if share is None else max(size) / share
    kernel = SquaredExponential(length) if nu is None else Matern(length, nu)
    samples = Texture(kernel, normalise=False).sample(400 if dims == 3 else 1000, size, seed=1, periodic=periodic)
    for lag in LAGS[dims]:
        expected = wrapped(kernel, lag, size) if periodic else kernel.covariance(math.hypot(*lag)).item()
        check_mean(products(samples, lag), expected)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_opposite_borders_are_alike_only_when_periodic(length):
    texture = Texture(SquaredExponential(length), normalise=False)
    for periodic in (False, True):
        samples = texture.sample(2000, (32, 2), seed=2, periodic=periodic)
        border = (samples[:, 0, 0] * samples[:, -1, 0]).double()
        near = texture.kernels[0].covariance(1.0 if periodic else 31.0).item()
        again = wrapped(texture.kernels[0], (1, 0), (32, 2)) if periodic else near
        check_mean(border, again)
    assert border.mean() > 0.4


@pytest.mark.parametrize("kernel", [SquaredExponential(4), Matern(4, 0.5)], ids=str)
def test_no_direction_is_preferred(kernel):
    samples = Texture(kernel, normalise=False).sample(3000, (16, 16), seed=3)
    for lags in [(5, 0), (0, 5), (3, 4), (4, 3), (3, -4), (-4, 3)], [(1, 7), (7, 1), (5, 5), (5, -5), (-1, 7)]:
        values = [products(samples, lag) for lag in lags]
        for one, other in pairwise(values):
            check_mean(one - other, 0)


@pytest.mark.parametrize("kernel", [SquaredExponential(1), SquaredExponential(5), Matern(3, 1.5)], ids=str)
def test_fields_are_normal(kernel):
    # Kolmogorov-Smirnov on values, slopes and sums of independent samples; each rejects by chance once in 1e8.
    samples = Texture(kernel, normalise=False).sample(5000, (12, 12), seed=4).double()
    x, y = (torch.linspace(-1, 1, 12).repeat(12, 1), torch.linspace(-1, 1, 12)[:, None].repeat(1, 12))
    distance = ((x[..., None] - x.flatten()) ** 2 + (y[..., None] - y.flatten()) ** 2).sqrt() * 11 / 2
    covariance = kernel.covariance(distance.view(144, 144))
    for weights in (torch.eye(144)[0], torch.eye(144)[70] - torch.eye(144)[71], torch.ones(144), (x * y).flatten()):
        weights = weights.double()
        values = samples.flatten(1) @ weights / (weights @ covariance @ weights).sqrt()
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-8
        check_mean(values**4, 3)


def test_scales_and_samples_and_seeds_are_independent():
    texture = Texture([SquaredExponential(2), SquaredExponential(2)], normalise=False)
    scales = torch.stack([texture.scales((8, 8), seed=5, index=i) for i in range(500)])
    check_mean((scales[:, 0] * scales[:, 1]).flatten(1).mean(1).double(), 0)
    samples = texture.sample(2000, (8, 8), seed=5).double()
    other = texture.sample(2000, (8, 8), seed=6).double()
    check_mean((samples[1:] * samples[:-1]).flatten(1).mean(1)[::2], 0)
    check_mean((samples * other).flatten(1).mean(1), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("texture", "size"),
    [
        (Texture([SquaredExponential(5), Matern(20, 1.5)], (0.75, 1.25)), (130, 77)),
        (Texture([Matern(3, 1.5), SquaredExponential(6)], combine="convolve"), (300, 200)),
        (Texture([Matern(3, 1.5), SquaredExponential(6)], combine="convolve"), (9000,)),
        (Texture(Matern(2, 0.5)), (30, 20, 25)),
        (Texture(Matern(3, 2.5)), (70_000,)),
        (Texture(Matern(3, 2.5)), (7000, 3)),
        (Texture(SquaredExponential(200)), (1100, 1000)),
    ],
    ids=str,
)
def test_a_sample_depends_on_its_seed_and_its_number_only(texture, size, dtype):
    together = texture.sample(3, size, seed=7, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            torch.manual_seed(count)  # the default generator does not matter
            assert torch.equal(texture.sample(1, size, seed=7, dtype=dtype, first=2), together[2:])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(texture.sample(2, size, seed=7, dtype=dtype), together[:2])
    assert not torch.equal(texture.sample(1, size, seed=8, dtype=dtype)[0], together[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("combine", ["sum", "product", "convolve"])
def test_on_a_gpu_too(combine):
    texture = Texture([SquaredExponential(3), Matern(6, 1.5)], (0.75, 1.25), combine)
    together = texture.sample(4, (130, 77), seed=7, device="cuda")
    assert together.is_cuda
    assert torch.equal(texture.sample(1, (130, 77), seed=7, device="cuda", first=2), together[2:3])
    state = torch.cuda.get_rng_state()
    data = TextureDataset([texture] * 2, 2, 32, 0, crop=16, device="cuda")
    assert data.images.is_cuda
    assert data.labels.is_cuda
    assert torch.equal(torch.cuda.get_rng_state(), state)
    kernel = SquaredExponential(4)
    for dims, size in SIZES.items():
        samples = Texture(kernel, normalise=False).sample(1000, size, seed=1, device="cuda").cpu()
        for lag in LAGS[dims]:
            check_mean(products(samples, lag), kernel.covariance(math.hypot(*lag)).item())
    whole = Texture(kernel).sample(2, (64, 64), seed=0, device="cuda").double()
    assert whole.mean((1, 2)).abs().max() < 1e-6
    assert (whole.std((1, 2), correction=0) - 1).abs().max() < 1e-5
    with pytest.raises(ValueError, match="GB free"):
        texture.sample(10**6, 4096, seed=0, device="cuda")


def test_sampling_leaves_the_default_generator_and_the_threads_alone():
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    Texture(Matern(2, 0.5)).sample(1, (500,), seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_float64_is_drawn_as_such():
    texture = Texture([SquaredExponential(3), Matern(8, 1.5)])
    single, double = (texture.sample(1, 64, seed=0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert single.shape == double.shape == (1, 64, 64)
    assert (double != double.float()).double().mean() > 0.99  # no float32 on the way
    assert abs(texture.scales(64, seed=0).mean()) < 1e-7
    assert abs(Texture(SquaredExponential(3)).sample(1, 64, seed=0, dtype=torch.float64).mean()) < 1e-15


@pytest.mark.parametrize("periodic", [False, True])
def test_every_scale_is_normalised_and_the_sum_is_weighted(periodic):
    texture = Texture([SquaredExponential(2), Matern(9, 1.5), SquaredExponential(30)], (0.5, -2, 3))
    samples = texture.sample(2, (60, 41), seed=0, periodic=periodic)
    for index in range(2):
        scales = texture.scales((60, 41), seed=0, index=index, periodic=periodic)
        assert scales.double().flatten(1).mean(1).abs().max() < 1e-6
        assert (scales.double().flatten(1).std(1, correction=0) - 1).abs().max() < 1e-6
        expected = torch.einsum("s,sij->ij", torch.tensor([0.5, -2, 3]), scales)
        assert torch.allclose(samples[index], expected, atol=1e-5)


def test_a_product_multiplies_the_weighted_scales():
    texture = Texture([SquaredExponential(2), Matern(9, 1.5)], (0.5, 3), "product")
    sample = texture.sample(1, (60, 41), seed=0, first=4)[0]
    assert torch.allclose(sample, 1.5 * texture.scales((60, 41), seed=0, index=4).prod(0), atol=1e-5)


def test_covariances_of_a_product_multiply():
    kernels = [SquaredExponential(2), Matern(6, 1.5)]
    samples = Texture(kernels, combine="product", normalise=False).sample(3000, (16, 20), seed=8)
    for lag in [(0, 0), (1, 0), (0, 2), (2, 2), (5, 3)]:
        r = math.hypot(*lag)
        check_mean(products(samples, lag), (kernels[0].covariance(r) * kernels[1].covariance(r)).item())


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("size", [(9,), (5, 6)], ids=str)
def test_a_convolution_is_the_sum_over_the_torus(size, periodic):
    texture = Texture([SquaredExponential(0.8), Matern(0.5, 1.5)], (2, 3), "convolve", normalise=False)
    sampler = Sampler(texture, size, periodic=periodic, dtype=torch.float64)
    one, two = (sampler._raw(i, 0, 0) for i in range(2))
    torus = one.shape
    assert two.shape == torus
    assert (torus == size) == periodic
    expected = torch.zeros(size, dtype=torch.float64)
    dims = tuple(range(len(size)))
    for y in torch.cartesian_prod(*map(torch.arange, torus)).view(-1, len(size)).tolist():
        shifted = torch.roll(two, y, dims)  # two(x - y)
        expected += one[tuple(y)] * shifted[tuple(slice(n) for n in size)]
    expected *= 6 / math.sqrt(math.prod(torus))
    sample = texture.sample(1, size, seed=0, periodic=periodic, dtype=torch.float64)[0]
    assert torch.allclose(sample, expected, atol=1e-12)
    texture.normalise = True
    normalised = texture.sample(1, size, seed=0, periodic=periodic, dtype=torch.float64)[0]
    assert normalised.mean().abs() < 1e-12
    assert normalised.std(correction=0).item() == pytest.approx(6)


def test_a_convolution_of_gaussians_has_the_root_of_the_squared_lengths():
    texture = Texture([SquaredExponential(3), SquaredExponential(4)], combine="convolve", normalise=False)
    samples = texture.sample(1500, (40,), seed=9)
    overlap = math.sqrt(2 * math.pi) * 3 * 4 / 5  # the sum over all lags of the product of both
    for lag in (0, 1, 3, 5, 10, 20, 39):
        check_mean(products(samples, (lag,)), overlap * SquaredExponential(5).covariance(float(lag)).item())


def test_the_patchwork_of_the_authors_shortens_a_length():
    # Their construction with exact patches: a sample times an envelope, at a place of its own. Patches are independent,
    # so the covariance of the sum is the mean over places of one patch's. Ratios of means of 4,000 patches.
    length, side = 10.0, 63
    patches = Texture(SquaredExponential(length), normalise=False).sample(4000, (4 * side,), seed=10).double()
    x = torch.arange(4 * side) - 2 * side + 0.5
    enveloped = patches * torch.exp(-23 * (x / (6.25 * length)) ** 2)
    power = products(enveloped, (0,))
    shorter = SquaredExponential(patchwork_length(length))
    for lag in (1, 2, 5, 8, 12, 20):
        check_mean(products(enveloped, (lag,)) * (4 * side - lag) / (4 * side) - power * shorter.covariance(lag), 0)
    assert patchwork_length(length) / length == pytest.approx(0.7933, abs=1e-4)
    assert patchwork_length(4.0) == pytest.approx(1 / math.sqrt(1 / 16 + 23 / 2500))
    assert patchwork_length(50.0) == 50.0


def test_the_papers_classes():
    classes = Texture.paper()
    lengths = [tuple(kernel.length for kernel in texture.kernels) for texture in classes]
    assert lengths == [(9.5, 80), (10, 80), (9.5, 140), (10, 140)]
    assert {texture.weights for texture in classes} == {(0.75, 1.25)}
    assert {texture.combine for texture in classes} == {"sum"}
    small = [texture.kernels[0].length for texture in Texture.paper(patchwork=True)]
    assert small[:2] == [patchwork_length(9.5), patchwork_length(10)]
    assert {texture.kernels[1].length for texture in Texture.paper(patchwork=True)} == {80, 140}


def test_a_grid_takes_any_number_of_groups():
    grid = Texture.grid([(1, 2, 3), (10,), (50, 60)], (1, 2, 3), "product")
    assert len(grid) == 6
    assert [tuple(kernel.length for kernel in texture.kernels) for texture in grid[:4]] == [
        (1, 10, 50),
        (2, 10, 50),
        (3, 10, 50),
        (1, 10, 60),
    ]


def test_a_data_set_has_independent_splits_and_may_grow():
    classes = Texture.grid([(2, 3), (10, 20)])
    train = TextureDataset(classes, 2, (40, 30), 0)
    assert len(train) == 8
    assert train.images.shape == (8, 1, 40, 30)
    assert train.labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    image, label = train[6]
    assert label == 2
    assert torch.equal(image, train.images[6])
    more = TextureDataset(classes, 3, (40, 30), 0)
    assert torch.equal(more.images[:8], train.images)
    test = TextureDataset(classes, 2, (40, 30), 0, split="test")
    other = TextureDataset(classes, 2, (40, 30), 1)
    flat = torch.cat([train.images, test.images, other.images]).flatten(1)
    assert len(flat.unique(dim=0)) == 24
    same = Texture(SquaredExponential(0.2))  # white: correlations of 1200 pixels are within 6.5 / sqrt(1200)
    sets = [TextureDataset([same] * 3, 3, (40, 30), seed, split=s) for s in ("train", "test") for seed in (0, 1)]
    noise = torch.cat([data.images for data in sets]).flatten(1)
    correlation = noise @ noise.T / 1200 - torch.eye(36)
    assert correlation.abs().max() < SIGMA / math.sqrt(1200)


def test_batches_come_from_a_data_loader():
    data = TextureDataset.paper(per_class=2, size=32)
    images, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=8)))
    assert torch.equal(images, data.images)
    assert torch.equal(labels, data.labels)


@pytest.mark.parametrize(("size", "crop"), [((8, 12), 4), ((8, 12), (2, 6)), ((12,), 3), ((4, 6, 8), 2)], ids=str)
def test_crops_are_the_tiles_of_the_whole_image(size, crop):
    whole = TextureDataset(Texture.grid([(1, 2)]), 2, size, 0)
    tiles = TextureDataset(Texture.grid([(1, 2)]), 2, size, 0, crop=crop)
    tile = (crop,) * len(size) if isinstance(crop, int) else crop
    per_image = math.prod(n // t for n, t in zip(size, tile, strict=True))
    assert len(tiles) == per_image * len(whole)
    assert tiles.labels.tolist() == [label for label in whole.labels.tolist() for _ in range(per_image)]
    corners = torch.cartesian_prod(*(torch.arange(0, n, t) for n, t in zip(size, tile, strict=True)))
    for i, image in enumerate(whole.images[:, 0]):
        for j, corner in enumerate(corners.view(per_image, -1).tolist()):
            window = image[tuple(slice(c, c + t) for c, t in zip(corner, tile, strict=True))]
            assert torch.equal(tiles.images[i * per_image + j, 0], window)


def test_the_papers_crops():
    assert len(TextureDataset.paper(size=1024, crop=512)) == 16
    crops = TextureDataset.paper(size=1024, crop=256)
    assert crops.images.shape == (64, 1, 256, 256)


def test_progress_wraps_the_loop():
    seen = []

    def progress(indices):
        for i in indices:
            seen.append(i)
            yield i

    Texture(SquaredExponential(2)).sample(3, 8, seed=0, progress=progress)
    TextureDataset.paper(size=16, progress=progress)
    assert seen == [0, 1, 2, 0, 1, 2, 3]


def test_too_little_memory_is_noticed_before_any_work(monkeypatch):
    monkeypatch.setattr(sampler, "available_bytes", lambda device: 10_000_000)
    monkeypatch.setattr(sampler.Field, "draw", None)
    texture = Texture(SquaredExponential(2))
    with pytest.raises(ValueError, match=r"3 samples of 1024 x 1024 pixels.* need 0.0 GB, but cpu has 0.0 GB free"):
        texture.sample(3, 1024, seed=0)
    with pytest.raises(ValueError, match="torus"):
        Texture(Matern(5000, 0.5)).sample(1, 64, seed=0)
    with pytest.raises(ValueError, match="GB"):
        TextureDataset.paper(per_class=10, size=512)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "size"),
    [(SquaredExponential(10), (512, 512)), (Matern(4, 1.5), (300, 400)), (Matern(2, 1), (40, 40, 40))],
    ids=str,
)
def test_what_a_field_needs_is_not_underestimated(kernel, size, count):
    sampler = Sampler(Texture(kernel), size, count)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = torch.empty(size)
        for i in range(count):
            sampler.draw(0, i, out)
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert out.nbytes < peak <= sampler.fields[0].bytes + out.nbytes + 100_000


@pytest.mark.parametrize("combine", ["sum", "product", "convolve"])
def test_a_picture_shows_the_scales_and_what_they_make(combine, tmp_path):
    pytest.importorskip("matplotlib")
    rows = Texture.grid([(2, 3), (12,)], (0.75, 1.25), combine)
    figure = textures.plot(rows, 64, seed=0, path=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert len(figure.axes) == 6
    titles = [ax.get_title() for ax in figure.axes]
    together = {"sum": "weighted sum", "product": "product", "convolve": "convolution"}[combine]
    assert titles == ["length 2", "length 12", together, "length 3", "length 12", together]
    shown = torch.from_numpy(figure.axes[5].images[0].get_array().data.copy())
    assert torch.equal(shown, rows[1].sample(1, 64, seed=0, first=1)[0])


@pytest.mark.parametrize("size", [(50,), (10, 12, 8)], ids=str)
def test_a_picture_of_a_curve_or_a_volume(size):
    pytest.importorskip("matplotlib")
    figure = textures.plot(Texture(SquaredExponential(3)), size)
    assert len(figure.axes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("combine", ["sum", "product", "convolve"])
def test_a_periodic_field_that_does_not_change_is_refused(dtype, combine):
    """It would be nothing but rounding errors, or 0 / 0."""
    for kernels in ([SquaredExponential(80)], [SquaredExponential(2), SquaredExponential(80)]):
        texture = Texture(kernels, combine=combine)
        with pytest.raises(
            ValueError, match=r"a periodic field of a length near its size hardly changes.* on 8 x 8 pix"
        ):
            texture.sample(1, 8, seed=0, periodic=True, dtype=dtype)
        assert texture.sample(1, 8, seed=0, dtype=dtype).isfinite().all()
        assert Texture(kernels, combine=combine, normalise=False).sample(1, 8, seed=0, periodic=True).isfinite().all()
    near = Texture([SquaredExponential(4)], combine=combine).sample(1, 8, seed=0, periodic=True, dtype=dtype)
    assert near.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    # Along one axis it changes, along the other it does not.
    assert Texture([SquaredExponential(8)]).sample(1, (8, 64), seed=0, periodic=True, dtype=dtype).isfinite().all()
