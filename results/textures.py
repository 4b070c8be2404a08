"""The stages of gp.

Learning rate, weight decay and length of training are searched on images of a quarter of the side, with lengths to
match, and the best of them on images of half the side; once with the paper's best masks, once without.
"""

from typing import Any

from search import POLICIES, Settings, Stage, chosen

from backdrop.experiments.study.plan import all_settings
from backdrop.experiments.task import product
from backdrop.experiments.tasks import TASKS
from backdrop.textures import PAPER_LENGTHS

WHOLE = {"p_small": 0.0, "p_large": 0.0, "crop": None}
MASKED = {"p_small": 0.99, "p_large": 0.94, "crop": None}
ARMS = [WHOLE, MASKED, {**WHOLE, "crop": 512}, {**WHOLE, "crop": 256}]


def sized(size: int, arm: Settings) -> Settings:
    """Validation images of this size, with everything else in proportion to the paper's 1024 pixels."""
    lengths = [[length * size / 1024 for length in pair] for pair in PAPER_LENGTHS]
    blocks = ({256: 2, 512: 3}[size], 3)
    crop = arm["crop"] and arm["crop"] * size // 1024
    return {**arm, "size": size, "small": lengths[0], "large": lengths[1], "blocks": blocks, "crop": crop}


def gp_best(size: int, arm: Settings, count: int = 1) -> list[Settings]:
    at = sized(size, arm)
    return chosen("gp", count, **{name: at[name] for name in ("size", *arm)})


def gp_whole() -> list[Settings]:
    """What is tried for whole images."""
    whole = product(lr=[0.0003, 0.001, 0.003, 0.01], weight_decay=[0.5, 4.0], epochs=[20, 40])
    whole += product(lr=[0.0003, 0.001, 0.003], weight_decay=[4.0], epochs=[10, 80])  # beyond the best of those
    whole += product(lr=[0.001, 0.003], weight_decay=[12.0], epochs=[20, 40, 80])
    whole += product(lr=[0.03], weight_decay=[0.5], epochs=[10, 20])
    whole += product(lr=[0.03, 0.1], weight_decay=[0.05], epochs=[10, 20])  # as no masks are best on two cores
    whole += product(lr=[0.0003, 0.001, 0.003, 0.01], weight_decay=[0.05, 0.5, 4.0], epochs=[1, 2, 5])  # 20 steps each
    return whole


def gp_coarse() -> Stage:
    crops = product(lr=[0.001, 0.003, 0.01], weight_decay=[0.5, 4.0], epochs=[1, 5, 20])  # 4 and 16 steps to a pass
    crops += product(lr=[0.0003, 0.001, 0.003], weight_decay=[0.05, 0.5], epochs=[1], passes=[5, 20])
    crops += product(lr=[0.0003], weight_decay=[0.05, 0.5], epochs=[5])
    points = [
        {**sized(256, arm), **protocol, "judge": "validation"}
        for arm in ARMS
        for protocol in (crops if arm["crop"] else gp_whole())
    ]
    return Stage(points, range(100, 103), "choice")


def gp_fine() -> Stage:
    best = [(arm, protocol) for arm in ARMS for protocol in gp_best(256, arm, 5)]
    points = [{**sized(512, arm), **protocol, "judge": "validation"} for arm, protocol in best]
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
    points = [{**sized(256, arm), **gp_best(256, arm)[0], **way} for arm in (WHOLE, MASKED) for way in ways]
    crops = {**WHOLE, "crop": 512}
    masks = [(0.0, 0.0), (0.0, 0.75), (0.9, 0.0), (0.9, 0.5), (0.99, 0.75)]
    points += [
        {**sized(256, crops), **gp_best(256, crops)[0], "p_small": small, "p_large": large, "epochs": epochs}
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
        {**sized(256, arm), **protocol, "flips": True, "judge": "validation"}
        for arm in ARMS[:3]
        for protocol in (crops if arm["crop"] else whole)
    ]
    return Stage(points, range(100, 103), "turned")


def gp_tiles() -> Stage:
    """Masks on crops of images that are turned."""
    masks = [(0.0, 0.0), (0.0, 0.5), (0.0, 0.75), (0.9, 0.0), (0.9, 0.5), (0.99, 0.75)]
    ways = product(lr=[0.0003], epochs=[3, 10, 30]) + product(lr=[0.001], epochs=[3])
    points = [
        {**sized(256, ARMS[2]), "p_small": small, "p_large": large, **way, "weight_decay": 0.05, "flips": True}
        for small, large in masks
        for way in ways
    ]
    return Stage([{**point, "judge": "validation"} for point in points], range(100, 105), "turned")


def gp_turned_crops() -> Stage:
    """Crops with and without the mask that was best on them."""
    points = []
    for p_large in (0.0, 0.75):
        crops = {**WHOLE, "crop": 512, "p_large": p_large}
        at = sized(256, crops)
        (best,) = chosen("gp", search="turned", **{name: at[name] for name in crops})
        points.append({**crops, **best, "flips": True})
    return Stage(points, range(10), "turned-crops")


def gp_policies() -> Stage:
    masked = {**MASKED, **gp_protocol(MASKED)}
    return Stage([{**masked, "skip": policy} for policy in POLICIES], range(5), "policies")


# Images of half the side, with twice as many training sets: the coarse mask alone with the same search as the others,
# one mask for all samples and the lengths that the authors' program comes to (docs/textures.md).

ALONE = [{**WHOLE, "p_large": p} for p in (0.75, 0.94)]
AUTHORS = {"small": [3.68, 3.87]}  # 7.36 and 7.74 pixels at full size


def gp_half_coarse() -> Stage:
    points = [{**sized(256, arm), **way, "judge": "validation"} for arm in ALONE for way in gp_whole()]
    return Stage(points, range(100, 103), "half-choice")


