"""Lightning with the callback against plain loops that set p by its formula."""

import copy
import io
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import processes
from backdrop import Backdrop, Backdrop2d, skip_blocked
from backdrop.losses import RankStatisticLoss
from backdrop.schedules import CosineP, LinearP, VarianceBudget
from skipping import always_skip

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

from lightning.pytorch.loggers.logger import Logger  # noqa: E402

from backdrop.integrations.lightning import BackdropCallback  # noqa: E402

pytestmark = [  # Lightning's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]

ROWS, FEATURES, BATCHES = 32, 6, 4


class Kept(Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def of(self, name):
        return [row[name] for row in self.rows if name in row]


def network(p=0.8, seed=3, **settings):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(seed)
    layers = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers, Backdrop(p, generator=generator, **settings))


def data(seed=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS * BATCHES, FEATURES, generator=generator)
    return x, (x[:, 0] + torch.randn(len(x), generator=generator) > 0).float()


class Ranking(pl.LightningModule):
    """The whole-batch loss of the documentation; notes the p that each batch was trained with."""

    def __init__(self, model, group=None):
        super().__init__()
        self.model, self.loss, self.seen = model, RankStatisticLoss(group=group), []

    def training_step(self, batch, index):
        x, labels = batch
        self.seen.append([float(m.p) for m in self.modules() if isinstance(m, Backdrop)])
        return self.loss(self.model(x), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trainer(folder, *callbacks, logger=False, **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"devices": 1, "max_epochs": 3, "log_every_n_steps": 1, **quiet, **settings}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), logger=logger, default_root_dir=folder, **settings)


def loader(tensors=None, batch=ROWS):
    return DataLoader(TensorDataset(*(tensors or data())), batch)


def plain_loop(model, p_of, epochs=3, accumulate=1):
    """The same without Lightning or a schedule: `p_of(steps, epoch)` is the p of a batch."""
    optimizer, loss, steps = torch.optim.SGD(model.parameters(), lr=0.5), RankStatisticLoss(), 0
    used = []
    for epoch in range(epochs):
        for i, (x, labels) in enumerate(loader()):
            model[-1].p = p_of(steps, epoch)
            used.append(model[-1].p)
            (loss(model(x), labels) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return used


CASES = {
    "every step": ("step", 1, lambda steps, epoch: 0.8 * min(steps / 8, 1)),
    "gradients of two batches": ("step", 2, lambda steps, epoch: 0.8 * min(steps / 8, 1)),
    "every epoch": ("epoch", 1, lambda steps, epoch: 0.8 * min(epoch / 8, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_like_a_plain_loop_and_logs_the_p_in_use(case, tmp_path):
    interval, accumulate, p_of = CASES[case]
    plain, module, logger = network(exact=True), Ranking(network(exact=True)), Kept()
    used = plain_loop(plain, p_of, accumulate=accumulate)
    assert len(set(used)) > 2
    callback = BackdropCallback(partial(LinearP, start=0.0, steps=8), interval=interval)
    fitting = trainer(tmp_path, callback, logger=logger, accumulate_grad_batches=accumulate)
    fitting.fit(module, loader())

    assert module.seen == [[p] for p in used]
    for name, value in plain.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], value), name
    logged = used[accumulate - 1 :: accumulate]  # Lightning writes when the optimiser has stepped
    kept = [max(1, round(ROWS * (1 - p))) for p in logged]
    assert logger.of("backdrop/model.3/p") == pytest.approx(logged)
    assert logger.of("backdrop/model.3/kept_units") == kept
    assert logger.of("backdrop/model.3/effective_batch_size") == pytest.approx([ROWS * (1 - p) for p in logged])
    count = fitting.global_step if interval == "step" else fitting.current_epoch
    assert callback.schedule.get_last_p() == pytest.approx([0.8 * min(count / 8, 1)])  # ready for the next one
    assert list(tmp_path.iterdir()) == []


def test_logs_as_often_as_lightning_writes(tmp_path):
    module, logger = Ranking(network()), Kept()
    callback = BackdropCallback(partial(LinearP, start=0.0, steps=8))
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=3).fit(module, loader())
    assert logger.of("backdrop/model.3/p") == pytest.approx([module.seen[t][0] for t in (2, 5, 8, 11)])


class Saves(pl.Callback):
    """A checkpoint after every batch."""

    def on_train_batch_end(self, trainer, module, *args):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.global_step}.ckpt")


