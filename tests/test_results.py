"""What is said of the paper's claims is what the trials in `results` say."""

import dataclasses
import importlib.util
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from backdrop.experiments.records import Record
from backdrop.experiments.report import exports, wording
from backdrop.experiments.report.statistics import CHOSEN, Results, estimate, paired
from backdrop.experiments.study.archive import Archive
from backdrop.experiments.study.plan import all_settings
from backdrop.experiments.study.worker import work
from backdrop.experiments.task import trial_key
from backdrop.experiments.tasks import TASKS

ROOT = Path(__file__).parent.parent
SEARCHED = [task for task in TASKS if (ROOT / "results" / task / "choice.json").exists()]
MEASURED = [task for task in TASKS if (ROOT / "results" / task / "trials.json").exists()]
STUDIES = [path for task in TASKS for path in sorted((ROOT / "results" / task).glob("*.json"))]


JUDGED_BY_VALIDATION = (
    "choice",
    "small-choice",
    "small-mask",
    "small-frozen",
    "variants",
    "turned",
    "half-choice",
    "quick-choice",
)


class Told:
    """Pages of which the figures count and the words are free.

    A phrase is in them if the figures of the phrase stand in one paragraph (or row of a table), in this order, with no
    other between them; a single one has to have a word beside it that it has in the phrase. So a figure that is out of
    date, or two that are exchanged, are noticed; a better sentence is not.
    """

    figure = re.compile(r"[+\N{MINUS SIGN}]?\d+(?:,\d{3})*(?:\.\d+)?%?")

    def __init__(self, *paths):
        parts = [part for path in paths for part in re.split(r"\n\s*\n|\n\|", path.read_text())]
        self.parts = [" ".join(part.split()) for part in parts]

    def __contains__(self, phrase):
        first, *others = self.figure.finditer(phrase)
        if not others:
            beside = phrase[: first.end()].split()[-2:], phrase[first.start() :].split()[:2]
            return any(" ".join(words) in part for words in beside if len(words) == 2 for part in self.parts)
        wanted, rows = self.figure.findall(phrase), map(self.figure.findall, self.parts)
        return any(row[i : i + len(wanted)] == wanted for row in rows for i in range(len(row)))


def script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_results", ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "results")  # as for a script there
        return script("make")


@pytest.fixture(scope="module")
def run():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "results")
        return script("run")


@pytest.fixture(scope="module")
def textures(run):
    return run.textures


@pytest.fixture(scope="module")
def photographs(run):
    return run.photographs


def test_the_page_is_in_step_with_the_trials(make):
    pages = {path: path.read_text() for path in make.PAGES}
    assert make.filled(pages) == pages


def test_what_was_measured_was_searched_for():
    assert set(MEASURED) <= set(SEARCHED)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_tables_are_in_step_with_the_trials(make, path):
    stem = "report" if path.stem == "trials" else path.stem
    results = Results(TASKS[path.parent.name], make.study(path.parent.name, path.stem).records())
    assert path.with_name(f"{stem}-trials.csv").read_bytes() == exports.trials(results)
    assert path.with_name(f"{stem}-configurations.csv").read_bytes() == exports.configurations(results)
    judge = "validation" if path.stem in JUDGED_BY_VALIDATION else "test"
    assert all(record.settings["judge"] == judge for record in results.records)
    assert all(record.state == "complete" for record in results.records)


def test_the_preset_for_textures_is_what_the_search_found_best(textures):
    preset = TASKS["gp"].presets["paper"]
    assert all({**preset.base, **point}.items() >= textures.gp_protocol(point).items() for point in preset.grid)


def test_the_preset_for_hidden_states_is_what_the_search_found_best(photographs):
    preset = TASKS["latent"].presets["paper"]
    for point, cell in zip(preset.grid, photographs.LATENT.cells, strict=True):
        best = photographs.LATENT.best(photographs.LATENT.arm(cell))
        assert {name: {**preset.base, **point}[name] for name in ("lr", "epochs", "passes")}.items() <= best.items()


@pytest.mark.parametrize("name", [name for name in MEASURED if name not in ("gp", "latent")])
def test_the_preset_is_what_the_search_found_best(make, name):
    results = Results(TASKS[name], make.study(name, "choice").records())
    names = [axis for axis in results.varied if axis not in CHOSEN]
    for point in TASKS[name].presets["paper"].grid:
        tried = [c for c in results.measured if all(c.settings[axis] == point[axis] for axis in names)]
        best = results.best(tried)
        assert best is not None, point
        assert all(best.settings[key] == value for key, value in point.items()), (point, best.settings)


@pytest.mark.parametrize("name", MEASURED)
def test_the_preset_is_what_was_measured(make, name):
    found = make.study(name).spec
    points = TASKS[name].presets[found.preset].grid
    measured = [record.settings for record in make.study(name).records()]
    for point in points:
        assert any(all(settings[key] == value for key, value in point.items()) for settings in measured), point


def test_the_page_shows_validation_accuracies_at_one_learning_rate(make):
    page = (ROOT / "docs" / "results" / "ponce.md").read_text()
    results = Results(TASKS["ponce"], make.study("ponce", "choice").records())
    for size in (64, 256):
        ends = []
        for p in (0.0, 0.9375):
            wanted = {"batch_size": size, "p": p, "lr": 0.003}
            (found,) = (c for c in results.measured if all(c.settings[name] == v for name, v in wanted.items()))
            ends.append(f"{results.estimate(found, 'accuracy').mean:.1f}")
        assert f"from {ends[0]} to {ends[1]} at" in " ".join(page.split())


def test_the_page_quotes_photographs_of_textures(make):
    page = Told(*make.PAGES)
    search = Results(TASKS["ponce"], make.study("ponce", "choice").records())
    found = {
        (c.settings["p"], c.settings["lr"]): search.estimate(c).mean
        for c in search.measured
        if c.settings["batch_size"] == 256
    }
    assert f"0.1 without masks gives {found[0.0, 0.1]:.1f} at 256" in page
    ahead = [found[p, 0.01] - found[p, 0.1] for p in (0.75, 0.875)]
    assert "best at 0.01, by {:.1f} and {:.1f} points more than at 0.1".format(*ahead) in page
    rates = {}
    for c in search.measured:
        rates.setdefault(c.settings["batch_size"], {}).setdefault(c.settings["p"], set()).add(c.settings["lr"])
    assert all(tried == masks[0.0] for masks in rates.values() for tried in masks.values())

    results = Results(TASKS["ponce"], make.study("ponce").records())
    highest = [c for c in results.measured if c.settings["lr"] == 0.1]
    assert {c.settings["batch_size"] for c in highest} == {128, 256}
    assert len(highest) == 6
    gains = {(c.settings["batch_size"], c.settings["p"]): results.gain(c) for c in results.measured if c.settings["p"]}
    best = [max(gain.mean for (size, _), gain in gains.items() if size == each) for each in (8, 32, 64, 128)]
    assert f"the best of four gains {min(best):.1f} to {max(best):.1f} points" in page
    behind = [-gains[256, p].mean for p in (0.75, 0.875)]
    assert "are {:.1f} and {:.1f} points behind no masks on the test images".format(*behind) in page
    most, some = gains[256, 0.9375], gains[256, 0.5]
    assert f"p = 0.9375 is {-most.mean:.1f} behind ({wording.number(-most.high, 1)} to {-most.low:.1f})" in page
    assert f"p = 0.5 is {some.mean:.1f} ahead ({wording.interval(some, 1)})" in page


