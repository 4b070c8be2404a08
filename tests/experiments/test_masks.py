"""Searches for masks with a training function of one's own: on every kind of storage, in several processes."""

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d
from backdrop.experiments import tune_masks
from backdrop.experiments.masks import joint
from backdrop.experiments.study import alive
from postgres import database, server  # noqa: F401
from spawned import CONTEXT, DEADLINE

optuna = pytest.importorskip("optuna", reason="Optuna is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_tune_masks.py"
SHAPE = (4, 1, 16, 16)
BEST = {"fine": 1 / 32, "coarse": 1 / 4}  # the shares to keep


class Model(nn.Module):
    """Masks on 256 and on 16 units."""

    def __init__(self, fine=0.9, coarse=0.0):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.fine = Backdrop2d(fine, generator=torch.Generator().manual_seed(1))
        self.second = nn.Conv2d(2, 2, 4, stride=4)
        self.coarse = Backdrop2d(coarse)

    def forward(self, x):
        return self.coarse(self.second(self.fine(self.first(x)))).mean((2, 3))


def distance(model, trial=None):
    """How far masks are from the best, in powers of two; 0 is best."""
    return sum(math.log2((1 - model.get_submodule(path).p) / share) ** 2 for path, share in BEST.items())


def no_trial(model, trial):
    raise AssertionError("nothing was left to do")


def tune(objective=distance, model=None, **kwargs):
    return tune_masks(objective, model or Model(), **{"input_shape": SHAPE, "trials": 3, **kwargs})


def test_finds_the_best_masks():
    tuned = tune(trials=40)
    assert tuned.value == distance(tuned.model) < 1
    assert tuned.without == 5**2 + 2**2
    assert tuned.trials == len(tuned.study.trials) == 40
    for path, share in BEST.items():
        assert tuned.p[path] == tuned.model.get_submodule(path).p
        assert abs(math.log2((1 - tuned.p[path]) / share)) < 1  # of ranges of 8 and 4
    largest = tune(lambda model, trial: -distance(model), trials=40, direction="maximize")
    assert largest.p == tuned.p
    assert largest.value == -tuned.value
    assert largest.without == -tuned.without


def test_first_trials_are_no_masks_the_models_own_and_those_given():
    seen = []

    def objective(model, trial):
        seen.append((model.fine.p, model.coarse.p))
        return 1.0

    tune(objective, start=[{"coarse": 0.5}, {"fine": 0.999, "coarse": 0.99}], trials=6)
    assert seen[:2] == [(0, 0), (0.9, 0)]
    assert seen[2] == (pytest.approx(0.9), 0.5)
    assert seen[3] == (1 - 1 / 256, 1 - 1 / 16)  # one unit is the least
    assert all(0 <= fine <= 1 - 1 / 256 and 0 <= coarse <= 1 - 1 / 16 for fine, coarse in seen)
    assert len({fine for fine, _ in seen}) == 5
    seen.clear()
    tune(objective, Model(0.0, 0.0), trials=2)
    assert seen[0] == (0, 0) != seen[1]


def test_every_trial_has_a_fresh_copy():
    model = Model()
    weights = model.first.weight.clone()
    state = model.fine.generator.get_state()
    copies = []

    def objective(copied, trial):
        assert torch.equal(copied.first.weight, weights)
        assert torch.equal(copied.fine.generator.get_state(), state)
        with torch.no_grad():
            copied.first.weight.zero_()
        copied(torch.ones(SHAPE)).sum().backward()
        copies.append(copied)
        return 0.0

    tuned = tune(objective, model)
    assert len({id(copied) for copied in [model, tuned.model, *copies]}) == 5
    assert torch.equal(model.first.weight, weights)
    assert torch.equal(tuned.model.first.weight, weights)
    assert torch.equal(model.fine.generator.get_state(), state)
    assert (model.fine.p, model.coarse.p) == (0.9, 0.0)


STORAGES = {
    "journal": lambda path: path / "masks.log",
    "text": lambda path: str(path / "masks.log"),
    "folder": lambda path: path,
    "sqlite": lambda path: f"sqlite:///{path}/masks.db",
    "object": lambda path: optuna.storages.RDBStorage(f"sqlite:///{path}/masks.db"),
}


@pytest.mark.parametrize("kind", [*STORAGES, "memory", "postgresql"])
def test_a_study_goes_on_where_it_was(kind, tmp_path, request):
    memory = optuna.storages.InMemoryStorage()
    if kind == "postgresql":
        address = request.getfixturevalue("database")
        places = [address, address]
    else:
        places = [memory, memory] if kind == "memory" else [STORAGES[kind](tmp_path) for _ in range(2)]
    first = tune(storage=places[0], trials=3)
    assert first.trials == 3
    seen = []
    more = tune(lambda model, trial: seen.append(trial.number) or distance(model), storage=places[1], trials=5)
    assert seen == [3, 4]
    assert more.trials == 5
    again = tune(no_trial, storage=places[0], trials=5)
    assert (again.p, again.value, again.without) == (more.p, more.value, more.without)
    assert tune(storage=places[0], name="another", trials=1).trials == 1
    assert tune(no_trial, storage=places[1], trials=5, timeout=0).p == more.p
    for place in places if kind == "object" else []:
        place.engine.dispose()  # ours, so ours to close


def test_storages_with_a_heartbeat_of_their_own(tmp_path):
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/masks.db", heartbeat_interval=60)
    assert tune(storage=storage, trials=2).trials == 2
    storage.engine.dispose()


def work(path, out):
    tuned = tune(storage=path, trials=12)
    Path(out).write_text(f"{tuned.p} {tuned.trials}")


def test_processes_join(tmp_path):
    outs = [tmp_path / f"{i}.txt" for i in range(3)]
    processes = [CONTEXT.Process(target=work, args=(str(tmp_path / "masks.log"), str(out))) for out in outs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE)
        assert process.exitcode == 0
    (said,) = {out.read_text() for out in outs}
    tuned = tune(no_trial, storage=tmp_path / "masks.log", trials=12)
    assert said == f"{tuned.p} 12"
    complete = [trial for trial in tuned.study.trials if trial.state.name == "COMPLETE"]
    assert len(complete) == 12
    assert [trial.params["keep fine"] for trial in complete].count(1.0) == 1  # starting points are run once
    assert len({str(trial.params) for trial in complete}) == 12


def die(path):
    def objective(model, trial):
        if trial.number == 1:
            os._exit(9)
        return distance(model)

    tune(objective, storage=path, trials=4)


def test_a_killed_processs_trial_is_run_again(tmp_path):
    path = str(tmp_path / "masks.log")
    process = CONTEXT.Process(target=die, args=(path,))
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == 9
    tuned = tune(storage=path, trials=4)
    states = [trial.state.name for trial in tuned.study.trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert tuned.study.trials[2].params["keep fine"] == pytest.approx(0.1)  # the starting point that was lost


def test_who_comes_last_waits_for_the_others(monkeypatch):
    """A trial that runs elsewhere, until it ends or seems lost."""
    study = optuna.create_study()
    options = {"seed": 0, "pruner": None}
    here, there = (joint.Joint(study, 1, [], **options) for _ in range(2))
    running = there.next(math.inf)
    monkeypatch.setattr(alive, "is_dead", lambda worker: None)  # on another machine

    def end(seconds):
        study.tell(running, 0.5)

    monkeypatch.setattr(joint.time, "sleep", end)
    assert here.next(math.inf) is None
    assert [trial.value for trial in here.finished()] == [0.5]

    study = optuna.create_study()
    here, there = (joint.Joint(study, 1, [], **options) for _ in range(2))
    there.next(math.inf)
    clock = iter([0.0, *(1.0 + i * joint.PATIENCE for i in range(100))])
    monkeypatch.setattr(joint.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(joint.time, "monotonic", lambda: next(clock))
    assert here.next(math.inf).number == 1


def test_a_trial_too_many_is_given_up():
    """Both processes have seen room for one more."""
    study = optuna.create_study()
    here, there = (joint.Joint(study, 1, [{"keep x": 1.0}], seed=0, pruner=None) for _ in range(2))
    assert here._ask().suggest_float("keep x", 0.1, 1.0) == 1.0
    assert there._ask() is None
    assert [trial.state.name for trial in study.trials] == ["RUNNING", "FAIL"]


def test_trials_that_a_user_enqueued_are_run():
    storage = optuna.storages.InMemoryStorage()
    tune(storage=storage, trials=1)
    study = optuna.load_study(study_name="masks", storage=storage)
    study.enqueue_trial({"keep fine": 0.5, "keep coarse": 0.5})
    tuned = tune(storage=storage, trials=3)
    shares = [(trial.params["keep fine"], trial.params["keep coarse"]) for trial in tuned.study.trials]
    assert shares == [(1, 1), (0.5, 0.5), (pytest.approx(0.1), 1)]


def test_the_same_seed_searches_alike():
    found = [tune(trials=12, seed=seed).p for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_bad_trials_are_pruned_after_a_third_of_their_steps():
    lengths = []

    def objective(model, trial):
        for step in range(10):
            trial.report(distance(model), step)
            if trial.should_prune():
                lengths.append(step)
                raise optuna.TrialPruned
        lengths.append(10)
        return distance(model)

    tuned = tune(objective, trials=30)
    assert tuned.trials == len(lengths) == 30
    assert set(lengths) == {3, 10}  # 9 // 3, then at once
    assert lengths[:8] == [10] * 8
    pruner = optuna.pruners.NopPruner()
    assert all(trial.state.name == "COMPLETE" for trial in tune(objective, trials=15, pruner=pruner).study.trials)


def test_a_value_that_is_no_number_is_a_failed_trial():
    def objective(model, trial):
        return math.nan if trial.number % 2 else distance(model)

    tuned = tune(objective, trials=6)
    assert [trial.state.name for trial in tuned.study.trials] == ["COMPLETE", "FAIL"] * 3
    assert tuned.trials == 6
    with pytest.raises(RuntimeError, match="no best masks: of 2 trials none is complete"):
        tune(lambda model, trial: math.nan, trials=2)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_is_finished_stays(error, tmp_path):
    def objective(model, trial):
        if trial.number == 2:
            raise error
        return distance(model)

    with pytest.raises(error):
        tune(objective, storage=tmp_path, trials=4)
    tuned = tune(storage=tmp_path, trials=4)
    states = [trial.state.name for trial in tuned.study.trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_masks_left_alone_keep_their_p():
    tuned = tune(lambda model, trial: model.fine.p - model.coarse.p, leave=["fine"], trials=5)
    assert list(tuned.p) == ["coarse"]
    assert tuned.model.fine.p == 0.9
    assert tuned.without == 0.9


def test_units_are_counted_or_given():
    assert tune(trials=1).units == {"fine": 256, "coarse": 16}
    patched = Model()
    patched.fine = Backdrop2d(0.5, patch=(4, 8))
    patched.coarse = Backdrop(0.5)  # drops samples
    assert tune(model=patched, trials=1, objective=lambda model, trial: 0.0).units == {"fine": 8, "coarse": 4}
    assert tune(trials=1, input_shape=None, units=7).units == {"fine": 7, "coarse": 7}
    assert tune(trials=1, units={"fine": 5}).units == {"fine": 5, "coarse": 16}


class Unforeseeable(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = Backdrop(0.5)

    def forward(self, x):
        return self.mask(x) if x.sum() > 0 else x


class Unused(Unforeseeable):
    def forward(self, x):
        return x


def test_words():
    text = str(tune(trials=30))
    assert text.startswith("The best of 30 trials has the value 0.")
    assert "(the lower the better), with\n  p = 0.96" in text
    assert "at fine: keeps about 8 of 256 units" in text
    assert text.endswith("Without masks: 29.")
    none = str(tune(lambda model, trial: float(model.fine.p + model.coarse.p), leave="coarse", trials=3))
    assert none.endswith("  no mask at fine\nNo masks at all were the best.")


def test_progress_is_shown_if_asked_for(capsys):
    tune()
    assert capsys.readouterr() == ("", "")
    verbosity = optuna.logging.get_verbosity()
    tuned = tune(progress=True)
    out, err = capsys.readouterr()
    assert not out
    assert f"best so far {tuned.value:.6g}" in err
    assert "3/3" in err
    assert optuna.logging.get_verbosity() == verbosity


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"objective": 3}, TypeError, "objective has to be a function of a model and a trial, but got int"),
        ({"objective": lambda model, trial: "good"}, TypeError, "objective has to return a number, but got 'good'"),
        ({"model": nn.Linear(1, 1)}, ValueError, "no Backdrop layer to search p for; put some in"),
        ({"model": len}, TypeError, r"model has to be a torch\.nn\.Module"),
        ({"direction": "up"}, ValueError, "direction has to be 'minimize' or 'maximize', but got 'up'"),
        ({"trials": 0}, ValueError, "trials has to be at least 1"),
        ({"seed": -1}, ValueError, "seed has to be at least 0"),
        ({"leave": ["fin"]}, ValueError, "leave names 'fin', which is not a mask to search for; did you mean 'fine'"),
        ({"leave": ["fine", "coarse"]}, ValueError, "leave names all Backdrop layers"),
        ({"start": [{"corse": 0.5}]}, ValueError, "start names 'corse'.* there are 'fine', 'coarse'"),
        ({"start": [{"fine": 1.5}]}, ValueError, r"p has to be in \[0, 1\)"),
        ({"units": {"fine": 0}}, ValueError, "units of fine has to be at least 1"),
        ({"units": {"x": 1}}, ValueError, "units names 'x'"),
        ({"input_shape": None}, ValueError, "units the mask 'fine' chooses; give input_shape, .* or give units="),
        ({"input_shape": (4, 3, 16, 16)}, ValueError, "cannot be counted, so give units: Model cannot take"),
        ({"model": nn.Sequential(Unforeseeable())}, ValueError, r"no call of it was seen, so give units="),
        ({"model": Unused()}, ValueError, "mask 'mask' chooses; no call of it was seen, so give units={'mask'"),
        ({"storage": 3}, TypeError, "storage has to be None, the path of a journal file"),
        ({"storage": "sqlite:////nowhere/at/all.db"}, OSError, "storage sqlite:... cannot be used"),
        ({"storage": "nonsense://host/x"}, OSError, "storage nonsense:... cannot be used"),
        ({"timeout": 0}, RuntimeError, "there was no time for a trial"),
    ],
)
def test_what_cannot_be_searched_is_an_error(arguments, error, message, monkeypatch):
    monkeypatch.setattr(joint, "POLL", 0.0)
    with pytest.raises(error, match=message):
        tune(**arguments)


def test_another_study_is_not_mixed_up(tmp_path):
    tune(storage=tmp_path, trials=1)
    with pytest.raises(ValueError, match="is there already, to minimize; give another name"):
        tune(storage=tmp_path, direction="maximize")
    with pytest.raises(ValueError, match=r"with masks of .* units, not .*; give another name"):
        tune(storage=tmp_path, units={"fine": 9})
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="mine").optimize(lambda trial: 0.0, n_trials=1)
    with pytest.raises(ValueError, match="with masks of None units"):
        tune(storage=storage, name="mine")


def test_importing_it_imports_nothing_heavy():
    code = "import sys, backdrop.experiments; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "backdrop.experiments.masks" in found
    assert not {"optuna", "sqlalchemy", "rich", "lightning", "matplotlib"} & set(found)


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[experiments\]' in a clone"):
        tune()


def test_the_example_runs(tmp_path):
    small = ["--trials=2", "--repeats=1", "--seeds=2", "--steps=1", "--images=1", f"--storage={tmp_path / 'masks.log'}"]
    command = [sys.executable, "-W", "error", str(EXAMPLE), *small]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith("The best of 2 trials has the value ")
    assert "over 2 other training sets" in said
    assert "the paper's  p = 0.99, 0.94 " in said
    assert "cannot be told from the paper's with so few training sets (--seeds): " in said
    study = optuna.load_study(study_name="masks", storage=optuna.storages.JournalStorage(journal(tmp_path)))
    shares = {tuple(round(share, 4) for share in trial.params.values()) for trial in study.trials}
    assert shares == {(1.0, 1.0), (0.01, 0.0625)}


def journal(path):
    return optuna.storages.journal.JournalFileBackend(str(path / "masks.log"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0, 3.0, 2.0, 1.0], "are better than the paper's: +1.8 [+1.2 to +2.4] points"),
        ([-1.0, -2.0, -3.0, -2.0, -1.0], "are worse than the paper's: -1.8 [-2.4 to -1.2] points"),
        ([-1.0, 2.0, 3.0, 2.0, -1.0], "cannot be told from the paper's with so few training sets (--seeds): +1.0 [-"),
        ([1.0, -2.0, -3.0, -2.0, 1.0], "cannot be told from the paper's with so few training sets (--seeds): -1.0 [-"),
        ([1.0, 2.0], "cannot be told from the paper's with so few training sets (--seeds): +1.5 [+1.0 to +2.0] points"),
    ],
)
def test_the_example_says_what_came_of_it(values, said):
    from backdrop.experiments.report.statistics import estimate

    words = runpy.run_path(str(EXAMPLE))["verdict"](estimate(values))
    assert said in words
    assert words.endswith(f"over {len(values)} training sets.")
