"""Means, intervals and paired gains, against calculations that are done in another way."""

import dataclasses
import itertools
import math
import statistics as standard

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import made_up
from backdrop.experiments.report import statistics as module
from backdrop.experiments.report import tables
from backdrop.experiments.report.statistics import ENOUGH, Estimate, Results, estimate, paired
from backdrop.experiments.tasks import AUC, CIFAR10, GP, TASKS


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0, 8.0], [3.0, -1.0, 0.5, 7.0, 2.0], [0.1, 0.2, 0.3, 0.9, 0.9, 0.4]])
def test_interval_is_that_of_all_resamples(values):
    """The percentiles of a sample of resamples, between those of all of them that lie a little to either side."""
    means = sorted(sum(draw) / len(values) for draw in itertools.product(values, repeat=len(values)))
    found = estimate(values)
    for end, level in ((found.low, 0.025), (found.high, 0.975)):
        around = [means[round(len(means) * (level + off))] for off in (-0.006, 0.006)]
        assert around[0] - 1e-9 <= end <= around[1] + 1e-9
    assert found.mean == pytest.approx(standard.fmean(values), abs=1e-12)
    assert found.sd == pytest.approx(standard.stdev(values), rel=1e-12)
    assert found.n == len(values)


def test_two_values_are_their_own_interval():
    assert estimate([2.0, 1.0]) == Estimate(1.5, math.sqrt(0.5), 1.0, 2.0, 2)


def test_few_values_or_none():
    assert estimate([]) is None
    assert estimate([math.nan, math.inf]) is None
    assert estimate([3.0, math.nan]) == Estimate(3.0, None, None, None, 1)
    same = estimate([0.1] * 7)
    assert (same.mean, same.sd, same.low, same.high) == (0.1, 0.0, 0.1, 0.1)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.floats(0.5, 20), st.floats(-50, 50))
def test_interval_moves_and_grows_with_the_values(values, scale, shift):
    before, after = estimate(values), estimate([scale * value + shift for value in values])
    assert after.low == pytest.approx(scale * before.low + shift, abs=1e-8)
    assert after.high == pytest.approx(scale * before.high + shift, abs=1e-8)
    assert before.low - 1e-9 <= before.mean <= before.high + 1e-9


def test_intervals_are_the_same_every_time():
    first = estimate([1.0, 5.0, 2.0])
    module._weights.cache_clear()
    assert estimate([1.0, 5.0, 2.0]) == first


@pytest.mark.parametrize(("n", "share"), [(4, 0.80), (5, 0.85), (8, 0.88), (25, 0.93)])
def test_how_often_an_interval_holds_the_mean(n, share):
    """What the page says about few seeds."""
    values = np.random.default_rng(0).normal(size=(4000, n))
    low, high = np.percentile(values @ module._weights(n)[:4000].T, [2.5, 97.5], axis=1)
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Estimate(2.0, 1.0, 1.0, 3.0, ENOUGH), True),
        (Estimate(-2.0, 1.0, -3.0, -1.0, ENOUGH), False),
        (Estimate(1.0, 1.0, 0.0, 2.0, ENOUGH), None),
        (Estimate(2.0, 1.0, 1.0, 3.0, ENOUGH - 1), None),
        (Estimate(2.0, None, None, None, 1), None),
    ],
)
def test_verdicts(found, expected):
    assert found.beyond() is expected


def test_pairs_are_of_the_same_seed():
    assert paired({0: 5.0, 1: 7.0, 3: 1.0}, {1: 2.0, 0: 1.0, 2: 9.0}) == {0: 4.0, 1: 5.0}


def arms(plain, masked, task=GP, names=("p_small", "p_large"), metric="accuracy", **common):
    """Records of a configuration without masks and one with them, by seed."""
    records = []
    for p, values in ((0.0, plain), (0.9, masked)):
        for seed, value in values.items():
            records.append(made_up.record({**dict.fromkeys(names, p), **common, "seed": seed}, {metric: value}))
    results = Results(task, records)
    (with_masks,) = (c for c in results.configurations if results.is_masked(c))
    return results, with_masks


def test_a_gain_is_over_the_seeds_that_both_arms_have():
    results, masked = arms({0: 50.0, 1: 52.0, 2: 90.0}, {1: 60.0, 0: 55.0, 7: 0.0})
    assert results.gain(masked)[:2] == (6.5, pytest.approx(standard.stdev([5.0, 8.0])))
    assert (results.gain(masked).low, results.gain(masked).high, results.gain(masked).n) == (5.0, 8.0, 2)
    control = results.control(masked)
    assert results.control(control) is None
    assert results.gain(control) is None
    assert results.estimate(control).mean == 64.0  # all of its own seeds


def test_a_gain_is_an_improvement_where_less_is_better():
    results, masked = arms({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5}, CIFAR10, ("p",), "loss")
    assert results.gain(masked).mean == 0.5
    assert results.difference(masked).mean == -0.5
    assert results.ratio(masked).mean == pytest.approx((0.5 / 1 + 1.5 / 2) / 2)


def test_ratios_of_nothing_are_left_out():
    results, masked = arms({0: 0.0, 1: 2.0}, {0: 0.5, 1: 1.0}, CIFAR10, ("p",), "loss")
    assert results.ratio(masked) == Estimate(0.5, None, None, None, 1)