def test_the_page_shows_how_the_best_training_moves_with_p(make):
    page = Told(*make.PAGES)
    areas, accuracies, losses = (make.moved(*search) for search in make.MOVED.values())

    def best(found, better):
        return [better(means, key=means.get) for means in found.values()]

    rates = best(areas, max)
    assert list(areas) == sorted(areas)
    assert rates == sorted(rates, reverse=True)
    assert len({*rates}) == 4
    assert best(accuracies, max) == [0.03, 0.003]
    assert best(losses, min) == [5, 5, 5, 10]
    choosing = Told(ROOT / "docs" / "choosing.md")
    assert f"from {rates[0]} without masks to {rates[-1]} with p = 0.97" in choosing
    plain, strong = areas[0.0,], areas[0.97,]
    at_one = f"at {rates[-1]}, a ROC AUC of {strong[rates[-1]]:.3f} with p = 0.97 and of {plain[rates[-1]]:.3f}"
    assert f"{at_one} without masks" in page
    assert f"at the rings, they do not: {strong[rates[-1]]:.3f} and {plain[rates[0]]:.3f}" in page
    assert make.moved_picture().startswith(b"\x89PNG")


def test_the_page_compares_masks_at_the_same_settings(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["auc"], make.study("auc", "choice").records())
    wanted = {"batch_size": 2048, "lr": 0.003, "passes": 60}
    same = [c for c in results.measured if all(c.settings[name] == value for name, value in wanted.items())]
    means = {c.settings["p"]: f"{results.estimate(c).mean:.3f}" for c in same}
    assert f"{means[0.0]} without masks, {means[0.94]} with p = 0.94 and {means[0.97]} with 0.97" in page


def test_the_page_quotes_the_areas_on_test_images(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["auc"], make.study("auc").records())
    means = {(c.settings["batch_size"], c.settings["p"]): results.estimate(c).mean for c in results.measured}
    shown = [f"{means[2048, p]:.3f}" for p in (0.0, 0.75, 0.94, 0.97)]
    assert "{1} with p = 0.75 against {0} at 2048".format(*shown) in page
    assert "with {2} and {3} at p = 0.94 and 0.97, are not surely worse".format(*shown) in page
    assert f"{means[32, 0.75]:.3f} with p = 0.75 against {means[32, 0.0]:.3f} without masks at 32" in page
    assert f"{means[256, 0.5]:.3f} with p = 0.5 against {means[256, 0.0]:.3f} at 256" in page
    costs = [f"{means[size, 0.0] - means[size, p]:.3f}" for size, p in ((32, 0.5), (32, 0.97), (256, 0.97))]
    assert "p = 0.5 costs {}, and p = 0.97 costs {} there and {} at 256".format(*costs) in page
    plain, *masked = (c for c in results.measured if c.settings["batch_size"] == 2048)
    gains = [results.gain(c) for c in masked]
    assert [gain.beyond() for gain in gains] == [None, None, None]
    sure = [results.gain(c).beyond() for c in results.measured if c.settings["p"]]
    assert True not in sure
    assert (len(sure) - 3, sure.count(False)) == (8, 4)  # but for the best of each batch size
    then = Results(TASKS["auc"], make.study("auc", "earlier").records())
    before = {(c.settings["p"], c.settings["lr"]): c for c in then.measured if c.settings["batch_size"] == 2048}
    first, second, half = (before[key].values("auc") for key in ((0.0, 0.01), (0.0, 0.03), (0.75, 0.01)))
    lowest = statistics.mean(first.values())
    less = [statistics.mean(half.values()) - lowest, means[2048, 0.97] - lowest]
    assert f"no masks had {lowest:.3f}: {less[0]:.3f} less than p = 0.75, and {less[1]:.3f} less" in page
    ahead = estimate(paired(masked[0].values("auc"), second).values())
    had = f"With 0.03 they had {statistics.mean(second.values()):.3f}, and p = 0.75 was ahead by {ahead.mean:.3f}"
    assert f"{had} ({wording.interval(ahead, 3)})" in page
    have = f"With 0.1 they have {shown[0]}, and it is ahead by {gains[0].mean:.3f} ({wording.interval(gains[0], 3)})"
    assert have in page
    assert (plain.settings["lr"], masked[0].settings["lr"], masked[0].settings["p"]) == (0.1, 0.03, 0.75)
    ends = {
        c.settings["p"]: [r.curve for r in c.complete] for c in results.measured if c.settings["batch_size"] == 2048
    }
    for p, words in (
        (0.0, "bring AUC on the test images to {} of {} without masks"),
        (0.97, "to {} of {} with p = 0.97"),
    ):
        first, last = (f"{statistics.mean(curve[i]['auc'] for curve in ends[p]):.3f}" for i in (0, -1))
        assert words.format(first, last) in page


@pytest.mark.parametrize("task", ["gp", "auc"])
def test_the_quick_studies_are_what_their_presets_say(make, task):
    kind, records = TASKS[task], make.study("quick", task).records()
    preset = kind.presets["quick"]
    wanted = [{**preset.base, **point, "seed": seed} for point in preset.grid for seed in range(preset.seeds)]
    keys = [trial_key(task, all_settings(kind, settings)) for settings in wanted]
    assert [record.state for record in records] == ["complete"] * len(wanted)
    assert {trial_key(task, all_settings(kind, record.settings)) for record in records} == set(keys)
    assert all(record.settings["judge"] == "test" for record in records)
    results = Results(kind, records)
    arms = [[c for c in results.measured if results.is_masked(c) is masked] for masked in (False, True)]
    assert len(arms[0]) == len(arms[1])  # both alike
    path = ROOT / "results" / "quick" / f"{task}.json"
    assert path.with_name(f"{task}-trials.csv").read_bytes() == exports.trials(results)
    assert path.with_name(f"{task}-configurations.csv").read_bytes() == exports.configurations(results)


def test_the_demo_is_what_the_search_found_best(make, textures):
    """The coarse mask alone is trained as is best for both masks, as it was judged on 24 training sets."""
    plain, masked = TASKS["gp"].presets["quick"].grid
    shared = TASKS["gp"].presets["quick"].base
    for arm, searched, point in ((textures.NONE, textures.NONE, plain), (textures.COARSE, textures.BOTH, masked)):
        (best,) = textures.chosen("gp", search="small-choice", **searched)
        assert {**shared, **point}.items() >= {**arm, **best}.items()
    judged = Results(TASKS["gp"], make.study("gp", "small").records())
    for c in Results(TASKS["gp"], make.study("quick", "gp").records()).measured:
        (same,) = (
            other for other in judged.measured if all(other.settings[m] == c.settings[m] for m in TASKS["gp"].masks)
        )
        values = same.values("accuracy")
        assert c.values("accuracy") == {seed: values[seed] for seed in range(5)}  # to the last digit


