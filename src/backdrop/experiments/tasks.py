"""The five experiments of the paper's section 3, and how a task is found, also one of your own.

| task | data | network | masks | section |
|---|---|---|---|---|
| `gp` | two-scale Gaussian-process textures, one image per class | Table 1, middle | positions at two scales | 3.2 |
| `ponce` | 25 classes of texture photographs | Table 1, left | positions | 3.2 |
| `cifar10` | CIFAR-10 | Table 1, right | positions | 3.2 |
| `auc` | cats and dogs of CIFAR-10, 5 to 1 | Table 1, right | samples | 3.1 |
| `latent` | CIFAR-10 with 100 i images of class i | Table 1, right | samples, one mask for each term | 3.1 |

`backdrop run TASK --preset quick` takes minutes on two CPU cores; `--preset paper` is the whole experiment. gp and auc
have `--preset laptop` between the two: Table 2 and the figure of ROC AUC, for a night without a GPU.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from backdrop._core import code
from backdrop.experiments import models
from backdrop.experiments.image_tasks import AUC, CIFAR10, MOST_CHANNELS, MOST_PIXELS, Latent, Ponce, check_norm
from backdrop.experiments.models import Norm
from backdrop.experiments.settings import MOST, as_text, check_range, nearest
from backdrop.experiments.task import Classification, Examples, Preset, Settings, Task, percent_right, product
from backdrop.layers import Backdrop2d
from backdrop.textures import PAPER_LENGTHS, PAPER_WEIGHTS, Texture, TextureDataset

__all__ = ["AUC", "CIFAR10", "GP", "TASKS", "Latent", "Ponce"]

# How textures are best trained without masks, by crop, and with (0.99, 0.94), on validation images (results/gp).
PLAIN = {
    None: {"epochs": 20, "lr": 0.01, "weight_decay": 0.5},
    512: {"epochs": 1, "lr": 0.001, "weight_decay": 0.05},
    256: {"epochs": 1, "lr": 0.003, "weight_decay": 0.05},
}
MASKED = {"epochs": 40, "lr": 0.001, "weight_decay": 4.0}
TABLE_2 = [
    *product(p_small=[0.0, 0.99, 0.999], p_large=[0.0, 0.75, 0.94], crop=[None]),
    *product(p_small=[0.0], p_large=[0.0], crop=[512, 256]),
]


def protocol(point: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a row of Table 2 is trained."""
    return MASKED if point["p_small"] or point["p_large"] else PLAIN[point["crop"]]


@dataclass(frozen=True, kw_only=True)
class GPSettings(Settings):
    """Of `gp`.

    Args:
        p_small: of the mask on small patches.
        p_large: of the mask on large patches.
        crop: train on tiles of this size instead, without masks: the paper's comparison.
        size: pixels of an image's side.
        small: the two lengths of the small scale.
        large: the two lengths of the large scale.
        channels: of the network.
        blocks: of the network before the small mask and after it; each halves the image.
        norm: of the network.
        per_class: training images.
        test_per_class: images to evaluate on, of each class.
        eval_batch: images in one step of an evaluation.
        flips: train on images that are turned and mirrored at random, which does not change the distribution that they
            come from.
        adapt: at the end, measure accuracy once more with batch statistics of the images to evaluate on, whose labels
            are not needed for that, in place of those of the few training images.
        shared: one mask for all images of a batch, as in the authors' program.
    """

    p_small: float = 0.0
    p_large: float = 0.0
    crop: int | None = None
    size: int = 1024
    small: tuple[float, ...] = PAPER_LENGTHS[0]
    large: tuple[float, ...] = PAPER_LENGTHS[1]
    channels: int = 64
    blocks: tuple[int, int] = (4, 3)
    norm: Norm = "batch"
    per_class: int = 1
    test_per_class: int = 25
    eval_batch: int = 8
    flips: bool = False
    adapt: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 2, MOST_PIXELS, "size", "crop")
        check_range(self, 1, MOST_CHANNELS, "channels")
        check_range(self, 1, MOST, "per_class", "test_per_class", "eval_batch")
        check_range(self, 0, 16, "blocks")
        check_norm(self, "channels")
        for name in ("small", "large"):
            lengths = getattr(self, name)
            if not lengths or not all(0 < length <= 100 * self.size for length in lengths):
                raise ValueError(
                    f"setting {name} has to be lengths above 0 and at most 100 times the size, {self.size}, but got "
                    f"{as_text(lengths) or 'none'}"
                )
        if not self.blocks[0]:
            raise ValueError(f"setting blocks has to begin with at least 1, but got {as_text(self.blocks)}")
        halved = 2 ** sum(self.blocks)  # each block halves the image, and rounds up
        if self.crop is None and self.size <= 4 * halved:
            raise ValueError(
                f"setting size has to be at least {4 * halved + 1} for {sum(self.blocks)} blocks, each of which halves "
                f"the image (setting blocks), but got {self.size}"
            )
        if self.crop is not None and (self.size % self.crop or self.crop < 2 * halved):
            raise ValueError(
                f"setting crop has to divide the size, {self.size}, and to be at least {2 * halved} for "
                f"{sum(self.blocks)} blocks (setting blocks), but got {self.crop}"
            )