def test_the_order_of_records_does_not_matter():
    records = made_up.auc()
    shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
    first, second = Results(AUC, records), Results(AUC, shuffled)
    assert [c.settings for c in first.configurations] == [c.settings for c in second.configurations]
    for a, b in zip(first.configurations, second.configurations, strict=True):
        assert first.estimate(a) == second.estimate(b)
        assert first.gain(a) == second.gain(b)


def test_crops_are_compared_with_whole_images():
    results = Results(GP, made_up.gp())
    (crop,) = (c for c in results.configurations if c.settings["crop"] == 256)
    assert results.control(crop).settings["crop"] is None
    assert not results.is_masked(results.control(crop))
    assert results.gain(crop).mean == pytest.approx(34.3 - 45.9, abs=2)


def test_batch_sizes_are_compared_with_themselves():
    results = Results(AUC, made_up.auc())
    for c in results.configurations:
        control = results.control(c)
        if control:
            assert control.settings == {**c.settings, "p": 0.0}
            value = {r.settings["seed"]: r.metrics["auc"] for r in c.records}
            other = {r.settings["seed"]: r.metrics["auc"] for r in control.records}
            assert results.gain(c).mean == pytest.approx(np.mean([value[s] - other[s] for s in value]))
    assert sum(results.control(c) is None for c in results.configurations) == 3


def chosen(*rows):
    """Trials of `auc` with masks, batch sizes, learning rates and results."""
    return [
        made_up.record({"batch_size": size, "p": p, "lr": lr, "seed": seed}, {"auc": auc + seed}, metric="auc")
        for size, p, lr, auc in rows
        for seed in range(6)
    ]


def test_a_learning_rate_chosen_for_each_configuration_is_no_axis():
    results = Results(AUC, chosen((32, 0.0, 0.1, 1.0), (32, 0.9, 0.2, 3.0), (64, 0.0, 0.1, 2.0), (64, 0.9, 0.1, 7.0)))
    assert (results.varied, results.axes) == (("lr", "batch_size", "p"), ("batch_size", "p"))
    gains = {c.settings["batch_size"]: results.gain(c).mean for c in results.configurations if results.is_masked(c)}
    assert gains == {32: 2.0, 64: 5.0}
    table = tables.configurations(results)
    assert list(table.headings[:3]) == ["batch size", "p", "lr"]
    assert "its own lr" in table.note


def test_a_learning_rate_that_tells_configurations_apart_is_an_axis():
    results = Results(AUC, chosen((32, 0.0, 0.1, 1.0), (32, 0.9, 0.1, 3.0), (32, 0.0, 0.2, 2.0), (32, 0.9, 0.2, 7.0)))
    assert results.axes == ("lr", "p")
    gains = {c.settings["lr"]: results.gain(c).mean for c in results.configurations if results.is_masked(c)}
    assert gains == {0.1: 2.0, 0.2: 5.0}
    assert "its own" not in tables.configurations(results).note


def test_what_is_not_complete_or_no_number_is_not_counted():
    good = {0: 1.0, 1: 2.0}
    results, masked = arms(good, good)
    spoilt = [
        made_up.record({**masked.settings, "seed": 2}, {"accuracy": math.nan}),
        made_up.record({**masked.settings, "seed": 3}, {}),
        *(
            made_up.record({**masked.settings, "seed": 4}, {"accuracy": 99.0}, state)
            for state in ("failed", "pruned", "running", "waiting")
        ),
    ]
    spoilt = [dataclasses.replace(r, metrics={"accuracy": 99.0}) if r.state != "complete" else r for r in spoilt]
    more = Results(GP, [*results.records, *spoilt])
    (same,) = (c for c in more.configurations if more.is_masked(c))
    assert same.values("accuracy") == good


def test_which_settings_vary():
    records = [
        made_up.record({"batch_size": 4, "p_small": p, "p_large": 0, "small": small, "seed": seed}, {"accuracy": 1.0})
        for p, small, seed in ((0, (2, 3), 0), (0.0, [2, 3], 1), (0.5, (2, 3), 0))
    ]
    results = Results(GP, records)
    assert results.varied == ("p_small",)
    assert results.shared["small"] in ((2, 3), [2, 3])
    assert "seed" not in results.shared
    assert [len(c.records) for c in results.configurations] == [2, 1]


def test_settings_that_some_trials_do_not_have_vary():
    records = [made_up.record({"p_small": 0.0, **more}, {"accuracy": 1.0}) for more in ({}, {"norm": "batch"})]
    results = Results(GP, records)
    assert results.varied == ("norm",)
    assert "norm" not in results.shared
    waiting = made_up.record({"seed": 1}, state="waiting")
    assert Results(GP, [records[1], waiting]).varied == ()


def test_one_lucky_seed_is_not_the_best():
    results, masked = arms(dict.fromkeys(range(6), 50.0), {0: 99.0})
    best = results.best(results.configurations)
    assert not results.is_masked(best)
    assert results.best([masked]) is masked
    assert results.best([]) is None


def test_searches_are_told_from_grids():
    assert Results(GP, made_up.search()).is_search
    unpruned = [r for r in made_up.search() if r.state == "complete"]
    assert Results(GP, unpruned).is_search
    for name, task in TASKS.items():
        for seeds in (1, 5):
            assert not Results(task, getattr(made_up, name)(seeds)).is_search
    assert not Results(GP, []).is_search
