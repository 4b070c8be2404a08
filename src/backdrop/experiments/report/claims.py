"""What the paper says of its experiments in words (section 3), and whether the records of a study say the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from backdrop.experiments.report import wording
from backdrop.experiments.report.judging import (
    Claim,
    Effects,
    averaged,
    by_size,
    changes,
    ends,
    everywhere,
    judge,
    leading,
    named,
    reduction,
    values,
    where,
)
from backdrop.experiments.report.statistics import Configuration, Results, estimate, paired

__all__ = ["CLAIMS"]

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

    claim, best = "Best are small batches with a high p.", results.best(results.measured)
    p = sorted({c.settings.get("p", 0.0) for c in results.measured})
    if best is None or not ends(sizes) or len(p) < 2:
        return [*claims, Claim(claim, IN_WORDS)]
    small = best.settings["batch_size"] <= sorted(sizes)[(len(sizes) - 1) // 2]
    agrees = small and best.settings.get("p", 0.0) >= p[len(p) // 2]
    return [*claims, Claim(claim, IN_WORDS, leading(results, best, named(results, best)), "yes" if agrees else "no")]


def cifar10_claims(results: Results) -> list[Claim]:
    sizes = by_size(results)
    masked = [c for arms in sizes.values() for c in arms.masked]
    falls = {c: changes(results, c, "loss", reduction) for c in masked}
    means = {c: found.mean for c, effects in falls.items() if (found := estimate(effects.values()))}
    most = max(means, key=lambda c: means[c], default=None)
    best = falls[most] if most else {}
    here = f"by up to {{}} with {named(results, most)}"
    claims = [judge("Masks lower the test loss.", "by up to 40%", best, here, "percent", amount=40)]
    claim = "Gains in accuracy are small, some not significant."
    gains = [gain for c in masked if (gain := results.difference(c, "accuracy")) is not None]
    if gains:
        low, high = (wording.number(end(g.mean for g in gains), 1, signed=True) for end in (min, max))
        signs = [gain.beyond() for gain in gains]
        better, worse = signs.count(True), signs.count(False)
        seeds = wording.count(min(gain.n for gain in gains), "seed")
        here = (
            f"{low} to {high} points; of {len(gains)} configurations {better} are surely better, {worse} worse; {seeds}"
        )
        agrees = 0 < better < len(gains) and not worse
        claims.append(Claim(claim, IN_WORDS, here, "yes" if agrees else "no" if better or worse else "not clear"))
    else:
        claims.append(Claim(claim, IN_WORDS))
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
    claim, paper = "The best has both masks.", "(0.94, 0.97) at batch size 2048"
    if best is None or not (only_x or only_d) or len(only_x + only_d) == len(masked):
        return [*claims, Claim(claim, paper)]
    pair = f"({wording.value(best.settings['p_x'])}, {wording.value(best.settings['p_d'])}) at {most}"
    both = bool(best.settings["p_x"] and best.settings["p_d"])
    return [*claims, Claim(claim, paper, leading(results, best, pair, 2), "yes" if both else "no")]


CLAIMS: Mapping[str, Callable[[Results], list[Claim]]] = {
    "gp": gp_claims,
    "ponce": ponce_claims,
    "cifar10": cifar10_claims,
    "auc": auc_claims,
    "latent": latent_claims,
}