def test_the_page_says_what_the_coarse_mask_does_in_short_training(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["gp"], make.study("gp", "small-short").records())
    plain, masked = results.measured
    (best,) = make.claims.where(
        Results(TASKS["gp"], make.study("gp", "small-mask").records()), lr=0.03, weight_decay=0.5
    )
    assert all(masked.settings[name] == best.settings[name] for name in CHOSEN)
    gain = results.gain(masked)
    ends = wording.interval(make.claims.t_interval(gain), 1), wording.interval(gain, 1)
    assert "gains {:.1f} points, which could be nothing (t interval {}; bootstrap {})".format(gain.mean, *ends) in page
    judged = Results(TASKS["gp"], make.study("gp", "small").records())
    (long,) = make.claims.where(judged, p_small=0.0, p_large=0.75)
    mean = statistics.mean(long.values("accuracy")[seed] for seed in plain.values("accuracy"))
    assert f"After 40 epochs as above, the mask has {mean:.1f} on" in page
    search = Results(TASKS["gp"], make.study("gp", "small-choice").records())
    settings = {name: long.settings[name] for name in CHOSEN}
    (same,) = make.claims.where(search, p_large=0.0, **settings)
    assert f"they have {search.estimate(same).mean:.1f} on validation images" in page


def test_the_readme_quotes_the_results(make):
    readme = Told(ROOT / "README.md")

    def mean(task, metric, study="trials", **settings):
        results = Results(TASKS[task], make.study(task, study).records())
        (found,) = (c for c in results.measured if settings.items() <= c.settings.items())
        return results.estimate(found, metric).mean

    areas = [mean("auc", "auc", batch_size=size, p=p) for size, p in ((2048, 0.75), (2048, 0.0), (32, 0.0))]
    assert "{:.3f} with masks and {:.3f} without, small batches without masks have {:.3f}".format(*areas) in readme
    textures = [mean("gp", "accuracy", crop=None, p_small=a, p_large=b) for a, b in ((0.0, 0.0), (0.99, 0.94))]
    assert "[{:.1f}% and {:.1f}%]".format(*textures) in readme
    textures = [mean("gp", "accuracy", "small", p_small=0.0, p_large=coarse) for coarse in (0.0, 0.75)]
    assert "{:.1f}% without masks, {:.1f}% with a coarse one, each over 24 training sets".format(*textures) in readme
    hidden = [
        mean("latent", metric, batch_size=2048, p_x=0.0, p_d=p) for metric in ("dist", "accuracy") for p in (0.0, 0.97)
    ]
    for page in (readme, Told(make.PAGE)):
        assert "{:.2f} to {:.2f}, accuracy from {:.1f}% to {:.1f}%".format(*hidden) in page
    photographs = Results(TASKS["cifar10"], make.study("cifar10").records())
    assert all(photographs.gain(c).mean < 0 for c in photographs.measured if c.settings["p"])
    assert "[on CIFAR-10 no mask lowers the loss]" in readme


def test_the_page_says_which_masks_validation_images_would_take(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["auc"], make.study("auc", "choice").records())
    points = {(point["batch_size"], point["p"]) for point in TASKS["auc"].presets["paper"].grid}
    best = {}
    for size in (32, 256, 2048):
        masked = [c for c in results.measured if c.settings["p"] and (size, c.settings["p"]) in points]
        best[size] = results.best(c for c in masked if c.settings["batch_size"] == size).settings["p"]
    assert f"take {best[2048]} at 2048, {best[256]} at 256 and {best[32]} at 32, of which none helps" in page
    judged = Results(TASKS["auc"], make.study("auc").records())
    taken = [c for c in judged.measured if c.settings["p"] == best[c.settings["batch_size"]]]
    assert len(taken) == 3
    assert not any(judged.gain(c).beyond() for c in taken)


def test_the_page_quotes_the_textures(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["gp"], make.study("gp").records())
    found = {tuple(c.settings[name] for name in ("p_small", "p_large", "crop")): c for c in results.measured}
    plain, both = (found[key].values("accuracy") for key in ((0.0, 0.0, None), (0.99, 0.94, None)))
    assert f"without masks from {min(plain.values()):.0f} to {max(plain.values()):.0f}" in page
    mean = statistics.mean(both.values())
    assert f"but with {mean:.1f} masks stay {66.2 - mean:.0f} points below the paper's 66.2" in page
    assert results.best(results.measured) is found[0.99, 0.94, None]
    gains = paired(both, plain)
    later = estimate([gain for seed, gain in gains.items() if seed >= 5])
    assert f"gains {statistics.mean(gains.values()):.1f} points" in page
    assert f"{later.mean:.1f} ({later.low:.1f} to {later.high:.1f})" in page
    assert f"is missed by {10 - statistics.mean(gains.values()):.1f} points" in page
    assert estimate(gains.values()).high > 10
    assert all(set(c.values("accuracy")) == set(range(10)) for c in found.values())
    masked = [c for c in found.values() if results.is_masked(c)]
    shared = []
    for metric in ("accuracy", "adapted_accuracy"):
        without = found[0.0, 0.0, None].values(metric)
        mean_of = {seed: statistics.mean(c.values(metric)[seed] for c in masked) for seed in without}
        gain = estimate(paired(mean_of, without).values())
        shared.append(f"{gain.mean:.1f} ({wording.interval(gain, 1)})")
    assert "and together gain {}, or {} with [other statistics]".format(*shared) in page
    crop = found[0.0, 0.0, 512].values("accuracy")
    less = estimate(paired(both, crop).values())
    assert f"Crops of 512 pixels have {statistics.mean(crop.values()):.1f}, less than masks by {less.mean:.1f}" in page
    assert f"it could be {less.high:.1f} less or {-less.low:.1f} more" in page
    more = {
        key: results.estimate(c, "adapted_accuracy").mean - results.estimate(c).mean
        for key, c in found.items()
        if key[2] is None
    }
    without = more.pop((0.0, 0.0, None))
    adapted = max(found.values(), key=lambda c: results.estimate(c, "adapted_accuracy").mean)
    assert adapted is found[0.0, 0.75, None]
    gain = estimate(paired(*(c.values("adapted_accuracy") for c in (adapted, found[0.0, 0.0, None]))).values())
    mean = results.estimate(adapted, "adapted_accuracy").mean
    assert (
        f"The best then is (0, 0.75) with {mean:.1f}, {gain.mean:.1f} more ({gain.low:.1f} to {gain.high:.1f})" in page
    )
    least, most, without = (
        wording.number(x, 1, signed=True) for x in (min(more.values()), max(more.values()), without)
    )
    assert f"by {without} points without masks and by {least} to {most} with them" in page
    search = Results(TASKS["gp"], make.study("gp", "choice").records())
    at_512 = {
        name: search.best(c for c in search.measured if {**arm, "size": 512}.items() <= c.settings.items())
        for name, arm in (("crops", {"crop": 256, "p_small": 0.0}), ("masks", {"crop": None, "p_small": 0.99}))
    }
    ahead = {name: f"{search.estimate(c).mean:.1f}" for name, c in at_512.items()}
    assert f"with {ahead['crops']} against {ahead['masks']}" in page
    assert {search.estimate(c).n for c in search.measured if c.settings["size"] == 512} == {5}
    five = estimate([gain for seed, gain in gains.items() if seed < 5])
    assert f"with {five.mean:.1f} ({wording.interval(five, 1)})" in page


