"""Several processes against one process that has all the data: gathering, losses, masks, what happens when one dies."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import processes
from backdrop import Backdrop, Backdrop2d, Skip, distributed
from backdrop.distributed import all_gather
from backdrop.graph import cost
from backdrop.losses import (
    average_precision_loss,
    class_distance_loss,
    concordance_loss,
    ndcg_loss,
    partial_auc_loss,
    rank_statistic_loss,
    soft_f_beta_loss,
    spearman_loss,
    squared_hinge_auc_loss,
)

LOSSES = {
    "rank statistic": lambda x, y, **more: rank_statistic_loss(x[:, 0], y, **more),
    "squared hinge": lambda x, y, **more: squared_hinge_auc_loss(x[:, 0], y, **more),
    "class distance": lambda x, y, **more: class_distance_loss(x, y, distance=1, **more),
    "soft F-beta": lambda x, y, **more: soft_f_beta_loss(x[:, 0].sigmoid(), y, **more),
}
WARM = {"temperature": 0.3}
RANKED = {  # losses on ranks, without masks
    "average precision": lambda x, y, **more: average_precision_loss(x[:, 0], y, **WARM, **more),
    "NDCG": lambda x, y, **more: ndcg_loss(x[:, 0], y, **WARM, **more),
    "partial AUC": lambda x, y, **more: partial_auc_loss(x[:, 0], y, max_fpr=0.3, **WARM, **more),
    "Spearman": lambda x, y, **more: spearman_loss(x[:, 0], x[:, 1], **WARM, **more),
    "concordance": lambda x, y, **more: concordance_loss(x[:, 0], x[:, 1].round(decimals=1), y, **WARM, **more),
}
EVERY = LOSSES | RANKED
SIZES = {"even": [4, 4, 4], "uneven": [5, 2, 6], "one empty": [7, 0, 3]}
MASKS = {  # how the layer is made for one process and for many
    "no mask": None,
    "Bernoulli": {"p": 0.5},
    "exact": {"p": 0.7, "exact": True},
    "one kept": {"p": 0.97, "exact": True},  # so all but one process keep none
}
FSDP_ON_A_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def batches(sizes):
    """The data of each process, the same wherever this is called."""
    generator = torch.Generator().manual_seed(1)
    n = sum(sizes)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    labels, weight = torch.arange(n) % 2, torch.rand(n, generator=generator, dtype=torch.float64)
    return [each.split(sizes) for each in (x, labels, weight)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def mask_for(settings, **more):
    return (
        nn.Identity() if settings is None else Backdrop(**settings, generator=torch.Generator().manual_seed(3), **more)
    )


class Masked(nn.Module):
    """A network and a mask behind it, with the parameters of the network alone."""

    def __init__(self, body, mask):
        super().__init__()
        self.body, self.mask = body, mask

    def forward(self, x):
        return self.mask(self.body(x))


class Rows(nn.Module):
    """As many networks do it; an error for a batch of no samples."""

    def forward(self, x):
        return x.view(len(x), -1)


def three_steps(model, loss, x, labels, weight):
    """Losses and gradients of three steps, so that masks differ."""
    found = []
    for _ in range(3):
        model.zero_grad()
        value = loss(model(x), labels, weight=weight)
        value.backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in model.parameters()]
        found.append((value.detach(), grads))
    return found


def on_one_process(sizes, mask, loss):
    x, labels, weight = (torch.cat(each) for each in batches(sizes))
    return three_steps(Masked(network(), mask_for(MASKS[mask], group="world")), EVERY[loss], x, labels, weight)


def sizes_for(kind, world):
    return SIZES[kind][:world]


def _train(rank, world, wrapper, cases):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for kind, mask, loss in cases:
        sizes = sizes_for(kind, world)
        layer = mask_for(MASKS[mask], group="world", uneven=kind != "even")
        if wrapper == "Skip":
            cost.pays = lambda spent, saved: True
            layer, body = nn.Identity(), Skip(nn.Sequential(network(), Rows()), layer)
        else:
            body = network()
        model = Masked(body, layer)
        if wrapper == "FSDP2":
            mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
            fully_shard(model.body, mesh=mesh)
            model = fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        over_group = lambda *args, loss=loss, **more: EVERY[loss](*args, group="world", **more)  # noqa: E731
        found[kind, mask, loss] = three_steps(model, over_group, *(each[rank] for each in batches(sizes)))
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "Skip"])
def test_many_processes_train_like_one(world, wrapper):
    if wrapper == "FSDP2" and not FSDP_ON_A_CPU:
        pytest.skip("this torch has no FSDP2 on a CPU")
    cases = [
        (kind, mask, loss)
        for kind in SIZES
        for mask in MASKS
        for loss in LOSSES
        if (wrapper == "DDP" or (kind, mask) in {("even", "exact"), ("uneven", "Bernoulli"), ("even", "one kept")})
        and not (wrapper == "Skip" and mask == "no mask")
    ]
    if wrapper == "DDP":
        cases += [(kind, "no mask", loss) for kind in SIZES for loss in RANKED]
    everywhere = processes.run(_train, world, world, wrapper, cases)
    for case in cases:
        expected = on_one_process(sizes_for(case[0], world), *case[1:])
        for rank in range(world):
            for (value, grads), (right, rights) in zip(everywhere[rank][case], expected, strict=True):
                torch.testing.assert_close(value, right, rtol=1e-10, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")
                torch.testing.assert_close(grads, rights, rtol=1e-6, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")


def _gather(rank, sizes):
    found = []
    for same_loss in (False, True):
        x = (torch.arange(sizes[rank] * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
        y = all_gather(x, same_loss=same_loss)
        ours = 1.0 if same_loss else rank + 1.0  # the loss of each process is another one
        ((ours * torch.arange(1.0, 1 + y.numel()).view_as(y)) * y).sum().backward()
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize("sizes", [[2, 2], [3, 0, 1], [0, 2]])
def test_all_gather(sizes):
    everywhere = processes.run(_gather, len(sizes), sizes)
    together = torch.cat([torch.arange(n * 2.0).view(-1, 2) + 100 * rank for rank, n in enumerate(sizes)])
    places = torch.arange(1.0, 1 + together.numel()).view_as(together).split(sizes)
    for rank, (gathered, grad, gathered_too, grad_too) in enumerate(everywhere):
        assert torch.equal(gathered, together)
        assert torch.equal(gathered_too, together)
        assert torch.equal(grad, places[rank] * sum(range(1, 1 + len(sizes))))
        assert torch.equal(grad_too, places[rank] * len(sizes))


def _count(rank):
    """How often gradients are reduced, and what else is communicated, in each of four steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    buckets, calls = [], []

    def count(state, bucket):
        buckets.append(1)
        return allreduce_hook(None, bucket)

    def counted(name, original):
        return lambda *args, **more: (calls.append(name), original(*args, **more))[1]

    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "all_gather_object"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    found = []
    for mask, loss in (
        (None, None),
        (Backdrop(0.9, group="world"), None),
        (Backdrop(0.9, group="world", exact=True), LOSSES["rank statistic"]),
    ):
        model = DistributedDataParallel(Masked(network(), mask or nn.Identity()), bucket_cap_mb=1e-5)
        model.register_comm_hook(None, count)
        x, labels, _ = (each[rank] for each in batches([4, 4]))
        for _ in range(4):
            buckets.clear()
            calls.clear()
            y = model(x)
            (loss(y, labels, group="world") if loss else y.square().mean()).backward()
            found.append((len(buckets), sorted(calls)))
    return found


