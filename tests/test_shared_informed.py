"""One choice by gradients over many processes, compared with one process that has the whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import processes
from backdrop import Backdrop, Backdrop2d, Skip, insert
from backdrop.distributed import Joined
from backdrop.losses import rank_statistic_loss
from skipping import captures

STEPS = 4
CASES = {
    "samples": ((12, 3), {"p": 0.75, "dims": 0}),
    "samples exact": ((12, 3), {"p": 0.75, "dims": 0, "exact": True}),
    "samples without a floor": ((12, 3), {"p": 0.5, "dims": 0, "exact": True, "floor": 0.0, "scale": "eq1"}),
    "scores": ((12,), {"p": 0.5, "dims": 0, "exact": True}),
    "scores without a floor": ((30, 1), {"p": 0.8, "dims": 0, "exact": True, "floor": 0.0}),
    "one channel": ((6, 1, 5, 4), {"p": 0.8, "dims": (0, 2, 3), "exact": True}),
    "positions": ((6, 2, 5, 4), {"p": 0.8, "dims": (0, 2, 3), "exact": True}),
    "patches": ((6, 2, 7), {"p": 0.5, "dims": (2, 0), "patch": 3}),
    "shared positions": ((6, 2, 5, 4), {"p": 0.8, "dims": (2, 3), "patch": 2, "exact": True}),
    "shared channels": ((6, 9), {"p": 0.6, "dims": 1}),
    "nothing dropped": ((6, 3), {"p": 0.0, "dims": 0}),
}


def seeded():
    return torch.Generator().manual_seed(4)


def make(settings, **more):
    return Backdrop(**settings, choose="gradient", group="world", generator=seeded(), **more)


def gradients(step, shape):
    """Some far larger than others, the same on all processes; zero in one step."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randn(shape, generator=generator, dtype=torch.float64)
    return found.pow(3) * (step != 2)


SPLITS = {  # where the parts of two and of three processes end
    "one": ([1, None], [1, 2, None]),
    "first empty": ([0, None], [0, 1, None]),
    "others empty": ([None, None], [1, None, None]),
}


def ours(x, rank, world, split):
    if split == "even" or world == 1:
        return x.tensor_split(world)[rank]
    ends = [0, *(len(x) if end is None else end for end in SPLITS[split][world - 2])]
    return x[ends[rank] : ends[rank + 1]]


def steps(layer, shape, rank, world, split):
    found = []
    for step in range(STEPS):
        grad = ours(gradients(step, shape), rank, world, split)
        x = torch.zeros_like(grad, requires_grad=True)
        y = layer(x)
        y.backward(grad, retain_graph=True)
        first, x.grad = x.grad, None
        y.backward(grad)
        assert torch.equal(first, x.grad)
        found.append(first)
    return found


def _chosen(rank, world):
    found = {}
    for name, (shape, settings) in CASES.items():
        for split in ("even", *SPLITS):
            found[name, split] = steps(make(settings, uneven=split != "even"), shape, rank, world, split)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_one_choice_over_all_processes(world):
    parts = processes.run(_chosen, world, world)
    for name, split in parts[0]:
        shape, settings = CASES[name]
        alone = steps(make(settings), shape, 0, 1, split)
        for step in range(STEPS):
            together = torch.cat([part[name, split][step] for part in parts])
            torch.testing.assert_close(together, alone[step], msg=lambda m, n=name, s=split: f"{n}, {s}: {m}")
        assert name == "nothing dropped" or any((g == 0).any() and (g != 0).any() for g in alone)


def network(choose="gradient"):
    torch.manual_seed(0)
    mask = Backdrop(0.75, exact=True, choose=choose, group="world", generator=seeded())
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1), mask).double()