def test_the_page_quotes_other_ways_to_train_textures(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["gp"], make.study("gp", "variants").records())
    whole = [c for c in results.measured if c.settings["crop"] is None and not results.is_masked(c)]
    usual, ramped = (
        next(c for c in whole if {**make.USUAL, "p_warmup": share}.items() <= c.settings.items())
        for share in (0.0, 0.5)
    )
    means = [results.estimate(c).mean for c in (usual, ramped)]
    assert "and {:.1f} becomes {:.1f}".format(*means) in page
    changes = [abs(change) for change in paired(ramped.values("accuracy"), usual.values("accuracy")).values()]
    assert f"with changes of {min(changes):.0f} to {max(changes):.0f} points for single sets" in page
    assert f"moves accuracy by {min(changes):.0f} to {max(changes):.0f} points" in page
    crops = [c for c in results.measured if c.settings["crop"] == 128]
    best = [max(results.estimate(c).mean for c in crops if results.is_masked(c) is masked) for masked in (False, True)]
    assert "have {:.1f} without masks, and at most {:.1f} with one of four pairs".format(*best) in page
    assert len({(c.settings["p_small"], c.settings["p_large"]) for c in crops if results.is_masked(c)}) == 4


def test_the_page_quotes_turned_images(make, textures):
    page = Told(*make.PAGES)
    search = Results(TASKS["gp"], make.study("gp", "turned").records())

    def best(**settings):
        found = search.best(c for c in search.measured if settings.items() <= c.settings.items())
        return found, search.estimate(found).mean

    whole, masked = (best(crop=None, p_small=p)[1] for p in (0.0, 0.99))
    assert f"they have {whole:.1f} without, and {masked:.1f} with (0.99, 0.94)" in page
    crops, first = best(crop=128, p_small=0.0, p_large=0.0)
    both, second = best(crop=128)
    assert (both.settings["p_small"], both.settings["p_large"]) == (0.0, 0.75)
    assert f"far ahead with {first:.1f}, and with a mask on the large patches with {second:.1f}" in page

    results = Results(TASKS["gp"], make.study("gp", "turned-crops").records())
    plain, with_mask = results.measured
    for judged, chosen in ((plain, crops), (with_mask, both)):
        assert all(judged.settings[name] == chosen.settings[name] for name in (*CHOSEN, "p_large", "flips"))
        assert set(judged.values("accuracy")) == set(range(10))
    usual = Results(TASKS["gp"], make.study("gp").records())
    (ours,) = (c for c in usual.measured if textures.MASKED.items() <= c.settings.items())
    mean = results.estimate(with_mask).mean
    ahead = estimate(paired(with_mask.values("accuracy"), ours.values("accuracy")).values())
    assert f"With {mean:.1f} the best configuration beats the paper's 66.2 by {mean - 66.2:.0f} points" in page
    assert f"has [{mean:.1f} where the paper's best had 66.2]" in page
    assert f"our own (0.99, 0.94) by {ahead.mean:.1f} ({wording.interval(ahead, 1)})" in page
    added = [
        estimate(paired(with_mask.values(metric), plain.values(metric)).values())
        for metric in ("accuracy", "adapted_accuracy")
    ]
    quoted = "adds {:.1f} points ({}), or {:.1f} ({})"
    assert quoted.format(*(part for gain in added for part in (gain.mean, wording.interval(gain, 1)))) in page


def test_the_page_quotes_textures_on_two_cores(make, textures):
    page = Told(*make.PAGES)
    search = Results(TASKS["gp"], make.study("gp", "small-choice").records())
    first: tuple[dict, dict] = ({}, {})
    for c in search.measured:
        place = tuple(c.settings[name] for name in ("lr", "weight_decay", "epochs"))
        first[search.is_masked(c)][place] = statistics.mean(c.values("accuracy")[seed] for seed in (100, 101, 102))
    plain, masked = first
    assert set(plain) == set(masked)
    assert f"First {len(plain)} combinations" in page
    low = [masked[place] - plain[place] for place in plain if place[0] <= 0.01]
    high = [masked[place] - plain[place] for place in plain if place[0] > 0.01]
    ahead = f"ahead in {sum(gain > 0 for gain in low)} of {len(low)} combinations, by up to {max(low):.0f} points"
    assert ahead in page
    assert f"behind in {sum(gain < 0 for gain in high)} of {len(high)}" in page
    decays = plain[0.03, 0.5, 10], plain[0.03, 0.05, 10]
    assert "has {:.1f} with a decay of 0.5 and {:.1f} with 0.05".format(*decays) in page

    results = Results(TASKS["gp"], make.study("gp", "small").records())
    found = {(c.settings["p_small"], c.settings["p_large"]): c for c in results.measured}
    points = {(point["p_small"], point["p_large"]): point for point in textures.gp_small_final().points}
    for masks, c in found.items():
        names = (*CHOSEN, "size", "channels", "exact", "skip")
        assert {name: c.settings[name] for name in names} == {name: points[masks][name] for name in names}
        assert set(c.values("accuracy")) == set(range(24))
    assert set(found) == set(points)
    without, ours = found[0.0, 0.0], found[0.95, 0.75]
    best = [search.estimate(search.best(c for c in search.measured if search.is_masked(c) is m)) for m in (True, False)]
    assert {each.n for each in best} == {8}
    for means, extreme in ((plain, min), (masked, max)):
        rate, decay, length = max(means, key=means.get)
        rates, decays, lengths = ({place[i] for place in means} for i in range(3))
        assert min(rates) < rate < max(rates)
        assert min(lengths) < length < max(lengths)
        assert decay == extreme(decays)
    assert f"ahead by {best[0].mean - best[1].mean:.1f} points only, with eight sets" in page
    means = [results.estimate(c).mean for c in (ours, without)]
    gain = results.gain(ours)
    assert (
        f"{means[0]:.1f} against {means[1]:.1f}, a gain of {gain.mean:.1f} points ({wording.interval(gain, 1)})" in page
    )
    assert f"it is reached, [with {gain.mean:.1f}](#on-two-cores)" in page
    assert results.difference(ours, "large").low > results.difference(ours, "small").high
    usual = Results(TASKS["gp"], make.study("gp", "choice").records())
    whole = [c for c in usual.measured if {**textures.WHOLE, "size": 256}.items() <= c.settings.items()]
    added = {c for c in whole if c.settings["lr"] >= 0.03 and c.settings["weight_decay"] == 0.05}
    assert len(added) == 4
    *_, fifth = five = sorted((usual.estimate(c).mean for c in set(whole) - added), reverse=True)[:5]
    best = max(usual.estimate(c).mean for c in added)
    assert best < fifth
    assert f"has {best:.1f}, where five others have {fifth:.1f} to {five[0]:.1f}" in page
    (final,) = (c for c in whole if textures.gp_protocol(textures.WHOLE).items() <= c.settings.items())
    assert f"at 512 pixels in the end has {usual.estimate(final).mean:.1f} here" in page


