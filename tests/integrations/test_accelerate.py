"""The recipe for Accelerate in the documentation, against plain loops, in one process and in two."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import processes
from backdrop import Backdrop
from backdrop.distributed import all_gather
from backdrop.losses import RankStatisticLoss
from backdrop.schedules import LinearP

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

ROWS, BATCHES = 24, 4
UNEVEN = 3 * ROWS + 17  # the last batch of the first process has 12 rows, that of the second 5


def network(**more):
    torch.manual_seed(1)
    mask = Backdrop(0.8, generator=torch.Generator().manual_seed(3), group="world", **more)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), mask)


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS * BATCHES, 6, generator=generator)
    return x, (x[:, 0] + torch.randn(len(x), generator=generator) > 0).float()


class Recipe:
    """The loop of the documentation; notes the p that each batch was trained with."""

    def __init__(self, accumulate=1, batch=ROWS, rows=ROWS * BATCHES, **more):
        loaders = accelerate.DataLoaderConfiguration(even_batches=not more)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=loaders
        )
        model = network(**more)
        self.schedule = LinearP(model, start=0.0, steps=6)
        loader = DataLoader(TensorDataset(*(part[:rows] for part in data())), batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.accelerator.register_for_checkpointing(self.schedule)
        self.loss, self.seen = RankStatisticLoss(group="world"), []

    def train(self, epochs=1):
        for _ in range(epochs):
            for x, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.seen += self.schedule.get_last_p()
                    self.accelerator.backward(self.loss(self.model(x), labels))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.schedule.step()

    def weights(self):
        return self.accelerator.unwrap_model(self.model).state_dict()


def plain_loop(epochs, accumulate):
    """Without Accelerate or a schedule: p by its formula."""
    model, loss, steps, seen = network(), RankStatisticLoss(), 0, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(epochs):
        for i, (x, labels) in enumerate(DataLoader(TensorDataset(*data()), ROWS)):
            model[-1].p = 0.8 * min(steps / 6, 1)
            seen.append(model[-1].p)
            (loss(model(x), labels) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return model, seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_like_a_plain_loop(accumulate):
    recipe = Recipe(accumulate)
    recipe.train(epochs=2)
    plain, seen = plain_loop(2, accumulate)
    assert len(set(seen)) > 2
    assert recipe.seen == seen
    for name, value in plain.state_dict().items():
        assert torch.equal(recipe.weights()[name], value), name


def test_the_schedule_is_stored_with_the_rest(tmp_path):
    whole = Recipe()
    whole.train()
    whole.accelerator.save_state(str(tmp_path))
    resumed = Recipe()
    resumed.accelerator.load_state(str(tmp_path))
    for recipe in (whole, resumed):
        recipe.seen.clear()
        recipe.train()
    assert resumed.seen == whole.seen
    assert resumed.seen == pytest.approx([0.8 * 4 / 6, 0.8 * 5 / 6, 0.8, 0.8])


def two(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    recipe = Recipe(batch=ROWS // 2)
    assert recipe.accelerator.num_processes == 2
    recipe.train(epochs=2)
    x = torch.full((2, 1), float(rank + 1), requires_grad=True)
    scores = all_gather(x)
    scores.square().sum().backward()
    cut = recipe.accelerator.gather(x)
    found = recipe.seen, recipe.weights(), scores.detach(), x.grad, cut.requires_grad
    uneven = Recipe(batch=ROWS // 2, rows=UNEVEN, uneven=True)
    uneven.train(epochs=3)
    return *found, uneven.weights()


def test_two_processes_train_like_one():
    """Accelerate deals batches out in turn, so batches of 12 for each of two processes are those of 24 for one."""
    one = Recipe()
    one.train(epochs=2)
    (seen, weights, scores, grad, graph, last), (other_seen, other, *_, other_last) = processes.run(two, 2)
    assert seen == other_seen == one.seen
    for name, value in one.weights().items():
        assert torch.equal(weights[name], other[name])
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
    uneven = Recipe(rows=UNEVEN, uneven=True)
    uneven.train(epochs=3)
    for name, value in uneven.weights().items():
        assert torch.equal(last[name], other_last[name])
        torch.testing.assert_close(last[name], value, rtol=1e-4, atol=1e-6)
    assert scores.flatten().tolist() == [1, 1, 2, 2]
    assert grad.flatten().tolist() == [4, 4]  # both processes computed a loss with our rows
    assert not graph  # what Accelerate gathers has no gradient
