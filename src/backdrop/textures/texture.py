"""Gaussian-process textures with structure at several scales: the paper's third contribution (section 3.2).

A texture is a stationary random field per scale, each normalised, weighted and combined. Sampling is exact, takes
milliseconds for a megapixel, and sample i of a seed is the same whatever is drawn beside it (docs/textures.md).

>>> texture = Texture([SquaredExponential(10), SquaredExponential(80)], weights=(0.75, 1.25))
>>> texture.sample(2, (256, 256), seed=0).shape
torch.Size([2, 256, 256])

The length of a kernel is in pixels and is the l of exp(-r^2 / (2 l^2)).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from backdrop._core.checks import check_crop, check_int, check_positive, check_scale_weights, check_size
from backdrop.textures.covariance import Kernel, SquaredExponential, patchwork_length
from backdrop.textures.sampler import Sampler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Combine: TypeAlias = Literal["sum", "convolve", "product"]
Progress: TypeAlias = Callable[[Iterable[int]], Iterable[int]]

PAPER_LENGTHS = ((9.5, 10.0), (80.0, 140.0))
PAPER_WEIGHTS = (0.75, 1.25)


class Texture:
    """A random field with one or more scales.

    Args:
        kernels: one per scale, from the smallest to the largest by custom.
        weights: one number per kernel; 1 for each by default.
        combine: what is done with the scales, each normalised to mean 0 and standard deviation 1 per image.
            `"sum"`: the weighted sum, which is what the authors' program does. `"product"`: the product of the weighted
            scales; covariances multiply. `"convolve"`: the convolution of the scales over the whole torus, as the
            paper's text has it, normalised again, times the product of the weights; covariances convolve, so that two
            squared exponentials give one of length sqrt(a^2 + b^2).
        normalise: with False the scales are left as drawn, mean 0 and variance 1 over all samples, so that
            covariances are exactly those of the kernels.

    >>> from backdrop.textures import Matern, SquaredExponential
    >>> Texture([SquaredExponential(2), Matern(8, nu=1.5)])
    Texture([SquaredExponential(length=2), Matern(length=8, nu=1.5)], weights=(1.0, 1.0), combine='sum')
    """

    def __init__(
        self,
        kernels: Sequence[Kernel] | Kernel,
        weights: Sequence[float] | None = None,
        combine: Combine = "sum",
        *,
        normalise: bool = True,
    ) -> None:
        self.kernels = (kernels,) if isinstance(kernels, Kernel) else tuple(kernels)
        if not self.kernels or not all(isinstance(kernel, Kernel) for kernel in self.kernels):
            raise TypeError(
                "kernels has to hold at least one kernel, SquaredExponential(length) or Matern(length, nu), "
                f"but got {kernels!r}"
            )
        self.weights = check_scale_weights(weights, len(self.kernels))
        if combine not in ("sum", "convolve", "product"):
            raise ValueError(f"combine has to be 'sum', 'convolve' or 'product', but got {combine!r}")
        self.combine: Combine = combine
        self.normalise = normalise

    @classmethod
    def grid(
        cls,
        groups: Sequence[Sequence[float]],
        weights: Sequence[float] | None = None,
        combine: Combine = "sum",
        *,
        patchwork: bool = False,
    ) -> list[Texture]:
        """A texture of squared exponentials for every choice of one length per group, the first group running fastest.

        Args:
            groups: for each scale, the lengths that it may have.
            weights: one number per group.
            combine: as for `Texture`.
            patchwork: take the lengths for those of the authors' program (see `patchwork_length`).
        """
        if not isinstance(groups, Sequence) or not all(
            isinstance(group, Sequence) and group for group in groups or [()]
        ):
            raise ValueError(f"groups has to hold one or more groups of one or more lengths, but got {groups!r}")
        for length in itertools.chain(*groups):
            check_positive("length", length)
        effective = patchwork_length if patchwork else float
        lengths = [[SquaredExponential(effective(length)) for length in group] for group in groups]
        return [cls(choice[::-1], weights, combine) for choice in itertools.product(*lengths[::-1])]

    @classmethod
    def paper(cls, *, patchwork: bool = False) -> list[Texture]:
        """The paper's four classes: lengths (9.5, 80), (10, 80), (9.5, 140), (10, 140), with weights 0.75 and 1.25."""
        return cls.grid(PAPER_LENGTHS, PAPER_WEIGHTS, patchwork=patchwork)

    def sample(
        self,
        n: int,
        size: int | Sequence[int],
        *,
        seed: int,
        device: torch.device | str = "cpu",
        periodic: bool = False,
        first: int = 0,
        dtype: torch.dtype = torch.float32,
        progress: Progress | None = None,
    ) -> Tensor:
        """n samples: (n, *size).

        Args:
            n: how many.
            size: pixels per axis, for one to three axes; one number is a square image.
            seed: sample i of a seed does not depend on n, `first`, the batches or the number of threads. It does depend
                on the kind of device, and on the type.
            device: the CPU or a CUDA device.
            periodic: whether opposite borders fit together. A periodic covariance is the sum over all images of the
                kernel; otherwise a larger torus is sampled and cut, where nothing is left of the other side.
            first: the index of the first sample.
            dtype: float32 or float64, also of the work.
            progress: what to wrap the loop over samples in, `rich.progress.track` or `tqdm` for instance.
        """
        n, first, seed = check_int("n", n, 0), check_int("first", first, 0), check_int("seed", seed)
        sampler = Sampler(self, size, n, device=device, periodic=periodic, dtype=dtype)
        samples = torch.empty(n, *sampler.size, dtype=dtype, device=sampler.device)
        for i in (progress or iter)(range(n)):
            sampler.draw(seed, first + i, samples[i])
        return samples

    def scales(self, size: int | Sequence[int], *, seed: int, index: int = 0, periodic: bool = False) -> Tensor:
        """The scales of one sample before weights, (kernels, *size): what `sample` puts together, on the CPU."""
        seed, index = check_int("seed", seed), check_int("index", index, 0)
        sampler = Sampler(self, size, kept=2 * len(self.kernels), periodic=periodic)
        return torch.stack([sampler.scale(i, seed, index) for i in range(len(self.kernels))])

    def __repr__(self) -> str:
        raw = "" if self.normalise else ", normalise=False"
        return f"Texture([{', '.join(map(repr, self.kernels))}], weights={self.weights}, combine={self.combine!r}{raw})"


