"""Draws the pictures of the pages on masks, losses, schedules, integrations and JAX, and the narrow one of the first.

    python docs/draw_pages.py [NAME ...]

The first takes half a minute, because it runs examples/01_where_gradients_go.py; the others take seconds.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import nn

from backdrop import Backdrop
from backdrop.functional import draw_mask
from backdrop.schedules import CosineP, LinearP, StepP

matplotlib.use("Agg")
ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
INK, KEPT, BACK, PALE, DROPPED = "#37323e", "#6a3fa0", "#b3541e", "#f3f0f7", "#ddd8e4"


def arrow(axes, begin, end, colour=INK, *, bend=0.0, dashed=False):
    axes.add_patch(
        FancyArrowPatch(
            *(begin, end),
            arrowstyle="-|>",
            mutation_scale=13,
            color=colour,
            linewidth=1.5,
            linestyle="--" if dashed else "-",
            connectionstyle=f"arc3,rad={bend}",
        )
    )


def box(axes, x, y, width, height, text, below="", colour=INK):
    shape = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch((x, y), width, height, shape, facecolor=PALE, edgecolor=colour, linewidth=1.6))
    middle = x + width / 2
    axes.text(
        *(middle, y + height * (0.66 if below else 0.5)), text, ha="center", va="center", fontsize=11.5, color=INK
    )
    if below:
        axes.text(
            *(middle, y + height * 0.3), below, ha="center", va="center", fontsize=10, color=colour, family="monospace"
        )


def hero():
    """The picture of the first page, two by two, for windows as narrow as a phone."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:  # the example saves its picture where it runs
        os.chdir(folder)
        found = runpy.run_path(str(ROOT / "examples" / "01_where_gradients_go.py"))
        os.chdir(before)
    figure, panels = plt.subplots(2, 2, figsize=(7, 7.6), layout="constrained")
    for axes, (title, values) in zip(panels.flat, found["gradients"].items(), strict=True):
        strong = values[values > 0].quantile(0.99)
        axes.imshow((values / strong).sqrt().numpy(), vmin=0, vmax=1, cmap="inferno", interpolation="antialiased")
        axes.set_title(f"{title}: {(values > 0).float().mean():.1%}", fontsize=19)
        axes.set(xticks=[], yticks=[])
    figure.savefig(IMAGES / "where_gradients_go_narrow.png", dpi=100)


def masks():
    """Four samples of one channel: the units that share a draw, of masks with other dims and patch."""
    torch.manual_seed(5)
    side, gap = 12, 2
    kinds = (
        ("samples", "Backdrop(0.5)", 0.5, (0,), 1),
        ("positions of every sample", "Backdrop2d(0.9)", 0.9, (0, 2, 3), 1),
        ("patches of positions", "Backdrop2d(0.8, patch=4)", 0.8, (0, 2, 3), 4),
        ("positions, one draw for all", "Backdrop(0.9, dims=(2, 3))", 0.9, (2, 3), 1),
    )
    figure, panels = plt.subplots(1, len(kinds), figsize=(13, 3.75), layout="constrained")
    for axes, (title, code, p, dims, patch) in zip(panels, kinds, strict=True):
        mask = draw_mask((4, 1, side, side), p, dims=dims, patch=patch, exact=True).expand(4, 1, side, side)
        for i, one in enumerate(mask[:, 0]):
            x, y = (i % 2) * (side + gap), (i // 2) * (side + gap)
            axes.imshow(one, cmap=ListedColormap([DROPPED, KEPT]), vmin=0, vmax=1, extent=(x, x + side, y + side, y))
            for line in range(0, side + 1, patch if dims != (0,) else side):
                axes.plot([x, x + side], [y + line] * 2, color="white", linewidth=0.8)
                axes.plot([x + line] * 2, [y, y + side], color="white", linewidth=0.8)
        axes.set(xlim=(-0.2, 2 * side + gap + 0.2), ylim=(2 * side + gap + 0.2, -0.2))
        axes.set_title(title, fontsize=13, color=INK)
        axes.text(side + gap / 2, 2 * side + gap + 2.6, code, ha="center", fontsize=11, family="monospace", color=INK)
        axes.axis("off")
    figure.savefig(IMAGES / "masks.png", dpi=100)


def losses():
    """Which samples losses compare; and the row and column of the gradient that a mask on samples keeps."""
    n, positive = 12, (1, 4, 5, 9)
    is_positive = torch.zeros(n, dtype=torch.bool).index_fill(0, torch.tensor(positive), True)
    later = torch.arange(n)[None, :] >= torch.arange(n)[:, None]
    classes = torch.arange(n) % 3
    apart = ~torch.eye(n, dtype=torch.bool)
    kinds = (
        ("a mean over samples", torch.eye(n, dtype=torch.bool), "cross-entropy"),
        ("ROC AUC", is_positive[:, None] & ~is_positive[None, :], "positive i, negative j"),
        ("average precision", is_positive[:, None] & apart, "positive i, all others j"),
        ("Cox, time to an event", is_positive[:, None] & later, "event i, all still at risk j"),
        ("contrast", torch.ones(n, n, dtype=torch.bool), "a of i, b of all j"),
        ("classes", (classes[:, None] == classes[None, :]) & apart, "i and j of one class"),
    )
    figure, panels = plt.subplots(1, len(kinds), figsize=(13, 2.75), layout="constrained")
    for axes, (title, pairs, below) in zip(panels, kinds, strict=True):
        axes.imshow(pairs, cmap=ListedColormap(["#f0edf3", KEPT]), vmin=0, vmax=1)
        axes.set_xticks(torch.arange(-0.5, n).tolist(), [])
        axes.set_yticks(torch.arange(-0.5, n).tolist(), [])
        axes.grid(color="white", linewidth=0.8)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_title(title, fontsize=12, color=INK)
        axes.set_xlabel(below, fontsize=10.5, color=INK)
    figure.savefig(IMAGES / "losses-pairs.png", dpi=100)


def schedules():
    """p, and the share that is kept, over a thousand steps."""
    steps = 1000
    kinds = {
        "LinearP(start=0)": lambda model: LinearP(model, start=0.0, steps=600),
        "CosineP(start=0)": lambda model: CosineP(model, start=0.0, steps=600),
        "StepP({0: 0.5, 300: 0.9, 600: 0.99})": lambda model: StepP(model, {0: 0.5, 300: 0.9, 600: 0.99}),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.3), layout="constrained")
    for (name, make), colour in zip(kinds.items(), (INK, KEPT, BACK), strict=True):
        schedule, values = make(nn.Sequential(nn.Linear(1, 1), Backdrop(0.99))), []
        for _ in range(steps):
            values.append(schedule.get_last_p()[0])
            schedule.step()
        left.plot(values, color=colour, label=name, linewidth=2)
        right.plot([100 * (1 - p) for p in values], color=colour, linewidth=2)
    left.set(xlabel="step", ylabel="p", ylim=(0, 1.05))
    right.set(xlabel="step", ylabel="percent of units kept", yscale="log")
    right.set_yticks([1, 10, 100], ["1", "10", "100"])
    left.legend(frameon=False, fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "schedules.png", dpi=100)