def test_the_page_judges_the_claims_on_two_cores(make):
    page, rows = Told(*make.PAGES), " ".join((ROOT / "docs" / "results" / "small.md").read_text().split())
    results = Results(TASKS["gp"], make.study("gp", "small").records())
    found = {(c.settings["p_small"], c.settings["p_large"]): c for c in results.measured}
    none, both, fine, coarse, strong = (0.0, 0.0), (0.95, 0.75), (0.95, 0.0), (0.0, 0.75), (0.99, 0.94)

    def ahead(one, other, metric="accuracy", points=""):
        gain = estimate(paired(found[one].values(metric), found[other].values(metric)).values())
        assert make.claims.t_interval(gain).low > 0
        return f"{gain.mean:.1f}{points} ({wording.interval(gain, 1)})"

    def row(claim, here, holds):
        assert f"| {claim} | {here} | {holds} |" in rows

    raised = f"by {ahead(coarse, none, points=' points')} with the large mask, by {ahead(both, none)} with both"
    row("Masks raise the accuracy.", raised, "held")
    alone = f"the large mask alone is ahead by {ahead(coarse, both, points=' points')}"
    row("Both masks together are best.", alone, "did not hold")
    large = f"by {ahead(coarse, none, 'large', ' points')}, and the small scale by {ahead(coarse, none, 'small')}"
    row("The large mask alone improves the large scale.", large, "held")
    lost, gained = ahead(none, fine, "small", " points"), ahead(fine, none, "large")
    row(
        "The small mask alone improves the small scale.",
        f"which loses {lost}; the large scale gains {gained}",
        "did not hold",
    )
    row(
        "Too much of both is worse again.",
        f"(0.99, 0.94) is behind (0.95, 0.75) by {ahead(both, strong, points=' points')}",
        "held",
    )
    policies = Results(TASKS["gp"], make.study("gp", "small-policies").records())
    (stronger,) = (policies.estimate(c).mean for c in policies.measured if c.settings["skip"] == "exact")
    weaker = [results.estimate(found[masks]).mean for masks in (coarse, both)]
    quoted = "{:.1f}, {:.1f} and [{:.1f}](#skip-and-batch-statistics) with p_small = 0, 0.95 and 0.99"
    assert quoted.format(*weaker, stronger) in page
    assert f"the easier one, at {results.estimate(found[none], 'small').mean:.1f} without masks" in page


def test_the_page_shows_every_round_of_crops(make):
    page, rows = Told(*make.PAGES), (ROOT / "docs" / "results" / "gp.md").read_text()
    results = Results(TASKS["gp"], make.study("gp").records())
    rounds = [*Results(TASKS["gp"], make.study("gp", "earlier").records()).measured, *results.measured]

    def judged(crop, sets=5, **settings):
        (found,) = (c for c in rounds if {"crop": crop, "p_small": 0.0, **settings}.items() <= c.settings.items())
        assert len(found.values("accuracy")) == sets
        return found

    wide = [judged(512, lr=0.01), judged(512, lr=0.001, weight_decay=0.5), judged(512, 10, lr=0.001, weight_decay=0.05)]
    tight = [judged(256, lr=0.01), judged(256, lr=0.001), judged(256, 10, lr=0.003)]
    assert len([c for c in rounds if c.settings["crop"]]) == 6
    for place, pair in enumerate(zip(wide, tight, strict=True), 1):
        cells = [results.estimate(pair[0], metric).mean for metric in ("accuracy", "small", "large")]
        cells.append(results.estimate(pair[1]).mean)
        assert re.search(rf"\| {place} \| [^|]* \| " + " \\| ".join(f"{x:.1f}" for x in cells) + r" \|", rows)
    first = [statistics.mean(c.values("accuracy")[seed] for seed in range(5)) for c in (wide[2], tight[2])]
    assert "the first five have {:.1f} and {:.1f} in total".format(*first) in page
    (plain,) = (c for c in results.measured if not results.is_masked(c) and c.settings["crop"] is None)
    gain, loss = (
        estimate(paired(*(c.values(metric) for c in pair)).values())
        for metric, pair in (("large", (wide[0], plain)), ("small", (plain, wide[0])))
    )
    assert f"gain {gain.mean:.1f} points ({wording.interval(gain, 1)}) at the large scale" in page
    assert f"lose {loss.mean:.1f} ({wording.interval(loss, 1)}) at the small one" in page


def test_the_page_quotes_the_policies(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["gp"], make.study("gp").records())
    masked = [c for c in results.measured if results.is_masked(c)]
    assert len(masked) == 8
    mean = statistics.mean(results.estimate(c).mean for c in masked)
    again = Results(TASKS["gp"], make.study("gp", "policies").records())
    found = {c.settings["skip"]: c.values("accuracy") for c in again.measured}
    exact = statistics.mean(found["exact"].values())
    assert f"the eight with masks have {mean:.1f} on average" in page
    (plain,) = (
        c.values("accuracy") for c in masked if {"p_small": 0.99, "p_large": 0.94}.items() <= c.settings.items()
    )
    first, next_ = (statistics.mean(plain[seed] for seed in seeds) for seeds in (range(5), range(5, 10)))
    assert f'They have {exact:.1f} with "exact", and without Skip {first:.1f} on these five' in page
    assert f"but {next_:.1f} on the next five" in page
    gains = [estimate(paired(found[policy], found["exact"]).values()) for policy in ("sampled", "frozen")]
    sampled, frozen = (
        f"{g.mean:.1f}{points} ({wording.interval(g, 1)})" for g, points in zip(gains, (" points", ""), strict=True)
    )
    assert f'against "exact", "sampled" gains {sampled} and "frozen" {frozen}' in page
    row, auc = (
        next(r for r in json.loads(make.STEPS.read_text())["rows"] if r["case"].startswith(make.POLICIES[task]))
        for task in ("gp", "auc")
    )
    faster = {way: f"{row['plain_ms'] / row[f'{way}_ms']:.2f}" for way in ("sampled", "frozen", "both")}
    assert f'"sampled" and "frozen" are {faster["sampled"]} and {faster["frozen"]} times as fast' in page
    assert f"is {faster['both']} times as fast ({row['both_ms']:.1f} ms)" in page
    faster = [f"{auc['plain_ms'] / auc[f'{way}_ms']:.2f}" for way in ("sampled", "frozen", "both")]
    assert "steps are {} and {} times as fast".format(*faster) in page
    assert f"compiled and recorded is {faster[2]} times as fast" in page
    results = Results(TASKS["auc"], make.study("auc").records())
    (plain,) = (
        c.values("auc") for c in results.measured if {"batch_size": 2048, "p": 0.97}.items() <= c.settings.items()
    )
    trained = Results(TASKS["auc"], make.study("auc", "policies").records()).measured
    assert {c.settings["skip"] for c in trained} == {"exact", "sampled", "frozen"}
    for c in trained:
        change = estimate(paired(c.values("auc"), plain).values())
        assert max(abs(change.low), abs(change.high)) < 0.01