class TextureDataset(Dataset[tuple[Tensor, int]]):
    """Samples of several textures, with the index of the texture as label.

    Everything is drawn when the data set is made, and lies on the device: `images` (N, 1, *size) and `labels` (N).
    Image i * classes + c is the i-th of class c, so a larger `per_class` begins with the same images.

    Args:
        classes: one texture per class.
        per_class: images per class.
        size: pixels per axis, or of a square.
        seed: of all images.
        split: images of one split are independent of those of another: `"train"` and `"test"`, or any name.
        crop: cut every image into tiles of this size, at fixed positions and without overlap, as in the paper's
            comparison with 512 and 256 pixel crops. Tiles of an image follow one another; they keep its label.
        device: the CPU or a CUDA device, where the data set stays.
        periodic: whether opposite borders fit together.
        dtype: float32 or float64.
        progress: what to wrap the loop over images in.

    >>> data = TextureDataset.paper(per_class=2, size=64, split="test", crop=32)
    >>> image, label = data[0]
    >>> len(data), image.shape, data.labels[:8].tolist()
    (32, torch.Size([1, 32, 32]), [0, 0, 0, 0, 1, 1, 1, 1])
    """

    def __init__(
        self,
        classes: Sequence[Texture],
        per_class: int,
        size: int | Sequence[int],
        seed: int,
        *,
        split: str = "train",
        crop: int | Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        periodic: bool = False,
        dtype: torch.dtype = torch.float32,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(classes, Iterable):
            raise TypeError(f"classes has to be a sequence of Textures, but got {type(classes).__name__}")
        self.classes = tuple(classes)
        if not self.classes or not all(isinstance(texture, Texture) for texture in self.classes):
            raise TypeError(f"classes has to hold at least one Texture, but got {classes!r}")
        per_class = check_int("per_class", per_class, 1)
        self.size = check_size(size)
        tile = self.size if crop is None else check_crop(crop, self.size)
        count, copies = per_class * len(self.classes), 1 if crop is None else 2
        samplers = [
            Sampler(texture, size, count, kept=copies * count, device=device, periodic=periodic, dtype=dtype)
            for texture in self.classes
        ]
        seed = split_seed(seed, split)
        images = torch.empty(count, *self.size, dtype=dtype, device=device)
        for i in (progress or iter)(range(count)):
            samplers[i % len(samplers)].draw(seed, i, images[i])
        labels = torch.arange(count, device=device) % len(self.classes)
        self.images = _tiles(images, tile).unsqueeze(1)
        self.labels = labels.repeat_interleave(len(self.images) // count)

    @classmethod
    def paper(
        cls,
        per_class: int = 1,
        size: int | Sequence[int] = 1024,
        seed: int = 0,
        *,
        split: str = "train",
        crop: int | Sequence[int] | None = None,
        patchwork: bool = False,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> TextureDataset:
        """The paper's four classes (`Texture.paper`): one training image each, or a test split of 25 each, say."""
        classes = Texture.paper(patchwork=patchwork)
        return cls(classes, per_class, size, seed, split=split, crop=crop, device=device, progress=progress)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def split_seed(seed: int, split: str) -> int:
    """A seed for the samples of this split, which no other seed or split has."""
    seed = check_int("seed", seed)
    if not isinstance(split, str):
        raise TypeError(f"split has to be a string such as 'train' or 'test', but got {split!r}")
    return int.from_bytes(hashlib.sha256(repr((seed, split)).encode()).digest()[:16], "little")


def _tiles(images: Tensor, tile: Sequence[int]) -> Tensor:
    """(N, *size) cut into (N * tiles, *tile), in reading order."""
    if tuple(images.shape[1:]) == tuple(tile):
        return images
    for axis, length in enumerate(tile):
        images = torch.unflatten(images, 1 + 2 * axis, (-1, length))  # (N, tiles, tile, ..., rest of size)
    order = [0, *range(1, images.ndim, 2), *range(2, images.ndim, 2)]
    return images.permute(order).reshape(-1, *tile)


def plot(
    textures: Texture | Sequence[Texture],
    size: int | Sequence[int] = 512,
    *,
    seed: int = 0,
    periodic: bool = False,
    path: str | Path | None = None,
) -> Figure:
    """One sample of each texture in a row: its scales side by side, and what they make together.

    Needs matplotlib. Curves for one axis, images for two, the middle slice for three.

    Args:
        textures: one or several with the same number of scales.
        size: pixels per axis, or of a square.
        seed: of the samples; the row is their index, so that rows are independent.
        periodic: whether opposite borders fit together.
        path: also write the figure to this file.
    """
    from matplotlib.figure import Figure

    rows = [textures] if isinstance(textures, Texture) else list(textures)
    if not rows or len({len(texture.kernels) for texture in rows}) > 1:
        raise ValueError(f"textures has to hold textures with one and the same number of scales, but got {rows!r}")
    scales = len(rows[0].kernels)
    columns = scales + (scales > 1)
    figure = Figure(figsize=(3 * columns, 3.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, texture in enumerate(rows):
        pictures = [*texture.scales(size, seed=seed, index=row, periodic=periodic)]
        titles = [f"length {kernel.length:g}" for kernel in texture.kernels]
        if scales > 1:
            pictures.append(texture.sample(1, size, seed=seed, first=row, periodic=periodic)[0])
            titles.append({"sum": "weighted sum", "product": "product", "convolve": "convolution"}[texture.combine])
        for ax, picture, title in zip(axes[row], pictures, titles, strict=True):
            ax.set_title(title)
            ax.set_xticks([])
            ax.set_yticks([])
            if picture.ndim == 1:
                ax.plot(picture.numpy())
            else:
                ax.imshow((picture if picture.ndim == 2 else picture[len(picture) // 2]).numpy(), cmap="viridis")
    if path is not None:
        figure.savefig(path, dpi=100)
    return figure
