"""The networks of the paper's Table 1.

Every convolution but the last is followed by ReLU and batch normalisation, in this order. What the table leaves open is
settled so that the lattices come out as the text says (docs/paper.md lists the choices). Receptive fields are in pixels
of the image; masks stand where the paper has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from torch import Tensor, nn

__all__ = ["LatentCNN", "Norm", "all_cnn", "gp_network", "ponce_network"]

Norm: TypeAlias = Literal["batch", "group", "none"]

GROUPS = 8
NORMS: dict[Norm, Callable[[int], list[nn.Module]]] = {
    "batch": lambda channels: [nn.BatchNorm2d(channels)],
    "group": lambda channels: [nn.GroupNorm(GROUPS, channels)],  # per sample: masks on samples can be skipped exactly
    "none": lambda channels: [],
}


def _conv(
    inputs: int, outputs: int, norm: Norm, *, kernel: int = 3, stride: int = 1, padding: int = 1
) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(), *NORMS[norm](outputs)]


def gp_network(
    small: nn.Module,
    large: nn.Module,
    *,
    classes: int = 4,
    channels: int = 64,
    blocks: Sequence[int] = (4, 3),
    norm: Norm = "batch",
    padded: bool = False,
) -> nn.Sequential:
    """The network for Gaussian-process textures, with a mask for each scale (Table 1, middle).

    | layer | output | receptive field |
    |---|---|---:|
    | image | 1 x 1024 x 1024 | 1 |
    | 2 x {3x3 conv 64}, 3x3 max-pool stride 2 | 64 x 512 x 512 | 7 |
    | the same | 64 x 256 x 256 | 19 |
    | the same | 64 x 128 x 128 | 43 |
    | the same | 64 x 64 x 64 | 91 |
    | mask `small` | 64 x 64 units, one for 16 x 16 pixels | 91 |
    | 2 x {3x3 conv 64}, 3x3 max-pool stride 2 | 64 x 32 x 32 | 187 |
    | the same | 64 x 16 x 16 | 379 |
    | the same | 64 x 8 x 8 | 763 |
    | 3x3 conv 64, unpadded | 64 x 6 x 6 | 1019 |
    | 3x3 conv 4, unpadded | 4 x 4 x 4 | 1275 |
    | mask `large` | 4 x 4 units, one for 256 x 256 pixels | 1275 |
    | average over positions | 4 | all |

    Args:
        small: a module after the first stage, such as `Backdrop2d(0.99)`.
        large: a module after the last convolution.
        classes: of textures.
        channels: of every convolution but the last.
        blocks: how many blocks there are before the first mask and after it; each halves the image.
        norm: "batch" is the paper's.
        padded: pad the last two convolutions, for crops so small that unpadded ones would leave nothing.
    """
    last = int(padded)
    layers: list[nn.Module] = []
    for stage, count in enumerate(blocks):
        for _ in range(count):
            layers += _conv(channels if layers else 1, channels, norm)
            layers += [*_conv(channels, channels, norm), nn.MaxPool2d(3, 2, 1)]
        layers += [small] if stage == 0 else []
    layers += [*_conv(channels, channels, norm, padding=last), nn.Conv2d(channels, classes, 3, padding=last), large]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def ponce_network(
    mask: nn.Module, *, classes: int = 25, channels: int = 64, norm: Norm = "batch", stride: int = 4
) -> nn.Sequential:
    """The network for the Ponce textures (Table 1, left).

    | layer | output | receptive field |
    |---|---|---:|
    | image | 1 x 300 x 400 | 1 |
    | 7x7 conv 64 stride 4 | 64 x 75 x 100 | 7 |
    | 3x3 conv 64 stride 2, unpadded | 64 x 37 x 49 | 15 |
    | 3x3 max-pool stride 2 | 64 x 19 x 25 | 31 |
    | 3x3 conv 64 stride 2, unpadded | 64 x 9 x 12 | 63 |
    | 3x3 max-pool stride 2 | 64 x 5 x 6 | 127 |
    | 3x3 conv 25 | 25 x 5 x 6 | 255 |
    | mask | 5 x 6 units, one for 60 x 67 pixels | 255 |
    | average over positions | 25 | all |

    Args:
        mask: a module after the last convolution, such as `Backdrop2d(0.9)`.
        classes: of textures.
        channels: of every convolution but the last.
        norm: "batch" is the paper's.
        stride: of the first convolution, 4 for images of 300 x 400.
    """
    layers = _conv(1, channels, norm, kernel=7, stride=stride, padding=3)
    for _ in range(2):
        layers += [*_conv(channels, channels, norm, stride=2, padding=0), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.Conv2d(channels, classes, 3, padding=1), mask]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _all_cnn_features(width: int, norm: Norm) -> list[nn.Module]:
    wide = 2 * width
    return [
        *_conv(3, width, norm),
        *_conv(width, width, norm),
        *_conv(width, width, norm, stride=2),
        *_conv(width, wide, norm),
        *_conv(wide, wide, norm),
        *_conv(wide, wide, norm, stride=2),
        *_conv(wide, wide, norm, padding=0),
        *_conv(wide, wide, norm),
    ]


def all_cnn(
    *, classes: int = 10, mask: nn.Module | None = None, after: nn.Module | None = None, width: int = 96, norm: Norm
) -> nn.Sequential:
    """The all-convolutional network for CIFAR-10 (Table 1, right).

    | layer | output | receptive field |
    |---|---|---:|
    | image | 3 x 32 x 32 | 1 |
    | 3x3 conv 96 | 96 x 32 x 32 | 3 |
    | 3x3 conv 96 | 96 x 32 x 32 | 5 |
    | 3x3 conv 96 stride 2 | 96 x 16 x 16 | 7 |
    | 3x3 conv 192 | 192 x 16 x 16 | 11 |
    | 3x3 conv 192 | 192 x 16 x 16 | 15 |
    | 3x3 conv 192 stride 2 | 192 x 8 x 8 | 19 |
    | 3x3 conv 192, unpadded | 192 x 6 x 6 | 27 |
    | 3x3 conv 192 | 192 x 6 x 6 | 35 |
    | 3x3 conv 10 | 10 x 6 x 6 | 43 |
    | `mask` | 6 x 6 units, one for about 5 x 5 pixels | 43 |
    | average over positions | 10 | all |
    | `after` | samples | all |

    Args:
        classes: of images; 1 for a score.
        mask: a module on the 6 x 6 map of scores, such as `Backdrop2d(0.9)`.
        after: a module on the averages, such as `Backdrop(0.9)`.
        width: channels of the first layers; the later ones have twice as many.
        norm: "batch" is the paper's.
    """
    layers = [*_all_cnn_features(width, norm), nn.Conv2d(2 * width, classes, 3, padding=1)]
    layers += [] if mask is None else [mask]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *([] if after is None else [after]))


class LatentCNN(nn.Module):
    """The all-convolutional network with two outputs and two masks (Eq. 4): class scores f and hidden states v.

    v is the output of the last layer but one, the last table row but two above, averaged over its 6 x 6 positions.

    Shape: (n, 3, 32, 32) to (n, classes) and (n, 2 * width).
    """

    def __init__(
        self, scores_mask: nn.Module, hidden_mask: nn.Module, *, classes: int = 10, width: int = 96, norm: Norm
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*_all_cnn_features(width, norm))
        self.scores = nn.Conv2d(2 * width, classes, 3, padding=1)
        self.average = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.scores_mask = scores_mask
        self.hidden_mask = hidden_mask

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.features(images)
        scores = self.average(self.scores(hidden))
        return self.scores_mask(scores), self.hidden_mask(self.average(hidden))
