"""Draws the picture of inside.md: python docs/draw_inside.py"""

from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

matplotlib.use("Agg")
IMAGES = Path(__file__).parent / "images"
INK, MASK, BACK, PALE = "#37323e", "#6a3fa0", "#b3541e", "#f3f0f7"
WIDTH, HEIGHT = 4.7, 0.86

# What happens, and in which file; "back" is the backward pass.
COLUMNS = {
    "(a) one step of Backdrop2d": (
        ("the layer is called, its p is checked", "layers.py, _core/checks.py", ""),
        ("units are drawn, at least one is kept", "_core/draw.py", ""),
        ("x goes through as it is, with a node behind it", "functional.py", ""),
        ("the gradient is multiplied by the weight", "_core/product.py", "back"),
        ("on a GPU in one kernel", "_core/kernels.py, triton.py", "back"),
    ),
    "(b) one step of skip_blocked(model)": (
        ("the graph that was captured before is called", "skip/engine.py, graph/capture.py", ""),
        ("a plan for this size: segments before masks", "skip/segments.py, graph/rules.py", ""),
        ("mask drawn; the segment runs without gradients", "skip/positions.py, programs.py", ""),
        ("windows of the kept units are cut out of its input", "skip/windows.py", "back"),
        ("they run again, with gradients", "skip/positions.py, epilogue.py", "back"),
    ),
    "(c) backdrop run gp, and the page": (
        ("options become a study and where it lies", "cli.py, experiments/commands.py", ""),
        ("points of its grid, without those done", "experiments/runs.py, study/plan.py", ""),
        ("a worker claims a trial", "study/worker.py, study.py", ""),
        ("it trains, and is saved after every epoch", "experiments/training.py, checkpoint.py", ""),
        ("backdrop report gp: means, pictures, a page", "experiments/report/write.py", ""),
    ),
}


def draw():
    figure, axes = plt.subplots(figsize=(14.6, 6.2), layout="constrained")
    for column, (title, steps) in enumerate(COLUMNS.items()):
        x = column * (WIDTH + 0.5)
        axes.text(x + WIDTH / 2, 0.28, title, ha="center", fontsize=13, color=INK, weight="bold")
        for row, (what, where, when) in enumerate(steps):
            y, edge = -row * (HEIGHT + 0.36) - HEIGHT, BACK if when else MASK
            shape = "round,pad=0,rounding_size=0.12"
            axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, shape, facecolor=PALE, edgecolor=edge, linewidth=1.6))
            axes.text(x + WIDTH / 2, y + 0.58, what, ha="center", va="center", fontsize=11, color=INK)
            axes.text(
                x + WIDTH / 2, y + 0.2, where, ha="center", va="center", fontsize=10, color=edge, family="monospace"
            )
            if row:
                ends = (x + WIDTH / 2, y + HEIGHT + 0.34), (x + WIDTH / 2, y + HEIGHT + 0.02)
                axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=13, color=INK, linewidth=1.3))
    axes.text(0, -6.4, "brown: in the backward pass", fontsize=11, color=BACK)
    axes.set(xlim=(-0.1, 3 * WIDTH + 1.1), ylim=(-6.6, 0.7), aspect="equal")
    axes.axis("off")
    figure.savefig(IMAGES / "inside.png", dpi=90)


if __name__ == "__main__":
    draw()
