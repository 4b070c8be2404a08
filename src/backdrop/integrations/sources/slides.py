"""Images in files, as sources: TIFF with tifffile, slides of microscopes with OpenSlide."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backdrop._source import Source
from backdrop.integrations.sources.arrays import Sliced, Transform

LARGEST_PIECE = 2**28  # bytes of a compressed strip or tile, which can only be read as a whole
BLOCK = 512  # pixels, see Slide


def from_tiff(
    path: str | Path,
    axes: str = "",
    *,
    level: int = 0,
    series: int = 0,
    transform: Transform | None = None,
    dtype: torch.dtype | None = None,
) -> Source:
    """A source of a TIFF file, with tifffile: of its tiles or strips only those are read that a region lies in.

    Args:
        path: of the file. Compressed ones have to be written in tiles (or short strips).
        axes: as those of `from_array`, if the file does not say them, or not as they are meant. A file's samples (S)
            and channels (C) are channels, all its other axes are space.
        level: of a pyramid; 0 is the finest.
        series: of a file with several images.
        transform: as that of `from_array`.
        dtype: as that of `from_array`.
    """
    opener = functools.partial(_open_tiff, str(path), series, level)
    return Sliced(opener, axes, transform, dtype, f"{path}{f' (level {level})' if level else ''}", letters=_own_letters)


def from_openslide(
    path: str | Path, *, level: int = 0, transform: Transform | None = None, dtype: torch.dtype | None = None
) -> Source:
    """A source of a slide, with OpenSlide: red, green and blue from 0 to 255, on the background colour where the slide
    has no pixels. `level` 0 is the finest; `transform` and `dtype` are those of `from_array`."""
    opener = functools.partial(Slide, str(path), level)
    return Sliced(opener, "yxc", transform, dtype, f"{path}{f' (level {level})' if level else ''}")


def _open_tiff(path: str, series: int, level: int) -> Any:
    import tifffile

    file = tifffile.TiffFile(path)
    try:
        if not 0 <= series < len(file.series):
            raise ValueError(f"{path} has {len(file.series)} series of images, but got series={series}")
        levels = file.series[series].levels
        if not 0 <= level < len(levels):
            raise ValueError(f"{path} has {len(levels)} levels, but got level={level}")
        return _tiff(file, levels[level], path)
    except Exception:
        file.close()
        raise


def _tiff(file: Any, image: Any, path: str) -> Any:
    if image.dataoffset is not None and image.keyframe.compression == 1:  # all of it in one piece
        import numpy as np

        kind = np.dtype(file.byteorder + image.dtype.char)
        made = Contiguous(np.memmap(path, kind, "r", image.dataoffset, image.shape), image.axes)
        file.close()
        return made
    return Pages(file, image, path)


def _own_letters(opened: Any) -> str:
    return str(opened.axes).lower().replace("s", "c") if opened.axes.count("S") + opened.axes.count("C") < 2 else ""


class Contiguous:
    """An image that lies in a file as it would in memory."""

    def __init__(self, array: Any, axes: str) -> None:
        self.array, self.axes, self.shape, self.dtype = array, axes, array.shape, array.dtype

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        return self.array[where]


class Pages:
    """An image in tiles or strips, one page or several."""

    def __init__(self, file: Any, image: Any, path: str) -> None:
        self.file, self.image = file, image
        weakref.finalize(self, file.close)
        self.page = image.keyframe
        self.axes, self.shape, self.dtype = image.axes, tuple(image.shape), image.dtype
        own = self.page.shape
        self.stack = self.shape[: len(self.shape) - len(own)]  # axes along which there is a page each
        fits = self.shape[len(self.stack) :] == tuple(own) and math.prod(self.stack) == len(image.pages)
        if not fits or self.page.imagedepth != 1:
            raise ValueError(
                f"{path} has an order of pages that cannot be read in parts: {image.axes} of shape {self.shape} in "
                f"{len(image.pages)} pages of shape {tuple(own)}. Write it as zarr, or as one tiled TIFF"
            )
        height = self.page.tilelength if self.page.is_tiled else self.page.rowsperstrip
        width = self.page.tilewidth if self.page.is_tiled else self.page.imagewidth
        self.size = min(height, self.page.imagelength), width
        contiguous = 1 if self.page.planarconfig == 2 else self.page.samplesperpixel
        if math.prod(self.size) * contiguous * self.dtype.itemsize > LARGEST_PIECE:
            raise ValueError(
                f"{path} is compressed in pieces of {self.size[0]} x {self.size[1]} pixels, each of which can only be "
                "read as a whole; write it in tiles (tifffile.imwrite(..., tile=(512, 512))) or as zarr"
            )
        self.counts = tuple(map(math.ceil, (self.page.imagelength / self.size[0], self.page.imagewidth / width)))

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        import numpy as np

        bounds = [part.indices(size)[:2] for part, size in zip(where, self.shape, strict=True)]
        stack, own = bounds[: len(self.stack)], bounds[len(self.stack) :]
        pages = list(np.ndindex(*[stop - start for start, stop in stack]))
        made = [
            self._of_page(int(np.ravel_multi_index(at, self.stack)) if at else 0, own)
            for at in (tuple(i + start for i, (start, _) in zip(page, stack, strict=True)) for page in pages)
        ]
        shape = [stop - start for start, stop in bounds]
        return np.stack(made).reshape(shape) if made else np.empty(shape, self.dtype)

    def _of_page(self, number: int, bounds: Sequence[tuple[int, int]]) -> Any:
        import numpy as np

        letters = self.page.axes
        by_letter = dict(zip(letters, bounds, strict=True))
        rows, columns, samples = by_letter["Y"], by_letter["X"], by_letter.get("S", (0, 1))
        made = np.full(
            (samples[1] - samples[0], rows[1] - rows[0], columns[1] - columns[0]), self.page.nodata, self.dtype
        )
        planar = self.page.planarconfig == 2 and self.page.samplesperpixel > 1
        page = self.image.pages[number]
        page = self.page if page is None else page
        for data, index in self._pieces(page, rows, columns, samples if planar else (0, 1)):
            piece, (first, _, top, left, _), _ = self._decoded(data, index)
            if piece is None:
                continue
            piece = piece[0].transpose(2, 0, 1)  # samples, rows, columns
            corner = (first if planar else 0, top, left)
            wanted, given = [], []
            for (start, stop), at, length in zip((samples, rows, columns), corner, piece.shape, strict=True):
                low, high = max(start, at), min(stop, at + length)
                wanted.append(slice(low - start, max(low, high) - start))
                given.append(slice(low - at, max(low, high) - at))
            made[tuple(wanted)] = piece[tuple(given)]
        order = [letters.index(letter) for letter in "SYX" if letter in letters]
        made = made if "S" in letters else made[0]
        return made.transpose(np.argsort(order))

    def _pieces(self, page: Any, rows: tuple[int, int], columns: tuple[int, int], planes: tuple[int, int]) -> Any:
        """The tiles or strips that a region lies in, encoded."""
        down, across = self.counts
        found = [
            (plane * down + i) * across + j
            for plane in range(*planes)
            for i in range(rows[0] // self.size[0], -(-rows[1] // self.size[0]))
            for j in range(columns[0] // self.size[1], -(-columns[1] // self.size[1]))
        ]
        offsets, counts = [page.dataoffsets[i] for i in found], [page.databytecounts[i] for i in found]
        return self.file.filehandle.read_segments(offsets, counts, found, sort=True)

    def _decoded(self, data: bytes | None, index: int) -> Any:
        more: dict[str, Any] = {}
        if self.page.compression in (6, 7):  # JPEG, with tables that all pieces share
            more = {"jpegtables": self.page.jpegtables, "jpegheader": self.page.jpegheader}
        return self.page.decode(data, index, **more)


class Slide:
    """A level of a slide.

    OpenSlide takes the corner of a region in pixels of the finest level. Where the levels are no whole numbers apart it
    would move what it returns by a part of a pixel, another one for every corner; so there regions are put together
    from blocks that do not depend on them.
    """

    axes = "YXC"

    def __init__(self, path: str, level: int) -> None:
        import numpy as np
        import openslide

        self.slide = openslide.OpenSlide(path)
        weakref.finalize(self, self.slide.close)
        levels = self.slide.level_dimensions
        if not 0 <= level < len(levels):
            raise ValueError(f"{path} has {len(levels)} levels, but got level={level}")
        self.level = level
        width, height = levels[level]
        self.shape, self.dtype = (height, width, 3), np.dtype("uint8")
        self.apart = self.slide.level_downsamples[level]
        colour = self.slide.properties.get("openslide.background-color", "FFFFFF")
        self.background = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)], "float32")

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        import numpy as np

        (top, bottom), (left, right), (first, last) = (
            part.indices(size)[:2] for part, size in zip(where, self.shape, strict=True)
        )
        if self.apart == round(self.apart):
            return self._region(left, top, right - left, bottom - top)[..., first:last]
        made = np.empty((bottom - top, right - left, 3), "uint8")
        for y in range(top // BLOCK * BLOCK, bottom, BLOCK):
            for x in range(left // BLOCK * BLOCK, right, BLOCK):
                block = self._region(x, y, min(BLOCK, self.shape[1] - x), min(BLOCK, self.shape[0] - y))
                block = block[max(top - y, 0) : bottom - y, max(left - x, 0) : right - x]
                at, beside = max(y - top, 0), max(x - left, 0)
                made[at : at + block.shape[0], beside : beside + block.shape[1]] = block
        return made[..., first:last]

    def _region(self, left: int, top: int, width: int, height: int) -> Any:
        import numpy as np

        corner = round(left * self.apart), round(top * self.apart)
        pixels = np.asarray(self.slide.read_region(corner, self.level, (width, height)))
        colours, alpha = pixels[..., :3], pixels[..., 3:]
        if alpha.all() and alpha.min() == 255:
            return colours
        share = alpha.astype("float32") / 255
        return (colours * share + self.background * (1 - share)).round().astype("uint8")
