"""Gaussian random fields on a torus, drawn in Fourier space: the engine of `backdrop.textures`.

A stationary field on a torus is white noise in Fourier space, times the square root of the eigenvalues of its
covariance, transformed back. Kernels are mixtures of Gaussians, so the eigenvalues are sums of products of one factor
per axis (docs/textures.md has the formulas). What makes it fast and lean:

1. White noise is white in Fourier space too, so it is drawn there: no forward transform. The field is real, so half of
   the last axis's frequencies will do.
2. Frequencies with less than `NOTHING` of the largest eigenvalue stay zero: a smooth field has few others.
3. The rest is drawn in slabs, each transformed along all axes but the last and cut to the image at once: the torus as a
   whole never lies in memory.
4. One sample at a time, from a generator of its own: sample i is the same whatever is drawn beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

NOTHING = 2.0**-60
SLAB = {"cpu": 2**17, "cuda": 2**20}  # complex numbers in work at a time
BLOCK = {"cpu": 2**19, "cuda": 2**21}  # real numbers in work at a time, along the last axis
STRETCH = 1024  # numbers that are summed by one thread; few enough sums of them are summed by one too


def fast_length(n: int) -> int:
    """The smallest even length >= n with no prime factor above 7, which FFTs like."""
    best = 1 << max(1, (n - 1).bit_length())
    odds = [1]
    for prime in (3, 5, 7):
        powers = [prime**k for k in range(best.bit_length())]
        odds = [odd * power for odd in odds for power in powers if odd * power < best]
    return min(odd << max(1, (-(-n // odd) - 1).bit_length()) for odd in odds)


def eigenvalues(lengths: Tensor, frequency: Tensor) -> Tensor:
    """Of exp(-r^2 / (2 l^2)) over the integers, for each length l: (lengths, frequencies).

    Lengths are in pixels and sorted, frequencies in cycles per pixel. At multiples of 1/T the result is that of the
    covariance wrapped around a circle of T pixels. The sum over all lags and the sum over all aliases of the
    transformed Gaussian are equal (Poisson), and each converges at once where the other does not.
    """
    frequency = frequency - frequency.round()
    split = int((lengths <= 1.5).sum())
    short, long = lengths[:split, None], lengths[split:, None]
    values = []
    if len(short):
        lag = torch.arange(1, 15, dtype=torch.float64)
        with one_thread():
            waves = torch.cos(2 * math.pi * lag[:, None] * frequency)
            values.append(1 + 2 * torch.exp(-0.5 * (lag / short) ** 2) @ waves)
    if len(long):
        near = (0,) if long[0] > 3 else (0, -1, 1)  # others have less than NOTHING
        aliases = sum(torch.exp(-2 * (math.pi * long * (frequency - k)) ** 2) for k in near)
        values.append(math.sqrt(2 * math.pi) * long * aliases)
    return torch.cat(values)


class Field:
    """Draws fields of this size, each the corner of a torus, with a mixture of Gaussians as covariance.

    Args:
        lengths: of the Gaussians exp(-r^2 / (2 length^2)), float64, sorted.
        weights: of the Gaussians, float64, none negative.
        torus: points per axis.
        size: points per axis to keep.
        device: the CPU or a CUDA device.
        dtype: float32 or float64.
        reused: whether more than one field will be drawn.
    """

    def __init__(
        self,
        lengths: Tensor,
        weights: Tensor,
        torus: Sequence[int],
        size: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        reused: bool = True,
    ) -> None:
        self.lengths, self.weights, self.reused = lengths, weights, reused
        self.torus, self.size, self.device, self.dtype = tuple(torus), tuple(size), device, dtype
        # To scale in the transform is one more kernel on a GPU. On a CPU it is free, and without it MKL's transforms
        # depend on the number of threads.
        self.norm = "forward" if device.type == "cuda" else "ortho"
        last = len(self.torus) - 1
        self.half = self._count(last)  # of the frequencies 0, 1, ..., T // 2
        self.others = [self._both(axis) for axis in range(last)]
        counts = list(map(len, self.others))
        sizes = (math.prod([*self.size[:i], self.torus[i], *counts[i + 1 :]]) for i in range(len(counts)))
        self.widest = max(sizes, default=1)  # what one frequency of the last axis is spread to
        self.step = min(self.half, max(1, SLAB[device.type] // self.widest))  # such frequencies per slab
        self._rows: Tensor | None = None
        self._cache: dict[int, Tensor] = {}

    def changes(self) -> list[float]:
        """For each axis, the eigenvalue of the slowest wave along it over that of the constant."""
        first = torch.tensor([0, 1])
        factors = [self._factors(axis, first) for axis in range(len(self.torus))]
        constant = math.prod((factor[:, 0] for factor in factors), start=self.weights)
        waves = (constant * factor[:, 1] / factor[:, 0] for factor in factors)
        return [float(wave.nan_to_num(0.0).sum() / constant.sum()) for wave in waves]

    @property
    def bytes(self) -> int:
        """What drawing one field needs at most, beside the field."""
        real = self.dtype.itemsize
        columns = math.prod(map(len, self.others))
        spectrum = 2 * math.prod(self.size[:-1]) * self.half
        block = 2 * min(BLOCK[self.device.type] + self.torus[-1], math.prod(self.size[:-1]) * self.torus[-1])
        slab = 6 * self.step * self.widest
        amplitudes = self.half * columns if self._caches else 0
        return real * (spectrum + block + slab + amplitudes) + 16 * len(self.lengths) * columns

    def draw(self, generator: torch.Generator, out: Tensor | None = None) -> Tensor:
        """One field, with shape `size`; written into `out` where given."""
        *rest, last = self.torus
        lead = self.size[:-1]
        complex_dtype = torch.complex64 if self.dtype == torch.float32 else torch.complex128
        spectrum = torch.empty(*lead, self.half, dtype=complex_dtype, device=self.device)
        for first in range(0, self.half, self.step):
            amplitude = self._amplitude(first)
            noise = torch.empty(*amplitude.shape, 2, dtype=self.dtype, device=self.device).normal_(generator=generator)
            slab = torch.view_as_complex(noise) * amplitude
            for axis, (points, keep) in enumerate(zip(rest, lead, strict=True), start=1):
                spread = _spread(slab, axis, points)
                with one_thread(spread.numel() == points):
                    slab = torch.fft.ifft(spread, dim=axis, norm=self.norm).narrow(axis, 0, keep)
            spectrum[..., first : first + len(slab)] = slab.movedim(0, -1)
        # At the ends of the half axis half of the noise was too much (see _amplitude), and has done its work.
        for end in (0, last / 2):
            if end < self.half and end == int(end):
                spectrum[..., int(end)].imag.zero_()
        field = torch.empty(self.size, dtype=self.dtype, device=self.device) if out is None else out
        rows, spectra = field.view(-1, self.size[-1]), spectrum.view(-1, self.half)
        step = max(1, BLOCK[self.device.type] // last)
        for first in range(0, len(rows), step):
            block = spectra[first : first + step]
            with one_thread(len(block) == 1):
                rows[first : first + step] = torch.fft.irfft(block, n=last, dim=1, norm=self.norm)[:, : self.size[-1]]
        return field

    def _amplitude(self, first: int) -> Tensor:
        """What the noise of a slab is multiplied by, the root of eigenvalues: (frequencies, *those of the others).

        Noise has variance 2 per frequency. Between the ends of the half axis that is halved. At the ends (0 and T / 2)
        it has to be the transform of something real: the real part of the transform along the other axes is just that,
        and has half of the variance.
        """
        if first in self._cache:
            return self._cache[first]
        counts = [int(j.max()) + 1 for j in self.others]
        if self._rows is None:
            rows = self.weights[:, None]
            for axis, count in enumerate(counts):
                rows = (rows[:, :, None] * self._factors(axis, torch.arange(count))[:, None, :]).flatten(1)
            self._rows = rows.to(self.device, self.dtype)
        j = torch.arange(first, min(first + self.step, self.half))
        columns = self._factors(-1, j)
        columns[:, (j > 0) & (2 * j != self.torus[-1])] /= 2
        if self.norm == "forward":
            columns /= math.prod(self.torus)
        with one_thread():
            amplitude = (columns.to(self.device, self.dtype).T @ self._rows).sqrt_()
        amplitude = amplitude.view(-1, *counts)
        for axis, j in enumerate(self.others, start=1):
            amplitude = amplitude.index_select(axis, j.to(self.device))
        if self._caches:
            self._cache[first] = amplitude
        return amplitude

    @property
    def _caches(self) -> bool:
        return self.reused and self.half * math.prod(map(len, self.others)) <= math.prod(self.size)

    def _factors(self, axis: int, j: Tensor) -> Tensor:
        return eigenvalues(self.lengths, j.double() / self.torus[axis]).clamp_(min=0)

    def _both(self, axis: int) -> Tensor:
        """The frequencies that are drawn, without their sign: 0, 1, ..., then ..., 2, 1 for those that are negative.

        On a GPU all of them: noise costs less there than to put it in its place.
        """
        points = self.torus[axis]
        count = self._count(axis) if self.device.type == "cpu" else points // 2 + 1
        return torch.cat([torch.arange(count), torch.arange(min(count - 1, points - count), 0, -1)])

    def _count(self, axis: int) -> int:
        """How many of the frequencies 0, 1, ..., T // 2 carry something: the eigenvalues fall along every axis."""
        weights = self.weights.clone()
        zero = torch.zeros(1, dtype=torch.int64)
        for other in range(len(self.torus)):
            if other != axis:
                weights *= self._factors(other, zero)[:, 0]
        low, high = 0, self.torus[axis] // 2 + 1  # the first is kept, the last is not
        while high - low > 1:
            j = torch.linspace(low, high - 1, min(high - low, 64), dtype=torch.float64).round().long()
            j[0] = 0
            values = weights @ self._factors(axis, j)
            j[0] = low
            count = int((values[1:] >= NOTHING * values[0]).sum())
            low, high = int(j[count]), int(j[count + 1]) if count + 1 < len(j) else high
        return high


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """For what else would be computed in another order with another number of threads: products, and single FFTs."""
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _spread(slab: Tensor, axis: int, points: int) -> Tensor:
    """Zeros between the positive and the negative frequencies that were kept."""
    kept = slab.shape[axis]
    if kept == points:
        return slab
    positive = kept // 2 + 1
    spread = slab.new_zeros(*slab.shape[:axis], points, *slab.shape[axis + 1 :])
    spread.narrow(axis, 0, positive).copy_(slab.narrow(axis, 0, positive))
    spread.narrow(axis, points - kept + positive, kept - positive).copy_(slab.narrow(axis, positive, kept - positive))
    return spread


def normalise_(field: Tensor) -> Tensor:
    """To mean 0 and standard deviation 1, in place."""
    if field.is_cuda:
        deviation, mean = torch.std_mean(field, correction=0)
        return field.sub_(mean).div_(deviation)
    flat = field.view(-1)
    flat -= (_total(flat, torch.sum) / flat.numel()).to(field.dtype)
    flat /= (_total(flat, lambda part, dim: torch.linalg.vector_norm(part, dim=dim).square()) / flat.numel()).sqrt()
    return field


def _total(flat: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The sum, or the sum of squares, in the same order whatever the number of threads: float64."""
    body = flat[: flat.numel() // STRETCH * STRETCH].view(-1, STRETCH)
    sums = torch.cat([reduce(body, 1).double(), reduce(flat[body.numel() :].view(1, -1), 1).double()])
    return sums.sum() if len(sums) < 2**14 else _total(sums, torch.sum)
