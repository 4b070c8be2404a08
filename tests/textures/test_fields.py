"""The engine of the textures against its covariance, without any luck.

A field is linear in its noise. Fed with one unit of noise at a time it gives the columns of a matrix A, and its
covariance is A A^T, exactly: compared with the kernel for every pair of pixels.
"""

import itertools
import math

import pytest
import torch
from scipy import special

from backdrop._core.draw import generator_for
from backdrop.textures import Matern, SquaredExponential, Texture, fields
from backdrop.textures.fields import Field, eigenvalues, fast_length, normalise_
from backdrop.textures.sampler import Sampler

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=NO_GPU)]
KERNELS = [
    SquaredExponential(0.2),
    SquaredExponential(1),
    SquaredExponential(2.5),
    Matern(1, 0.5),
    Matern(2, 1.5),
    Matern(3, 2.5),
    Matern(1.5, 0.2),
    Matern(2, 40),
]


def exact_covariance(field, monkeypatch):
    """Of all pairs of pixels: (pixels, pixels)."""
    noise = []  # how many numbers each slab takes

    def count(self, *, generator):
        noise.append(self.numel())
        return self.zero_()

    def unit(self, *, generator):
        self.zero_()
        if 0 <= generator.left < self.numel():
            self.view(-1)[generator.left] = 1
        generator.left -= self.numel()
        return self

    class Unit:
        def __init__(self, left):
            self.left = left

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", count)
        assert not field.draw(None).any()
        patch.setattr(torch.Tensor, "normal_", unit)
        columns = torch.stack([field.draw(Unit(i)).flatten().cpu() for i in range(sum(noise))], 1)
    return columns @ columns.T


def differences(size):
    """Between all pairs of pixels, per axis: a list of (pixels, pixels)."""
    axes = torch.meshgrid(*map(torch.arange, size), indexing="ij")
    return [axis.flatten()[:, None] - axis.flatten() for axis in axes]


def wrapped(kernel, lags, size, images=40):
    """The kernel's covariance summed over the images of a periodic cell."""
    total = 0
    reach = [math.ceil(kernel.reach(1e-18) / n) for n in size]
    for shift in itertools.product(*(range(-min(k, images), min(k, images) + 1) for k in reach)):
        squared = sum((lag + n * s).double() ** 2 for lag, n, s in zip(lags, size, shift, strict=True))
        total = total + kernel.covariance(squared.sqrt())
    return total


def check_covariance(field, expected, monkeypatch, tolerance=1e-12):
    covariance = exact_covariance(field, monkeypatch)
    assert (covariance - expected).abs().max().item() < tolerance


def mixture_on(torus, lags):
    """Two Gaussians, one long and one white, and their covariance wrapped around the torus."""
    lengths, weights = torch.tensor([[0.1, 1.7], [0.2, 0.8]], dtype=torch.float64)
    long, white = SquaredExponential(1.7), SquaredExponential(0.1)
    return lengths, weights, 0.8 * wrapped(long, lags, torus) + 0.2 * wrapped(white, lags, torus)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("slab", [1, 40, 2**17])
@pytest.mark.parametrize(
    "torus",
    [(2,), (3,), (17,), (18,), (2, 2), (6, 5), (5, 8), (8, 7), (9, 6), (6, 5, 4), (5, 4, 7), (3, 6, 8)],
    ids=str,
)
def test_the_covariance_on_a_torus_is_exact(torus, slab, device, monkeypatch):
    monkeypatch.setitem(fields.SLAB, device.type, slab)
    monkeypatch.setitem(fields.BLOCK, device.type, slab)
    lengths, weights, expected = mixture_on(torus, differences(torus))
    check_covariance(Field(lengths, weights, torus, torus, device, torch.float64), expected, monkeypatch)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("torus", "size"), [((12,), (5,)), ((8, 10), (5, 3)), ((6, 8, 9), (4, 3, 2))], ids=str)
def test_what_is_cut_from_a_torus_is_its_corner(torus, size, device, monkeypatch):
    lengths, weights, expected = mixture_on(torus, differences(size))
    check_covariance(Field(lengths, weights, torus, size, device, torch.float64), expected, monkeypatch)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("size", [(2,), (7,), (24,)], ids=str)
def test_nothing_wraps_around_in_one_dimension(kernel, size, monkeypatch):
    (field,) = Sampler(Texture(kernel), size, dtype=torch.float64).fields
    check_covariance(field, kernel.covariance(differences(size)[0].abs()), monkeypatch)
    (periodic,) = Sampler(Texture(kernel), size, dtype=torch.float64, periodic=True).fields
    assert periodic.torus == size
    check_covariance(periodic, wrapped(kernel, differences(size), size), monkeypatch, 1e-11)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kernel", [SquaredExponential(0.3), SquaredExponential(1), Matern(0.4, 1.5)], ids=str)
@pytest.mark.parametrize("size", [(2, 9), (5, 4)], ids=str)
def test_nothing_wraps_around_in_two_dimensions(kernel, size, device, monkeypatch):
    (field,) = Sampler(Texture(kernel), size, device=device, dtype=torch.float64).fields
    distance = sum(lag.double() ** 2 for lag in differences(size)).sqrt()
    check_covariance(field, kernel.covariance(distance), monkeypatch)