class GP(Classification):
    """One-shot classification of Gaussian-process textures at two scales."""

    name = "gp"
    Settings = GPSettings
    masks = ("p_small", "p_large")
    presets: ClassVar[dict[str, Preset]] = {
        "quick": Preset(
            {
                "size": 256,
                "small": (2.5, 3.3),
                "large": (8.0, 14.0),
                "blocks": (3, 2),
                "channels": 12,
                "test_per_class": 50,
                "eval_batch": 4,
                "batch_size": 4,
                "passes": 20,
                "evaluations": 2,
                "exact": True,
            },
            [  # each chosen on validation images, on other seeds (results/gp)
                {"p_small": 0.0, "p_large": 0.0, "lr": 0.03, "weight_decay": 0.05, "epochs": 10},
                {"p_small": 0.0, "p_large": 0.75, "lr": 0.003, "weight_decay": 2.0, "epochs": 40},
            ],
            seeds=5,
        ),
        "laptop": Preset(  # Table 2 at half the side, for a night
            {
                "size": 512,
                "small": tuple(length / 2 for length in PAPER_LENGTHS[0]),
                "large": tuple(length / 2 for length in PAPER_LENGTHS[1]),
                "blocks": (3, 3),
                "channels": 16,
                "batch_size": 4,
                "passes": 20,
                "evaluations": 5,
            },
            [{**point, **protocol(point), "crop": point["crop"] and point["crop"] // 2} for point in TABLE_2],
            seeds=10,
        ),
        "paper": Preset(
            {"batch_size": 4, "passes": 20, "evaluations": 5, "adapt": True},
            [{**point, **protocol(point)} for point in TABLE_2],
            seeds=10,
        ),
    }

    def data(self, device: torch.device) -> tuple[Examples, Examples]:
        s = self.settings
        classes = Texture.grid((s.small, s.large), PAPER_WEIGHTS)

        def draw(per_class: int, split: str, crop: int | None = None) -> Examples:
            drawn = TextureDataset(classes, per_class, s.size, s.seed, split=split, crop=crop, device=device)
            return Examples(drawn.images, drawn.labels)

        return draw(s.per_class, "train", s.crop), draw(s.test_per_class, s.judge)

    def model(self) -> nn.Module:
        s = self.settings
        small, large = (Backdrop2d(p, exact=s.exact, shared=s.shared) for p in (s.p_small, s.p_large))
        return models.gp_network(
            small,
            large,
            classes=len(s.small) * len(s.large),
            channels=s.channels,
            blocks=s.blocks,
            norm=s.norm,
            padded=s.crop is not None,
        )

    def evaluate(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        found, lengths = outputs.argmax(1), len(self.settings.small)
        right = {"small": percent_right(found % lengths, labels % lengths)}
        right |= {"large": percent_right(found // lengths, labels // lengths)}
        return {**super().evaluate(outputs, labels), **right}

    def augment(self, inputs: Tensor) -> Tensor:
        if not self.settings.flips:
            return inputs
        ways = torch.stack([torch.rot90(x, turns, (2, 3)) for x in (inputs, inputs.flip(3)) for turns in range(4)])
        chosen = torch.randint(len(ways), (len(inputs),), device=inputs.device)
        return ways[chosen, torch.arange(len(inputs), device=inputs.device)]

    @torch.no_grad()
    def examine(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        if not self.settings.adapt:
            return {}
        adapted = copy.deepcopy(model)
        order = torch.randperm(len(examples.labels), generator=torch.Generator().manual_seed(0))
        images = examples.inputs[order.to(examples.inputs.device)]  # batches of all classes, as in training
        update_bn(torch.split(images, self.settings.batch_size), adapted)
        outputs = torch.cat([adapted(part) for part in torch.split(examples.inputs, self.settings.eval_batch)])
        found = self.evaluate(outputs, examples.labels)
        return {f"adapted_{name}": found[name] for name in ("accuracy", "small", "large")}

    def units(self) -> dict[str, int]:
        before, after = self.settings.blocks
        fine = math.ceil(self.settings.size / 2**before)
        coarse = math.ceil(fine / 2**after) - (4 if self.settings.crop is None else 0)
        return {"p_small": fine**2, "p_large": coarse**2}


TASKS: dict[str, type[Task]] = {task.name: task for task in (GP, Ponce, CIFAR10, AUC, Latent)}

NAMED: dict[str, type[Task]] = {}  # tasks of one's own that were named in this process, by `reference`


def find_task(name: str) -> type[Task]:
    """A task of the paper by its name, or one of your own by `module:Class` or `path/to/file.py:Class`.

    This runs the module or the file, so the name has to come from the user, never from a file or a database.
    """
    if name in TASKS:
        return TASKS[name]
    where, colon, which = name.rpartition(":")
    if not colon or not where:
        raise ValueError(
            f"task has to be one of {', '.join(TASKS)}, or one of your own as MODULE:CLASS or FILE.py:CLASS, but got "
            f"{name!r}{nearest(name, TASKS)}"
        )
    found = getattr(_module(where), which, None)
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ValueError(f"{name} has to be a subclass of backdrop.experiments.task.Task, but is {str(found)[:80]}")
    _check_task(name, found)
    NAMED[reference(found)] = found
    return found


def _check_task(name: str, task: type[Task]) -> None:
    """An error unless a task of the user's own has all that one has to have."""
    if missing := [*sorted(task.__abstractmethods__), *(what for what in ("presets",) if not hasattr(task, what))]:
        raise ValueError(f"{name} has to be a subclass of backdrop.experiments.task.Task with {', '.join(missing)}")
    kinds = {
        "name": isinstance(task.name, str) and bool(task.name) and task.name.isprintable(),
        "Settings": inspect.isclass(task.Settings) and issubclass(task.Settings, Settings),
        "presets": isinstance(task.presets, Mapping) and all(map(_is_preset, task.presets.values())),
        "masks": isinstance(task.masks, (list, tuple)) and all(isinstance(mask, str) for mask in task.masks),
    }
    for what, is_right in kinds.items():
        if not is_right:
            raise ValueError(f"{name} has {what} that cannot be: {str(getattr(task, what))[:80]!r}")


def _is_preset(found: Any) -> bool:
    return isinstance(found, Preset) and type(found.seeds) is int and found.seeds >= 1


def known_task(where: str, name: str) -> type[Task] | None:
    """The task that a file names, by its place and its own name, if it is there already: nothing is run for it.

    These are the tasks of the paper, and those that the user has named in this process.
    """
    found = TASKS.get(where) or NAMED.get(where)
    return found if found is not None and found.name == name else None


def reference(task: type[Task]) -> str:
    """What `find_task` finds this task by, also in another process."""
    return task.name if TASKS.get(task.name) is task else f"{Path(inspect.getfile(task)).resolve()}:{task.__qualname__}"


def find_claims(name: str) -> Any:
    """A function for the claims of a report, by `module:name` or `path/to/file.py:name`, which is run."""
    where, colon, which = name.rpartition(":")
    found = getattr(_module(where), which, None) if colon and where else None
    if not callable(found):
        raise ValueError(f"claims have to be a function, given as FILE.py:NAME, but {name!r} is {found!r}")
    return found


def _module(where: str) -> ModuleType:
    return code.from_file(Path(where), where) if where.endswith(".py") else code.from_name(where)
