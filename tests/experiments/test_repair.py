"""Journals with lines that are damaged or missing: who reads them says so, and what `repair` makes of them is right."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("optuna", reason="Optuna is not installed")

from backdrop.experiments.study import alive, tune
from backdrop.experiments.study.journal import NONE, TAIL_SIZE, Damaged
from backdrop.experiments.study.plan import plan
from backdrop.experiments.study.repair import repair
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from backdrop.experiments.study.worker import work
from backdrop.experiments.train import Options
from tiny_task import FILE

OPTIONS = Options(accelerator="cpu")
COMMAND = {"overrides": ["p=0,0.5", "bad_seed=1", "epochs=2"], "seeds": "0,1"}
NAME = "tiny-quick"


def began(folder, **kwargs):
    with open_storage(folder / NAME / "journal.log", create=True) as storage:
        spec, points = plan(FILE, "quick", **kwargs)
        study = Study.begin(storage, NAME, spec)
        study.add(spec, points)
        work(study, folder / NAME, OPTIONS)
        return study.records()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study of four trials, one of which has failed, and its records."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, began(folder, **COMMAND)


@pytest.fixture(autouse=True)
def _ended(monkeypatch):
    """The workers of these studies were in this process, which is still there."""
    monkeypatch.setattr(alive, "is_dead", lambda worker: True)


def records(folder, name=NAME):
    with open_storage(folder / name / "journal.log") as storage:
        return Study(storage, name).records()


def outcomes(found):
    """What came of each trial, whatever the machine took for it."""
    return sorted((record.key, record.state, record.reason, *record.metrics.items()) for record in found)


def copied(finished, folder, *, alone):
    """The study in another folder, with its journal alone or with all that is there."""
    shutil.copytree(finished[0], folder, dirs_exist_ok=True)
    path = folder / NAME / "journal.log"
    for other in path.parent.iterdir() if alone else ():
        if other != path:
            (shutil.rmtree if other.is_dir() else type(other).unlink)(other)
    return path


def flipped(content, random):
    damaged = bytearray(content)
    damaged[random.integers(len(content) - 1)] ^= 1 << int(random.integers(8))
    return bytes(damaged)


def zeroed(content, random):
    damaged, place = bytearray(content), int(random.integers(len(content) - 1))
    length = min(int(2 ** random.integers(1, 11)), len(content) - 1 - place)
    damaged[place : place + length] = bytes(length)
    return bytes(damaged)


def changed_lines(content, random):
    rows = content.splitlines(keepends=True)
    place, count = int(random.integers(len(rows) - 1)), int(random.integers(1, 4))
    kind = random.integers(5)
    if kind == 0:
        rows[place:place] = [b"\n"] * count
    elif kind == 1:
        del rows[place : place + count]
    elif kind == 2:
        rows[place] = rows[place][: int(random.integers(len(rows[place])))] + b"\n"
    elif kind == 3:
        rows[place:place] = [rows[int(random.integers(place + 1))]]
    else:
        rows[place] = random.bytes(200).replace(b"\n", b"") + b"\n"
    return b"".join(rows)


def told(kind, function, *args):
    """What an error says, if there is one."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    return None


def as_before(content):
    """As lines were before they had checksums."""
    return b"".join(line[:-TAIL_SIZE] + b"}\n" for line in content.splitlines(keepends=True))


@pytest.mark.parametrize("damage", [flipped, zeroed, changed_lines])
@pytest.mark.parametrize("alone", [False, True], ids=["with results", "alone"])
def test_what_repair_saves_is_right(tmp_path, finished, damage, alone):
    """What is in the new journal is as it was or is run again; with the trials' folders nothing is trained again."""
    truth = {record.key: record for record in finished[1]}
    saved = beyond = 0
    for seed in range(40):
        folder = tmp_path / str(seed)
        path = copied(finished, folder, alone=alone)
        content = damage(path.read_bytes(), np.random.default_rng(seed))
        path.write_bytes(content)
        problem = told(Damaged, records, folder)
        if problem is None:
            assert damage is changed_lines  # the last line went
            continue
        assert re.search(rf"{path}, line \d+, .*; backdrop repair {path} rebuilds", problem)
        repaired = []
        problem = told(ValueError, lambda found=repaired, path=path: found.append(repair(path)))
        if problem:  # what the study is about stands in one line alone
            assert "move the file away and give the command again" in problem
            assert path.read_bytes() == content
            beyond += 1
            continue
        (done,) = repaired
        assert done.kept.read_bytes() == content
        assert sorted(file.name for file in path.parent.iterdir() if file.is_file() and "log" in file.name) == sorted(
            ["journal.log", "journal.log.damaged-1", *([] if alone else ["log.jsonl"])]
        )
        for record in records(folder):  # and every line of it can be read
            if record.state in ("waiting", "running"):
                assert record.settings == truth[record.key].settings
            elif record.state == "failed":  # its curve is no result
                assert record in (truth[record.key], dataclasses.replace(truth[record.key], curve=()))
            else:
                assert record == truth[record.key]
                saved += 1
        assert repair(path).kept is None
        if not alone and seed < 10:
            log = path.parent / "log.jsonl"
            before = len(log.read_bytes())
            assert outcomes(began(folder, **COMMAND)) == outcomes(finished[1])
            events = map(json.loads, log.read_bytes()[before:].splitlines())
            trained = {event["key"] for event in events if event["event"] == "epoch"}
            assert not any(truth[key].state == "complete" for key in trained)
    assert beyond < 20
    assert saved > 20