def test_the_page_quotes_the_policies_of_the_quick_preset(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["auc"], make.study("quick", "auc-policies").records())
    found = {c.settings["skip"]: c for c in results.measured}
    assert all(c.settings["p"] == 0.95 and len(c.records) == 8 for c in found.values())
    exact = found.pop("exact")
    gains, faster = {}, {}
    for policy, c in found.items():
        gain = estimate(paired(c.values("auc"), exact.values("auc")).values())
        gains[policy] = f"{gain.mean:.3f} ({wording.interval(gain, 3)})"
        faster[policy] = sum(r.seconds for r in exact.records) / sum(r.seconds for r in c.records)
    assert f'against "exact", with {results.estimate(exact).mean:.3f},' in page
    assert f'"sampled" gains {gains["sampled"]} and "frozen" {gains["frozen"]}' in page
    assert f"is {faster['sampled']:.2f} and {faster['frozen']:.2f} times as fast" in page


def test_the_page_quotes_the_policies_on_two_cores(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["gp"], make.study("gp", "small-policies").records())
    found = {(c.settings["skip"], c.settings["lr"]): c for c in results.measured}
    exact = found["exact", 0.003]
    assert all(set(c.values("accuracy")) == set(range(24)) for c in found.values())
    assert {(c.settings["p_small"], c.settings["p_large"]) for c in found.values()} == {(0.99, 0.75)}

    def less(policy, rate, metric="accuracy"):
        return estimate(paired(found[policy, rate].values(metric), exact.values(metric)).values())

    sampled, frozen, lower = less("sampled", 0.003), less("frozen", 0.003), less("frozen", 0.001)
    assert f'"exact", with {sampled.mean:.1f} points more ({wording.interval(sampled, 1)})' in page
    assert f"loses {-frozen.mean:.1f} points ({-frozen.high:.1f} to {-frozen.low:.1f})" in page
    assert less("frozen", 0.003, "small").mean < 2 * less("frozen", 0.003, "large").mean < 0
    assert f"{-lower.mean:.1f} points less than " in page
    assert f"could be {-lower.low:.1f} less or {lower.high:.1f} more: better at the small scale, worse at the" in page
    assert less("frozen", 0.001, "small").low > 0 > less("frozen", 0.001, "large").high
    time = [sum(record.seconds for record in c.records) for c in (exact, found["sampled", 0.003])]
    assert f"trains {time[0] / time[1]:.2f} times as fast" in page
    for name in ("docs/skip/statistics.md", "docs/results.md"):
        assert f"{-frozen.mean:.0f} points" in (ROOT / name).read_text()
    search = Results(TASKS["gp"], make.study("gp", "small-frozen").records())
    tried = {c.settings["lr"]: search.estimate(c) for c in search.measured}
    assert {each.n for each in tried.values()} == {8}
    assert max(tried, key=lambda rate: tried[rate].mean) == 0.001
    quoted = "{:.1f}, {:.1f}, {:.1f} and {:.1f} with 0.0003, 0.001, 0.003 and 0.01"
    assert quoted.format(*(tried[rate].mean for rate in (0.0003, 0.001, 0.003, 0.01))) in page


def test_the_page_says_how_long_training_overfits(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["latent"], make.study("latent", "choice").records())
    wanted = {"batch_size": 2048, "p_x": 0.0, "p_d": 0.0, "lr": 0.0003}
    found = {c.settings["passes"]: c for c in results.measured if wanted.items() <= c.settings.items()}
    short, long = (results.estimate(found[passes]).mean for passes in (10, 30))
    steps = [found[passes].records[0].curve[-1]["step"] for passes in (10, 30)]
    fitted = statistics.mean(r.curve[-1]["loss"] for r in found[30].records)
    assert f"validation loss is {short:.1f} after {steps[0]} steps and {long:.1f} after {steps[1]}" in page
    assert f"while the training loss falls to {fitted:.1f}" in page


def test_the_page_compares_textures_at_the_same_settings(make, textures):
    page = Told(*make.PAGES)
    results = Results(TASKS["gp"], make.study("gp", "choice").records())
    wanted = {"size": 256, **textures.gp_protocol(textures.MASKED)}
    same = [c for c in results.measured if wanted.items() <= c.settings.items()]
    without, masked = (f"{results.estimate(c).mean:.1f}" for c in same)
    assert f"without masks the very same settings give {without} at 256 pixels, where masks give {masked}" in page
    for arm, tried in zip(textures.ARMS, (70, 70, 30, 30), strict=True):
        at = textures.sized(256, arm)
        wanted = {name: at[name] for name in ("size", *arm)}.items()
        assert len([c for c in results.measured if wanted <= c.settings.items()]) == tried
    assert "70 combinations for whole images and 30 for crops" in page
    whole = {**textures.WHOLE, "size": 256, "epochs": 2}.items()
    short = [c for c in results.measured if whole <= c.settings.items()]
    assert len(short) == 12
    assert f"has {max(results.estimate(c).mean for c in short):.1f}." in page
    assert max(round(record.curve[-1]["loss"], 2) for c in short for record in c.records) == 0.02
    assert {record.curve[-1]["step"] for c in short for record in c.records} == {40}


