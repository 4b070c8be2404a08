"""What the paper says of its experiments in words (section 3), and whether the records of a study say the same.

    backdrop report gp-paper --claims results/claims.py:table

Every claim comes down to a number per seed, its *effect*, such as a difference between two configurations, that is
above 0 where the claim is true. One rule makes the verdict of the 95% t interval of the mean effect:

| the interval lies | verdict |
|---|---|
| above 0, and what the paper says is in it or below it, or the paper gives no number | held |
| above 0, and below what the paper says | smaller |
| around 0 | open |
| below 0 | did not hold |

What is said of every batch size is judged at each, with intervals that are wider by so many (Bonferroni), and its
verdict is that of the weakest. With fewer than five seeds all is open. For what is open, `decides` says how many seeds
would decide it if mean and spread stayed as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from backdrop.experiments.report import wording
from backdrop.experiments.report.statistics import ENOUGH, Configuration, Estimate, Results, estimate, paired
from backdrop.experiments.report.tables import Cell, Table

Effects = Mapping[Any, float]  # a number per seed

HELD, SMALLER, OPEN, NOT = VERDICTS = ("held", "smaller", "open", "did not hold")
WEAKEST = (NOT, OPEN, SMALLER, HELD)
LEVEL = 0.95
MOST = 1000  # seeds; an effect that would take more is as good as none


class Claim(NamedTuple):
    """A sentence of the paper, its numbers, ours, and what becomes of it.

    Args:
        claim: the sentence.
        paper: its numbers.
        here: ours.
        verdict: one of `VERDICTS`, or "not measured".
        decides: how many seeds would decide what is open; more than `MOST` for none within reason.
        parts: the effects that were judged, each with the paper's amount.
    """

    claim: str
    paper: str
    here: str = "\N{EN DASH}"
    verdict: str = "not measured"
    decides: int | None = None
    parts: tuple[tuple[Estimate, float | None], ...] = ()

    @property
    def is_less(self) -> bool:
        """Whether the effect is surely less than in the paper, wherever it lies else."""
        return any(amount is not None and t_interval(found).beyond(amount) is False for found, amount in self.parts)

    def among(self, many: int) -> str:
        """The verdict with intervals that are as wide as so many claims at once ask for (Bonferroni)."""
        return _verdict(self.parts, 1 - (1 - LEVEL) / many) if self.parts else self.verdict


def t_cdf(t: float, df: int) -> float:
    """Of Student's t with a whole number of degrees of freedom: the finite sums of Abramowitz and Stegun 26.7.3-4."""
    angle = math.atan(t / math.sqrt(df))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= square * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + inside) / 2


@functools.cache
def t_quantile(level: float, df: int) -> float:
    """So that the mean of df + 1 normal values lies so many standard errors or less away at this level."""
    low, high = 0.0, 1.0
    while t_cdf(high, df) < (1 + level) / 2:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < (1 + level) / 2 else (low, middle)
    return high


def t_interval(found: Estimate, level: float = LEVEL) -> Estimate:
    """The same mean with its t interval in place of the bootstrap's."""
    if found.sd is None:
        return found
    half = t_quantile(level, found.n - 1) * found.sd / math.sqrt(found.n)
    return found._replace(low=found.mean - half, high=found.mean + half)


def _verdict(parts: Sequence[tuple[Estimate, float | None]], level: float = LEVEL) -> str:
    """Of one effect, or of the weakest of many that all have to be there."""
    return min((_one(*part, 1 - (1 - level) / len(parts)) for part in parts), key=WEAKEST.index)


def _one(found: Estimate, amount: float | None, level: float) -> str:
    found = t_interval(found, level)
    above, less = found.beyond(), amount is not None and found.beyond(amount) is False
    return OPEN if above is None else NOT if not above else SMALLER if less else HELD


