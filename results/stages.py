"""What is searched for and measured, task by task: the stages that `run.py` runs.

The stages of a task come one after the other, and each takes what those before it found best on validation data.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backdrop.experiments.report.statistics import CHOSEN, Results
from backdrop.experiments.study.archive import Archive
from backdrop.experiments.study.plan import all_settings
from backdrop.experiments.task import product
from backdrop.experiments.tasks import TASKS
from backdrop.textures import PAPER_LENGTHS

ROOT = Path(__file__).parent
POLICIES = ("exact", "sampled", "frozen")
Settings = dict[str, Any]


class Stage(NamedTuple):
    """Points, without their seeds, and where their trials are kept."""

    points: list[Settings]
    seeds: Sequence[int]
    file: str


def chosen(task: str, count: int = 1, search: str = "choice", **wanted: Any) -> list[Settings]:
    """What the search has found best, for the points with these settings."""
    results = Results(TASKS[task], Archive(ROOT / task / f"{search}.json").records())
    tried = [c for c in results.measured if all(c.settings[name] == value for name, value in wanted.items())]
    found = []
    for _ in range(count):
        if best := results.best(tried):
            tried.remove(best)
            found.append({name: best.settings[name] for name in CHOSEN if name in best.settings})
    return found


# Textures: learning rate, weight decay and length of training are searched on images of a quarter of the side, with
# lengths to match, and the best of them on images of half the side; once with the paper's best masks, once without.

WHOLE = {"p_small": 0.0, "p_large": 0.0, "crop": None}
MASKED = {"p_small": 0.99, "p_large": 0.94, "crop": None}
ARMS = [WHOLE, MASKED, {**WHOLE, "crop": 512}, {**WHOLE, "crop": 256}]


def textures(size: int, arm: Settings) -> Settings:
    """Validation images of this size, with everything else in proportion to the paper's 1024 pixels."""
    lengths = [[length * size / 1024 for length in pair] for pair in PAPER_LENGTHS]
    blocks = ({256: 2, 512: 3}[size], 3)
    crop = arm["crop"] and arm["crop"] * size // 1024
    return {**arm, "size": size, "small": lengths[0], "large": lengths[1], "blocks": blocks, "crop": crop}


def gp_best(size: int, arm: Settings, count: int = 1) -> list[Settings]:
    at = textures(size, arm)
    return chosen("gp", count, **{name: at[name] for name in ("size", *arm)})


def gp_coarse() -> Stage:
    whole = product(lr=[0.0003, 0.001, 0.003, 0.01], weight_decay=[0.5, 4.0], epochs=[20, 40])
    whole += product(lr=[0.0003, 0.001, 0.003], weight_decay=[4.0], epochs=[10, 80])  # beyond the best of those
    whole += product(lr=[0.001, 0.003], weight_decay=[12.0], epochs=[20, 40, 80])
    whole += product(lr=[0.03], weight_decay=[0.5], epochs=[10, 20])
    whole += product(lr=[0.03, 0.1], weight_decay=[0.05], epochs=[10, 20])  # as no masks are best on two cores
    whole += product(lr=[0.0003, 0.001, 0.003, 0.01], weight_decay=[0.05, 0.5, 4.0], epochs=[1, 2, 5])  # 20 steps each
    crops = product(lr=[0.001, 0.003, 0.01], weight_decay=[0.5, 4.0], epochs=[1, 5, 20])  # 4 and 16 steps to a pass
    crops += product(lr=[0.0003, 0.001, 0.003], weight_decay=[0.05, 0.5], epochs=[1], passes=[5, 20])
    crops += product(lr=[0.0003], weight_decay=[0.05, 0.5], epochs=[5])
    points = [
        {**textures(256, arm), **protocol, "judge": "validation"}
        for arm in ARMS
        for protocol in (crops if arm["crop"] else whole)
    ]
    return Stage(points, range(100, 103), "choice")


def gp_fine() -> Stage:
    best = [(arm, protocol) for arm in ARMS for protocol in gp_best(256, arm, 5)]
    points = [{**textures(512, arm), **protocol, "judge": "validation"} for arm, protocol in best]
    return Stage(points, range(100, 105), "choice")