def test_the_page_quotes_the_hidden_states(make):
    page = Told(*make.PAGES)
    results = Results(TASKS["latent"], make.study("latent").records())
    found = {tuple(c.settings[name] for name in ("batch_size", "p_x", "p_d")): c for c in results.measured}
    small, plain = found[32, 0.0, 0.0], found[2048, 0.0, 0.0]

    def mean(c, metric):
        return results.estimate(c, metric).mean

    both = f"of {mean(small, 'dist_minibatch'):.2f} on those and of {mean(small, 'dist'):.2f} on all images"
    assert both in page
    off = [
        paired(c.values("dist_minibatch"), c.values("dist"), lambda a, b: 100 * abs(a / b - 1)) for c in (small, plain)
    ]
    burst = [r.settings["seed"] for r in small.records if max(row["loss"] for row in r.curve[1:]) > 1000]
    assert burst == [0]
    without = {seed: value for seed, value in off[0].items() if seed not in burst}
    assert estimate(paired(without, off[1]).values()).low > 0
    shares = [statistics.mean(values.values()) for values in (without, off[1])]
    assert "off by {:.0f}%, which is surely more than the {:.0f}% at 2048".format(*shares) in page
    assert f"from {mean(plain, 'dist'):.2f} to {mean(found[2048, 0.0, 0.97], 'dist'):.2f} with p_d = 0.97" in page
    rise = [mean(found[2048, p_x, 0.0], "xe") for p_x in (0.0, 0.94, 0.97)]
    assert "L_XE rises from {:.2f} to {:.2f} and {:.2f}".format(*rise) in page
    right = [mean(found[size, 0.0, 0.0], "accuracy") for size in (2048, 512)]
    assert "classify {:.1f}% of the images, where batches of 512 reach {:.1f}%".format(*right) in page

    same = Results(TASKS["latent"], make.study("latent", "same").records())
    like = {c.settings["p_x"]: c for c in same.measured}
    masked = found[2048, 0.0, 0.97]
    assert all(c.settings[name] == masked.settings[name] for c in like.values() for name in CHOSEN)
    assert all(c.settings["p_d"] == 0 for c in like.values())
    less = estimate(paired(like[0.0].values("dist"), masked.values("dist")).values())
    quoted = f"the L_dist of {mean(like[0.0], 'dist'):.2f} after the same training, p_d = 0.97 takes {less.mean:.2f}"
    assert f"{quoted} ({wording.interval(less, 2)})" in page
    assert less.mean > mean(plain, "dist") - mean(masked, "dist")
    for p_x in (0.94, 0.97):
        change, rise = (
            estimate(paired(like[p_x].values(metric), like[0.0].values(metric)).values()) for metric in ("dist", "xe")
        )
        assert change.low < 0 < change.high
        assert rise.low > 0


def test_the_page_quotes_the_losses_of_cifar10(make):
    page = Told(*make.PAGES)
    search = Results(TASKS["cifar10"], make.study("cifar10", "choice").records())

    def loss(batch_size, epochs, lr, p):
        wanted = {"batch_size": batch_size, "epochs": epochs, "lr": lr, "p": p}.items()
        (found,) = (c for c in search.measured if wanted <= c.settings.items())
        return search.estimate(found).mean

    cells = ((16, 10, 0.0003), (128, 20, 0.003), (2048, 30, 0.003))
    both = [(loss(*cell, 0.9), loss(*cell, 0.0)) for cell in cells]
    assert f"{both[0][0]:.3f} instead of {both[0][1]:.3f} at 16 (10 epochs, learning rate 0.0003)" in page
    assert f"{both[1][0]:.3f} instead of {both[1][1]:.3f} at 128 (20, 0.003)" in page
    assert f"{both[2][0]:.3f} instead of {both[2][1]:.3f} at 2048 (30, 0.003)" in page
    assert "which is {:.0f}%, {:.0f}% and {:.0f}% less".format(*(100 * (1 - low / high) for low, high in both)) in page
    short = [loss(16, 5, 0.0003, 0.0), loss(128, 5, 0.001, 0.0), loss(2048, 7, 0.01, 0.0)]
    wanted = "5 epochs give {:.3f} at 16 and {:.3f} at 128 (0.001), and 7 give {:.3f} at 2048 (0.01)"
    assert wanted.format(*short) in page

    results = Results(TASKS["cifar10"], make.study("cifar10").records())
    found = {(c.settings["batch_size"], c.settings["p"]): c for c in results.measured}
    assert all(results.gain(c).mean < 0 for c in found.values() if c.settings["p"])
    more = [results.difference(found[2048, p], "accuracy").mean for p in (0.5, 0.9)]
    assert "At 2048, p = 0.5 and 0.9 have {:.1f} and {:.1f} points more accuracy than no mask".format(*more) in page
    unlucky = (loss(128, 10, 0.003, 0.9), results.estimate(found[128, 0.9]).mean)
    assert "gave {:.3f} on the validation images and {:.3f} on the test images".format(*unlucky) in page
    then = Results(TASKS["cifar10"], make.study("cifar10", "earlier").records())
    before = {(c.settings["p"], c.settings["epochs"]): c for c in then.measured if c.settings["batch_size"] == 2048}
    assert f"15 epochs had given {then.estimate(before[0.0, 15], 'accuracy').mean:.1f}" in page
    ahead = loss(2048, 7, 0.01, 0.5) - loss(2048, 14, 0.01, 0.5)
    behind = results.estimate(found[2048, 0.5]).mean - then.estimate(before[0.5, 7]).mean
    assert f"14 epochs ahead of 7 by {ahead:.3f}, the test images behind by {behind:.3f}" in page
    for metric in ("loss", "accuracy"):
        gap = estimate(paired(before[0.5, 7].values(metric), found[2048, 0.0].values(metric)).values())
        assert gap.beyond() is None
    for (size, p), c in found.items():
        lengths = {
            s.settings["epochs"] for s in search.measured if {"batch_size": size, "p": p}.items() <= s.settings.items()
        }
        assert min(lengths) < c.settings["epochs"] < max(lengths)

    same = [c for c in found.values() if c.settings["p"] and make.training(results, c) == "the same"]
    changed = [results.difference(c, "pgd_2").mean for c in same]
    assert f"changes by +{min(changed):.1f} to +{max(changed):.1f} points" in page
    sure = [c for c in same if results.difference(c, "pgd_2").beyond() is not None]
    assert sure == [found[16, 0.75]]
    kept = [then.estimate(before[0.0, 15], "pgd_2").mean, results.estimate(found[2048, 0.0], "pgd_2").mean]
    assert "15 epochs leave {:.1f} of what is {:.1f} after 7".format(*kept) in page
    longer = [found[cell] for cell in ((16, 0.9), (128, 0.9), (2048, 0.9), (2048, 0.5))]
    lost = [-results.difference(c, "pgd_2").mean for c in longer]
    assert "lost {:.1f}, {:.1f} and {:.1f} points, and p = 0.5 at 2048 lost {:.1f}".format(*lost) in page
    assert [round(c.settings["epochs"] / results.control(c).settings["epochs"]) for c in longer] == [2, 2, 2, 2]
    assert max(value for c in found.values() for value in c.values("pgd_8").values()) == 0