def test_lines_without_checksums_are_judged_by_what_is_left_of_them(tmp_path, finished):
    """Of older journals, where a flipped bit that leaves a whole line cannot be seen, and is not looked for."""
    truth = {record.key: record for record in finished[1]}
    for seed in range(40):
        path = copied(finished, tmp_path / str(seed), alone=True)
        content = zeroed(as_before(path.read_bytes()), np.random.default_rng(seed))
        path.write_bytes(content)
        assert b"crc32" not in content
        try:
            repair(path)
        except ValueError:
            continue
        for record in records(tmp_path / str(seed)):
            whole = truth[record.key]
            assert record in (whole, dataclasses.replace(whole, curve=())) or record.state in ("waiting", "running")
            assert record.curve or record.state in ("failed", "waiting", "running")


def test_a_journal_without_checksums_goes_on(tmp_path, finished):
    path = copied(finished, tmp_path, alone=False)
    path.write_bytes(as_before(path.read_bytes()))
    assert records(tmp_path) == finished[1]
    found = began(tmp_path, overrides=["p=0,0.5", "bad_seed=1", "epochs=2"], seeds="0,1,2")
    assert found[:4] == finished[1]
    assert [record.state for record in found[4:]] == ["complete"] * 2
    assert f',"after":"{NONE.decode()}"'.encode() in path.read_bytes()
    assert repair(path).kept is None


def test_where_a_trial_may_have_begun_nothing_more_is_kept(tmp_path, finished):
    path = copied(finished, tmp_path, alone=True)
    rows = path.read_bytes().splitlines(keepends=True)
    begun = [i for i, row in enumerate(rows) if row.startswith(b'{"op_code":4')]
    del rows[begun[1]]  # the trials after it have other numbers now
    path.write_bytes(b"".join(rows))
    done = repair(path)
    assert (done.lost, done.since) == ([begun[1] + 1], begun[1] + 1)
    assert [record.state for record in records(tmp_path)] == ["waiting"]
    assert outcomes(began(tmp_path, **COMMAND)) == outcomes(finished[1])


def test_a_trial_of_which_a_part_is_gone_is_run_again(tmp_path, finished):
    for name in ("metrics", "curve", "seconds", "machine", "reason"):
        path = copied(finished, tmp_path / name, alone=True)
        rows = path.read_bytes().splitlines(keepends=True)
        place = next(i for i, row in enumerate(rows) if f'"user_attr":{{"{name}"'.encode() in row)
        rows[place] = rows[place].replace(b"user_attr", b"user\xffttr")
        path.write_bytes(b"".join(rows))
        done = repair(path)
        assert (done.lost, done.since) == ([place + 1], None)
        assert sorted(record.state for record in records(tmp_path / name)) == sorted(
            ["running", *(["complete", "failed", "failed"] if name != "reason" else ["complete", "complete", "failed"])]
        )
        assert outcomes(began(tmp_path / name, **COMMAND)) == outcomes(finished[1])


