"""Draws the two pictures of problems.md: python docs/draw_problems.py"""

from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from backdrop.functional import draw_mask
from backdrop.textures import Texture

matplotlib.use("Agg")
IMAGES = Path(__file__).parent / "images"
INK, KEPT, PALE = "#37323e", "#6a3fa0", "#c9c3d1"


def arrow(axes, begin, end, colour, *, dashed=False, width=1.6):
    style = "--" if dashed else "-"
    axes.add_patch(
        FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=12, color=colour, linestyle=style, linewidth=width)
    )


def box(axes, x, y, width, height, text):
    axes.add_patch(Rectangle((x, y), width, height, facecolor="white", edgecolor=INK, linewidth=1.6, zorder=3))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, zorder=4, fontsize=11)


def whole_batch(axes, title, kept, sees):
    """Six samples, one loss: solid lines forward, dashed ones backward."""
    for i in range(6):
        y = 5 - i
        is_seen = i in sees
        colour = KEPT if i in kept else PALE
        axes.add_patch(
            Circle((0, y), 0.3, facecolor=colour if is_seen else "white", edgecolor=INK if is_seen else PALE)
        )
        if is_seen:
            arrow(axes, (0.4, y + 0.07), (2.1, y + 0.07), INK, width=1.1)
            arrow(axes, (3.3, y + 0.07), (4.9, 2.5 + 0.35 * (2.5 - i)), INK, width=1.1)
        if i in kept:
            arrow(axes, (2.1, y - 0.14), (0.4, y - 0.14), KEPT, dashed=True)
            arrow(axes, (4.9, 2.33 + 0.35 * (2.5 - i)), (3.3, y - 0.14), KEPT, dashed=True)
    box(axes, 2.1, -0.5, 1.2, 6.0, "net-\nwork")
    box(axes, 4.9, 1.3, 1.1, 2.4, "loss")
    axes.set_title(title, fontsize=11, color=INK)
    axes.set(xlim=(-0.5, 6.2), ylim=(-0.8, 5.8), aspect="equal")
    axes.axis("off")


def draw_whole_batch():
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    whole_batch(panels[0], "whole batch: exact loss, no noise", set(range(6)), range(6))
    whole_batch(panels[1], "minibatch: noise, but a loss of two samples", {1, 4}, {1, 4})
    whole_batch(panels[2], "Backdrop: exact loss, and noise", {1, 4}, range(6))
    figure.savefig(IMAGES / "whole-batch.png", dpi=110)


def draw_large_sample():
    """One texture; what a fine mask and a coarse one learn from in one step."""
    image = Texture.grid(((5.0,), (48.0,)), (0.75, 1.25))[0].sample(1, 256, seed=3)[0]
    generator = torch.Generator().manual_seed(4)
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.9), layout="constrained")
    rows = (("the whole image, always seen in full", None, 0), ("a fine mask: 10 of 256 positions", 16, 10))
    for axes, (title, cells, count) in zip(panels, (*rows, ("a coarse mask: 2 of 16 positions", 4, 2)), strict=True):
        axes.imshow(image, cmap="gray", vmin=-4, vmax=4)
        if cells:
            mask = draw_mask((1, cells**2), 1 - count / cells**2, dims=(0, 1), exact=True, generator=generator)
            side = 256 / cells
            axes.imshow(
                torch.full((2, 2), 1.0), cmap="gray", vmin=0, vmax=1, alpha=0.55, extent=(-0.5, 255.5, 255.5, -0.5)
            )
            for place in mask[0].nonzero().flatten().tolist():
                x, y = side * (place % cells) - 0.5, side * (place // cells) - 0.5
                part = (slice(int(y + 0.5), int(y + 0.5 + side)), slice(int(x + 0.5), int(x + 0.5 + side)))
                axes.imshow(image[part], cmap="gray", vmin=-4, vmax=4, extent=(x, x + side, y + side, y))
                axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=KEPT, linewidth=2))
        axes.set(xlim=(-0.5, 255.5), ylim=(255.5, -0.5), xticks=[], yticks=[])
        axes.set_title(title, fontsize=11, color=INK)
    figure.savefig(IMAGES / "large-sample.png", dpi=110)


if __name__ == "__main__":
    draw_whole_batch()
    draw_large_sample()
