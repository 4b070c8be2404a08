"""From a texture to its samples: one field per scale, put together, within the memory there is."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backdrop._core.checks import check_size
from backdrop._core.draw import generator_for
from backdrop.textures.fields import Field, fast_length, normalise_, one_thread

if TYPE_CHECKING:
    from backdrop.textures.texture import Texture

SHORTEST = 0.1  # in pixels: on a grid of pixels a Gaussian of this length is white noise


class Sampler:
    """Draws the samples of one texture at one size, one by one.

    Args:
        texture: what to draw.
        size: pixels per axis, or of a square.
        count: how many samples are to be drawn.
        kept: how many of them are kept at a time, all by default; it is an error if they do not fit in memory.
        device: as for `Texture.sample`, like the rest.
        periodic: whether opposite borders fit together.
        dtype: float32 or float64.
    """

    def __init__(
        self,
        texture: Texture,
        size: int | Sequence[int],
        count: int = 1,
        *,
        kept: int | None = None,
        device: torch.device | str = "cpu",
        periodic: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.texture, self.size, self.device = texture, check_size(size), torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"device has to be a CPU or a CUDA device, but got {device}; sample on the CPU and move it"
            )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device}, but torch finds no CUDA device here; use device='cpu'")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype has to be torch.float32 or torch.float64, but got {dtype}")
        if texture.normalise and max(kernel.length for kernel in texture.kernels) > 100 * max(self.size):
            raise ValueError(
                f"lengths have to be at most 100 times the size, {self.size}, but got {texture}; "
                "a field that hardly changes within the image cannot be normalised"
            )
        pixels = math.prod(self.size)
        kept = count if kept is None else kept
        needed = kept * pixels * dtype.itemsize
        _check_memory(needed, kept, self.size, self.device)
        self.convolves = texture.combine == "convolve" and len(texture.kernels) > 1
        margins = [0 if periodic else kernel.reach(torch.finfo(dtype).eps) for kernel in texture.kernels]
        if self.convolves:
            margins = [sum(margins)] * len(margins)
        toruses = [self.size if periodic else tuple(fast_length(n - 1 + m) for n in self.size) for m in margins]
        largest = max(toruses)
        _check_memory(needed + 16 * max(largest), kept, self.size, self.device, largest)
        self.fields = [
            Field(
                *kernel.mixture(SHORTEST), torus, torus if self.convolves else self.size, self.device, dtype, count > 1
            )
            for kernel, torus in zip(texture.kernels, toruses, strict=True)
        ]
        if periodic and texture.normalise:
            self._check_changes()
        work = max(field.bytes for field in self.fields)
        if self.convolves:
            work += 6 * math.prod(largest) * dtype.itemsize
        elif len(self.fields) > 1:
            work += pixels * dtype.itemsize
        _check_memory(needed + work, kept, self.size, self.device, largest)

    def _check_changes(self) -> None:
        """That rounding does not hide all that changes: on a torus a long field is as good as constant."""
        least = (16 * torch.finfo(self.fields[0].dtype).eps) ** 2
        changes = [field.changes() for field in self.fields]
        if self.convolves:
            changes = [[math.prod(along) for along in zip(*changes, strict=True)]]
        if any(max(each) < least for each in changes):
            raise ValueError(
                f"a periodic field of a length near its size hardly changes and cannot be normalised, but got "
                f"{self.texture} on {' x '.join(map(str, self.size))} pixels; take shorter lengths, or periodic=False"
            )

    def draw(self, seed: int, index: int, out: Tensor) -> None:
        """Sample `index` of the seed, written into `out`."""
        texture = self.texture
        if self.convolves:
            torus = self.fields[0].torus
            with one_thread():
                spectrum = torch.fft.rfftn(self._raw(0, seed, index), norm="ortho")
                for i in range(1, len(self.fields)):
                    spectrum *= torch.fft.rfftn(self._raw(i, seed, index), norm="ortho")
                out.copy_(_corner(torch.fft.irfftn(spectrum, s=torus, norm="ortho"), self.size))
            if texture.normalise:
                normalise_(out)
            out *= math.prod(texture.weights)
            return
        self.scale(0, seed, index, out)
        if texture.weights[0] != 1:
            out *= texture.weights[0]
        for i, weight in enumerate(texture.weights[1:], start=1):
            if texture.combine == "product":
                out *= self.scale(i, seed, index).mul_(weight)
            else:
                out.add_(self.scale(i, seed, index), alpha=weight)

    def scale(self, i: int, seed: int, index: int, out: Tensor | None = None) -> Tensor:
        """Scale i of a sample, without its weight."""
        field = self._raw(i, seed, index, out)
        field = _corner(field, self.size).contiguous()
        return normalise_(field) if self.texture.normalise else field

    def _raw(self, i: int, seed: int, index: int, out: Tensor | None = None) -> Tensor:
        return self.fields[i].draw(generator_for(self.device, seed, index, i), out)


def _corner(field: Tensor, size: Sequence[int]) -> Tensor:
    return field[tuple(slice(n) for n in size)]


def _check_memory(
    needed: int, count: int, size: tuple[int, ...], device: torch.device, torus: tuple[int, ...] | None = None
) -> None:
    free = available_bytes(device)
    if needed > free:
        shape = " x ".join(map(str, size))
        through = "" if torus is None or torus == size else f", through a torus of {' x '.join(map(str, torus))},"
        raise ValueError(
            f"{count} sample{'s' * (count != 1)} of {shape} pixels{through} need {needed / 1e9:.1f} GB, "
            f"but {device} has {free / 1e9:.1f} GB free; draw fewer at a time (first=...), smaller ones, "
            "or with shorter lengths"
        )


def available_bytes(device: torch.device) -> int:
    """Free memory of the device, as far as the system tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return sys.maxsize
    return 1024 * int(meminfo.partition("MemAvailable:")[2].split()[0])