def gp_protocol(point: Settings) -> Settings:
    """What was found best, with both masks where there is one."""
    return gp_best(512, MASKED if point["p_small"] or point["p_large"] else {**WHOLE, "crop": point["crop"]})[0]


def gp_final() -> Stage:
    points = [{**point, **gp_protocol(point)} for point in TASKS["gp"].presets["paper"].grid]
    return Stage(points, range(10), "trials")


def gp_variants() -> Stage:
    """Other ways to train, with what was best at this size, and masks on crops."""
    ways: list[Settings] = [{}, {"norm": "group"}, {"exact": True}, {"p_warmup": 0.5}, {"lr_schedule": "cosine"}]
    ways += [{"flips": True}, {"batch_size": 2}, {"batch_size": 1}]
    ways += product(optimizer=["sgd"], lr=[0.01, 0.03, 0.1, 0.3], weight_decay=[0.0005])
    points = [{**textures(256, arm), **gp_best(256, arm)[0], **way} for arm in (WHOLE, MASKED) for way in ways]
    crops = {**WHOLE, "crop": 512}
    masks = [(0.0, 0.0), (0.0, 0.75), (0.9, 0.0), (0.9, 0.5), (0.99, 0.75)]
    points += [
        {**textures(256, crops), **gp_best(256, crops)[0], "p_small": small, "p_large": large, "epochs": epochs}
        for small, large in masks
        for epochs in (1, 3)
    ]
    return Stage([{**point, "judge": "validation"} for point in points], range(100, 105), "variants")


# Of these ways, only training on turned and mirrored images was better: it has a search of its own.


def gp_turned() -> Stage:
    whole = product(lr=[0.0003, 0.001, 0.003, 0.01], weight_decay=[4.0], epochs=[20, 40, 80])
    whole += product(lr=[0.001, 0.003], weight_decay=[0.5, 12.0], epochs=[40])
    whole += product(lr=[0.0003, 0.001], weight_decay=[4.0], epochs=[160])
    crops = product(lr=[0.0003, 0.001, 0.003], weight_decay=[0.05], epochs=[1, 3, 10])
    points = [
        {**textures(256, arm), **protocol, "flips": True, "judge": "validation"}
        for arm in ARMS[:3]
        for protocol in (crops if arm["crop"] else whole)
    ]
    return Stage(points, range(100, 103), "turned")


def gp_tiles() -> Stage:
    """Masks on crops of images that are turned."""
    masks = [(0.0, 0.0), (0.0, 0.5), (0.0, 0.75), (0.9, 0.0), (0.9, 0.5), (0.99, 0.75)]
    ways = product(lr=[0.0003], epochs=[3, 10, 30]) + product(lr=[0.001], epochs=[3])
    points = [
        {**textures(256, ARMS[2]), "p_small": small, "p_large": large, **way, "weight_decay": 0.05, "flips": True}
        for small, large in masks
        for way in ways
    ]
    return Stage([{**point, "judge": "validation"} for point in points], range(100, 105), "turned")


def gp_turned_crops() -> Stage:
    """Crops with and without the mask that was best on them."""
    points = []
    for p_large in (0.0, 0.75):
        crops = {**WHOLE, "crop": 512, "p_large": p_large}
        at = textures(256, crops)
        (best,) = chosen("gp", search="turned", **{name: at[name] for name in crops})
        points.append({**crops, **best, "flips": True})
    return Stage(points, range(10), "turned-crops")


def gp_policies() -> Stage:
    masked = {**MASKED, **gp_protocol(MASKED)}
    return Stage([{**masked, "skip": policy} for policy in POLICIES], range(5), "policies")


# Textures on two CPU cores: the quick preset, whose trials take seconds, with more seeds and the same search without
# masks and with its own.

SMALL = TASKS["gp"].presets["quick"]


def small(arm: Settings, protocol: Settings) -> Settings:
    return {**all_settings(TASKS["gp"], SMALL.base), **arm, **protocol}