def test_nothing_wraps_around_in_three_dimensions(monkeypatch):
    kernel, size = SquaredExponential(0.6), (2, 4, 3)
    (field,) = Sampler(Texture(kernel), size, dtype=torch.float64).fields
    distance = sum(lag.double() ** 2 for lag in differences(size)).sqrt()
    check_covariance(field, kernel.covariance(distance), monkeypatch)


@pytest.mark.parametrize("length", [3, 10, 30])
def test_frequencies_that_are_left_out_carry_nothing(length, monkeypatch):
    (field,) = Sampler(Texture(SquaredExponential(length)), (60,), dtype=torch.float64).fields
    assert field.half <= 1 + 1.46 * field.torus[0] / length  # exp(-2 (pi f l)^2) = 2^-60
    check_covariance(field, SquaredExponential(length).covariance(differences((60,))[0].abs()), monkeypatch)
    (rough,) = Sampler(Texture(Matern(length, 0.5)), (60, 60)).fields
    assert rough.half == rough.torus[1] // 2 + 1
    assert len(rough.others[0]) == rough.torus[0]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("tolerance", [1e-7, 2e-16])
def test_the_torus_reaches_to_where_the_covariance_ends(kernel, tolerance):
    reach = kernel.reach(tolerance)
    assert kernel.covariance(float(reach)) < tolerance
    assert reach == 1 or kernel.covariance(float(reach - 1)) >= tolerance


@pytest.mark.parametrize("nu", [0.05, 0.1, 0.3, 0.5, 1, 1.5, 2.5, 5, 20, 60])
@pytest.mark.parametrize("length", [1.0, 10.0, 300.0])
def test_matern_is_the_textbook_formula(nu, length):
    r = torch.logspace(-2, 1.2, 40, dtype=torch.float64) * length
    scaled = math.sqrt(2 * nu) * r.numpy() / length
    expected = torch.from_numpy(2 ** (1 - nu) / special.gamma(nu) * scaled**nu * special.kv(nu, scaled))
    assert torch.allclose(Matern(length, nu).covariance(r), expected, rtol=0, atol=1e-10)
    assert Matern(length, nu).covariance(0.0).item() == pytest.approx(1, abs=1e-12)


def test_matern_becomes_the_squared_exponential():
    r = torch.linspace(0, 30, 31)
    apart = Matern(7.0, 1e4).covariance(r) - SquaredExponential(7.0).covariance(r)
    assert apart.abs().max() < 1e-4


@pytest.mark.parametrize("torus", [2, 3, 16, 50])
def test_eigenvalues_are_the_transform_of_the_covariance(torus):
    lengths = torch.tensor([0.1, 0.3, 1.0, 1.5, 1.6, 5.0, 40.0], dtype=torch.float64)
    lag, j = torch.arange(-2000, 2001).double(), torch.arange(torus).double()
    waves = torch.cos(2 * math.pi * j[:, None] * lag / torus)
    expected = (torch.exp(-0.5 * (lag / lengths[:, None]) ** 2)[:, None] * waves).sum(-1)
    assert torch.allclose(eigenvalues(lengths, j / torus), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 11, 13, 1081, 4097])
def test_a_fast_length_is_even_and_has_small_factors_only(n):
    length = fast_length(n)
    smooth = {2**a * 3**b * 5**c * 7**d for a in range(1, 14) for b in range(9) for c in range(6) for d in range(5)}
    assert length == min(value for value in smooth if value >= n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2,), (5, 7), (1024,), (2000, 1025), (3, 4, 5)], ids=str)
def test_normalised_means_mean_zero_and_deviation_one(shape, dtype):
    field = normalise_(3 + 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    assert abs(field.double().mean().item()) < tolerance
    assert abs(field.double().std(correction=0).item() - 1) < tolerance


def test_generators_differ_in_every_part_of_the_key():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0), (2**32, 0, 0), (-1, 0, 0), (10, 0, 0), (1, 0, 1)]
    first = [tuple(torch.randn(4, generator=generator_for(CPU, *key)).tolist()) for key in keys]
    assert len(set(first)) == len(keys)
    again = torch.randn(4, generator=generator_for(CPU, 0, 0, 0))
    assert tuple(again.tolist()) == first[0]


def test_numbers_of_the_generators_are_independent():
    # 4,000 generators, the first 64 numbers each: means, variances and correlations of neighbours, each within
    # 6 standard errors, which one of these 4 x 64 checks would miss by chance with a probability of 5e-7.
    numbers = torch.stack([torch.randn(64, generator=generator_for(CPU, 0, i)) for i in range(4000)]).double()
    error = 1 / math.sqrt(len(numbers))
    assert numbers.mean(0).abs().max() < 6 * error
    assert (numbers.square().mean(0) - 1).abs().max() < 6 * math.sqrt(2) * error
    assert (numbers[1:] * numbers[:-1]).mean(0).abs().max() < 6 * error
    assert (numbers[:, 1:] * numbers[:, :-1]).mean(0).abs().max() < 6 * error


def test_another_layout_of_the_generators_state_is_noticed(monkeypatch):
    class Other(torch.Generator):
        def get_state(self):
            return super().get_state().flip(0)

    monkeypatch.setattr(torch, "Generator", Other)
    with pytest.raises(RuntimeError, match="state of its CPU generator"):
        generator_for(CPU, 0)