def _seeds(parts: Sequence[tuple[Estimate, float | None]]) -> int:
    """How many would decide, if means and standard deviations stayed as they are; `MOST` + 1 for more than that."""
    low, high = max(ENOUGH, min(found.n for found, _ in parts)), MOST + 1
    while low < high:
        middle = (low + high) // 2
        if _verdict([(found._replace(n=middle), amount) for found, amount in parts]) == OPEN:
            low = middle + 1
        else:
            high = middle
    return low


def told(found: Estimate, unit: str, digits: int) -> str:
    """A mean, its standard deviation, its t interval and the bootstrap's, and the number of seeds."""
    ends, seeds = wording.interval(t_interval(found), digits), wording.count(found.n, "seed")
    number = f"{wording.plus_minus(found, digits)} {unit}".strip()
    return f"{number} ({f'{ends}, bootstrap {wording.interval(found, digits)}, ' if ends else ''}{seeds})"


def settled(claim: str, paper: str, here: str, parts: Sequence[tuple[Estimate, float | None]]) -> Claim:
    verdict = _verdict(parts)
    return Claim(claim, paper, here, verdict, _seeds(parts) if verdict == OPEN else None, tuple(parts))


def judge(
    claim: str,
    paper: str,
    effects: Effects,
    here: str,
    unit: str = "points",
    digits: int = 1,
    amount: float | None = None,
) -> Claim:
    """A claim of one effect.

    Args:
        claim: the sentence.
        paper: the paper's numbers.
        effects: a number per seed.
        here: ours, with {} for their mean.
        unit: of the effects.
        digits: after the point.
        amount: of the effect in the paper.
    """
    found = estimate(effects.values())
    if found is None:
        return Claim(claim, paper)
    return settled(claim, paper, here.replace("{}", told(found, unit, digits)), [(found, amount)])


def values(configuration: Configuration | None, metric: str) -> Effects:
    return configuration.values(metric) if configuration else {}


def changes(
    results: Results,
    configuration: Configuration | None,
    metric: str,
    compare: Callable[[float, float], float] = lambda value, other: value - other,
) -> Effects:
    """By seed, what masks make of a metric."""
    control = results.control(configuration) if configuration else None
    return paired(values(configuration, metric), values(control, metric), compare)


def reduction(value: float, other: float) -> float:
    """In percent."""
    return 100 * (1 - value / other) if other > 0 else math.nan


def averaged(arms: Iterable[Effects]) -> Effects:
    """By seed, the mean over arms, for the seeds that all of them have."""
    arms = [arm for arm in arms if arm]
    common = [seed for seed in arms[0] if all(seed in arm for arm in arms)] if arms else []
    return {seed: math.fsum(arm[seed] for arm in arms) / len(arms) for seed in common}


def where(results: Results, **wanted: Any) -> list[Configuration]:
    """Configurations with these settings, for which the main metric is known."""
    return [c for c in results.measured if all(c.settings.get(name) == v for name, v in wanted.items())]


def named(results: Results, configuration: Configuration | None) -> str:
    if configuration is None:
        return ""
    others = [name for name in results.axes if name not in results.task.masks]
    return wording.label(configuration.settings, [*others, *results.task.masks])


def ahead(
    results: Results, configurations: Iterable[Configuration], others: Iterable[Configuration]
) -> tuple[Effects, Configuration | None, Configuration | None]:
    """By how much the best of some is better than the best of others, and which these are."""
    best, other = results.best(configurations), results.best(others)
    sign = 1 if results.task.maximize else -1
    metric = results.task.metric
    effects = paired(values(best, metric), values(other, metric), lambda value, its: sign * (value - its))
    return effects, best, other


class Size(NamedTuple):
    """What was measured with one batch size: the best without masks, the best with them, the one with the highest p."""

    plain: Configuration
    best: Configuration
    highest: Configuration
    masked: list[Configuration]


