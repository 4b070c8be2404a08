"""The short form of `chaos.py`, which says what is done and asserted: some kills, on both kinds of storage."""

import signal

import pytest

pytest.importorskip("optuna", reason="Optuna is not installed")

import chaos
from postgres import database, server  # noqa: F401

SIZE = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return chaos.quiet(tmp_path_factory.mktemp("quiet"), SIZE)


@pytest.mark.parametrize(("kind", "seed", "kills"), [("journal", 1, 8), ("journal", 2, 8), ("postgresql", 1, 4)])
def test_nothing_is_lost(kind, seed, kills, tmp_path, undisturbed, request):
    address = request.getfixturevalue("database") if kind == "postgresql" else None
    tally = chaos.Tally()
    chaos.besiege(tmp_path, kind, address, seed, tally, undisturbed, kills=kills, size=SIZE, parents=False)
    assert tally.studies == 1
    assert tally.trials == 2 * SIZE
    assert tally.kills


@pytest.mark.parametrize(
    ("kind", "point", "after"),
    [
        ("journal", "torn", False),
        ("journal", "rename", True),
        ("postgresql", "commit", False),
    ],
)
def test_a_process_that_was_stopped_holds_nobody_up(kind, point, after, tmp_path, undisturbed, request):
    address = request.getfixturevalue("database") if kind == "postgresql" else None
    siege = chaos.Siege(tmp_path, kind, address, 0, chaos.Tally(), SIZE)
    try:
        # The moment is the first after the trials were enqueued, of which each is one write.
        nth = {"torn": 12, "commit": 30}.get(point, 2)
        assert siege.stop(chaos.Doom(signal.SIGSTOP, point, nth, after, delay=60.0), go_on=True)
        siege.check(undisturbed)
    finally:
        siege.close()


def test_what_is_asserted_can_fail(tmp_path, undisturbed):
    siege = chaos.Siege(tmp_path, "journal", None, 0, chaos.Tally(), SIZE)
    siege.start().wait()
    siege.check(undisturbed)
    key = next(iter(undisturbed))
    other = {**undisturbed, key: ({"score": 0.0}, [])}
    with pytest.raises(AssertionError, match="not those of a quiet run"):
        siege.check(other)
    stray = tmp_path / "runs" / "tiny-quick" / key / ".result.json.1.new"
    stray.touch()
    with pytest.raises(AssertionError, match="left over"):
        siege.check(undisturbed)
    stray.unlink()
    records, trials = siege.study()
    siege.study = lambda: (records, [*trials, trials[0]])
    with pytest.raises(AssertionError, match="complete twice"):
        siege.check(undisturbed)
    siege.study = lambda: (records[1:], trials)
    with pytest.raises(AssertionError, match="1 trials were lost"):
        siege.check(undisturbed)
