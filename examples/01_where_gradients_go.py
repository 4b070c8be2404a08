# %% [markdown]
"""
# Where gradients go: a first layer

    python examples/01_where_gradients_go.py

A Backdrop layer does nothing in the forward pass and drops gradients at random in the backward pass. First in numbers,
on eight samples. Then as a picture: the input gradient of one network without masks, with each of two masks, and with
both. Takes seconds on a laptop, and writes where_gradients_go.png.
"""

# %%
import torch
from matplotlib import pyplot as plt
from torch import nn

from backdrop import Backdrop, Backdrop2d
from backdrop.textures import Texture

# %% [markdown]
"""
Eight samples with one value each, 1 to 8, and a loss that is the mean of their squares, so that sample n has the
gradient n / 4. With p = 0.75 a sample's gradient is dropped with probability 0.75, and what is kept is multiplied by
N/|b|, the number of samples over the number kept. The loss is the same in all cases, and so is the gradient in the mean
over many masks.
"""


# %%
def gradient(layer: nn.Module) -> torch.Tensor:
    x = torch.arange(1.0, 9.0).requires_grad_()
    loss = layer(x).square().mean()
    assert loss == 25.5  # whatever the layer
    loss.backward()
    return x.grad


torch.manual_seed(0)
masked = Backdrop(0.75)
rows = {"no mask": gradient(nn.Identity())} | {f"mask {i}": gradient(masked) for i in (1, 2, 3)}
rows["mean of 10000"] = torch.stack([gradient(masked) for _ in range(10_000)]).mean(0)
rows["in eval()"] = gradient(masked.eval())
print("gradient of sample" + "".join(f"{n:6}" for n in range(1, 9)))
for name, values in rows.items():
    print(f"{name:18}" + "".join(f"{value:6.2f}" for value in values))

# %% [markdown]
"""
The same with positions instead of samples. The network reads an image of 1024 x 1024 pixels. A fine `Backdrop2d` sits
where one unit sees 26 x 26 pixels (a lattice of 64 x 64), a coarse one where a unit sees 266 x 266 (4 x 4). In the
backward pass the fine mask keeps 41 small patches, the coarse mask 4 large ones, and both together the small patches
that lie inside the large ones. There is no batch normalisation: in training it couples all positions.
"""


# %%
def network(p_fine: float, p_coarse: float) -> nn.Sequential:
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
    """The scores, and the size of the gradient of each pixel."""
    image = image.clone().requires_grad_()
    scores = network(p_fine, p_coarse)(image)
    nn.functional.cross_entropy(scores, torch.tensor([0])).backward()
    return scores.detach(), image.grad[0, 0].abs()


CASES = [("no mask", 0.0, 0.0), ("fine mask", 0.99, 0.0), ("coarse mask", 0.0, 0.75), ("both masks", 0.99, 0.75)]
image = Texture.paper()[0].sample(1, 1024, seed=0)[None]
scores, gradients = {}, {}
for title, p_fine, p_coarse in CASES:
    scores[title], gradients[title] = input_gradient(image, p_fine, p_coarse)
    print(f"{title:12} {(gradients[title] > 0).float().mean():7.2%} of pixels get a gradient")
assert all(torch.equal(score, scores["no mask"]) for score in scores.values()), "the forward pass changed"
print("The scores are the same in all four cases, bit for bit.")

# %%
figure, axes = plt.subplots(1, 5, figsize=(15, 3.6), layout="constrained")
axes[0].imshow(image[0, 0].numpy(), cmap="gray")
axes[0].set_title("input\n1024 x 1024 pixels", fontsize=11)
for axis, (title, values) in zip(axes[1:], gradients.items(), strict=True):
    strong = values[values > 0].quantile(0.99)  # every panel has its own colours: kept gradients are scaled up
    axis.imshow((values / strong).sqrt().numpy(), vmin=0, vmax=1, cmap="inferno", interpolation="antialiased")
    axis.set_title(f"{title}\n{(values > 0).float().mean():.1%} of pixels get a gradient", fontsize=11)
kept = (gradients["coarse mask"] > 0).numpy()
axes[-1].contour(kept, levels=[0.5], colors="white", linewidths=0.8, linestyles="dotted")
for axis in axes:
    axis.set(xticks=[], yticks=[])
figure.savefig("where_gradients_go.png", dpi=110)
print("The picture is in where_gradients_go.png")
