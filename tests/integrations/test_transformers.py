"""Transformers' Trainer with the callback against plain loops, and `Skip` in a loss over the whole batch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

from backdrop import Backdrop, Skip
from backdrop.losses import RankStatisticLoss
from backdrop.schedules import CosineP, LinearP, VarianceBudget
from skipping import always_skip

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate, which the Trainer needs, is not installed")

from backdrop.integrations.transformers import BackdropCallback  # noqa: E402

ROWS, BATCHES = 16, 4


class Scores(nn.Module):
    """Notes the p that each batch was trained with."""

    def __init__(self, p=0.8, seed=3):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.mask = Backdrop(p, exact=True, generator=torch.Generator().manual_seed(seed))
        self.seen = []

    def forward(self, x):
        if self.training:
            self.seen.append(self.mask.p)
        return self.mask(self.body(x))


class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(inputs["x"])
        loss = RankStatisticLoss()(scores, inputs["labels"])
        return (loss, {"scores": scores}) if return_outputs else loss

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def samples():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS * BATCHES, 6, generator=generator)
    labels = (x[:, 0] + torch.randn(len(x), generator=generator) > 0).float()
    return [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]


def train(folder, model, callback, resume=None, trainer=Trainer, others=(), collate=None, data=None, **settings):
    common = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    plain = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    loop = {"num_train_epochs": 3, "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": ROWS}
    loop["per_device_eval_batch_size"] = ROWS
    args = transformers.TrainingArguments(str(folder), **{**common, **plain, **loop, **settings})
    data = data or samples()
    callbacks = [callback, *others]
    run = trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data, data_collator=collate, callbacks=callbacks
    )
    run.remove_callback(transformers.PrinterCallback)
    run.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return run


def plain_loop(model, p_of, epochs=3, accumulate=1):
    """The same without the Trainer or a schedule: `p_of(steps, epoch)` is the p of a batch."""
    optimizer, loss, steps, data = torch.optim.SGD(model.parameters(), lr=0.5), RankStatisticLoss(), 0, samples()
    for epoch in range(epochs):
        for i in range(BATCHES):
            batch = data[i * ROWS : (i + 1) * ROWS]
            model.mask.p = p_of(steps, epoch)
            scores = model(torch.stack([row["x"] for row in batch]))
            (loss(scores, torch.stack([row["labels"] for row in batch])) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1


CASES = {
    "every step": ("step", 1, lambda steps, epoch: 0.8 * min(steps / 8, 1)),
    "gradients of two batches": ("step", 2, lambda steps, epoch: 0.8 * min(steps / 8, 1)),
    "every epoch": ("epoch", 1, lambda steps, epoch: 0.8 * min(epoch / 8, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_like_a_plain_loop_and_logs_the_p_in_use(case, tmp_path):
    interval, accumulate, p_of = CASES[case]
    plain, model = Scores(), Scores()
    plain_loop(plain, p_of, accumulate=accumulate)
    assert len(set(plain.seen)) > 2
    callback = BackdropCallback(partial(LinearP, start=0.0, steps=8), interval=interval)
    run = train(tmp_path, model, callback, gradient_accumulation_steps=accumulate)

    assert model.seen == plain.seen
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    rows = [row for row in run.state.log_history if "loss" in row]
    logged = plain.seen[accumulate - 1 :: accumulate]
    assert [row["backdrop/mask/p"] for row in rows] == logged
    assert [row["backdrop/mask/kept_units"] for row in rows] == [max(1, round(ROWS * (1 - p))) for p in logged]
    assert [row["backdrop/mask/effective_batch_size"] for row in rows] == [ROWS * (1 - p) for p in logged]
    count = run.state.global_step if interval == "step" else 3
    assert callback.schedule.get_last_p() == [0.8 * min(count / 8, 1)]  # ready for the next one
    assert "draw_weight" not in model.mask.__dict__
    assert not model.mask._forward_pre_hooks


def test_a_budget_of_variance_sees_the_gradients_of_every_step(tmp_path):
    make = partial(VarianceBudget, share=0.3, memory=10, start=1)
    plain, model, callback, data = Scores(), Scores(), BackdropCallback(make), samples()
    optimizer, loss = torch.optim.SGD(plain.parameters(), lr=0.5), RankStatisticLoss()
    budget = make(plain)
    for i in [*range(BATCHES)] * 3:
        batch = data[i * ROWS : (i + 1) * ROWS]
        scores = plain(torch.stack([row["x"] for row in batch]))
        loss(scores, torch.stack([row["labels"] for row in batch])).backward()
        optimizer.step()
        budget.step()
        optimizer.zero_grad()
    run = train(tmp_path, model, callback)
    assert model.seen == pytest.approx(plain.seen)
    assert len(set(plain.seen)) > 5
    assert callback.schedule.shares() == pytest.approx(budget.shares())
    assert "backdrop/mask/share_of_variance" in [row for row in run.state.log_history if "loss" in row][-1]


@pytest.mark.parametrize("restore", [False, True])  # what the Trainer does with the states of callbacks
@pytest.mark.parametrize(("interval", "stop"), [("step", 4), ("step", 6), ("epoch", 4), ("epoch", 6)])
def test_resumes_with_the_same_p(interval, stop, restore, tmp_path):
    schedule = partial(CosineP, start=0.1, steps=9 if interval == "step" else 4)
    settings = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": restore}
    whole, resumed = Scores(), Scores()
    train(tmp_path, whole, BackdropCallback(schedule, interval=interval), **settings)
    train(tmp_path, resumed, BackdropCallback(schedule, interval=interval), stop, **settings)
    assert resumed.seen == whole.seen[stop:]
    assert len(resumed.seen) == 3 * BATCHES - stop


def test_training_again_goes_back_to_the_start_with_the_layers_own_p(tmp_path):
    model, callback = Scores(), BackdropCallback(partial(LinearP, start=0.1, steps=20))
    train(tmp_path, model, callback)
    train(tmp_path, model, callback)
    assert model.seen == pytest.approx([0.1 + 0.7 * t / 20 for t in range(12)] * 2)


class Listens(transformers.TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.heard.append(dict(logs))


def test_callbacks_behind_it_hear_of_the_masks_of_training_only(tmp_path):
    listener = Listens()
    train(tmp_path, Scores(), BackdropCallback(), others=[listener], eval_strategy="epoch", label_names=["labels"])
    with_masks = [row for row in listener.heard if "backdrop/mask/p" in row]
    assert with_masks == [row for row in listener.heard if "loss" in row]
    assert len(with_masks) == 3 * BATCHES
    assert sum("eval_loss" in row for row in listener.heard) == 3


class TextEncoder(nn.Module):
    """One vector of length 1 for each text."""

    def __init__(self, config):
        super().__init__()
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(tokens.dtype)
        return nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1)


class Masked(nn.Module):
    """What `Skip` stands for."""

    def __init__(self, module, mask):
        super().__init__()
        self.module, self.mask = module, mask

    def forward(self, **inputs):
        return self.mask(self.module(**inputs))


class TextModel(nn.Module):
    """Its forward names what it takes, see the documentation."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids, attention_mask):
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask)


class ContrastiveTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        queries, documents = model(**inputs).chunk(2)
        scores = queries @ documents.T / 0.05
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def collate(pairs):
    """Queries first, then documents."""
    texts = [text for side in zip(*pairs, strict=True) for text in side]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_skip_in_a_contrastive_loss_of_a_text_encoder(tmp_path, monkeypatch):
    always_skip(monkeypatch)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(
        vocab_size=40, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    torch.manual_seed(0)
    encoder = TextEncoder(config).double()
    data = [(torch.randint(1, 40, (3 + i % 5,)), torch.randint(1, 40, (4 + i % 3,))) for i in range(2 * ROWS)]
    trained, reports = [], []
    for kind in (Masked, Skip):
        mask = Backdrop(0.75, generator=torch.Generator().manual_seed(5))
        model = TextModel(kind(copy.deepcopy(encoder), mask))
        callback = BackdropCallback(partial(LinearP, start=0.5, steps=4))
        run = train(
            tmp_path, model, callback, trainer=ContrastiveTrainer, collate=collate, data=data, learning_rate=0.05
        )
        assert [row["backdrop/encoder.mask/p"] for row in run.state.log_history if "loss" in row] == (
            [0.5, 0.5625, 0.625, 0.6875, 0.75, 0.75]
        )
        trained.append(model.state_dict())
        reports.append(getattr(model.encoder, "report", None))
    plain, skipped = trained
    assert "of 32 samples ran with gradients" in reports[1][0].last
    words = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(plain[f"encoder.module.{words}"], encoder.state_dict()[words])  # it did learn
    for name, value in plain.items():
        torch.testing.assert_close(skipped[name], value, rtol=1e-8, atol=1e-10)