def by_size(results: Results) -> dict[int, Size]:
    """In rising order; batch sizes that have not both, masks and none, are left out."""
    found = {}
    for size in sorted({c.settings["batch_size"] for c in results.measured if "batch_size" in c.settings}):
        here = where(results, batch_size=size)
        masked = [c for c in here if results.is_masked(c)]
        plain, best = results.best(c for c in here if not results.is_masked(c)), results.best(masked)
        p = [max(c.settings.get(name) or 0.0 for name in results.task.masks) for c in masked]
        highest = results.best(c for c, value in zip(masked, p, strict=True) if value == max(p))
        if plain and best and highest:
            found[size] = Size(plain, best, highest, masked)
    return found


def everywhere(claim: str, paper: str, effects: Mapping[int, Effects], digits: int = 1) -> Claim:
    """A claim of every batch size."""
    gains = {size: found for size, effect in effects.items() if (found := estimate(effect.values()))}
    if not gains:
        return Claim(claim, paper)
    level = 1 - (1 - LEVEL) / len(gains)
    shown = [
        f"{size}: {wording.number(gain.mean, digits, signed=True)} "
        f"({wording.interval(t_interval(gain, level), digits)})"
        for size, gain in gains.items()
    ]
    seeds = wording.count(min(gain.n for gain in gains.values()), "seed")
    here = f"{'; '.join(shown)}; {seeds}, intervals for {len(gains)} at once"
    return settled(claim, paper, here, [(gain, None) for gain in gains.values()])


def ends(sizes: Mapping[int, Size]) -> tuple[int, int] | None:
    """The smallest and the largest batch size, if there are two."""
    return (min(sizes), max(sizes)) if len(sizes) > 1 else None


IN_WORDS = "in words only"


def gp_claims(results: Results) -> list[Claim]:
    masked = [c for c in results.measured if results.is_masked(c)]
    both = [c for c in masked if c.settings.get("p_small") and c.settings.get("p_large")]
    small = [c for c in masked if not c.settings.get("p_large")]
    large = [c for c in masked if not c.settings.get("p_small")]
    strong = results.best(where(results, p_small=0.99, p_large=0.94))
    stronger = results.best(where(results, p_small=0.999, p_large=0.94))
    shown = strong or results.best(masked)
    one = results.best([*small, *large]) if small and large else None
    crop, tight = (results.best(where(results, crop=size)) for size in (512, 256))
    uncropped = results.control(crop) if crop else None
    return [
        judge(
            "Masks raise the accuracy.",
            "45.9 to 66.2 with (0.99, 0.94)",
            changes(results, shown, "accuracy"),
            f"by {{}} with {named(results, shown)}",
            amount=66.2 - 45.9 if strong else None,
        ),
        judge(
            "Both masks together are best.",
            "66.2 with both, at most 57.4 with one",
            paired(values(results.best(both), "accuracy"), values(one, "accuracy")),
            "the best with both is ahead by {}",
            amount=66.2 - 57.4,
        ),
        judge(
            "The large mask alone improves the large scale.",
            "74.1 to 82.9 and 88.2",
            averaged(changes(results, c, "large") for c in large),
            "by {} on average",
            amount=(82.9 + 88.2) / 2 - 74.1,
        ),
        judge(
            "The small mask alone improves the small scale.",
            "64.7 to 77.9 and 68.2",
            averaged(changes(results, c, "small") for c in small),
            "by {} on average",
            amount=(77.9 + 68.2) / 2 - 64.7,
        ),
        judge(
            "Too much of both is worse again.",
            "66.2, but 55.0 with (0.999, 0.94)",
            paired(values(strong, "accuracy"), values(stronger, "accuracy")),
            "(0.999, 0.94) is behind (0.99, 0.94) by {}",
            amount=66.2 - 55.0,
        ),
        judge(
            "Crops of 512 pixels improve the large scale ...",
            "74.1 to 87.9",
            changes(results, crop, "large"),
            "by {}",
            amount=87.9 - 74.1,
        ),
        judge(
            "... at the cost of the small one.",
            "64.7 to 50.9",
            paired(values(uncropped, "small"), values(crop, "small")),
            "which loses {}",
            amount=64.7 - 50.9,
        ),
        _tight_crops(results, tight),
    ]