def train(model, rank, world, wrap):
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x, noise = torch.randn(24, 5, generator=generator).double(), torch.randn(24, generator=generator)
        labels = (x[:, 0] + noise > 1).long()
        x, labels = x.tensor_split(world)[rank], labels.tensor_split(world)[rank]
        model.zero_grad()
        rank_statistic_loss(wrap(x).flatten(), labels, group="world").backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def _trained(rank, world):
    model = network()
    found = {"DDP": train(model, rank, world, DistributedDataParallel(model))}
    for at_once in (None, 3):
        model = network()
        skip = Skip(model[:3], model[3], when="always", at_once=at_once)
        found[f"Skip {at_once}"] = train(model, rank, world, DistributedDataParallel(skip))
        assert "chosen by gradients worth" in skip.report[0].last, skip.report
    model = network()
    parallel = DistributedDataParallel(model)
    found["checkpoint"] = train(model, rank, world, lambda x: checkpoint(parallel, x, use_reentrant=False))
    return found


@captures
@pytest.mark.parametrize("world", [2, 3])
def test_training_over_processes_is_training_with_the_whole_batch(world):
    alone = network()
    expected = train(alone, 0, 1, alone)
    for part in processes.run(_trained, world, world, timeout=120):
        for name, found in part.items():
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def positions(rank, world, skips):
    torch.manual_seed(0)
    mask = Backdrop2d(0.9, exact=True, choose="gradient", group="world", generator=seeded())
    below = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()).double()
    model = Skip(below, mask, when="always") if skips else nn.Sequential(below, mask)
    total = 0.0
    for step in range(STEPS):
        x = gradients(step, (6, 1, 10, 10)).tensor_split(world)[rank]
        below.zero_grad()
        model(x).exp().sum().backward()
        total = total + below[0].weight.grad
    return total


def _positions(rank, world):
    return positions(rank, world, skips=True)


@captures
def test_positions_in_the_engine():
    torch.testing.assert_close(sum(processes.run(_positions, 2, 2)), positions(0, 1, skips=False))


class Nested(nn.Module):
    def forward(self, x):
        return {"a": x[:, :2] * 2, "b": x[:, 2:].exp()}


def nested(rank, world):
    mask = Backdrop(0.75, exact=True, choose="gradient", group="world", generator=seeded())
    model, found = insert(nn.Sequential(Nested()), {"0": mask}), []
    for step in range(STEPS):
        x = gradients(step, (12, 4)).tensor_split(world)[rank].requires_grad_()
        out = model(x)
        (out["a"].pow(2).sum() + out["b"].sum()).backward()
        found.append(x.grad)
    return found


def _nested(rank, world):
    return nested(rank, world)


def test_one_choice_for_all_outputs_of_a_module():
    parts = processes.run(_nested, 2, 2)
    for step, alone in enumerate(nested(0, 1)):
        torch.testing.assert_close(torch.cat([part[step] for part in parts]), alone)
        assert (alone != 0).any(1).sum() == 3


def _refusals(rank, world):
    said = []

    def tell(call):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))

    mask = Backdrop(0.5, choose="gradient", group="world", generator=seeded())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 1), mask))
    for call in (
        lambda: Joined(model).join_hook(),
        lambda: torch.func.grad(lambda x: mask(x).sum())(torch.ones(4, 3)),
        lambda: mask.draw_weight(torch.ones(4, 3)),
    ):
        tell(call)
    other = Backdrop(0.5, choose="gradient" if rank else "uniform", group="world", generator=seeded(), dims=(0, 1))

    def go_on():
        for _ in range(40):
            other(torch.ones(4, 3, requires_grad=True)).sum().backward()

    tell(go_on)
    return said


def test_what_is_refused_or_noticed():
    for said in processes.run(_refusals, 2, 2):
        for text, part in zip(said, ["1 chooses by", "transforms", "choose_weight", "chosen by gradient"], strict=True):
            assert part in text


def test_copies_and_changes():
    mask = make({"p": 0.5, "dims": 0})
    assert "group=world" in repr(copy.deepcopy(mask))
    assert "choose='gradient'" in repr(mask)
    assert (mask.choose_weight(torch.randn(8, 2)) > 0).any()
    mask.group = None
    assert (mask.choose_weight(torch.randn(8, 2)) > 0).any()