def integrations():
    """What belongs to the library of others, and what is put in."""
    figure, axes = plt.subplots(figsize=(12, 4.1), layout="constrained")
    box(axes, 0, 1.5, 1.9, 1.0, "data", "DataLoader")
    box(axes, 2.7, 1.5, 2.6, 1.0, "model", "timm, Transformers")
    box(axes, 6.1, 1.5, 2.6, 1.0, "loss", "of all samples")
    box(axes, 9.5, 1.5, 2.5, 1.0, "trainer", "Lightning, Trainer")
    for begin, end in ((1.9, 2.7), (5.3, 6.1), (8.7, 9.5)):
        arrow(axes, (begin + 0.04, 2.0), (end - 0.04, 2.0))
    box(axes, 2.3, 3.2, 3.4, 1.0, "masks go in", "insert, insert_masks", KEPT)
    box(axes, 6.1, 3.2, 2.6, 1.0, "losses", "backdrop.losses", KEPT)
    box(axes, 9.3, 3.2, 2.9, 1.0, "p moves, and is logged", "BackdropCallback", KEPT)
    for x in (4.0, 7.4, 10.75):
        arrow(axes, (x, 3.18), (x, 2.52), KEPT)
    box(axes, 2.3, -0.2, 3.4, 1.0, "what is blocked is skipped", "skip_blocked, Skip", BACK)
    box(axes, 6.1, -0.2, 2.6, 1.0, "of all processes", 'group="world"', BACK)
    box(axes, 9.3, -0.2, 2.9, 1.0, "checkpoints", "same keys, and p", BACK)
    for x in (4.0, 7.4, 10.75):
        arrow(axes, (x, 0.82), (x, 1.48), BACK)
    axes.set(xlim=(-0.1, 12.3), ylim=(-0.35, 4.35), aspect="equal")
    axes.axis("off")
    figure.savefig(IMAGES / "integrations.png", dpi=95)


def jax():
    """Keys, and what `skip` gained by benchmarks/results/jax-cpu.json."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.9), width_ratios=(1.15, 1), layout="constrained")
    box(left, -0.2, 1.75, 1.4, 0.9, "key", "of a run")
    for i, y in enumerate((3.5, 1.75, 0.0)):
        box(left, 2.0, y, 1.6, 0.9, f"step {i + 1}", "split(key)")
        arrow(left, (1.22, 2.2), (1.98, y + 0.45))
    for y, name in ((4.0, "mask of positions"), (3.0, "mask of samples")):
        box(left, 4.5, y, 3.2, 0.8, name, "backdrop(x, key, p)", KEPT)
        arrow(left, (3.62, 3.95), (4.48, y + 0.4), KEPT)
    left.text(4.5, 1.2, "a key draws one mask,\nalways the same", fontsize=11, color=INK)
    left.set(xlim=(-0.3, 7.8), ylim=(-0.2, 5.0), aspect="equal")
    left.axis("off")
    rows = json.loads((ROOT / "benchmarks" / "results" / "jax-cpu.json").read_text())["rows"]
    names = list(dict.fromkeys(row["network"] for row in rows))
    for name, colour in zip(names, (INK, KEPT), strict=True):
        mine = [row for row in rows if row["network"] == name]
        kept = [100 * (1 - row["p"]) for row in mine]
        right.plot(kept, [row["plain_ms"] / row["skip_ms"] for row in mine], "o-", color=colour, label=name)
    shares = [s / 100 for s in range(5, 56)]
    counted = [3 / (1 + 2 * share) for share in shares]
    right.plot([100 * s for s in shares], counted, "--", color=BACK, label="by counting forward passes")
    right.set(xlabel="percent of samples kept", ylabel="times faster with skip", xlim=(0, 55), ylim=(0, 8))
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    figure.savefig(IMAGES / "jax.png", dpi=95)


if __name__ == "__main__":
    drawn = {each.__name__: each for each in (hero, masks, losses, schedules, integrations, jax)}
    for name in sys.argv[1:] or drawn:
        drawn[name]()
