"""The training loop: what it saves, how it goes on, what it says; several processes against one."""

import dataclasses
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning.fabric import fabric
from torch import nn
from torch._dynamo.utils import counters

from backdrop import Backdrop, Backdrop2d
from backdrop._core import files
from backdrop.experiments import checkpoint, data, train
from backdrop.experiments.steps import WARM, Recorded, RecordingError
from backdrop.experiments.task import Examples, Preset, Settings, Task
from backdrop.experiments.tasks import AUC, GP, Latent
from backdrop.experiments.train import Diverged, Options, fit
from backdrop.experiments.training import Training
from tiny_task import Tiny

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)

TINY_GP = {
    "size": 32,
    "blocks": (1, 1),
    "channels": 8,
    "passes": 2,
    "epochs": 4,
    "test_per_class": 2,
    "evaluations": 10,
}


def gp(folder, *, epochs=4, on_epoch=None, options=None, note=None, **settings):
    task = GP.with_preset("quick", {**TINY_GP, "epochs": epochs, "p_small": 0.9, "p_large": 0.5, **settings}, seed=3)
    return fit(task, folder, options or Options(threads=1), on_epoch, *([note] if note else []))


class Killed(Exception):  # noqa: N818
    pass


def stop_after(epoch):
    def on_epoch(row):
        if row["epoch"] == epoch:
            raise Killed

    return on_epoch


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"p_warmup": 0.6, "lr_schedule": "cosine"},
        {"optimizer": "sgd", "lr": 0.01, "lr_schedule": "constant"},
        {"skip": "sampled"},
        {"flips": True},
    ],
    ids=["usual", "schedules", "sgd", "skip", "flips"],
)
@pytest.mark.parametrize("epoch", [1, 3])
def test_a_resumed_run_is_bit_identical(tmp_path, settings, epoch):
    whole = gp(tmp_path / "whole", options=Options(threads=1, keep_weights=True), **settings)
    with pytest.raises(Killed):
        gp(tmp_path / "parts", on_epoch=stop_after(epoch), **settings)
    torch.manual_seed(1234)  # whatever else happened meanwhile
    torch.randn(7)
    seen = []
    options = Options(threads=1, keep_weights=True)
    parts = gp(tmp_path / "parts", on_epoch=lambda row: seen.append(row["epoch"]), options=options, **settings)
    assert seen == list(range(epoch + 1, 5))
    assert parts.metrics == whole.metrics
    for one, other in zip(whole.curve, parts.curve, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    weights = [torch.load(tmp_path / name / "weights.pt")["model"] for name in ("whole", "parts")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_what_a_trial_leaves(tmp_path):
    outcome = gp(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "result.json"]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2, 3, 4]
    assert [row["step"] for row in log] == [2, 4, 6, 8]
    assert log[-1]["left"] == 0
    assert log[0]["epochs"] == 4
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"] == outcome.metrics
    assert result["settings"]["p_small"] == 0.9
    assert set(outcome.machine) >= {"host", "device", "threads", "torch", "backdrop"}


def test_a_finished_trial_is_not_run_again(tmp_path):
    first = gp(tmp_path)
    seen = []
    assert gp(tmp_path, on_epoch=seen.append) == first
    assert not seen


def test_evaluations_are_spread_over_training(tmp_path):
    outcome = gp(tmp_path, epochs=5, evaluations=2)
    assert ["accuracy" in row for row in outcome.curve] == [False, False, True, False, True]


def test_settings_matter(tmp_path):
    usual = gp(tmp_path / "0")
    others = [
        {"p_small": 0.5},
        {"lr": 1e-4},
        {"weight_decay": 0.5},
        {"exact": False},
        {"p_warmup": 1.0},
        {"norm": "group"},
    ]
    for number, settings in enumerate(others, 1):
        assert gp(tmp_path / str(number), **settings).curve[-1]["loss"] != usual.curve[-1]["loss"], settings


def test_without_masks_there_is_nothing_to_raise(tmp_path):
    ramped, usual = (gp(tmp_path / str(share), p_small=0.0, p_large=0.0, p_warmup=share) for share in (1.0, 0.0))
    assert [row["loss"] for row in ramped.curve] == [row["loss"] for row in usual.curve]
    assert ramped.metrics == usual.metrics


def test_validation_data_are_not_test_data():
    parts = {}
    for judge in ("test", "validation"):
        task = GP.with_preset("quick", {**TINY_GP, "epochs": 1, "judge": judge})
        parts[f"train for {judge}"], parts[judge] = task.data(torch.device("cpu"))
    assert torch.equal(parts["train for test"].inputs, parts["train for validation"].inputs)
    assert not torch.equal(parts["test"].inputs, parts["validation"].inputs)
    assert not torch.equal(parts["test"].inputs[:4], parts["train for test"].inputs)


def test_a_checkpoint_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.write_text, (tmp_path / "hacked", "!"))

    checkpoint.save(tmp_path / "checkpoint.pt", {"key": "k", "evil": Evil()})  # its checksum is right
    with pytest.raises(checkpoint.Unusable, match=r"checkpoint.pt is no checkpoint of ours: UnpicklingError"):
        checkpoint.load(tmp_path / "checkpoint.pt", "k", 1)
    assert not (tmp_path / "hacked").exists()


