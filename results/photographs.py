"""The stages of ponce, cifar10, auc and latent.

Every batch size and mask has its own search, first for the learning rate and then beyond the ends of what was tried,
until the best lies between two others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from search import POLICIES, Settings, Stage, chosen

from backdrop.experiments.study.plan import all_settings
from backdrop.experiments.task import product
from backdrop.experiments.tasks import TASKS

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


class Quick(NamedTuple):
    """How a quick preset is searched: every arm alike, with seeds that are not the preset's.

    Args:
        task: its name.
        arms: masks, none among them.
        tried: rates and lengths to begin with.
        ladders: for what is widened while the best lies at an end of what was tried, the values there are.
        seeds: of the search.
    """

    task: str
    arms: list[Settings]
    tried: list[Settings]
    ladders: dict[str, Sequence[float]]
    seeds: Sequence[int] = (100, 101)
    file: str = "quick-choice"

    def point(self, **changed: Any) -> Settings:
        kind = TASKS[self.task]
        settings = {**all_settings(kind, kind.presets["quick"].base), "evaluations": 1, "judge": "validation"}
        return {**settings, **changed}

    def coarse(self) -> Stage:
        return Stage([self.point(**arm, **way) for arm in self.arms for way in self.tried], self.seeds, self.file)

    def edge(self) -> Stage:
        """One step beyond every end at which the best of an arm lies."""
        points = []
        for arm in self.arms:
            found = chosen(self.task, 1000, self.file, **arm)
            for name, ladder in self.ladders.items():
                best = found[0][name]
                tried = sorted(each[name] for each in found if all(each[n] == found[0][n] for n in each if n != name))
                place = ladder.index(best)
                beyond = [place - 1] * (best == tried[0]) + [place + 1] * (best == tried[-1])
                points += [self.point(**arm, **{**found[0], name: ladder[i]}) for i in beyond if 0 <= i < len(ladder)]
        return Stage(points, self.seeds, self.file)

    def fine(self) -> Stage:
        """The best two of every arm, where two seeds do not tell them apart, with four more."""
        points = [self.point(**arm, **way) for arm in self.arms for way in chosen(self.task, 2, self.file, **arm)]
        return Stage(points, range(self.seeds[0], self.seeds[0] + 6), self.file)


LENGTHS = (1, 2, 3, 6, 12, 25, 50, 100, 200)
QUICK = {
    "cifar10": Quick(
        "cifar10",
        product(p=[0.0, 0.75, 0.9]),
        product(lr=[0.001, 0.003, 0.01, 0.03], epochs=[3, 6, 12, 25]),
        {"lr": RATES, "epochs": LENGTHS},
    ),
    "ponce": Quick(
        "ponce",
        product(p=[0.0, 0.9375]),
        product(lr=[0.003, 0.01, 0.03, 0.1], epochs=[12, 25]),
        {"lr": RATES, "epochs": LENGTHS},
    ),
    "latent": Quick(
        "latent",
        [{"p_x": 0.0, "p_d": 0.0}, {"p_x": 0.9, "p_d": 0.75}],
        product(lr=[0.0003, 0.001, 0.003, 0.01], epochs=[3, 6, 12, 25]),
        {"lr": RATES, "epochs": LENGTHS},
    ),
    "auc": Quick(
        "auc",
        product(p=[0.0, 0.75]),
        product(lr=[0.0003, 0.001, 0.003, 0.01, 0.03, 0.1], epochs=[2, 6]),
        {"lr": (*RATES, 1.0), "epochs": LENGTHS},
    ),
}


def latent_same() -> Stage:
    """Without masks on the distances, but trained as with them."""
    masked = LATENT.best({"batch_size": 2048, "p_x": 0.0, "p_d": 0.97})
    cells = [cell for cell in LATENT.cells if cell["batch_size"] == 2048 and not cell["p_d"]]
    return Stage([{**cell, **masked} for cell in cells], range(5), "same")


def auc_policies() -> Stage:
    (best,) = chosen("auc", batch_size=2048, p=0.97)
    points = [{"batch_size": 2048, "p": 0.97, **best, "skip": policy} for policy in POLICIES]
    return Stage(points, range(5), "policies")


STAGES = {
    "ponce": {"edge": PONCE.edge, "even": PONCE.even, "final": PONCE.final},
    "auc": {"edge": AUC.edge, "final": AUC.final, "policies": auc_policies},
    "latent": {"coarse": LATENT.coarse, "refine": LATENT.refine, "final": LATENT.final, "same": latent_same},
    "cifar10": {"coarse": CIFAR10.coarse, "refine": CIFAR10.refine, "again": CIFAR10.again, "final": CIFAR10.final},
}
for task, search in QUICK.items():
    STAGES[task] |= {"quick-coarse": search.coarse, "quick-edge": search.edge, "quick-fine": search.fine}
