"""The paper's sentences, held against records in which they are true, false or not to be told."""

import dataclasses
import re
import runpy
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

import made_up
from backdrop import cli
from backdrop.experiments.report.statistics import Results
from backdrop.experiments.report.tables import GP_TABLE
from backdrop.experiments.study.archive import pack
from backdrop.experiments.study.plan import describe
from backdrop.experiments.tasks import TASKS

FILE = Path(__file__).parent.parent / "results" / "claims.py"
MODULE = runpy.run_path(str(FILE))
CLAIMS = MODULE["CLAIMS"]


def claims(name, records):
    return CLAIMS[name](Results(TASKS[name], records))


def mirrored(records):
    """The same trials, in which every effect has the other sign."""
    return [dataclasses.replace(r, metrics={name: 200 - v for name, v in r.metrics.items()}) for r in records]


def test_every_task_of_the_paper_has_claims():
    assert CLAIMS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_planted_is_found(name):
    for claim in claims(name, getattr(made_up, name)()):
        assert claim.verdict == "held", claim


@pytest.mark.parametrize("name", ["gp", "ponce", "auc"])
def test_the_opposite_is_found_too(name):
    first, *others = claims(name, mirrored(getattr(made_up, name)()))
    assert first.verdict == "did not hold", first
    assert all(claim.verdict not in ("held", "smaller") for claim in others)


@pytest.mark.parametrize(("name", "which"), [("cifar10", 0), ("latent", 2)])
def test_a_loss_that_rises_is_no_gain(name, which):
    records = getattr(made_up, name)()
    assert claims(name, mirrored(records))[which].verdict == "did not hold"


@pytest.mark.parametrize("name", CLAIMS)
def test_what_was_measured_has_numbers_and_how_many_seeds(name):
    for claim in claims(name, getattr(made_up, name)()):
        if claim.verdict != "not measured":
            assert re.search(r"\d seeds?\b|\bn = \d", claim.here), claim
            assert "±" in claim.here or "at once" in claim.here, claim


@pytest.mark.parametrize("name", CLAIMS)
def test_few_seeds_leave_measured_claims_open(name):
    found = claims(name, getattr(made_up, name)(3))
    measured = [claim for claim in found if "seed" in claim.here]
    assert len(measured) >= 2
    assert all(claim.verdict == "open" and claim.decides >= 5 for claim in measured), measured


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("kept", ["none", "plain", "masked", "unfinished"])
def test_without_the_trials_it_takes_nothing_is_said(name, kept):
    """Only the crops of `gp` say something about themselves and no masks."""
    task, records = TASKS[name], getattr(made_up, name)()
    of = {
        "none": [],
        "plain": [
            r for r in records if not any(r.settings[mask] for mask in task.masks) and not r.settings.get("crop")
        ],
        "masked": [r for r in records if all(r.settings[mask] for mask in task.masks)],
        "unfinished": [dataclasses.replace(r, state="running") for r in records],
    }[kept]
    for claim in claims(name, of):
        if claim.claim.startswith(("Small batches estimate", "Too much of both")):
            continue  # of no masks alone, and of both masks alone
        assert (claim.here, claim.verdict) == ("\N{EN DASH}", "not measured"), claim


def test_trainings_that_failed_are_no_evidence():
    failed = [
        dataclasses.replace(r, metrics=r.metrics | {"accuracy": 25.0}) if r.settings["crop"] == 256 else r
        for r in made_up.gp()
    ]
    *others, crops = claims("gp", failed)
    assert (crops.here, crops.verdict) == ("every training failed: guessing", "not measured")
    assert all(claim.verdict == "held" for claim in others)


@pytest.mark.parametrize(
    ("fall", "more", "verdicts"), [(0.1, -2.0, ("smaller", "did not hold")), (0.4, 0.0, ("held", "open"))]
)
def test_less_than_the_paper_found_is_smaller(fall, more, verdicts):
    records = [
        made_up.record(
            {"batch_size": size, "p": p, "seed": seed},
            {"loss": 0.5 * (1 - p * fall) + 0.01 * (-1) ** seed, "accuracy": 85 + p * (more + 0.1 * (-1) ** seed)},
            metric="loss",
        )
        for size in (16, 2048)
        for p in (0.0, 1.0)
        for seed in range(6)
    ]
    assert tuple(claim.verdict for claim in claims("cifar10", records)[:2]) == verdicts


@pytest.mark.parametrize(
    ("p_small", "p_large", "gain", "verdict"),
    [
        (0.9, 0.9, 1.0, "held"),
        (0.99, 0.94, 20.0, "smaller"),
        (0.99, 0.94, 21.0, "held"),
        (0.99, 0.94, -21.0, "did not hold"),
    ],
)
def test_claims_pair_seeds(p_small, p_large, gain, verdict):
    """A difference between seeds that is larger than the effect does not hide it. The paper gained 20.3 points."""
    records = [
        made_up.record({"p_small": s, "p_large": p, "crop": None, "seed": seed}, {"accuracy": 30.0 * seed + by})
        for s, p, by in ((0.0, 0.0, 0.0), (p_small, p_large, gain))
        for seed in range(6)
    ]
    first = claims("gp", records)[0]
    shown = str(gain).replace("-", "\N{MINUS SIGN}")
    ends = f"{shown} to {shown}, bootstrap {shown} to {shown}, 6 seeds"
    assert first.here == f"by {shown} ± 0.0 points ({ends}) with p_small {p_small}, p_large {p_large}"
    assert first.verdict == verdict