@pytest.mark.parametrize("saves", ["first", "last"])  # before and after the callback at the end of a batch
@pytest.mark.parametrize(("interval", "stop"), [("step", 4), ("step", 6), ("epoch", 4), ("epoch", 6)])
def test_resumes_with_the_same_p(interval, stop, saves, tmp_path):
    schedule = partial(CosineP, start=0.1, steps=9 if interval == "step" else 4)
    whole, callback = Ranking(network()), BackdropCallback(schedule, interval=interval)
    callbacks = [Saves(), callback] if saves == "first" else [callback, Saves()]
    trainer(tmp_path, *callbacks).fit(whole, loader())

    resumed, callback = Ranking(network(p=0.3)), BackdropCallback(schedule, interval=interval)
    trainer(tmp_path, callback).fit(resumed, loader(), ckpt_path=tmp_path / f"{stop}.ckpt")
    assert resumed.seen == whole.seen[stop:]
    assert len(resumed.seen) == 3 * BATCHES - stop
    assert callback.schedule.own_p == [0.8]  # comes back too


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_budget_of_variance_sees_the_gradients_of_every_step_and_resumes(accumulate, tmp_path):
    make = partial(VarianceBudget, share=0.3, memory=10, start=1)
    plain, used = network(exact=True), []
    optimizer, loss = torch.optim.SGD(plain.parameters(), lr=0.5), RankStatisticLoss()
    budget = make(plain)
    for _ in range(3):
        for i, (x, labels) in enumerate(loader()):
            used.append([plain[-1].p])
            (loss(plain(x), labels) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                budget.step()
                optimizer.zero_grad()
    whole, callback, logger = Ranking(network(exact=True)), BackdropCallback(make), Kept()
    settings = {"accumulate_grad_batches": accumulate}
    trainer(tmp_path, callback, Saves(), logger=logger, **settings).fit(whole, loader())
    assert whole.seen == used
    assert callback.schedule.state_dict() == budget.state_dict()
    assert len(logger.of("backdrop/model.3/share_of_variance")) == 12 // accumulate

    stop = 4 // accumulate
    resumed, callback = Ranking(network(p=0.3, exact=True)), BackdropCallback(make)
    resumed.model[-1].generator.manual_seed(99)  # another mask, so that only p is looked at
    trainer(tmp_path, callback, **settings).fit(resumed, loader(), ckpt_path=tmp_path / f"{stop}.ckpt")
    assert resumed.seen[0] == whole.seen[4]
    assert callback.schedule.last_step == 12 // accumulate
    with pytest.raises(ValueError, match="interval='step'"):
        trainer(tmp_path, BackdropCallback(make, interval="epoch")).fit(Ranking(network()), loader())


def test_fitting_on_and_fitting_anew(tmp_path):
    """The counter of the trainer decides, and the layer's own p is that of before the first training."""
    module, callback = Ranking(network()), BackdropCallback(partial(LinearP, start=0.0, steps=5))
    one = trainer(tmp_path, callback, max_epochs=1)
    one.fit(module, loader())
    one.fit_loop.max_epochs = 2
    one.fit(module, loader())
    trainer(tmp_path, callback, max_epochs=1).fit(module, loader())
    expected = [0.8 * min(t / 5, 1) for t in [*range(8), *range(4)]]
    assert [p for (p,) in module.seen] == pytest.approx(expected)


def test_the_number_of_steps_is_known_to_the_schedule(tmp_path):
    module = Ranking(network())
    callback = BackdropCallback(lambda m: LinearP(m, steps=int(m.trainer.estimated_stepping_batches)))
    trainer(tmp_path, callback).fit(module, loader())
    assert callback.schedule.steps == 3 * BATCHES
    assert callback.schedule.get_last_p() == [0.8]


class Textures(Ranking):
    """Two kinds of units; drops positions and samples."""

    def training_step(self, batch, index):
        return self.loss(self.model(batch[0].view(-1, 1, 12, 16)), batch[1])


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 12 * 16, generator=generator), torch.arange(16) % 2


def convolutions():
    torch.manual_seed(1)
    stage = [nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), Backdrop2d(0.9, patch=5)]  # 3 x 4 patches
    head = [nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1), Backdrop(0.75)]
    return nn.Sequential(*stage, *head)


