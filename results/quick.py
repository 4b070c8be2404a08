"""The searches for the quick presets of ponce, cifar10, auc and latent: `python results/run.py TASK quick --workers 2`.

Both arms, without masks and with the preset's, start with three learning rates at one length of training. Then
whatever lies beside the best of either is tried with both: the learning rates next to it, half and twice the length,
and the other weight decays. The same command goes on until nothing is missing; then no best lies at an end of what was
tried. Two seeds decide, and `quick-fine` tries the best two of each arm with three more.
"""

from typing import NamedTuple

from search import ROOT, Settings, Stage, chosen

from backdrop.experiments.study.plan import all_settings
from backdrop.experiments.tasks import TASKS

RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
DECAYS = (0.01, 0.3, 3.0)  # the first is next to none
SEEDS = (100, 101)
FILE = "quick-choice"


class Quick(NamedTuple):
    """How a quick preset is searched.

    Args:
        task: its name.
        rates: learning rates to begin with.
        epochs: the length to begin with.
    """

    task: str
    rates: tuple[float, ...]
    epochs: int

    @property
    def arms(self) -> list[Settings]:
        kind = TASKS[self.task]
        return [{name: point[name] for name in kind.masks} for point in kind.presets["quick"].grid]

    def point(self, arm: Settings, way: Settings) -> Settings:
        kind = TASKS[self.task]
        return {**all_settings(kind, kind.presets["quick"].base), **arm, **way, "evaluations": 1, "judge": "validation"}

    def beside(self, best: Settings) -> list[Settings]:
        """Itself, and all that differs from it by one step."""
        rate, decay = RATES.index(best["lr"]), DECAYS.index(best["weight_decay"])
        rates = [RATES[i] for i in (rate - 1, rate + 1) if 0 <= i < len(RATES)]
        decays = [DECAYS[i] for i in (decay - 1, decay + 1) if 0 <= i < len(DECAYS)]
        ways = [best, *({**best, "lr": each} for each in rates), *({**best, "weight_decay": each} for each in decays)]
        return [*ways, *({**best, "epochs": n} for n in (best["epochs"] // 2, best["epochs"] * 2) if n)]

    def search(self) -> Stage:
        ways: list[Settings] = [{"lr": rate, "epochs": self.epochs, "weight_decay": DECAYS[0]} for rate in self.rates]
        if (ROOT / self.task / f"{FILE}.json").exists():
            ways += [
                way for arm in self.arms for best in chosen(self.task, search=FILE, **arm) for way in self.beside(best)
            ]
        return Stage([self.point(arm, way) for way in ways for arm in self.arms], SEEDS, FILE)

    def fine(self) -> Stage:
        best = [(arm, way) for arm in self.arms for way in chosen(self.task, 2, FILE, **arm)]
        return Stage([self.point(arm, way) for arm, way in best], range(SEEDS[0], SEEDS[0] + 5), FILE)


SEARCHES = (
    Quick("ponce", (0.003, 0.01, 0.03), 8),
    Quick("cifar10", (0.001, 0.003, 0.01), 4),
    Quick("auc", (0.003, 0.01, 0.03), 10),
    Quick("latent", (0.0003, 0.001, 0.003), 10),
)
STAGES = {each.task: {"quick": each.search, "quick-fine": each.fine} for each in SEARCHES}
