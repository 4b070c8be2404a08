"""A task of milliseconds for tests of studies, which writes down what it does and can be held up or fail."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from backdrop.experiments.task import Examples, Preset, Settings, Task, product
from backdrop.layers import Backdrop

FILE = f"{Path(__file__).resolve()}:Tiny"


@dataclass(frozen=True, kw_only=True)
class TinySettings(Settings):
    """Of `tiny`.

    Args:
        p: of the mask.
        width: of the network.
        planted: the best p, for a score that says how near a trial is.
        bad_seed: of trials that diverge.
        broken_seed: of trials that raise an error of their own.
    """

    p: float = 0.0
    width: int = 4
    planted: float = 0.9
    bad_seed: int = -1
    broken_seed: int = -1


class Tiny(Task):
    """Two classes in four dimensions."""

    Settings = TinySettings
    metric = "score"
    presets: ClassVar[dict[str, Preset]] = {
        "quick": Preset({"epochs": 3, "evaluations": 3, "batch_size": 16}, product(p=[0.0, 0.5]), seeds=2),
        "paper": Preset({"epochs": 4, "batch_size": 16}, product(p=[0.0, 0.5], width=[4, 8]), seeds=3),
    }

    def data(self, device):
        s, self.evaluations = self.settings, 0
        if not measured():
            note(f"begin p={s.p:g} seed={s.seed} {os.getpid()}")
        if s.seed == s.broken_seed:
            raise ValueError("this seed is broken")
        generator = torch.Generator().manual_seed(s.seed)
        inputs = torch.randn(64, 4, generator=generator)
        labels = (inputs.sum(1) > 0).long()
        return Examples(inputs[:48], labels[:48]), Examples(inputs[48:], labels[48:])

    def model(self):
        s = self.settings
        return nn.Sequential(nn.Linear(4, s.width), Backdrop(s.p), nn.ReLU(), nn.Linear(s.width, 2))

    def loss(self, outputs, labels):
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss * float("nan") if self.settings.seed == self.settings.bad_seed else loss

    def evaluate(self, outputs, labels):
        s, self.evaluations = self.settings, self.evaluations + 1
        note(f"epoch p={s.p:g} seed={s.seed} {os.getpid()}")
        hold = Path(os.environ.get("TINY_HOLD", ""), "hold")
        while self.evaluations > 1 and hold.exists():  # in the middle, with a checkpoint behind it
            time.sleep(0.01)
        loss = nn.functional.cross_entropy(outputs, labels).item()
        nearness = abs(torch.tensor((1 - s.p) / (1 - s.planted)).log().item())
        return {"score": -nearness - abs(s.lr - 1e-3) - 1e-3 * loss, "loss": loss}

    def units(self):
        return {"p": 1000}


def measured():
    """Whether this is no trial, but the few steps by which `run` knows how long trials take."""
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "measure":
        frame = frame.f_back
    return frame is not None


def note(text):
    """Adds a line to the file that tests read, if there is one."""
    if path := os.environ.get("TINY_LOG"):
        with open(path, "a") as file:
            file.write(f"{text}\n")


def noted(path, what):
    """How often each trial did this, as (p, seed)."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split()[1:3] for line in lines if line.startswith(what)]
    pairs = [(float(p.partition("=")[2]), int(seed.partition("=")[2])) for p, seed in found]
    return {pair: pairs.count(pair) for pair in pairs}