def test_a_search_keeps_what_it_has_learned(tmp_path):
    spec = tune.plan_search(FILE, "quick", ["epochs=4", "evaluations=4"])
    with open_storage(tmp_path / "search" / "journal.log", create=True) as storage:
        study = Study.begin(storage, "search", spec)
        tune.add_slots(study, spec, 8)
        work(study, tmp_path / "search", OPTIONS)
        before = study.records()
        trials = {trial.user_attrs["key"]: trial for trial in study.optuna.trials}
    path = tmp_path / "search" / "journal.log"
    rows = path.read_bytes().splitlines(keepends=True)
    place = next(i for i, row in enumerate(rows) if b'"user_attr":{"beat"' in row)
    rows[place] = rows[place].replace(b"beat", b"b\xffat")
    path.write_bytes(b"".join(rows))
    assert repair(path).lost == [place + 1]
    with open_storage(path) as storage:
        study = Study(storage, "search")
        assert study.records() == before
        for trial in study.optuna.trials:
            was = trials[trial.user_attrs["key"]]
            assert trial.params == was.params
            assert trial.distributions == was.distributions
            assert trial.intermediate_values == was.intermediate_values
            assert (trial.state, trial.value) == (was.state, was.value)


def test_a_journal_in_use_is_not_touched(tmp_path, finished, monkeypatch):
    monkeypatch.undo()
    path = copied(finished, tmp_path, alone=False)
    with open_storage(path) as storage:
        study = Study(storage, NAME)
        study.enqueue("more", {"seed": 7}, {})
        assert study.claim(alive.identity()) is not None
    rows = path.read_bytes().splitlines(keepends=True)
    content = b"".join([*rows[:5], b"\n", *rows[5:]])
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"process \d+ works on .*journal.log: stop it first"):
        repair(path)
    assert path.read_bytes() == content


def test_a_whole_journal_is_left_alone(tmp_path, finished):
    path = copied(finished, tmp_path, alone=False)
    content = path.read_bytes()
    for torn in (b"", b'{"op_code":8,"trial_id":1,"user_at', bytes(100)):
        path.write_bytes(content + torn)
        assert records(tmp_path) == finished[1]
        assert repair(path).lost == []
        assert path.read_bytes() == content + torn


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\n", "is blank"),
        (b"   \n", "is blank"),
        (b"{\n", "is no JSON"),
        (b"\x00\x00\n", "is no JSON"),
        (b"[" * 100_000 + b"\n", "is no JSON"),
        (b"5\n", "is no change of a study"),
        (b"null\n", "is no change of a study"),
        (b'{"op_code":77,"worker_id":"x"}\n', "is no change of a study"),
        (b'{"op_code":true,"worker_id":"x"}\n', "is no change of a study"),
        (b'{"op_code":8}\n', "is no change of a study"),
        (b'{"op_code":8,"worker_id":"x","trial_id":"0"}\n', "has to say trial_id"),
        (b'{"op_code":8,"worker_id":"x","trial_id":0,"crc32":"00000000"}\n', "is damaged: its checksum does not fit"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_the_remedy(tmp_path, finished, line, why):
    path = copied(finished, tmp_path, alone=False)
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:6], line, *rows[6:]]))
    with pytest.raises(Damaged) as error:
        records(tmp_path)
    assert str(error.value).startswith(f"{path}, line 7, {why}; backdrop repair {path} rebuilds the journal")
    done = repair(path)  # nothing was lost between the lines around it
    assert (done.lost, done.since) == ([7], None)
    assert records(tmp_path) == finished[1]


def test_a_missing_line_is_seen(tmp_path, finished):
    path = copied(finished, tmp_path, alone=False)
    rows = path.read_bytes().splitlines(keepends=True)
    for number in range(len(rows) - 1):
        path.write_bytes(b"".join([*rows[:number], *rows[number + 1 :]]))
        with pytest.raises(Damaged, match=rf"line {number + 1}, does not follow the one before it: some are missing"):
            records(tmp_path)


def test_without_the_line_that_says_what_the_study_is_about(tmp_path, finished):
    """Moving the journal away and giving the command again takes all results from the trials' folders."""
    path = copied(finished, tmp_path, alone=False)
    rows = path.read_bytes().splitlines(keepends=True)
    assert b'"spec"' in rows[1]
    path.write_bytes(b"".join([rows[0], b"\n", *rows[2:]]))
    with pytest.raises(ValueError, match=r"what its study is about stood in line 2, which cannot be read"):
        repair(path)
    path.rename(tmp_path / "old")
    events = len((path.parent / "log.jsonl").read_text().splitlines())
    again = began(tmp_path, **COMMAND)
    assert [(r.key, r.state, r.metrics, r.seconds) for r in again if r.state == "complete"] == [
        (r.key, r.state, r.metrics, r.seconds) for r in finished[1] if r.state == "complete"
    ]
    new = [json.loads(line) for line in (path.parent / "log.jsonl").read_text().splitlines()[events:]]
    assert not [line for line in new if line["event"] == "epoch" and line["key"] in {r.key for r in again if r.metrics}]