def gp_small_coarse() -> Stage:
    ways = product(lr=[0.001, 0.003, 0.01], weight_decay=[0.05, 2.0], epochs=[5, 10, 20])
    ways += product(lr=[0.03], weight_decay=[0.05, 2.0], epochs=[5, 10])  # beyond the ends at which the best were
    ways += product(lr=[0.01, 0.03], weight_decay=[0.05], epochs=[2])
    ways += product(lr=[0.003], weight_decay=[2.0], epochs=[40])
    ways += product(lr=[0.03], weight_decay=[0.05], epochs=[20]) + product(lr=[0.03], weight_decay=[0.5], epochs=[10])
    ways += product(lr=[0.1], weight_decay=[0.05], epochs=[10]) + product(lr=[0.003], weight_decay=[2.0], epochs=[80])
    points = [{**small(arm, way), "judge": "validation"} for arm in SMALL.grid for way in ways]
    return Stage(points, range(100, 103), "small-choice")


def gp_small_fine() -> Stage:
    """The best two of each, where three seeds do not tell them apart, with five more."""
    best = [(arm, way) for arm in SMALL.grid for way in chosen("gp", 2, "small-choice", **arm)]
    return Stage([{**small(arm, way), "judge": "validation"} for arm, way in best], range(100, 108), "small-choice")


def gp_small_final() -> Stage:
    points = [small(arm, chosen("gp", search="small-choice", **arm)[0]) for arm in SMALL.grid]
    return Stage(points, range(24), "small")


# Photographs: every batch size and mask has its own search, first for the learning rate and then beyond the ends of
# what was tried, until the best lies between two others.

RATES = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


class Images(NamedTuple):
    """How a task is searched.

    Args:
        task: its name.
        cells: batch sizes and masks.
        tried: by batch size, the learning rates and lengths of training to begin with.
        seeds: of the search.
        like: the masks to search with, in place of all that are not 0; none where each has its own search.
        judge: settings of the search alone.
        judged: how many seeds are for the test images.
    """

    task: str
    cells: list[Settings]
    tried: dict[int, list[Settings]]
    seeds: Sequence[int]
    like: Settings = {}  # noqa: RUF012
    judge: Settings = {"judge": "validation"}  # noqa: RUF012
    judged: int = 5

    def arm(self, cell: Settings) -> Settings:
        """What is searched in place of a cell."""
        return {**cell, **{name: p for name, p in self.like.items() if cell[name]}}

    def arms(self) -> list[Settings]:
        arms = [self.arm(cell) for cell in self.cells]
        return [arm for place, arm in enumerate(arms) if arm not in arms[:place]]

    def best(self, arm: Settings) -> Settings:
        if found := chosen(self.task, **arm):
            return found[0]
        raise SystemExit(f"{self.task}: there is no search for {arm} yet; run the stage coarse to its end first")

    def coarse(self) -> Stage:
        arms = self.arms()
        points = [{**cell, **way, **self.judge} for cell in arms for way in self.tried[cell["batch_size"]]]
        return Stage(points, self.seeds, "choice")

    def edge(self) -> Stage:
        points = []
        for cell in self.arms():
            best = self.best(cell)
            rates = sorted(found["lr"] for found in chosen(self.task, 100, **cell))
            place = RATES.index(best["lr"])
            beyond = [place - 1] * (best["lr"] == rates[0]) + [place + 1] * (best["lr"] == rates[-1])
            near = [RATES[i] for i in beyond if 0 <= i < len(RATES)]
            points += [{**cell, **best, "lr": rate, **self.judge} for rate in near]
        return Stage(points, self.seeds, "choice")

    def even(self) -> Stage:
        """Every learning rate that was tried with one mask, for all masks of that batch size."""
        arms = self.arms()
        rates: dict[int, set[float]] = {}
        for cell in arms:
            found = chosen(self.task, 100, **cell)
            rates.setdefault(cell["batch_size"], set()).update(each["lr"] for each in found)
        points = [
            {**cell, **self.best(cell), "lr": rate, **self.judge}
            for cell in arms
            for rate in sorted(rates[cell["batch_size"]])
        ]
        return Stage(points, self.seeds, "choice")

    def refine(self) -> Stage:
        """Twice and half the epochs at the best rate, and what lies beyond the ends."""
        best = [{**cell, **self.best(cell), **self.judge} for cell in self.arms()]
        points = [{**point, "epochs": max(1, int(point["epochs"] * factor))} for factor in (2, 0.5) for point in best]
        return Stage([*points, *self.edge().points], self.seeds, "choice")

    def again(self) -> Stage:
        """The two best for the largest batches, where one seed does not tell them apart, with two more."""
        largest = max(self.tried)
        points = [
            {**cell, **found, **self.judge}
            for cell in self.arms()
            if cell["batch_size"] == largest
            for found in chosen(self.task, 2, **cell)
        ]
        return Stage(points, [*self.seeds, *(self.seeds[-1] + i for i in (1, 2))], "choice")

    def final(self) -> Stage:
        points = [{**cell, **self.best(self.arm(cell))} for cell in self.cells]
        return Stage(points, range(self.judged), "trials")


