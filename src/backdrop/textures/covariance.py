"""Covariances of random fields, and the lengths they have: what `backdrop.textures` can draw.

The length of a kernel is in pixels and is the l of exp(-r^2 / (2 l^2)), everywhere in this library.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from backdrop._core.checks import check_positive


class Kernel(ABC):
    """A covariance that is a mixture of Gaussians: what the kernels below have in common."""

    length: float

    @abstractmethod
    def mixture(self, shortest: float = 0.0) -> tuple[Tensor, Tensor]:
        """Lengths (sorted) and weights of the Gaussians; those below `shortest` are lumped into one of that length."""

    def covariance(self, distance: Tensor | float) -> Tensor:
        """At this distance in pixels, float64; 1 at distance 0."""
        lengths, weights = self.mixture()
        r = torch.as_tensor(distance, dtype=torch.float64)
        return torch.exp(-0.5 * (r[..., None] / lengths) ** 2) @ weights

    def reach(self, tolerance: float) -> int:
        """The distance in whole pixels from which on the covariance is below the tolerance."""
        low, high = 0, 1
        while self.covariance(high).item() >= tolerance:
            low, high = high, 8 * high
        while high - low > 1 + high // 2**40:  # what float64 can tell apart
            distances = torch.linspace(low, high, min(high - low + 1, 65), dtype=torch.float64).round()
            near = int((self.covariance(distances[1:-1]) >= tolerance).sum())
            low, high = int(distances[near]), int(distances[near + 1])
        return high


@dataclass(frozen=True)
class SquaredExponential(Kernel):
    """The covariance exp(-r^2 / (2 length^2)): infinitely smooth. `length` is in pixels.

    >>> SquaredExponential(10).covariance(10.0).item() == math.exp(-0.5)
    True
    """

    length: float

    def __post_init__(self) -> None:
        check_positive("length", self.length)

    def mixture(self, shortest: float = 0.0) -> tuple[Tensor, Tensor]:
        return torch.tensor([max(self.length, shortest)], dtype=torch.float64), torch.ones(1, dtype=torch.float64)


@dataclass(frozen=True)
class Matern(Kernel):
    r"""The Matérn covariance of smoothness nu: nu = 1/2 is exp(-r / length), large nu the squared exponential.

    2^(1-nu) / Gamma(nu) (sqrt(2 nu) r / length)^nu K_nu(sqrt(2 nu) r / length), with `length` in pixels. Fields are
    ceil(nu) - 1 times differentiable.

    >>> abs(Matern(10, nu=0.5).covariance(10.0).item() - math.exp(-1)) < 1e-12
    True
    """

    length: float
    nu: float

    def __post_init__(self) -> None:
        check_positive("length", self.length)
        check_positive("nu", self.nu)
        if not 0.05 <= self.nu <= 1e4:
            raise ValueError(
                f"nu has to be in [0.05, 10000], but got {self.nu}; below, a field is hardly more than white noise, "
                "and above, SquaredExponential is the same"
            )

    def mixture(self, shortest: float = 0.0) -> tuple[Tensor, Tensor]:
        """With u from a gamma distribution of shape and rate nu, the mean of exp(-r^2 / (2 length^2 u)) is the kernel.

        The mean is an integral over t = log(u) of exp(nu (t - exp(t))): smooth and falling at both ends, where the
        trapezoidal rule converges faster than any power of its step.
        """
        step = min(0.3, 0.6 / math.sqrt(self.nu))
        a = 46 / self.nu  # beyond these limits exp(nu (1 + t - exp(t))) is below exp(-46) = 1e-20
        low, high = -a - math.sqrt(2 * a), math.log1p(a + math.sqrt(2 * a))
        t = step * torch.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=torch.float64)
        weights = torch.exp(self.nu * (1 + t - torch.exp(t)))
        weights /= weights.sum()
        lengths = self.length * torch.exp(t / 2)
        white = lengths < shortest
        if not white.any():
            return lengths, weights
        lump, rest = weights[white].sum(0, keepdim=True), weights[~white]
        return torch.cat([lengths.new_tensor([shortest]), lengths[~white]]), torch.cat([lump, rest])


def patchwork_length(length: float) -> float:
    """The length that a squared exponential of this nominal length has in the authors' published program.

    It builds lengths below 50 pixels from patches of side S = max(50, 6.25 length), each a sample times the envelope
    exp(-23 d^2 / S^2). Independent patches multiply the covariance by the envelope's autocorrelation, so
    1 / effective^2 = 1 / length^2 + 23 / S^2: 0.79 of the length from 8 pixels on (docs/textures.md).

    >>> round(patchwork_length(10.0), 2), patchwork_length(80.0)
    (7.93, 80.0)
    """
    check_positive("length", length)
    if length >= 50:
        return length
    return 1 / math.sqrt(1 / length**2 + 23 / max(50.0, 6.25 * length) ** 2)
