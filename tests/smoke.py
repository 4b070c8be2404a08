"""A few seconds with an installed package and nothing but torch beside it: python tests/smoke.py. No pytest needed."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import backdrop
from backdrop import Backdrop, Backdrop2d, insert, receptive_fields, selftest, skip_blocked
from backdrop.losses import rank_statistic_loss
from backdrop.textures import TextureDataset

SOURCE = Path(__file__).resolve().parent.parent / "src"


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 4, 4), nn.ReLU(), Backdrop2d(0.9, exact=True), nn.Conv2d(8, 4, 4, 4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def gradients(model, images, labels):
    torch.manual_seed(1)
    nn.functional.cross_entropy(model(images), labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main():
    here = Path(backdrop.__file__).resolve()
    assert SOURCE not in here.parents, f"this is the source tree, not an installed package: {here}"
    assert importlib.metadata.version("torch-backdrop") == backdrop.__version__
    assert (here.parent / "py.typed").exists()

    data = TextureDataset.paper(1, 64, 0)
    torch.testing.assert_close(
        gradients(network(), data.images, data.labels), gradients(skip_blocked(network()), data.images, data.labels)
    )
    assert receptive_fields(network(), (1, 1, 64, 64))
    assert any(
        isinstance(m, Backdrop2d) for m in insert(nn.Sequential(nn.Conv2d(1, 1, 3)), {"0": Backdrop2d()}).modules()
    )
    ranked = nn.Sequential(nn.Linear(4, 1), Backdrop(0.5))
    rank_statistic_loss(ranked(torch.randn(32, 4)), torch.arange(32) % 2).backward()
    assert ranked[0].weight.grad.abs().sum() > 0

    assert selftest.main() == 0

    command = Path(sys.executable).with_name("backdrop")
    told = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert "Traceback" not in told.stderr, told.stderr
    assert told.returncode == 0 or "[experiments]" in told.stderr, told.stderr
    print(f"backdrop {backdrop.__version__} works with torch {torch.__version__} on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