PONCE = Images(
    "ponce",
    [
        {"batch_size": point["batch_size"], "p": point["p"], "precision": "32-true", "skip": "sampled"}
        for point in TASKS["ponce"].presets["paper"].grid
    ],
    {},
    (100, 101),
    judge={"judge": "validation", "evaluations": 4},
    judged=7,
)
AUC = Images(
    "auc",
    [{name: point[name] for name in ("batch_size", "p")} for point in TASKS["auc"].presets["paper"].grid],
    {},
    (100, 101),
)
LATENT = Images(
    "latent",
    [{name: point[name] for name in ("batch_size", "p_x", "p_d")} for point in TASKS["latent"].presets["paper"].grid],
    {
        32: product(lr=[0.0001, 0.0003, 0.001, 0.003], epochs=[10], passes=[4]),
        128: product(lr=[0.0003, 0.001, 0.003, 0.01], epochs=[10], passes=[8]),
        512: product(lr=[0.0003, 0.001, 0.003, 0.01], epochs=[10], passes=[16]),
        2048: product(lr=[0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01], epochs=[10], passes=[30])
        + product(lr=[0.00003, 0.0001, 0.0003, 0.001], epochs=[10], passes=[10]),
    },
    (100, 101),
    {"p_x": 0.94, "p_d": 0.97},
)
CIFAR10 = Images(
    "cifar10",
    [{name: point[name] for name in ("batch_size", "p")} for point in TASKS["cifar10"].presets["paper"].grid],
    {
        16: product(lr=[0.0001, 0.0003, 0.001], epochs=[10]),
        128: product(lr=[0.0003, 0.001, 0.003], epochs=[20]),
        2048: product(lr=[0.001, 0.003, 0.01], epochs=[30]),
    },
    (100,),
    judge={"judge": "validation", "attacked": 0},
)


def latent_same() -> Stage:
    """Without masks on the distances, but trained as with them."""
    masked = LATENT.best({"batch_size": 2048, "p_x": 0.0, "p_d": 0.97})
    cells = [cell for cell in LATENT.cells if cell["batch_size"] == 2048 and not cell["p_d"]]
    return Stage([{**cell, **masked} for cell in cells], range(5), "same")


def auc_policies() -> Stage:
    (best,) = chosen("auc", batch_size=2048, p=0.97)
    points = [{"batch_size": 2048, "p": 0.97, **best, "skip": policy} for policy in POLICIES]
    return Stage(points, range(5), "policies")


STAGES: dict[str, dict[str, Callable[[], Stage]]] = {
    "gp": {
        "coarse": gp_coarse,
        "fine": gp_fine,
        "final": gp_final,
        "variants": gp_variants,
        "turned": gp_turned,
        "tiles": gp_tiles,
        "turned-crops": gp_turned_crops,
        "policies": gp_policies,
        "small-coarse": gp_small_coarse,
        "small-fine": gp_small_fine,
        "small-final": gp_small_final,
    },
    "ponce": {"edge": PONCE.edge, "even": PONCE.even, "final": PONCE.final},
    "auc": {"edge": AUC.edge, "final": AUC.final, "policies": auc_policies},
    "latent": {"coarse": LATENT.coarse, "refine": LATENT.refine, "final": LATENT.final, "same": latent_same},
    "cifar10": {"coarse": CIFAR10.coarse, "refine": CIFAR10.refine, "again": CIFAR10.again, "final": CIFAR10.final},
}