def gp_half_best(size: int, arm: Settings, count: int = 1) -> list[Settings]:
    at = sized(size, arm)
    search = "half-choice" if arm in ALONE else "choice"
    return chosen("gp", count, search, **{name: at[name] for name in ("size", *arm)})


def gp_half_fine() -> Stage:
    points = [
        {**sized(512, arm), **protocol, "judge": "validation"}
        for arm in ALONE
        for protocol in gp_half_best(256, arm, 5)
    ]
    return Stage(points, range(100, 105), "half-choice")


def gp_half_arms() -> list[Settings]:
    return [{**sized(512, arm), **gp_half_best(512, arm)[0]} for arm in (WHOLE, MASKED, *ALONE)]


def gp_half_final() -> Stage:
    return Stage(gp_half_arms(), range(24), "half")


def gp_half_authors() -> Stage:
    shared = [{**arm, "shared": True} for arm in gp_half_arms() if arm["p_large"]]
    authors = [{**arm, **AUTHORS} for arm in (*gp_half_arms(), *shared)]
    return Stage([*shared, *authors], range(24), "half-authors")


# Textures on two CPU cores: the quick preset, whose trials take seconds, with more seeds and the same search without
# masks and with its own.

SMALL = TASKS["gp"].presets["quick"]
DEMO = 10  # epochs: the best length without masks, and what `make demo` has time for
NONE, BOTH, COARSE = ({"p_small": fine, "p_large": coarse} for fine, coarse in [(0.0, 0.0), (0.95, 0.75), (0.0, 0.75)])


def small(point: Settings) -> Settings:
    return {**all_settings(TASKS["gp"], SMALL.base), "evaluations": 1, **point}


def gp_small_coarse() -> Stage:
    ways = product(lr=[0.001, 0.003, 0.01], weight_decay=[0.05, 2.0], epochs=[5, 10, 20])
    ways += product(lr=[0.03], weight_decay=[0.05, 2.0], epochs=[5, 10])  # beyond the ends at which the best were
    ways += product(lr=[0.01, 0.03], weight_decay=[0.05], epochs=[2])
    ways += product(lr=[0.003], weight_decay=[2.0], epochs=[40])
    ways += product(lr=[0.03], weight_decay=[0.05], epochs=[20]) + product(lr=[0.03], weight_decay=[0.5], epochs=[10])
    ways += product(lr=[0.1], weight_decay=[0.05], epochs=[10]) + product(lr=[0.003], weight_decay=[2.0], epochs=[80])
    points = [small({**arm, **way, "judge": "validation"}) for arm in (NONE, BOTH) for way in ways]
    return Stage(points, range(100, 103), "small-choice")


def gp_small_mask() -> Stage:
    """The coarse mask alone, in a search of two seeds and of the length that `make demo` has time for."""
    ways = product(lr=[0.003, 0.01], weight_decay=[0.05, 2.0], epochs=[DEMO])
    ways += product(lr=[0.03], weight_decay=[0.05, 0.5], epochs=[DEMO]) + product(
        lr=[0.001], weight_decay=[2.0], epochs=[DEMO]
    )
    points = [small({**COARSE, **way, "judge": "validation"}) for way in ways]
    return Stage(points, range(100, 102), "small-mask")


def gp_small_fine() -> Stage:
    """The best two of each, where three seeds do not tell them apart, with five more."""
    best = [(arm, way) for arm in (NONE, BOTH) for way in chosen("gp", 2, "small-choice", **arm)]
    return Stage([small({**arm, **way, "judge": "validation"}) for arm, way in best], range(100, 108), "small-choice")


def gp_small_final() -> Stage:
    """Both that were searched; then each mask alone and stronger ones, with what was best for both, as at full size."""
    without, masked = ({**arm, **chosen("gp", search="small-choice", **arm)[0]} for arm in (NONE, BOTH))
    others = [(0.95, 0.0), (0.0, 0.75), (0.99, 0.94)]
    points = [without, masked, *({**masked, "p_small": fine, "p_large": coarse} for fine, coarse in others)]
    return Stage([small(point) for point in points], range(24), "small")


def small_strong(**changed: Any) -> Settings:
    """The small patches masked more strongly than in the preset, so that skipping pays on a CPU as well."""
    (best,) = chosen("gp", search="small-choice", **BOTH)
    return small({**BOTH, **best, "p_small": 0.99, **changed})


def gp_small_frozen() -> Stage:
    """Whether "frozen" wants another learning rate."""
    points = [small_strong(skip="frozen", lr=rate, judge="validation") for rate in (0.0003, 0.001, 0.003, 0.01)]
    return Stage(points, range(100, 108), "small-frozen")


def gp_small_policies() -> Stage:
    """All with the learning rate that was best for plain masks, and "frozen" with its own as well."""
    (best,) = chosen("gp", search="small-frozen")
    points = [*(small_strong(skip=policy) for policy in POLICIES), small_strong(skip="frozen", lr=best["lr"])]
    return Stage(points, range(24), "small-policies")


STAGES = {
    "coarse": gp_coarse,
    "fine": gp_fine,
    "final": gp_final,
    "variants": gp_variants,
    "turned": gp_turned,
    "tiles": gp_tiles,
    "turned-crops": gp_turned_crops,
    "policies": gp_policies,
    "half-coarse": gp_half_coarse,
    "half-fine": gp_half_fine,
    "half-final": gp_half_final,
    "half-authors": gp_half_authors,
    "small-coarse": gp_small_coarse,
    "small-mask": gp_small_mask,
    "small-fine": gp_small_fine,
    "small-final": gp_small_final,
    "small-frozen": gp_small_frozen,
    "small-policies": gp_small_policies,
}
