"""Networks to look at: where are the masks, what do they see, what do they keep?

    backdrop inspect examples/06_networks.py:textures --input 4,1,1024,1024
    backdrop inspect examples/06_networks.py:textures --input 4,1,1024,1024 --out textures.html

A file of your own works the same way: a function without arguments that returns a model is all that is needed.
"""

from __future__ import annotations

from torch import nn

from backdrop import Backdrop2d
from backdrop.experiments.models import gp_network
from backdrop.placement import insert


def textures() -> nn.Module:
    """The paper's network for Gaussian-process textures, with a mask for each of two scales."""
    return gp_network(Backdrop2d(0.99, exact=True), Backdrop2d(0.94, exact=True))


def resnet18() -> nn.Module:
    """A network of timm's, which knows nothing of masks, with one after its second stage."""
    import timm

    return insert(timm.create_model("resnet18"), {"layer2": Backdrop2d(0.95)})
