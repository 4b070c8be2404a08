"""A task of your own: a subclass of Task with four methods, and all of `backdrop run`, `tune` and `report` for it.

    backdrop run examples/05_your_own_task.py:Tones --preset quick
    backdrop report tones-quick
    backdrop tune examples/05_your_own_task.py:Tones

The problem: a few long noisy series, in each of which hums one of four tones. A network looks at windows of each
series, and the mean of its scores over all windows decides. A mask drops most windows in the backward pass.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop1d
from backdrop.experiments.task import Examples, Preset, Settings, Task, product

PERIODS = (20.0, 22.0, 24.0, 26.0)  # in time steps, one for each class


@dataclass(frozen=True, kw_only=True)
class ToneSettings(Settings):
    """Every field can be changed with --set; those of Settings (lr, epochs, batch_size, ...) are there already."""

    p: float = 0.0
    length: int = 2048
    noise: float = 1.5
    per_class: int = 4


class Tones(Task):
    """Which of four tones hums in a noisy series."""

    Settings = ToneSettings
    masks = ("p",)
    metric = "accuracy"
    presets = {  # noqa: RUF012
        "quick": Preset(
            base={"batch_size": 16, "passes": 10, "epochs": 10, "lr": 3e-3}, grid=product(p=[0.0, 0.9]), seeds=6
        )
    }

    def data(self, device):
        s = self.settings
        train = self._series(s.per_class, s.seed, "train")
        judge = self._series(50, s.seed, s.judge)  # "test", or "validation" when tuning
        return tuple(Examples(*(x.to(device) for x in part)) for part in (train, judge))

    def _series(self, per_class, seed, split):
        s = self.settings
        generator = torch.Generator().manual_seed(1000 * seed + ("train", "test", "validation").index(split))
        labels = torch.arange(per_class * len(PERIODS)) % len(PERIODS)
        phase = torch.rand(len(labels), 1, 1, generator=generator)
        time = torch.arange(s.length) / torch.tensor(PERIODS)[labels, None, None]
        noise = s.noise * torch.randn(len(labels), 1, s.length, generator=generator)
        return torch.sin(2 * math.pi * (time + phase)) + noise, labels

    def model(self):
        return nn.Sequential(
            nn.Conv1d(1, 32, 64, stride=16),
            nn.ReLU(),
            nn.Conv1d(32, 32, 3),
            nn.ReLU(),
            nn.Conv1d(32, len(PERIODS), 1),
            Backdrop1d(self.settings.p),  # one unit for each of about 120 windows
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )

    def loss(self, outputs, labels):
        return F.cross_entropy(outputs, labels)

    def evaluate(self, outputs, labels):
        right = (outputs.argmax(1) == labels).double().mean().item()
        return {"accuracy": 100 * right, "loss": F.cross_entropy(outputs, labels).item()}

    def units(self):
        return {"p": 120}