def test_trials_are_run_once_and_kept(run, tmp_path, monkeypatch, capsys):
    tiny = {"size": 32, "blocks": (1, 1), "channels": 8, "passes": 1, "test_per_class": 1, "precision": "32-true"}

    def start(file, rates):
        judge = "validation" if file == "choice" else "test"
        stage = run.Stage([{**tiny, "epochs": 1, "lr": rate, "judge": judge} for rate in rates], (7,), file)
        monkeypatch.setattr(run, "STAGES", {"gp": {"stage": lambda: stage}})
        arguments = ["gp", "stage", "--workers", "1", "--folder", str(tmp_path / file), "--to", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["run.py", *arguments])
        run.main()
        records = Archive(tmp_path / "gp" / f"{file}.json").records()
        assert all(record.state == "complete" for record in records)
        return re.findall(r"(\d+) trials are", capsys.readouterr().out), [r.settings["lr"] for r in records]

    monkeypatch.setattr(run.search, "ROOT", tmp_path)
    assert start("choice", [0.1, 0.01]) == (["2"], [0.1, 0.01])
    monkeypatch.setattr(run, "train", lambda study, home, options, *_: work(study, home, options))  # no more processes
    assert start("choice", [0.01, 0.1]) == (["0"], [0.1, 0.01])
    assert start("choice", [0.01, 0.001]) == (["1"], [0.1, 0.01, 0.001])  # a search keeps what it has tried
    assert len(run.search.chosen("gp", 5)) == 3
    assert start("trials", [0.1]) == (["1"], [0.1])
    assert start("trials", [0.1, 0.01]) == (["1"], [0.1, 0.01])
    earlier = tmp_path / "gp" / "earlier.json"
    assert not earlier.exists()
    assert start("trials", [0.01, 0.001]) == (["1"], [0.01, 0.001])  # what is chosen no more is kept elsewhere
    assert start("trials", [0.001, 0.03]) == (["1"], [0.001, 0.03])
    assert [record.settings["lr"] for record in Archive(earlier).records()] == [0.1, 0.01]


def test_a_search_goes_beyond_its_ends(run, photographs, monkeypatch):
    found = {0.0: {0.001: 0.7, 0.003: 0.8}, 0.5: {0.001: 0.7, 0.003: 0.6}, 0.9: {0.0003: 0.5, 0.001: 0.7, 0.003: 0.6}}
    records = [
        Record(
            f"{p} {lr}",
            "complete",
            {"batch_size": 32, "p": p, "lr": lr, "epochs": 3, "seed": 100},
            metrics={"auc": value},
        )
        for p, values in found.items()
        for lr, value in values.items()
    ]
    monkeypatch.setattr(run.search, "Archive", lambda path: SimpleNamespace(records=lambda: records))
    search = photographs.Images("auc", [{"batch_size": 32, "p": p} for p in found], {}, (100,))
    assert [(point["p"], point["lr"]) for point in search.edge().points] == [(0.0, 0.01), (0.5, 0.0003)]
    assert [point["lr"] for point in search.final().points] == [0.003, 0.001, 0.001]
    assert all(point["epochs"] == 3 for point in (*search.edge().points, *search.final().points))  # not the preset's
    refined = [(point["p"], point["lr"], point["epochs"]) for point in search.refine().points]
    lengths = [(p, lr, epochs) for epochs in (6, 1) for p, lr in ((0.0, 0.003), (0.5, 0.001), (0.9, 0.001))]
    assert refined == [*lengths, (0.0, 0.01, 3), (0.5, 0.0003, 3)]
    even = [(point["p"], point["lr"], point["epochs"]) for point in search.even().points]
    assert even == [(p, lr, 3) for p in (0.0, 0.5, 0.9) for lr in (0.0003, 0.001, 0.003)]
    once_more = search._replace(tried={32: []}).again()
    assert [(point["p"], point["lr"]) for point in once_more.points] == [
        (p, lr) for p, rates in ((0.0, (0.003, 0.001)), (0.5, (0.001, 0.003)), (0.9, (0.001, 0.003))) for lr in rates
    ]
    assert once_more.seeds == [100, 101, 102]
    assert search._replace(tried={32: [], 64: []}).again().points == []  # the largest batches only
    with pytest.raises(SystemExit, match=r"no search for .* 0\.7"):
        search._replace(cells=[{"batch_size": 32, "p": 0.7}]).final()
    alike = search._replace(like={"p": 0.5})
    assert alike.arms() == [{"batch_size": 32, "p": 0.0}, {"batch_size": 32, "p": 0.5}]
    assert [(point["p"], point["lr"]) for point in alike.final().points] == [(0.0, 0.003), (0.5, 0.001), (0.9, 0.001)]


def test_the_table_of_policies(make, tmp_path, monkeypatch):
    kept = make.study
    masks = {"gp": {"p_small": 0.99, "p_large": 0.94}, "auc": {"batch_size": 2048, "p": 0.97}}
    change = {"exact": 0.0, "sampled": 0.02, "frozen": -0.01}

    def study(task, name="trials"):
        if name != "policies":
            return kept(task, name)
        found = [r for r in kept(task).records() if masks[task].items() <= r.settings.items()]
        records = [
            dataclasses.replace(
                r,
                settings={**r.settings, "skip": policy},
                metrics={metric: value * (1 + by) for metric, value in r.metrics.items()},
            )
            for r in found
            for policy, by in change.items()
        ]
        return SimpleNamespace(records=lambda: records)

    steps = [
        {"case": f"{case} and so on", "plain_ms": 20.0, "exact_ms": 16.0, "sampled_ms": 10.0, "frozen_ms": 8.0}
        for case in make.POLICIES.values()
    ]
    (tmp_path / "steps.json").write_text(json.dumps({"rows": steps}))
    monkeypatch.setattr(make, "study", study)
    monkeypatch.setattr(make, "STEPS", tmp_path / "steps.json")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in make.policies().splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [task, name] for task in masks for name in ("without Skip", "exact", "sampled", "frozen")
    ]
    results = Results(TASKS["gp"], kept("gp").records())
    (plain,) = (c for c in results.measured if masks["gp"].items() <= c.settings.items())
    mean = results.estimate(plain).mean
    assert [row[2].split()[0] for row in rows[:4]] == [f"{mean * (1 + by):.1f}" for by in (0.0, *change.values())]
    assert [row[3].split()[0] for row in rows[1:4]] == [
        "0.0",
        f"+{0.02 * mean:.1f}",
        f"\N{MINUS SIGN}{0.01 * mean:.1f}",
    ]
    assert [row[4:] for row in rows[:4]] == [["20.0", "1.00"], ["16.0", "1.25"], ["10.0", "2.00"], ["8.0", "2.50"]]


def test_words_are_free_and_figures_are_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Masks gain 8.6 points, less\nthan 10.\n\nFrom 1,200 to \N{MINUS SIGN}3.5% in 2.\n| a | 4.0 |\n")
    told = Told(page)
    for phrase in ("a gain of 8.6, not of 10", "gain 8.6", "are 8.6 points", "1,200 becomes \N{MINUS SIGN}3.5%"):
        assert phrase in told
    for phrase in ("8.7 and 10", "10 and 8.6", "8.6", "by 8.6 percent", "10 and 1,200", "1,200 and 3.5%", "2 of 4.0"):
        assert phrase not in told