def tiny(folder, *, on_epoch=None, note=None):
    """A trial of two steps."""
    task = Tiny.with_preset("quick", {"epochs": 2, "batch_size": 48, "p": 0.5}, seed=3)
    return fit(task, folder, Options(threads=1, accelerator="cpu"), on_epoch, *([note] if note else []))


@pytest.fixture
def quick(monkeypatch):
    """Without Fabric's search for plugins among all packages, half of the time of such a trial."""
    monkeypatch.setattr(fabric, "_load_external_callbacks", lambda group: [])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A trial that was stopped after the first of two epochs, and what would have come of it."""
    folder = tmp_path_factory.mktemp("stopped")
    whole = tiny(folder / "whole")
    with pytest.raises(Killed):
        tiny(folder / "parts", on_epoch=stop_after(1))
    notes = []
    shutil.copytree(folder / "parts", folder / "intact")
    assert tiny(folder / "intact", note=notes.append).metrics == whole.metrics
    assert not notes
    return (folder / "parts" / "checkpoint.pt").read_bytes(), whole


def without_times(curve):
    return [{**row, "seconds": 0} for row in curve]


def begins_anew(folder, content, whole):
    """Whether a trial with this checkpoint says that it cannot be used, and ends as if there were none."""
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "checkpoint.pt").write_bytes(content)
    notes, epochs = [], []
    found = tiny(folder, note=notes.append, on_epoch=lambda row: epochs.append(row["epoch"]))
    assert found.metrics == whole.metrics
    assert without_times(found.curve) == without_times(whole.curve)
    assert not (folder / "checkpoint.pt").exists()
    return epochs == [1, 2] and len(notes) == 1 and str(folder) in notes[0]


@pytest.mark.parametrize("kind", ["flip", "zero", "cut", "longer", "noise"])
def test_a_damaged_checkpoint_counts_as_none(tmp_path, quick, stopped, kind):
    """Over 300 damages in all: none trains on with what is wrong, and none fails the trial."""
    content, whole = stopped
    for seed in range(64):
        random = np.random.default_rng(seed)
        damaged = bytearray(content)
        place, length = int(random.integers(len(content))), int(2 ** random.integers(12))
        if kind == "flip":
            damaged[place] ^= 1 << int(random.integers(8))
        elif kind == "zero":
            damaged[place : place + length] = bytes(len(damaged[place : place + length]))
        elif kind == "cut":
            del damaged[place:]
        elif kind == "longer":
            damaged[place:place] = random.bytes(length)
        else:
            damaged[place : place + length] = random.bytes(len(damaged[place : place + length]))
        if damaged != content:  # zeros in place of zeros
            assert begins_anew(tmp_path, bytes(damaged), whole), (seed, place, length)


def test_files_that_are_no_checkpoint_count_as_none(tmp_path, quick, stopped):
    content, whole = stopped
    for other in (b"", b"\n", b"text", content.partition(b"\n")[2], checkpoint.HEAD, content + content):
        assert begins_anew(tmp_path, other, whole)


def rows(count):
    return [{"epoch": i + 1, "step": i + 1, "loss": 1.0, "lr": 1.0, "seconds": 1.0} for i in range(count)]


WRONG = {
    "epoch 99": {"epoch": 99},
    "epoch 99 with rows": {"epoch": 99, "curve": rows(99)},
    "epoch 0": {"epoch": 0, "curve": []},
    "epoch -1": {"epoch": -1},
    "epoch 2": {"epoch": 2},
    "epoch 2 without an evaluation": {"epoch": 2, "curve": rows(2)},
    "epoch 1.0": {"epoch": 1.0},
    "epoch true": {"epoch": True},
    "another trial": {"key": "0123456789abcdef"},
    "steps": {"curve": [{**rows(1)[0], "step": 7}]},
    "text in a row": {"curve": [{**rows(1)[0], "loss": "1"}]},
    "no row": {"curve": None},
    "seconds": {"seconds": float("nan")},
    "no weights": {"model": {}},
    "other weights": {"model": {"0.weight": torch.zeros(3)}},
    "weights that are none": {"model": 3},
    "no optimiser": {"optimizer": {}},
    "schedule of another epoch": {"schedule": {"last_epoch": 5}},
    "no schedule": {"schedule": None},
    "no random numbers": {"rng": []},
    "random numbers of nothing": {"rng": [[torch.zeros(3, dtype=torch.uint8)]]},
    "random numbers that are none": {"rng": [[3]]},
    "generators": {"generators": 3},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_that_is_wrong_counts_as_none(tmp_path, quick, stopped, case):
    """Whole, with a right checksum, and not what this trial could have saved."""
    content, whole = stopped
    state = torch.load(io.BytesIO(content.partition(b"\n")[2]), weights_only=True)
    checkpoint.save(tmp_path / "checkpoint.pt", {**state, **WRONG[case]})
    assert begins_anew(tmp_path, (tmp_path / "checkpoint.pt").read_bytes(), whole)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("optimizer", "param_groups", 0, "eps"), "x"),
        (("optimizer", "param_groups", 0, "betas"), (0.9,)),
        (("optimizer", "param_groups", 0, "maximize"), torch.zeros(3)),
        (("optimizer", "param_groups", 0, "lr"), torch.zeros(3)),
        (("optimizer", "param_groups", 0, "weight_decay"), 10**400),
        (("optimizer", "param_groups", 0), {}),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(3)),
        (("optimizer", "state", 0, "exp_avg_sq"), None),
        (("optimizer", "state", 0, "step"), torch.zeros(2)),
        (("schedule", "total_steps"), None),
        (("schedule", "_schedule_phases"), []),
        (("schedule", "_schedule_phases", 0, "end_step"), "x"),
        (("curve", 0, "seconds"), 10**400),
    ],
    ids=str,
)
def test_a_state_that_no_training_has_counts_as_none(tmp_path, quick, stopped, path, value):
    content, whole = stopped
    state = torch.load(io.BytesIO(content.partition(b"\n")[2]), weights_only=True)
    *parts, last = path
    place = state
    for part in parts:
        place = place[part]
    assert last in place or last == 0
    place[last] = value
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    assert begins_anew(tmp_path, (tmp_path / "checkpoint.pt").read_bytes(), whole)


def test_a_checkpoint_without_one_of_its_parts_counts_as_none(tmp_path, quick, stopped):
    content, whole = stopped
    state = torch.load(io.BytesIO(content.partition(b"\n")[2]), weights_only=True)
    for name in state:
        checkpoint.save(tmp_path / "checkpoint.pt", {other: part for other, part in state.items() if other != name})
        assert begins_anew(tmp_path, (tmp_path / "checkpoint.pt").read_bytes(), whole), name


def test_without_anyone_to_tell_a_damaged_checkpoint_is_a_warning(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.warns(
        UserWarning, match=r"checkpoint.pt is damaged: its checksum does not fit; this trial begins anew"
    ):
        tiny(tmp_path)


def test_a_damaged_result_counts_as_none(tmp_path, quick):
    whole = tiny(tmp_path)
    path = tmp_path / "result.json"
    content = path.read_bytes()
    damages = [
        b"",
        b"\n",
        b"{}",
        b"[]",
        b"null",
        b"3",
        content[:-3],
        content[: len(content) // 2],
        b"\x00" * len(content),
    ]
    damages += [b"[" * 100_000, b"\xff\xfe", content.replace(b'"task": "tiny"', b'"task": "tony"')]
    for seed in range(100):
        random = np.random.default_rng(seed)
        damaged = bytearray(content)
        damaged[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
        damages.append(bytes(damaged))
    refused = 0
    for damaged in damages:
        path.write_bytes(damaged)
        notes = []
        found = tiny(tmp_path, note=notes.append)
        assert found.metrics == whole.metrics
        assert without_times(found.curve) == without_times(whole.curve)
        refused += len(notes)
        assert all(str(path) in text for text in notes)
    assert refused > len(damages) * 0.8  # the others changed a space, the time, or the machine


def test_a_result_of_an_older_version_has_no_checksum(tmp_path):
    whole = tiny(tmp_path)
    path = tmp_path / "result.json"
    found = json.loads(path.read_text())
    assert found.pop("checksum").startswith("sha256:")
    path.write_text(json.dumps(found))
    assert tiny(tmp_path, on_epoch=stop_after(1)) == whole
    found["metrics"]["score"] = "100"
    path.write_text(json.dumps(found))
    with pytest.raises(checkpoint.Unusable, match="has to hold numbers"):
        checkpoint.read_result(path)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.replace(path, fail)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_divergence_is_told(tmp_path):
    with pytest.raises(Diverged, match=r"the loss was (nan|inf) in epoch \d of 4, with a learning rate of 1e\+18"):
        gp(tmp_path, lr=1e18, optimizer="sgd", norm="none", lr_schedule="constant")
    assert not (tmp_path / "result.json").exists()


def test_tensorboard_files_have_the_curve(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = Options(threads=1, log="tensorboard")
    with pytest.raises(Killed):
        gp(tmp_path, on_epoch=stop_after(2), options=options)
    outcome = gp(tmp_path, options=options)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(row["step"], pytest.approx(row["loss"])) for row in outcome.curve]
    assert [event.step for event in events.Scalars("accuracy")] == [2, 4, 6, 8]


def test_threads_are_put_back(tmp_path):
    torch.set_num_threads(1)
    outcome = gp(tmp_path, options=Options(threads=2), epochs=1)
    assert torch.get_num_threads() == 1
    assert outcome.machine["threads"] == "2"


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions(tmp_path, precision):
    outcome = gp(tmp_path, precision=precision)
    assert outcome.metrics.keys() == {"accuracy", "loss", "small", "large"}


def images(subset_classes, seed, device, rows=48):
    """Random images with a weak trace of their class, in place of CIFAR-10."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for count in (rows, rows // 2):
        labels = torch.arange(count) % 6 // 5 if subset_classes == 2 else torch.arange(count) % subset_classes
        pixels = torch.randint(0, 200, (count, 3, 32, 32), generator=generator) + 20 * labels[:, None, None, None]
        names = tuple(f"c{i}" for i in range(subset_classes))
        sets.append(data.ImageSet(pixels.clamp(max=255).to(torch.uint8).to(device), labels.to(device), names))
    return sets[0], sets[1]