def test_nothing_more_is_communicated_than_is_needed():
    for found in processes.run(_count, 2):
        plain, masked, with_loss = found[:4], found[4:8], found[8:]
        (_, reductions) = plain[-1]  # of gradients, one for each bucket
        assert len(reductions) > 1
        assert set(reductions) == {"all_reduce"}
        assert [calls for _, calls in masked[1:]] == [reductions] * 3  # nothing more once the seed is known
        assert masked[0][1].count("all_gather") == 1
        assert [calls for _, calls in with_loss[1:]] == [["all_gather", "all_gather", *reductions]] * 3  # sizes, scores
        assert all(buckets == len(reductions) for buckets, _ in [*masked[1:], *with_loss[1:]])


def _draw(rank, steps):
    layers = [Backdrop(0.9, group="world"), Backdrop(0.9, group="world", scale="eq1")]
    shared = Backdrop2d(0.5, shared=True, group="world")
    x = torch.zeros(3, 1, requires_grad=True)
    weights = [torch.stack([layer.draw_weight(x)[:, 0] for _ in range(steps)]) for layer in layers]
    image = torch.zeros(1 + rank, 2, 4, 4, requires_grad=True)
    return [*weights, torch.stack([shared.draw_weight(image) for _ in range(5)])]


def test_one_mask_over_all_processes():
    """Never empty as a whole, though often on one process; one count for all."""
    everywhere = processes.run(_draw, 2, 300)
    for index, factor in ((0, 1.0), (1, 0.1)):
        weights = torch.cat([each[index] for each in everywhere], 1)  # (steps, samples of both)
        kept = (weights != 0).sum(1)
        assert kept.min() == 1
        assert kept.max() > 1
        torch.testing.assert_close(weights.amax(1), factor * 6 / kept)
        assert ((weights == 0) | (weights == weights.amax(1, keepdim=True))).all()
        assert ((weights[:, :3] != 0).sum(1) == 0).any()
        # Each of the six is kept equally often: 5 standard deviations, an error rate below 1e-6.
        share = (weights != 0).double().mean(0)
        assert (share - share.mean()).abs().max() < 5 * (share.mean() / 300) ** 0.5
    assert torch.equal(everywhere[0][2], everywhere[1][2])  # the same positions on all


