"""docs/evidence.md says what the figures in benchmarks/results say, and its rule does what it says."""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence.md"


@pytest.fixture(scope="module")
def made():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield pytest.importorskip("quality_pages", reason="it needs the extra experiments")


@pytest.fixture(scope="module")
def rows(made):
    return made.loaded()


def test_what_stands_between_markers_is_made_from_the_figures(made, rows):
    text = PAGE.read_text()
    parts = made.parts(rows)
    assert set(re.findall(r"<!-- evidence-(\w+) -->", text)) == set(parts)
    for name, part in parts.items():
        assert f"<!-- evidence-{name} -->\n\n{part}\n\n<!-- end of evidence-{name} -->" in text, name


def test_all_tasks_have_ten_seeds_of_one_machine_and_rates_that_were_searched(made, rows):
    for name in made.known(rows):
        runs = made.trainings(rows, name)
        assert [row["seed"] for row in runs] == list(range(10)), name
        assert len({(row["machine"], row["scale"]) for row in runs}) == 1, name
        for row in runs:
            assert list(row["ways"]) == list(made.TASKS[name].ways)
            assert all(one["rate"] in made.RATES for one in row["ways"].values())


def test_what_the_words_of_the_page_say_holds(made, rows):
    text = " ".join(PAGE.read_text().split())
    words = {name: made.verdict(rows, name)[0] for name in made.known(rows)}
    assert [name for name, word in words.items() if word == "use"] == ["latent"]
    assert [name for name, word in words.items() if word == "try"] == ["gp"]
    by = {one["way"]: one["end"][0] for one in made.compared(rows, "latent")}
    assert "minibatches of 32 end at more than twice the loss" in text
    assert by["small"] > 2 * by["whole"]
    table = (ROOT / "docs" / "skip" / "statistics.md").read_text()
    told = re.search(r"test accuracy, % \| ([\d.]+) ± [\d.]+ \| ([\d.]+) ", table)
    assert "{}% without, {}% with masks".format(*told.groups()) in text


def test_the_words_on_what_fits_hold(made):
    rows = json.loads((made.RESULTS / "quality-memory-cpu.json").read_text())["rows"]
    size = {(row["kind"], row["way"], row["limit"]): row["size"] for row in rows}
    text = " ".join(PAGE.read_text().split())
    assert size["image", "engine", 2] > size["image", "plain", 4]
    assert size["batch", "engine", 2] == 8 * size["batch", "plain", 2]
    rates = {row["way"]: row["size"] / row["seconds"] for row in rows if (row["kind"], row["limit"]) == ("batch", 2)}
    assert f"{rates['engine'] / rates['gradcache']:.1f} times as many in the same time as GradCache" in text
    most = size["cohort", "gradcache", 2], size["cohort", "tiles", 2]
    assert "GradCache takes {} images, tiles no more than {}.".format(*most) in text


def test_the_first_page_has_the_figures(made, rows):
    text = (ROOT / "docs" / "index.md").read_text()
    ends = {name: {one["way"]: one["end"][0] for one in made.compared(rows, name)} for name in ("latent", "survival")}
    latent, survival = ends.values()
    best = min(latent[way] for way in made.BATCHES)
    assert (
        f"end at {latent['informed']:.1f} with informed masks](evidence.md), at {latent['whole']:.1f} without" in text
    )
    assert f"and at {best:.1f} with the best minibatches" in text
    masks = min(survival[way] for way in made.MASKED)
    assert f"{100 - survival['crops']:.1f}% with them and [{100 - masks:.1f}% with the best masks]" in text
    assert made.verdict(rows, "rare")[0] == "don't"


def training(seed, **ends):
    curves = {way: {"seconds": [1.0, 2.0], "validation": [9.0, end], "test": [9.0, end]} for way, end in ends.items()}
    return {"task": "decorrelation", "kind": "train", "seed": seed, "scale": 1.0, "ways": curves}


@pytest.mark.parametrize(
    ("whole", "small", "informed", "word"),
    [(5, 6, 4, "use"), (5, 3, 4, "don't"), (5, 6, 5, "don't"), (5, 4, 4, "try")],
)
def test_the_rule(made, whole, small, informed, word):
    rows = []
    for seed in range(10):
        shake = 0.1 * (-1) ** seed
        ends = dict.fromkeys(made.TASKS["decorrelation"].ways, 8.0 + 0.001 * seed)
        ends |= {"whole": whole + 0.001 * seed, "small": small + shake, "informed": informed - shake}
        rows.append(training(seed, **ends))
        for one in rows[-1]["ways"].values():
            one |= {"rate": 0.01, "steps": 1}
    assert made.verdict(rows, "decorrelation")[0] == word


def test_a_point_of_a_curve_is_chosen_on_validation_samples(made):
    curve = {"seconds": [1.0, 2.0, 3.0], "validation": [3.0, 1.0, 2.0], "test": [5.0, 6.0, 4.0]}
    assert made.best_of(curve) == (1.0, 6.0)
    assert made.best_of(curve, 1.5) == (3.0, 5.0)


def test_intervals_and_ranks_are_those_of_scipy(made):
    stats = pytest.importorskip("scipy.stats")
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.5]
    low, high = stats.t.interval(0.95, len(values) - 1, statistics.fmean(values), stats.sem(values))
    mean, half = made.interval(values)
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-3)
    points = [("", "", a, b) for a, b in zip(values, [2.0, 7.0, 1.0, 8.0, 2.0, 8.0, 1.0, 8.0, 2.0, 8.0], strict=True)]
    wanted = stats.spearmanr([x[2] for x in points], [x[3] for x in points]).statistic
    assert made.correlation(points) == pytest.approx(wanted)
