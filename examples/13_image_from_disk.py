"""Images that stay on the disk: train on slides of 8192 x 8192 pixels within 3 GiB.

    python examples/13_image_from_disk.py

Eight images like slides under a microscope are written as tiled TIFF files: white glass, and on it tissue with a
texture of one of two kinds, finer or coarser. They have different sizes. None of them ever lies in memory as a whole:
the forward pass runs in tiles with halos, which `tile="auto"` chooses by the budget in `memory`; a mask behind the last
convolution keeps one position in 2000, and the backward pass reads and computes the windows of these alone. Gradients
are those of the plain masked model on the whole image.

Prints what every step read and the most memory that was taken, tells four new images apart, and writes
image_from_disk.png: the tiles of a forward pass, one of them with its halo, and the windows of a backward pass.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from backdrop import Backdrop2d, Source, skip_blocked

try:
    import tifffile

    from backdrop.integrations.sources import from_tiff, stack
except ModuleNotFoundError:
    sys.exit("this example writes and reads TIFF files: pip install tifffile")

TINY = bool(os.environ.get("TINY"))  # TINY=1 is for tests
SIZES = [(512, 512), (512, 384)] if TINY else [(8192, 8192), (8192, 6144)]
MEMORY = "4MB" if TINY else "500MB"  # for tiles, windows and what is kept
PASSES = 2 if TINY else 4
LEARNING_RATE = 0.01
TILE = 64 if TINY else 512  # of the files
KINDS = (1.0, 3.0)  # the length scale of each texture, in pixels


# Slides, written tile by tile.


def noise(seed: int, i: int, j: int) -> Tensor:
    return torch.randn(TILE, TILE, generator=torch.Generator().manual_seed((seed * 1000 + i + 1) * 1000 + j + 1))


def texture(seed: int, kind: int, i: int, j: int) -> Tensor:
    """A part of a random texture without end: noise, smoothed over its neighbourhood."""
    around = torch.cat([torch.cat([noise(seed, i + a, j + b) for b in (-1, 0, 1)], 1) for a in (-1, 0, 1)], 0)
    reach = 12
    part = around[TILE - reach : 2 * TILE + reach, TILE - reach : 2 * TILE + reach]
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / KINDS[kind]) ** 2)
    bell /= bell.square().sum().sqrt()
    rows = F.conv2d(part[None, None], bell.view(1, 1, -1, 1))
    return F.conv2d(rows, bell.view(1, 1, 1, -1))[0, 0]


def write(path: Path, seed: int, kind: int, size: tuple[int, int]) -> None:
    """White glass, and tissue in an ellipse."""

    def tiles():
        for i in range(0, size[0], TILE):
            for j in range(0, size[1], TILE):
                y = (torch.arange(i, i + TILE)[:, None] / size[0] - 0.5) / 0.4
                x = (torch.arange(j, j + TILE) / size[1] - 0.5) / 0.3
                tissue = y**2 + x**2 < 1
                if not tissue.any():
                    yield torch.full((TILE, TILE), 255, dtype=torch.uint8).numpy()
                    continue
                grey = (120 + 40 * texture(seed, kind, i // TILE, j // TILE)).clamp(0, 250)
                yield torch.where(tissue, grey, 255).to(torch.uint8).numpy()

    tifffile.imwrite(path, tiles(), shape=size, dtype="uint8", tile=(TILE, TILE), compression="zlib")


def scaled(region: Tensor) -> Tensor:
    """What the network gets for a region; it looks at each pixel by itself. Glass is zero, as tissue is on average."""
    return torch.where(region == 255, 0.0, (120 - region.float()) / 40)


class Slides(Dataset):
    """Pairs of files, one of each kind and of the same size; what a loader hands on are sources, not images."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.pairs = [[folder / f"{seed}-{i}-{kind}.tif" for kind in (0, 1)] for i in range(len(SIZES))]
        for i, (pair, size) in enumerate(zip(self.pairs, SIZES, strict=True)):
            for kind, path in enumerate(pair):
                write(path, seed + 2 * i + kind, kind, size)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Source, Tensor]:
        return stack([from_tiff(path, transform=scaled) for path in self.pairs[index]]), torch.tensor([0, 1])


class Watched(Source):
    """Another source, and what is read of it."""

    def __init__(self, source: Source) -> None:
        self.source, self.shape, self.dtype = source, source.shape, source.dtype
        self.reads: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.forward = 0  # how many of them were for the forward pass

    def read(self, sample, low, high):
        self.reads.append((sample, tuple(low), tuple(high)))
        return self.source.read(sample, low, high)


# Network and training.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.ReLU()),
        Backdrop2d(0.95 if TINY else 0.9995),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 2)),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(model[-1].weight)
    return model


def peak() -> float:
    """The most memory that this process ever had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def train(model: nn.Module, slides: Slides) -> Watched:
    """Returns what the last step read."""
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(slides, batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(0))
    for epoch in range(PASSES):
        for source, labels in loader:
            watched, start = Watched(source), time.perf_counter()
            loss = F.cross_entropy(model(watched), labels)
            watched.forward = len(watched.reads)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            images, _, height, width = source.shape
            print(
                f"pass {epoch + 1}: {images} x {height} x {width}, loss {loss.item():.3f}, {watched.forward} tiles "
                f"forward, {len(watched.reads) - watched.forward} windows backward, {time.perf_counter() - start:.1f} s"
            )
    return watched


def draw(watched: Watched, path: Path) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    height, width = watched.shape[2:]
    step = max(1, height // 512)
    lines = [watched.source.read(0, (top, 0), (top + 1, width))[0, :, ::step] for top in range(0, height, step)]
    small = torch.cat(lines)
    small = torch.where(small == 0, small.min(), small).numpy()  # glass is white
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.6))
    forward, backward = (
        [(low, high) for sample, low, high in reads if sample == 0]
        for reads in (watched.reads[: watched.forward], watched.reads[watched.forward :])
    )
    marked = len(forward) // 2

    def box(axis, low, high, **style):
        axis.add_patch(Rectangle((low[1], low[0]), high[1] - low[1], high[0] - low[0], fill=False, **style))

    for axis in axes:
        axis.imshow(small, cmap="gray_r", extent=(0, width, height, 0))
        axis.set(xlim=(-width // 50, width * 51 // 50), ylim=(height * 51 // 50, -height // 50))
    for low, high in forward:
        box(axes[0], low, high, ec="tab:blue", lw=0.8)
    box(axes[0], *forward[marked], ec="tab:red", lw=2)
    axes[0].set_title(f"forward: {len(forward)} tiles; red: one of them, with its halo", fontsize=10)
    for low, high in backward:
        box(axes[1], low, high, ec="tab:orange", lw=1)
    axes[1].set_title(f"backward: {len(backward)} windows of kept positions", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        slides, new = Slides(Path(folder), seed=0), Slides(Path(folder), seed=100)
        took = time.perf_counter() - start
        written = sum(path.stat().st_size for pair in slides.pairs for path in pair) / 2**20
        print(f"wrote 8 slides in {took:.0f} s; the four to train on take {written:.0f} MiB")
        model = skip_blocked(network(), tile="auto", memory=MEMORY)
        watched = train(model, slides)
        print(model.skip_report)
        model.eval()
        with torch.no_grad():  # in tiles, too
            right = sum(int((model(source).argmax(1) == labels).sum()) for source, labels in new)
        print(f"{right} of 4 new slides are told right")
        print(f"the most memory taken: {peak():.2f} GiB")
        draw(watched, Path("image_from_disk.png"))
    assert TINY or peak() < 3


if __name__ == "__main__":
    main()