@pytest.mark.parametrize("skipping", [False, True])
def test_logs_the_units_of_every_mask_also_where_gradients_are_skipped(skipping, monkeypatch, tmp_path):
    always_skip(monkeypatch)
    plain, model = Textures(convolutions()), convolutions()
    module, logger = Textures(skip_blocked(model) if skipping else model), Kept()
    for one, kept in ((plain, False), (module, logger)):
        torch.manual_seed(4)
        trainer(tmp_path, BackdropCallback(), logger=kept, max_epochs=2).fit(one, loader(images(), 16))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-7)
    if skipping:
        assert not any("plain" in entry.last for entry in module.model.skip_report)
    row = {name.removeprefix("backdrop/model."): value for name, value in logger.rows[0].items()}
    row.pop("epoch", None)
    assert row == pytest.approx(
        {
            "2/p": 0.9,
            "2/kept_units": 12 * 0.1 + 0.9**12,  # never none
            "7/p": 0.75,
            "7/kept_units": 16 * 0.25 + 0.75**16,
            "7/effective_batch_size": 4.0,
        },
        rel=1e-5,
    )


class Breaks(pl.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        copy.deepcopy(module.model)
        torch.save(module.model, io.BytesIO())
        raise KeyError("on purpose")


def test_leaves_the_layers_as_they_were_also_after_an_error(tmp_path):
    module = Ranking(network())
    before = set(module.model[-1].__dict__)
    with pytest.raises(KeyError, match="on purpose"):
        trainer(tmp_path, BackdropCallback(lambda m: LinearP(m, steps=4)), Breaks()).fit(module, loader())
    assert len(module.seen) == 1
    trainer(tmp_path, BackdropCallback()).fit(module, loader())
    assert set(module.model[-1].__dict__) == before
    assert not module.model[-1]._forward_pre_hooks


def test_what_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"functools.partial\(CosineP, start=0.0, steps=1000\), but got LinearP"):
        BackdropCallback(LinearP(network(), steps=2))
    with pytest.raises(ValueError, match="'step' or 'epoch', but got 'batch'"):
        BackdropCallback(interval="batch")
    with pytest.raises(ValueError, match="Ranking has no Backdrop layer"):
        trainer(tmp_path, BackdropCallback()).fit(Ranking(nn.Linear(FEATURES, 1)), loader())
    with pytest.raises(TypeError, match="has to make a Schedule, but made a Ranking"):
        trainer(tmp_path, BackdropCallback(lambda m: m)).fit(Ranking(network()), loader())


def ddp(rank, folder):
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    module, logger = Ranking(network(group="world"), group="world"), Kept()
    part = [torch.cat([batch.chunk(2)[rank] for batch in whole.split(ROWS)]) for whole in data()]
    callback = BackdropCallback(partial(LinearP, start=0.0, steps=8))
    both = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer(folder, callback, logger=logger, **both).fit(module, loader(part, ROWS // 2))
    numbers = ("p", "kept_units", "effective_batch_size")
    return module.seen, module.model.state_dict(), {name: logger.of(f"backdrop/model.3/{name}") for name in numbers}


def test_two_processes_train_like_one(tmp_path):
    one = Ranking(network(group="world"))
    trainer(tmp_path, BackdropCallback(partial(LinearP, start=0.0, steps=8))).fit(one, loader())
    (seen, state, logged), (other_seen, other_state, _) = processes.run(ddp, 2, str(tmp_path))
    assert seen == other_seen == one.seen
    for name, value in one.model.state_dict().items():
        assert torch.equal(state[name], other_state[name])
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
    used = [p for (p,) in seen]
    assert logged["p"] == pytest.approx(used)
    assert logged["effective_batch_size"] == pytest.approx([ROWS * (1 - p) for p in used])  # of both
    assert logged["kept_units"] == pytest.approx([ROWS * (1 - p) + p**ROWS * (p > 0) for p in used])


def test_no_library_is_imported_before_it_is_asked_for_and_a_missing_one_is_named():
    code = """
import sys
import backdrop, backdrop.integrations, backdrop.integrations.timm
libraries = {"lightning", "pytorch_lightning", "transformers", "accelerate", "timm"}
print(sorted(libraries & set(sys.modules)))
for name in ("lightning", "transformers"):
    sys.modules[name] = None
    try:
        __import__(f"backdrop.integrations.{name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "backdrop.integrations.lightning needs Lightning; install it with: pip install 'lightning>=2.5'",
        "backdrop.integrations.transformers needs Transformers; install it with: "
        "pip install 'transformers[torch]>=4.50'",
    ]
