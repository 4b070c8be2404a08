"""What is computed when: the maps of a network in the forward pass, and the cells that the backward pass needs of each.

    python examples/03_what_skip_computes.py [--output FILE]

A fine Backdrop2d keeps 2% of the 64 x 64 positions behind two blocks of convolutions and pooling. Forward, every cell
of every map is computed, and none is kept in memory. Backward, the gradient is zero but for the cells that a kept
position was computed from: those are the windows that `skip_blocked` computes again. Takes seconds on a laptop.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn

from backdrop import Backdrop2d, skip_blocked
from backdrop.textures import PAPER_WEIGHTS, SquaredExponential, Texture

mpl.use("Agg")
from matplotlib import pyplot as plt

SIZE, P = 256, 0.98


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(3, 2, 1)),
        *(
            nn.Conv2d(16, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(3, 2, 1),
        ),
        Backdrop2d(P, exact=True),
    )


def texture() -> torch.Tensor:
    """An image with structure at two scales: (1, 1, SIZE, SIZE)."""
    return Texture([SquaredExponential(5), SquaredExponential(40)], PAPER_WEIGHTS).sample(1, SIZE, seed=3)[None]


def gradients(model: nn.Sequential, image: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The map in front of each convolution and of the mask, and where its gradient is not zero, with plain masks."""
    x, maps = image.clone().requires_grad_(), []
    for layer in model:
        if isinstance(layer, (nn.Conv2d, Backdrop2d)):
            x.retain_grad()
            maps.append(x)
        if isinstance(layer, Backdrop2d):
            torch.manual_seed(1)
        x = layer(x)
    x.backward(torch.randn_like(x))
    return [m.detach() for m in maps], [(m.grad != 0).any(1)[0] for m in maps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("what_skip_computes.png"))
    output = parser.parse_args().output
    model, image = network(), texture()
    maps, alive = gradients(model, image)
    fast = skip_blocked(model)
    torch.manual_seed(1)
    assert torch.equal(fast(image), maps[-1])

    figure, axes = plt.subplots(2, len(maps), figsize=(11, 5.6), layout="constrained")
    titles = ["image", "after block 1", "inside block 2", "at the mask"]
    for column, (title, m, cells) in enumerate(zip(titles, maps, alive, strict=True)):
        top, bottom = axes[:, column]
        top.imshow(m[0].mean(0).numpy(), cmap="viridis")
        top.set_title(f"{title}\n{m.shape[2]} x {m.shape[3]}", fontsize=10)
        shown = m[0].mean(0).clone()
        shown[~cells] = float("nan")
        bottom.set_facecolor("0.88")
        bottom.imshow(shown.numpy(), cmap="viridis")
        bottom.set_title(f"{cells.float().mean():.0%} of the cells", fontsize=10)
        for axis in (top, bottom):
            axis.set(xticks=[], yticks=[])
    axes[0][0].set_ylabel("forward: everything,\nand nothing is kept")
    axes[1][0].set_ylabel(f"backward: windows of\n{int(alive[-1].sum())} kept positions")
    figure.savefig(output, dpi=110)
    print(f"{output}: {int(alive[-1].sum())} of {alive[-1].numel()} positions kept; same output bit for bit")


if __name__ == "__main__":
    main()
