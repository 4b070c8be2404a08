"""Libraries that import torchvision, whose compiled part may be missing: placeholders for what it would register."""

import sys
from pathlib import Path

import pytest
import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def import_or_skip(name):
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            _LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    aside = str(Path(sys.prefix) / "foreign")  # where the Makefile puts them
    with pytest.MonkeyPatch.context() as patch:  # processes started later take sys.path over, but no placeholders
        patch.setattr(sys, "path", [*sys.path, aside])
        return pytest.importorskip(name, reason=f"{name} is not installed")