class FakeAUC(AUC):
    """`auc` on data that need not be fetched."""

    def sets(self, device):
        return images(2, 0, device)


SHARED = {"width": 8, "norm": "group", "epochs": 2, "passes": 1, "batch_size": 12, "samples": None, "shrink": 1}
SHARED |= {"p": 0.5, "optimizer": "sgd", "lr": 0.05, "precision": "64-true"}


def auc(folder, on_epoch=None, *, devices=1, **settings):
    task = FakeAUC.with_preset("quick", {**SHARED, **settings}, seed=1)
    options = Options(accelerator="cpu", devices=devices, threads=1, keep_weights=True)
    return fit(task, folder, options, on_epoch), torch.load(folder / "weights.pt")["model"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Training over two processes: what came of it, the weights, and the epochs that were told."""
    seen = []
    return *auc(tmp_path_factory.mktemp("two"), lambda row: seen.append(row["epoch"]), devices=2), seen


def test_two_processes_train_as_one(tmp_path, two_processes):
    """Whole batches for the loss and one mask over both: the same training, up to the order of sums."""
    one, weights = auc(tmp_path)
    two, others, seen = two_processes
    assert two.machine["devices"] == "2"
    assert seen == [1, 2]
    for a, b in zip(one.curve, two.curve, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)  # Fabric hands outputs on in float32
    assert two.metrics["auc"] == pytest.approx(one.metrics["auc"], abs=1e-12)
    assert weights.keys() == others.keys()
    for key in weights:
        torch.testing.assert_close(weights[key], others[key], rtol=1e-4, atol=1e-6)
    assert one.curve[0]["loss"] != pytest.approx(one.curve[1]["loss"], rel=1e-4)  # they did learn


def test_two_processes_resume_bit_identically(tmp_path, two_processes):
    whole, weights, _ = two_processes
    task = FakeAUC.with_preset("quick", SHARED, seed=1)
    fabric = train.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="64-true")
    fabric.launch(one_epoch, dataclasses.asdict(task.settings), str(tmp_path))
    assert checkpoint.load(tmp_path / "checkpoint.pt", task.key, task.settings.epochs)["epoch"] == 1
    parts, others = auc(tmp_path, devices=2)
    assert [row["loss"] for row in parts.curve] == [row["loss"] for row in whole.curve]
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def one_epoch(fabric, settings, folder):
    torch.set_num_threads(1)
    training = Training(
        fabric, FakeAUC(AUC.Settings(**settings)), Path(folder), Options(accelerator="cpu", devices=2, threads=1)
    )
    row = training._train_epoch() | {"seconds": 1.0}
    if training._is_due():
        row |= training._evaluate()
    training.curve.append(row)
    state = training._state()
    if fabric.global_rank == 0:
        checkpoint.save(Path(folder) / "checkpoint.pt", state)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_diverge_as_one(tmp_path):
    with pytest.raises(Diverged, match="the loss was nan in epoch 1 of 2"):
        auc(tmp_path, devices=2, lr=1e30, lr_schedule="constant", norm="none")


def test_more_devices_than_samples_in_a_batch(tmp_path):
    with pytest.raises(ValueError, match="batch_size has to be at least the number of devices, 2, but got 1"):
        auc(tmp_path, devices=2, batch_size=1)


@dataclass(frozen=True, kw_only=True)
class MineSettings(Settings):
    p: float = 0.0


class Mine(Task):
    """A task that forgets its metric."""

    Settings = MineSettings
    presets: ClassVar = {"quick": Preset({"epochs": 1}, [{"p": 0.0}], seeds=1)}

    def data(self, device):
        return (Examples(torch.randn(8, 4), torch.zeros(8)),) * 2

    def model(self):
        return nn.Sequential(nn.Linear(4, 1), Backdrop(self.settings.p))

    def loss(self, outputs, labels):
        return outputs.square().mean()

    def evaluate(self, outputs, labels):
        return {"other": 1.0}


def test_a_task_without_its_metric_is_told_so(tmp_path):
    with pytest.raises(ValueError, match="evaluate has to give 'accuracy', but got other"):
        fit(Mine.with_preset("quick"), tmp_path)
    assert Mine.name == "mine"
    assert Mine.title == "A task that forgets its metric."


def test_masks_are_on_during_training_and_off_in_evaluation(tmp_path, monkeypatch):
    calls = []
    forward = Backdrop2d.forward
    monkeypatch.setattr(Backdrop2d, "forward", lambda self, x: calls.append(self.training) or forward(self, x))
    gp(tmp_path, epochs=1, passes=1, eval_batch=8)
    assert calls == [True, True, False, False]


def test_training_inputs_alone_are_augmented(tmp_path, monkeypatch):
    seen, forward = [], Backdrop2d.forward

    def record(self, x):
        seen.append((self.training, bool((x != x[:1]).any())))  # whether images differ
        return forward(self, x)

    monkeypatch.setattr(GP, "augment", lambda self, inputs: torch.zeros_like(inputs))
    monkeypatch.setattr(Backdrop2d, "forward", record)
    gp(tmp_path, epochs=1, passes=1, eval_batch=8)
    assert seen == [(True, False), (True, False), (False, True), (False, True)]


def assert_trains_alike(folder, options, other, **settings):
    # In double precision, so that what differs by rounding alone stays close for all the steps. Masks come from one
    # generator, so both see the same.
    settings = {"per_class": 4, "batch_size": 3, "passes": 3, "epochs": 4, "p_large": 0.5, **settings}
    found = []
    for name, how in (("one", options), ("other", other)):
        outcome = gp(folder / name, options=how, precision="64-true", **settings)
        found.append((outcome, torch.load(folder / name / "weights.pt", weights_only=True)["model"]))
    (one, weights), (other_one, other_weights) = found
    torch.testing.assert_close(other_weights, weights, rtol=1e-6, atol=1e-8)
    for row, other_row in zip(one.curve, other_one.curve, strict=True):
        assert {**row, "seconds": 0} == pytest.approx({**other_row, "seconds": 0}, rel=1e-5)


@pytest.fixture
def recordings(monkeypatch):
    """The sizes of batches whose steps were recorded, one after the other."""
    sizes, record = [], Recorded._record
    monkeypatch.setattr(Recorded, "_record", lambda self, rows: sizes.append(len(rows)) or record(self, rows))
    return sizes


@needs_cuda
def test_recorded_steps_train_like_others(tmp_path, recordings):
    # Batches of 3 and 2 images: a graph for each.
    options = [Options(accelerator="cuda", keep_weights=True, graphs=graphs) for graphs in (False, True)]
    assert_trains_alike(tmp_path, *options)
    assert sorted(recordings) == [2, 3]


@needs_compiler
def test_compiled_networks_train_like_others(tmp_path):
    options = [Options(threads=1, keep_weights=True, compile=compiled) for compiled in (False, True)]
    before = counters["stats"]["unique_graphs"]
    assert_trains_alike(tmp_path, *options, p_small=0.0, p_large=0.0)  # compiled random numbers are others
    assert counters["stats"]["unique_graphs"] > before


@needs_compiler
def test_what_is_compiled_serves_every_p(tmp_path):
    options = Options(threads=1, compile=True)
    gp(tmp_path / "one", options=options, p_small=0.5, p_large=0.5, epochs=1)
    before = counters["stats"]["unique_graphs"]
    gp(tmp_path / "other", options=options, p_small=0.9, p_large=0.75, epochs=1)
    gp(tmp_path / "rising", options=options, p_small=0.9, p_large=0.75, epochs=2, p_warmup=1.0)
    assert counters["stats"]["unique_graphs"] == before > 0


@needs_compiler
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_networks_with_masks_over_all_processes_are_compiled_in_one_piece(tmp_path, first, then):
    # And a trial that was stopped goes on without being compiled, or the other way.
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    task = FakeAUC.with_preset("quick", {**SHARED, "precision": "32-true"}, seed=1)
    with pytest.raises(Killed):
        fit(task, tmp_path, Options(accelerator="cpu", threads=1, compile=first), stop_after(1))
    outcome = fit(task, tmp_path, Options(accelerator="cpu", threads=1, compile=then))
    assert counters["stats"]["unique_graphs"] == before + 1
    assert [row["epoch"] for row in outcome.curve] == [1, 2]


@needs_cuda
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_replay_of_a_recorded_step_has_masks_of_its_own(tmp_path, monkeypatch, recordings, compiled, p):
    # The weights stay where they are, so without masks all steps have the same gradients.
    found, step = [], Training.step

    def record(self, rows):
        loss = step(self, rows)
        found.append(torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]).double())
        return loss

    monkeypatch.setattr(Training, "step", record)
    still = {"lr": 1e-30, "weight_decay": 0.0, "precision": "64-true"}
    gp(
        tmp_path,
        options=Options(accelerator="cuda", graphs=True, compile=compiled),
        p_small=0.0,
        p_large=p,
        epochs=1,
        passes=12,
        **still,
    )
    assert len(found) == 12
    assert recordings == [4]
    gradients = torch.stack(found)[4:]  # those of replays
    close = torch.cdist(gradients, gradients) / gradients.norm(dim=1).max() < 1e-6
    assert close.sum() == (len(close) if p else close.numel())


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=needs_cuda)])
def test_where_gradients_are_skipped_nothing_is_compiled_or_recorded(tmp_path, monkeypatch, recordings, graphs):
    compiled = []
    real = torch.compile

    def compiling(model, **how):
        if "backend" in how:  # the engine's capture
            return real(model, **how)
        compiled.append(how)
        return model

    monkeypatch.setattr(torch, "compile", compiling)
    options = Options(accelerator="cuda" if graphs else "cpu", threads=1, graphs=graphs, compile=not graphs)
    gp(tmp_path / "skipped", options=options, skip="sampled", passes=4)
    assert not compiled
    assert not recordings
    gp(tmp_path / "plain", options=options, passes=4)
    assert compiled if not graphs else recordings


def test_exact_statistics_train_as_plain_masks_do(tmp_path):
    settings = {"p_small": 0.99, "p_large": 0.75, "epochs": 2, "passes": 2, "test_per_class": 1}

    def losses(skip):
        task = GP.with_preset("quick", {**settings, "skip": skip}, seed=3)
        return [(row["loss"], row.get("test loss")) for row in fit(task, tmp_path / skip, Options(threads=1)).curve]

    assert losses("exact") == losses("off")
    assert losses("exact") != losses("sampled")


@needs_cuda
@pytest.mark.parametrize(("first", "then"), [(True, True), (True, False), (False, True)])
def test_a_recorded_trial_goes_on(tmp_path, recordings, first, then):
    settings = {"per_class": 4, "batch_size": 4, "passes": 4, "epochs": 4, "precision": "64-true"}
    options = [Options(accelerator="cuda", graphs=graphs) for graphs in (first, then)]
    whole = gp(tmp_path / "whole", options=options[0], **settings)
    with pytest.raises(Killed):
        gp(tmp_path / "parts", options=options[0], on_epoch=stop_after(2), **settings)
    parts = gp(tmp_path / "parts", options=options[1], **settings)
    assert recordings == [4] * (2 * first + then)
    for row, other in zip(whole.curve, parts.curve, strict=True):
        assert {**row, "seconds": 0} == pytest.approx({**other, "seconds": 0}, rel=1e-5)


@needs_cuda
@pytest.mark.parametrize("task", [AUC, Latent])
def test_losses_that_wait_for_the_gpu_are_recorded_around(tmp_path, monkeypatch, recordings, task):
    classes = 2 if task is AUC else 10
    monkeypatch.setattr(task, "sets", lambda self, device: images(classes, 0, device))
    settings = {"width": 8, "batch_size": 11, "epochs": 4, "passes": 2, "samples": None, "precision": "64-true"}
    found = []
    for graphs in (False, True):
        options = Options(accelerator="cuda", graphs=graphs)
        trial = task.with_preset("quick", settings | dict.fromkeys(task.masks, 0.5), seed=1)
        outcome = fit(trial, tmp_path / str(graphs), options)
        found.append([{**row, "seconds": 0} for row in outcome.curve])
    assert recordings
    for row, other in zip(*found, strict=True):
        assert other == pytest.approx(row, rel=1e-5)


def test_a_recording_that_fails_says_why(monkeypatch):
    def record(self, rows):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")  # as torch ends a recording

    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Recorded, "_run", lambda self, rows: rows.sum())
    monkeypatch.setattr(Recorded, "_record", record)
    step = Recorded(lambda rows: rows, lambda outputs, rows: outputs.sum(), lambda loss: None)
    for _ in range(WARM):
        step(torch.ones(2))
    with pytest.raises(RecordingError, match=r"recorded: CUDA out of memory; this process has to end.*fewer workers"):
        step(torch.ones(2))
