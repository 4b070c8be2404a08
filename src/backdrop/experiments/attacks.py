"""Accuracy under attack: each image is changed a little, every pixel by at most a radius, to lead a network astray.

FGSM takes one step along the sign of the gradient (Goodfellow, Shlens and Szegedy, "Explaining and harnessing
adversarial examples", 2015), PGD many small ones from a random start (Madry et al., "Towards deep learning models
resistant to adversarial attacks", 2018). The network gives scores of classes, and has to be in eval mode, in which
masks do nothing. A radius is by how much a pixel may change, of 0 (black) to 1 (white).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Attack", "Pixels", "accuracy_under", "fgsm", "pgd"]

Attack = Callable[[nn.Module, Tensor, Tensor, float, "Pixels"], Tensor]


class Pixels(NamedTuple):
    """What the darkest and the brightest pixel are to a network, after normalisation; they broadcast with images."""

    black: Tensor
    white: Tensor


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, radius: float, pixels: Pixels) -> Tensor:
    """Images after one step that raises the loss."""
    reach = radius * (pixels.white - pixels.black)
    return _within(images + reach * _direction(model, images, labels), images, reach, pixels)


def pgd(
    model: nn.Module, images: Tensor, labels: Tensor, radius: float, pixels: Pixels, *, steps: int = 20, seed: int = 0
) -> Tensor:
    """Images after several steps of a quarter of the radius, from a random start, that each stay within the radius."""
    reach = radius * (pixels.white - pixels.black)
    generator = torch.Generator(images.device).manual_seed(seed)
    start = 2 * torch.rand(images.shape, generator=generator, device=images.device, dtype=images.dtype) - 1
    changed = _within(images + reach * start, images, reach, pixels)
    for _ in range(steps):
        changed = _within(changed + reach / 4 * _direction(model, changed, labels), images, reach, pixels)
    return changed


def accuracy_under(
    attack: Attack, model: nn.Module, images: Tensor, labels: Tensor, radius: float, pixels: Pixels, batch: int = 1000
) -> float:
    """The share of images, in percent, that a model still classifies correctly; so many are attacked at a time."""
    right = 0
    for some, its in zip(torch.split(images, batch), torch.split(labels, batch), strict=True):
        with torch.no_grad():
            found = model(attack(model, some, its, radius, pixels)).argmax(1)
        right += int((found == its).sum())
    return 100 * right / len(labels)


def _direction(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Where the loss rises, as signs. The sum, not the mean: a gradient of few images must not become zero."""
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, images)
    return gradient.sign()


def _within(changed: Tensor, images: Tensor, reach: Tensor, pixels: Pixels) -> Tensor:
    changed = images + (changed - images).clamp(-reach, reach)
    return changed.clamp(pixels.black, pixels.white)
