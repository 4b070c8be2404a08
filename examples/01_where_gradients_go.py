"""Where gradients go: the input gradient of one network without masks, with each of two masks, and with both.

    python examples/01_where_gradients_go.py [--output FILE]

The network reads a 1024 x 1024 image. A fine Backdrop2d sits where one unit sees 26 x 26 pixels (a 64 x 64 lattice), a
coarse one where a unit sees 266 x 266 (4 x 4). The forward pass is the same in all four cases. In the backward pass the
fine mask keeps 41 small patches, the coarse mask 4 large ones, and both together the small patches that lie inside the
large ones. Takes seconds on a laptop.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn

from backdrop import Backdrop2d
from backdrop.textures import Texture

mpl.use("Agg")
from matplotlib import pyplot as plt

CASES = [("no mask", 0.0, 0.0), ("fine mask", 0.99, 0.0), ("coarse mask", 0.0, 0.75), ("both masks", 0.99, 0.75)]


def network(p_fine: float, p_coarse: float) -> nn.Sequential:
    """Patches of 4 x 4, four times over. No batch normalisation: in training it couples all positions."""
    torch.manual_seed(0)  # the same weights in all cases, and with the generators below the same masks
    fine, coarse = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 16, 4, stride=4),  # 256 x 256
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 4, stride=4),  # 64 x 64
        Backdrop2d(p_fine, exact=True, generator=fine),
        nn.GELU(),
        nn.Conv2d(32, 64, 4, stride=4),  # 16 x 16
        nn.GELU(),
        nn.Conv2d(64, 4, 4, stride=4),  # 4 x 4
        Backdrop2d(p_coarse, exact=True, generator=coarse),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def input_gradient(image: torch.Tensor, p_fine: float, p_coarse: float) -> tuple[torch.Tensor, torch.Tensor]:
    image = image.clone().requires_grad_()
    scores = network(p_fine, p_coarse)(image)
    nn.functional.cross_entropy(scores, torch.tensor([0])).backward()
    return scores.detach(), image.grad[0, 0].abs()


def draw(image: torch.Tensor, gradients: dict[str, torch.Tensor], output: Path) -> None:
    figure, axes = plt.subplots(1, 5, figsize=(15, 3.6), layout="constrained")
    axes[0].imshow(image[0, 0].numpy(), cmap="gray")
    axes[0].set_title("input\n1024 x 1024 pixels", fontsize=11)
    for axis, (title, gradient) in zip(axes[1:], gradients.items(), strict=True):
        strong = gradient[gradient > 0].quantile(0.99)  # every panel has its own colours: kept gradients are scaled up
        axis.imshow((gradient / strong).sqrt().numpy(), vmin=0, vmax=1, cmap="inferno", interpolation="antialiased")
        axis.set_title(f"{title}\n{(gradient > 0).float().mean():.1%} of pixels get a gradient", fontsize=11)
    kept = (gradients["coarse mask"] > 0).numpy()
    axes[-1].contour(kept, levels=[0.5], colors="white", linewidths=0.8, linestyles="dotted")
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("where_gradients_go.png"))
    output = parser.parse_args().output
    image = Texture.paper()[0].sample(1, 1024, seed=0)[None]
    scores, gradients = {}, {}
    for title, p_fine, p_coarse in CASES:
        scores[title], gradients[title] = input_gradient(image, p_fine, p_coarse)
        print(f"{title:12} {(gradients[title] > 0).float().mean():7.2%} of pixels get a gradient")
    assert all(torch.equal(score, scores["no mask"]) for score in scores.values()), "the forward pass changed"
    print("The scores are the same in all four cases, bit for bit.")
    draw(image, gradients, output)
    print(f"The picture is in {output}")


if __name__ == "__main__":
    main()