def test_braces_in_a_setting_are_harmless():
    records = [
        made_up.record({"p_small": p, "p_large": p, "norm": norm, "seed": seed}, {"accuracy": 50 + 5 * p + gain})
        for norm, gain in (("batch", 0.0), ("{0} {oops}", 3.0))
        for p in (0.0, 0.9)
        for seed in range(5)
    ]
    assert claims("gp", records)[0].here.endswith("with norm {0} {oops}, p_small 0.9, p_large 0.9")


def test_table_2_says_what_the_text_says():
    rows = {row[:3]: row for row in GP_TABLE}
    assert max(GP_TABLE, key=lambda row: row.accuracy)[:4] == (0.99, 0.94, None, 66.2)
    assert rows[0.0, 0.0, None].accuracy == 45.9
    assert len(rows) == 11


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ((1.0, 1.0), "held"),
        ((1.0, -1.0), "did not hold"),
        ((1.0, 0.0), "open"),
        ((0.0, 0.0), "open"),
        ((0.0, -1.0), "did not hold"),
    ],
)
def test_what_is_said_of_every_batch_size_is_as_its_weakest(gains, verdict):
    records = [
        made_up.record(
            {"batch_size": size, "p": p, "seed": seed}, {"auc": (gain + 0.1 * (-1) ** seed) * p}, metric="auc"
        )
        for size, gain in zip((32, 2048), gains, strict=True)
        for p in (0.0, 0.9)
        for seed in range(6)
    ]
    assert claims("auc", records)[0].verdict == verdict


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 23, 24, 100])
@pytest.mark.parametrize("level", [0.5, 0.95, 1 - 0.05 / 23])
def test_quantiles_of_students_t(df, level):
    stats = pytest.importorskip("scipy.stats")
    assert MODULE["t_quantile"](level, df) == pytest.approx(stats.t.ppf((1 + level) / 2, df), rel=1e-9)
    assert MODULE["t_cdf"](1.3, df) == pytest.approx(stats.t.cdf(1.3, df), rel=1e-12)


def judged(effects, amount=None):
    return MODULE["judge"]("claim", "paper", dict(enumerate(effects)), "{}", amount=amount)


def test_one_rule_for_all_verdicts():
    """A mean of 4 with a standard deviation of 2: with 9 seeds the t interval ends at 4 ± 2.306 * 2 / 3."""
    around = [-1.5, -1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
    scale = 2 / statistics.stdev(around)
    half = 2.306 * 2 / 3
    for mean, amount, verdict in (
        (4.0, None, "held"),
        (4.0, 4.0 + half - 0.01, "held"),
        (4.0, 4.0 + half + 0.01, "smaller"),
        (half + 0.01, None, "held"),
        (half - 0.01, None, "open"),
        (half - 0.01, 50.0, "open"),
        (-half + 0.01, None, "open"),
        (-half - 0.01, None, "did not hold"),
        (-half - 0.01, 50.0, "did not hold"),
    ):
        found = judged([mean + scale * x for x in around], amount)
        assert found.verdict == verdict, (mean, amount)
        assert found.is_less is (amount is not None and amount > mean + half), (mean, amount)
        assert (found.decides is not None) is (verdict == "open")


def test_how_many_seeds_would_decide():
    """The least n at which the quantile times the standard error is below the mean, by a search of our own."""
    stats = pytest.importorskip("scipy.stats")
    effects = [-1.0, 3.0, 0.5, -2.0, 4.0, 1.5]
    mean, sd = statistics.mean(effects), statistics.stdev(effects)
    wanted = next(n for n in range(6, 1000) if stats.t.ppf(0.975, n - 1) * sd / n**0.5 < mean)
    found = judged(effects)
    assert (found.verdict, found.decides) == ("open", wanted)
    assert judged([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]).decides > MODULE["MOST"]


def test_many_claims_at_once_ask_for_more():
    effects = [1.0, 3.0, 0.5, 2.0, 4.0, 1.5]
    found = judged(effects)
    assert found.verdict == "held"
    assert found.among(1) == "held"
    assert found.among(1000) == "open"


def report(tmp_path, *more):
    task = TASKS["gp"]
    records = made_up.gp()
    shared = task.with_preset("paper").settings
    spec = describe(task, "paper", dataclasses.asdict(shared), {"p_small", "p_large", "crop", "seed"})
    (tmp_path / "study.json").write_bytes(pack("gp-paper", spec, records))
    command = ["report", str(tmp_path / "study.json"), "--format", "md", "--out", str(tmp_path / "page.md"), *more]
    return CliRunner().invoke(cli.app, command)


def test_a_report_shows_the_claims_that_it_is_given(tmp_path):
    assert report(tmp_path, "--claims", f"{FILE}:table").exit_code == 0
    page = (tmp_path / "page.md").read_text()
    assert "## What the paper says" in page
    assert "Both masks together are best." in page
    assert report(tmp_path).exit_code == 0
    assert "What the paper says" not in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [(f"{FILE}:CLAIM", "is None"), (str(FILE), "is None"), ("nowhere.py:table", "there is no file")],
)
def test_claims_that_are_no_function_are_an_error(tmp_path, name, message):
    result = report(tmp_path, "--claims", name)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