def _tight_crops(results: Results, tight: Configuration | None) -> Claim:
    claim, paper = "Crops of 256 pixels are worse than none.", "34.3, against 45.9 (guessing: 25)"
    if tight and set(values(tight, "accuracy").values()) == {25.0}:  # one class for all images: no training to judge by
        return Claim(claim, paper, "every training failed: guessing")
    losses = changes(results, tight, "accuracy", lambda value, other: other - value)
    return judge(claim, paper, losses, "by {}", amount=45.9 - 34.3)


def ponce_claims(results: Results) -> list[Claim]:
    sizes = by_size(results)
    gains = {size: changes(results, arms.highest, "accuracy") for size, arms in sizes.items()}
    claims = [everywhere("At every batch size, accuracy rises with p.", "8 to 256, p up to 0.9375", gains)]
    least, most = ends(sizes) or (0, 0)
    claim = "The gain is larger for larger batches."
    more = paired(gains[most], gains[least]) if ends(sizes) else {}
    claims.append(judge(claim, IN_WORDS, more, f"the gain at {most} exceeds that at {least} by {{}}"))

    claim, p = "Best are small batches with a high p.", sorted({c.settings.get("p", 0.0) for c in results.measured})
    if not ends(sizes) or len(p) < 2:
        return [*claims, Claim(claim, IN_WORDS)]
    most, high = sorted(sizes)[(len(sizes) - 1) // 2], p[len(p) // 2]
    named_so = [c for c in results.measured if c.settings["batch_size"] <= most and c.settings.get("p", 0.0) >= high]
    effects, best, other = ahead(results, named_so, [c for c in results.measured if c not in named_so])
    here = f"{named(results, best)} is ahead of {named(results, other)} by {{}}"
    return [*claims, judge(claim, IN_WORDS, effects, here)]


def cifar10_claims(results: Results) -> list[Claim]:
    sizes = by_size(results)
    masked = [c for arms in sizes.values() for c in arms.masked]
    falls = {c: changes(results, c, "loss", reduction) for c in masked}
    means = {c: found.mean for c, effects in falls.items() if (found := estimate(effects.values()))}
    most = max(means, key=lambda c: means[c], default=None)
    best = falls[most] if most else {}
    here = f"by up to {{}} with {named(results, most)}"
    claims = [judge("Masks lower the test loss.", "by up to 40%", best, here, "percent", amount=40)]
    gains = [gain for c in masked if (gain := results.difference(c, "accuracy")) is not None]
    low, high = (wording.number(end((g.mean for g in gains), default=0.0), 1, signed=True) for end in (min, max))
    mean = averaged(changes(results, c, "accuracy") for c in masked)
    here = f"by {{}} on average over {wording.count(len(gains), 'mask')}, singly by {low} to {high}"
    claims.append(judge("Masks gain a little accuracy.", "small, some not significant", mean, here))
    least, largest = ends(sizes) or (min(sizes, default=0), 0)
    more = paired(falls[sizes[least].best], falls[sizes[largest].best]) if ends(sizes) else {}
    below = results.best(c for c in sizes[least].masked if c is not sizes[least].highest) if sizes else None
    harm = paired(values(sizes[least].highest, "loss"), values(below, "loss")) if sizes else {}
    return [
        *claims,
        judge(
            "The loss falls most for small batches.",
            IN_WORDS,
            more,
            f"at {least} more than at {largest}, by {{}}",
            "percentage points",
        ),
        judge(
            "Too much masking of small batches does harm.",
            IN_WORDS,
            harm,
            f"at {least}, the highest p is behind the best lower one by {{}}",
            unit="",
            digits=3,
        ),
    ]


def auc_claims(results: Results) -> list[Claim]:
    sizes = by_size(results)
    gains = {size: changes(results, arms.best, "auc") for size, arms in sizes.items()}
    least, most = ends(sizes) or (32, 2048)
    effect = paired(values(sizes[most].best, "auc"), values(sizes[least].plain, "auc")) if ends(sizes) else {}
    return [
        everywhere("Masks improve every batch size.", "32, 256 and 2048", gains, digits=4),
        judge(
            f"At {most}, masks gain more than batches of {least} do.",
            "with 2048 and 32",
            effect,
            f"{most} with masks is ahead of {least} without by {{}}",
            unit="",
            digits=4,
        ),
    ]


def latent_claims(results: Results) -> list[Claim]:
    plain: dict[int, Configuration] = {}
    for c in results.measured:
        if not results.is_masked(c) and c.values("dist"):
            plain.setdefault(c.settings.get("batch_size", 0), c)
    apart = {
        size: paired(
            c.values("dist_minibatch"), c.values("dist"), lambda a, b: abs(100 * (a / b - 1)) if b else math.nan
        )
        for size, c in plain.items()
    }
    low, high = min(plain, default=0), max(plain, default=0)
    sizes = by_size(results)
    most = max(sizes, default=0)
    masked = sizes[most].masked if sizes else []
    best = sizes[most].best if sizes else None
    only_x = [c for c in masked if not c.settings.get("p_d")]
    only_d = [c for c in masked if not c.settings.get("p_x")]

    def lead(metric: str, own: Sequence[Configuration], other: Sequence[Configuration]) -> Effects:
        """By how much more a metric falls with its own mask than with the other."""
        mine, its = (averaged(changes(results, c, metric, reduction) for c in cs) for cs in (own, other))
        return paired(mine, its)

    claims = [
        judge(
            "Small batches estimate L_dist poorly.",
            IN_WORDS,
            paired(apart[low], apart[high]) if low < high else {},
            f"off at {low} more than at {high}, by {{}}",
            "percentage points",
        ),
        judge(
            "Masks lower L_XE ...",
            IN_WORDS,
            changes(results, best, "xe", reduction),
            f"by {{}} at batch size {most}",
            "percent",
        ),
        judge("... and L_dist.", IN_WORDS, changes(results, best, "dist", reduction), "by {}", "percent"),
        judge(
            "p_x does more for L_XE than p_d does.", IN_WORDS, lead("xe", only_x, only_d), "by {}", "percentage points"
        ),
        judge(
            "p_d does more for L_dist than p_x does.",
            IN_WORDS,
            lead("dist", only_d, only_x),
            "by {}",
            "percentage points",
        ),
    ]
    both = [c for c in results.measured if c.settings.get("p_x") and c.settings.get("p_d")]
    effects, first, other = ahead(results, both, [c for c in results.measured if c not in both])
    here = f"{named(results, first)} is ahead of {named(results, other)} by {{}}" if effects else ""
    alone = only_x or only_d
    return [
        *claims,
        judge("The best has both masks.", "(0.94, 0.97) at batch size 2048", effects if alone else {}, here, "in loss"),
    ]


CLAIMS: Mapping[str, Callable[[Results], list[Claim]]] = {
    "gp": gp_claims,
    "ponce": ponce_claims,
    "cifar10": cifar10_claims,
    "auc": auc_claims,
    "latent": latent_claims,
}


def table(results: Results) -> Table | None:
    """What the paper says, and what the records say to it; None for a search, or for a task that it does not have."""
    if results.task.name not in CLAIMS or results.is_search:
        return None
    rows = [[Cell(c.claim), Cell(c.paper), Cell(c.here), Cell(c.verdict)] for c in CLAIMS[results.task.name](results)]
    note = "In brackets: 95% t interval over seeds, by which the verdict is given, and that of the bootstrap."
    return Table(["claim", "the paper", "here", "verdict"], rows, 4, note)