def _message(call, *args, **more):
    try:
        call(*args, **more)
    except ValueError as error:
        return str(error)
    return ""


def _disagree(rank):
    x = torch.zeros(2 + rank, 1, requires_grad=True)
    seeded = Backdrop(0.5, group="world", generator=torch.Generator().manual_seed(rank))
    return [
        _message(Backdrop(0.5, group="world"), x),
        _message(seeded, x[:2]),
        _message(rank_statistic_loss, x[:2, 0], torch.full((2,), rank), group="world"),  # one has all the positives
        _message(rank_statistic_loss, x[:2, 0], torch.full((2,), 3 * rank), group="world"),
        _message(class_distance_loss, x, torch.zeros(2 + rank, dtype=torch.long), distance=1, group="world"),
    ]


def test_processes_that_disagree():
    for sizes, seeds, fine, labels, alone in processes.run(_disagree, 2):
        assert "sizes 2, 3" in sizes
        assert "uneven=True" in sizes
        assert "seeded alike" in seeds
        assert fine == ""
        assert "labels has to hold 0 and 1" in labels
        assert "one class only" in alone


def _die(rank):
    layer = Backdrop(0.5, group="world")
    x = torch.zeros(2, requires_grad=True)
    layer(x)
    if rank == 1:
        os._exit(7)
    with pytest.raises(RuntimeError):
        rank_statistic_loss(layer(x), torch.tensor([0, 1]), group="world")
    os._exit(8)  # without the good-bye, for which all are needed


def test_a_process_that_dies_is_an_error_for_the_others():
    assert processes.run(_die, 2, timeout=20) == [None, None]


def _deep(rank):
    import copy

    layer = Backdrop(0.5, group=dist.group.WORLD)
    x = torch.zeros(8, 1, requires_grad=True)
    layer(x)
    copied = copy.deepcopy(nn.Sequential(nn.Linear(1, 1), layer))
    return repr(copied[1]), copied[1].draw_weight(x)


def test_copies_keep_the_group():
    for text, weight in processes.run(_deep, 2):
        assert text == "Backdrop(p=0.5, group=...)"
        assert weight.shape == (8, 1)


def _compiled(rank):
    from torch.nn.parallel import DistributedDataParallel

    found = []
    x, labels, _ = (each[rank] for each in batches([4, 4]))
    for compiled in (False, True):
        model = DistributedDataParallel(Masked(network(), mask_for(MASKS["Bernoulli"], group="world")))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        rank_statistic_loss(run(x)[:, 0], labels, group="world").backward()
        found.append([p.grad for p in model.parameters()])
    return found


def test_compiled_models():
    for eager, compiled in processes.run(_compiled, 2):
        torch.testing.assert_close(eager, compiled, rtol=1e-12, atol=0)


def test_one_process_alone():
    """Without torch.distributed a group is this process."""
    x = torch.randn(6, 2, requires_grad=True)
    assert all_gather(x) is x
    alone, grouped = (Backdrop(0.5, group=g) for g in (None, "world"))
    drawn = []
    for layer in (alone, grouped):
        torch.manual_seed(0)
        drawn.append(layer.draw_weight(x))
    assert torch.equal(*drawn)
    assert grouped.eval()(x) is x
    labels = torch.arange(6) % 2
    for loss in EVERY.values():
        assert torch.equal(loss(x, labels, group="world"), loss(x, labels))
    assert distributed.resolve("world") is None
