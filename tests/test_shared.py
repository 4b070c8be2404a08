"""Masks over many processes stay in step, whatever one of them did alone, or all are told."""

import contextlib
import copy
import datetime
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import processes
from backdrop import Backdrop, Backdrop1d, Skip
from backdrop._core.draw import generator_for
from backdrop._shared import CHECK_EVERY, SharedDraw
from backdrop.distributed import Joined, agree
from backdrop.functional import draw_weight
from backdrop.schedules import LinearP

ROWS, P = 8, 0.75
DISTURBED = 2  # the step in which the last process does something of its own


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def leaf(rows=ROWS):
    return torch.zeros(rows, 2, requires_grad=True)


def gradient(layer, rows=ROWS):
    x = leaf(rows)
    layer(x).sum().backward()
    return x.grad[:, 0]


# What one process does that the others do not do, in one step; gives the mask of that step, if any.


def batch_of_another_size(layer):
    return gradient(layer, ROWS - 3)


def forward_more(layer):
    layer(leaf())
    return gradient(layer)


def forward_more_that_lives_on(layer):
    layer.kept = layer(leaf())
    return gradient(layer)


def step_without_gradients(layer):
    with torch.no_grad():
        layer(leaf())


def other_p(layer):
    layer.p = 0.5
    found = gradient(layer)
    layer.p = P
    return found


def no_mask(layer):
    layer.p = 0.0
    found = gradient(layer)
    layer.p = P
    return found


def evaluation(layer):
    layer.eval()
    layer(leaf())
    gradient(layer)
    with torch.no_grad():
        layer(leaf())
    layer.train()
    return gradient(layer)


def other_numbers(layer):
    torch.rand(5)
    if layer.generator is not None:
        torch.rand(7, generator=layer.generator)
    return gradient(layer)


def backward_more(layer):
    x = leaf()
    y = layer(x).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()
    return x.grad[:, 0]


def many_forward(layer):
    for _ in range(5):
        layer(leaf(3))
    return gradient(layer)


HARMFUL = {batch_of_another_size, step_without_gradients, other_p, no_mask}
HARMLESS = {forward_more, forward_more_that_lives_on, evaluation, other_numbers, backward_more, many_forward}
ALONE = {call.__name__: call for call in sorted(HARMFUL | HARMLESS, key=lambda call: call.__name__)}


def make(kind, **more):
    generator = None if kind == "agreed seed" else seeded(4)
    return Backdrop(P, group="world", generator=generator, exact=kind == "exact", **more)


def caught(call, *args):
    try:
        return call(*args), ""
    except RuntimeError as error:
        return None, str(error)


def _disturbed(rank, world):
    found = {}
    for kind in ("agreed seed", "generator", "exact"):
        for name, alone in ALONE.items():
            layer, seen, error = make(kind), [], None
            for step in range(2 * CHECK_EVERY + DISTURBED + 8):
                is_alone = step == DISTURBED and rank == world - 1
                part, message = caught(alone if is_alone else gradient, layer)
                seen.append(part)
                error = (step, message) if message else error
            found[kind, name] = seen, error, layer.step
    return found


def adds_up(parts, n):
    weights = torch.cat(parts)
    return weights.sum().item() == pytest.approx(n, rel=1e-5) and len(weights[weights != 0].unique()) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_processes_find_together_again_and_all_are_told(world):
    """Masks of later steps add up to N at once; what could have spoilt one is an error for all within 2 CHECK_EVERY."""
    everywhere = processes.run(_disturbed, world, world)
    for case in everywhere[0]:
        kind, name = case
        masks, errors, steps = zip(*(each[case] for each in everywhere), strict=True)
        at = [None if error is None else error[0] for error in errors]
        assert len(set(at)) == 1, (case, at)
        assert (at[0] is None) == (ALONE[name] in HARMLESS), (case, errors)
        assert len(set(steps)) == 1, (case, steps)
        wrong = [step for step, parts in enumerate(zip(*masks, strict=True)) if None in map(type_of, parts)]
        added = [
            step
            for step, parts in enumerate(zip(*masks, strict=True))
            if step not in wrong and adds_up(parts, world * ROWS)
        ]
        expected = set(range(len(masks[0]))) - {at[0]}
        expected -= set() if ALONE[name] in HARMLESS else {DISTURBED}
        assert expected <= set(added), (case, sorted(expected - set(added)))
        if at[0] is not None:
            assert DISTURBED < at[0] <= DISTURBED + 2 * CHECK_EVERY, (case, at)
            assert "process 0 drew mask" in errors[0][1]
            assert f"process {world - 1} drew" in errors[0][1]
            assert "agree anew" in errors[0][1]
        if kind != "agreed seed" and at[0] is None:
            one = make(kind)
            for parts in zip(*masks, strict=True):  # as one process with all samples
                assert torch.equal(torch.cat(parts), gradient(one, world * ROWS)), case


def type_of(part):
    return None if part is None else type(part)


def _calls(rank):
    """What is communicated over 100 steps, without and with sizes that are exchanged; operations on the store."""
    calls = []

    def counted(name, original):
        return lambda *args, **more: (calls.append(name), original(*args, **more))[1]

    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "all_gather_object", "barrier"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    found = []
    for uneven in (False, True):
        layers = nn.Sequential(*(Backdrop(P, group="world", uneven=uneven) for _ in range(3)))
        gradient(layers)
        ledger = layers[0]._across.agreed.ledger
        assert all(layer._across.agreed.ledger is ledger for layer in layers)
        before = ledger.window
        calls.clear()
        for _ in range(99):
            gradient(layers)
        found.append((list(calls), ledger.window - before))
    return found


def test_steps_communicate_as_little_as_before():
    for (even, checks), (uneven, others) in processes.run(_calls, 2):
        assert even == []  # no collective once the seed is known
        assert uneven == ["all_gather"] * 3 * 99  # sizes, once per mask
        assert 10 <= checks <= 99 // CHECK_EVERY  # for all masks together
        assert 10 <= others <= 99 // CHECK_EVERY


def _agreed(rank):
    """Steps that only one process restored, and agreeing anew on the way."""
    layer = make("generator")
    if rank:
        layer.step = 5
    found = [gradient(layer)]
    for _ in range(2):
        agree(nn.Sequential(layer))
        found += [gradient(layer), gradient(layer)]
    return found, layer.step


def test_agreeing_takes_the_largest_step_and_leaves_the_masks():
    (first, step), (second, other) = processes.run(_agreed, 2)
    assert step == other == 10
    one = make("generator")
    one.step = 5
    for parts in zip(first, second, strict=True):
        assert torch.equal(torch.cat(parts), gradient(one, 2 * ROWS))


def _uneven(rank):
    sizes = [[8, 3], [1, 9], [0, 4], [5, 0], [7, 7]]
    layer, seen = Backdrop(P, group="world", uneven=True), []
    for each in sizes * 8:
        x = torch.zeros(each[rank], 2, requires_grad=True)
        layer(x).sum().backward()
        seen.append(x.grad[:, 0])
    messages = []
    for change in ("p", "step", "exact"):
        if rank:
            setattr(layer, change, {"p": 0.5, "step": 1000, "exact": True}[change])
        with pytest.raises(RuntimeError, match=r"about to draw different masks.*the steps \d+, \d+") as error:
            gradient(layer)
        messages.append(str(error.value))
        layer.p, layer.exact = P, False
        seen += [gradient(layer), gradient(layer)]
    return seen, messages, layer.step


def test_uneven_batches():
    """Whatever the sizes, and with a disagreement told before the mask is drawn, on all alike."""
    (first, messages, step), (second, others, other) = processes.run(_uneven, 2)
    assert step == other >= 1000
    for parts in zip(first, second, strict=True):
        assert adds_up(parts, sum(map(len, parts)))
    for message, also in zip(messages, others, strict=True):
        assert message.split(": they are")[1].split("; here")[0] == also.split(": they are")[1].split("; here")[0]
    assert ["other settings" in message for message in messages] == [True, False, True]


class Watched:
    """The masks that layers draw, as they are drawn."""

    def __init__(self):
        self.seen = []
        original = SharedDraw.draw

        def draw(shared, mask):
            weight = original(shared, mask)
            self.seen.append(weight.flatten().clone())
            return weight

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(SharedDraw, "draw", draw)

    def take(self):
        seen, self.seen = self.seen, []
        return seen


def _train(rank, world):
    """Epochs that end unevenly, skipped steps, evaluation on one process, accumulated gradients."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    watched, found = Watched(), {}
    for kind, uneven in (("even", False), ("uneven", True)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), Backdrop(P, group="world", uneven=uneven))
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = LinearP(network, start=0.0, steps=4)
        epochs = []
        for _ in range(3):
            sizes = [ROWS] * (4 + 2 * rank) + [3 * uneven] * (rank == world - 1)
            with Join([Joined(model)]):
                for size in filter(None, sizes):
                    optimizer.zero_grad()
                    model(torch.randn(size, 2)).square().sum().backward()
                    optimizer.step()
            schedule.step()
            if rank == 0:
                model.eval()
                model.module(torch.randn(5, 2)).sum().backward()
                model.train()
            epochs.append((watched.take(), network[3].step))
        found["Join", kind] = epochs
        weights = [p.detach().clone() for p in model.parameters()]
        found["weights", kind] = weights
    for wrapper in ("DDP", "FSDP2"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), Backdrop(P, group="world"))
        if wrapper == "FSDP2":
            model = fully_shard(network, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
        else:
            model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=wrapper == "DDP")
        skipped = 0
        for step in range(3 * CHECK_EVERY):
            optimizer.zero_grad()
            for part in range(2):
                within = contextlib.nullcontext() if part or wrapper == "FSDP2" else model.no_sync()
                with within:
                    loss = model(torch.randn(ROWS, 2)).square().sum()
                    infinite = wrapper == "DDP" and step % 5 == 1 and rank == 0
                    scaler.scale(loss * (math.inf if infinite else 1.0)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            if rank == 0 and step % 3 == 0 and wrapper == "DDP":
                model.eval()
                model.module(torch.randn(5, 2))
                model.train()
        found[wrapper, "steps"] = watched.take(), network[3].step, skipped
    watched.patch.undo()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_training_with_all_that_comes_between(world):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        pytest.skip("this torch has no FSDP2 on a CPU")
    everywhere = processes.run(_train, world, world)
    for kind in ("even", "uneven"):
        for epochs in zip(*(each["Join", kind] for each in everywhere), strict=True):
            masks, steps = zip(*epochs, strict=True)
            assert len(set(steps)) == 1
            longest = max(map(len, masks))
            for step in range(longest):
                parts = [mask[step] for mask in masks if len(mask) > step]
                total = world * ROWS if kind == "even" else sum(map(len, parts))
                if len(parts) == world or kind == "uneven":  # even: those who joined count as if they were there
                    assert adds_up(parts, total)
        for each in everywhere:
            for a, b in zip(everywhere[0]["weights", kind], each["weights", kind], strict=True):
                torch.testing.assert_close(a, b)
    for wrapper in ("DDP", "FSDP2"):
        masks, steps, skipped = zip(*(each[wrapper, "steps"] for each in everywhere), strict=True)
        assert len(set(steps)) == 1
        assert steps[0] == 6 * CHECK_EVERY
        assert len(set(skipped)) == 1
        assert (skipped[0] > 0) == (wrapper == "DDP")
        assert len({tuple(torch.cat(parts).tolist()) for parts in zip(*masks, strict=True)}) > 5 * CHECK_EVERY
        for parts in zip(*masks, strict=True):
            assert adds_up(parts, world * ROWS)


def _waits(rank):
    """One calls the mask, the other has ended its training."""
    layer = Backdrop(P, group="world")
    message, steps = "", 0
    while not message and steps < (CHECK_EVERY if rank else 4 * CHECK_EVERY):
        _, message = caught(gradient, layer)
        steps += not message
        if rank == 0:
            layer._across.agreed.ledger.store.set_timeout(datetime.timedelta(seconds=1))
    return message, steps


def test_nobody_waits_for_ever():
    (message, steps), (_, few) = processes.run(_waits, 2)
    assert few == CHECK_EVERY
    assert steps <= 4 * CHECK_EVERY
    assert "waited 1 s for the process 1 of a group" in message
    assert "Joined" in message


def _skip(rank):
    """The engine draws in forward: an extra forward pass spoils one step at most, and all are told."""
    watched, found = Watched(), []
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    model = Skip(body, Backdrop(P, group="world"), when="always")
    for step in range(4 * CHECK_EVERY):
        x = torch.randn(ROWS, 2)
        if step == DISTURBED and rank:
            model(x)
            watched.take()
        _, message = caught(lambda x=x: model(x).sum().backward())
        drawn = watched.take()
        found += [message] if message else drawn
    watched.patch.undo()
    return found, model.mask.step


def test_skipping_over_many_processes():
    (first, step), (second, other) = processes.run(_skip, 2)
    assert step == other
    kinds = [(type(a), type(b)) for a, b in zip(first, second, strict=True)]
    assert kinds.count((str, str)) == 1
    assert kinds.count((torch.Tensor, torch.Tensor)) == len(kinds) - 1
    wrong = [i for i, parts in enumerate(zip(first, second, strict=True)) if type(parts[0]) is not str]
    wrong = [i for i in wrong if not adds_up([first[i], second[i]], 2 * ROWS)]
    assert wrong in ([], [DISTURBED])
    (told,) = (i for i, pair in enumerate(kinds) if pair == (str, str))
    assert DISTURBED < told <= DISTURBED + 2 * CHECK_EVERY


def _given_on_one(rank):
    found = []
    for more in ({"uneven": rank == 1}, {"generator": seeded(3) if rank else None}):
        with pytest.raises(ValueError, match="has to be given on all processes of the group or on none") as error:
            gradient(Backdrop(P, group="world", **more))
        found.append(str(error.value))
    return found


def test_what_only_one_process_has_is_an_error_on_all():
    """Else the others would wait for a message that never comes."""
    first, second = processes.run(_given_on_one, 2)
    assert first == second
    assert [message.split(" has")[0] for message in first] == ["uneven", "a generator"]
    assert all(message.endswith("but got it on 1 alone") for message in first)


def _without_backward(rank):
    """One process leaves a step out, which the others take."""
    layer, found = Backdrop(P, group="world", uneven=True), []
    for step in range(6):
        if rank and step == DISTURBED:
            found.append(caught(layer, leaf()))
        else:
            found.append(caught(gradient, layer))
    return [None if message else part for part, message in found], [message for _, message in found], layer.step


def test_a_step_that_one_process_leaves_out_is_noticed_where_sizes_are_exchanged():
    (first, messages, step), (second, others, other) = processes.run(_without_backward, 2)
    told = DISTURBED + 1
    assert [bool(message) for message in messages] == [bool(message) for message in others]
    assert [i for i, message in enumerate(messages) if message] == [told]
    assert f"at the steps {told}, {told - 1}" in messages[told]
    assert step == other
    for i in {0, 1, 4, 5}:
        assert adds_up([first[i], second[i]], 2 * ROWS)


# One process, in which a mask with a generator is the same function.


def test_a_mask_is_a_function_of_seed_and_step():
    masks = [gradient(layer) for layer in (make("generator"),) for _ in range(6)]
    assert len({tuple(mask.tolist()) for mask in masks}) > 3
    jumped = make("generator")
    jumped.step = 4
    assert torch.equal(gradient(jumped), masks[4])
    assert jumped.step == 5
    moved = make("generator")
    torch.rand(100, generator=moved.generator)
    assert [gradient(moved).tolist() for _ in range(6)] == [mask.tolist() for mask in masks]
    other = Backdrop(P, group="world", generator=seeded(5))
    assert [gradient(other).tolist() for _ in range(6)] != [mask.tolist() for mask in masks]


def test_steps_are_backward_passes():
    layer = make("generator")
    x = leaf()
    assert layer.step == 0
    y, z = layer(x), layer(x)  # two masks of one step
    assert layer.step == 0
    (y.sum() + z.sum()).backward()
    assert layer.step == 1
    layer(x)
    layer.eval()(x)
    assert layer.step == 1
    layer.train()
    with torch.no_grad():
        assert layer(x) is x
    assert layer.step == 2
    y = layer(x).sum()
    found = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1])  # one mask, however often one goes back from it
    assert torch.equal(found[0], found[2])
    assert layer.step == 3
    layer.p = 0.0
    layer(x).sum().backward()
    assert layer.step == 4
    assert repr(copy.deepcopy(nn.Sequential(Backdrop(group="world"))))  # a copy without a generator
    with pytest.raises(ValueError, match="step is for masks over many processes"):
        Backdrop().step = 3
    with pytest.raises(ValueError, match="step has to be at least 0, but got -1"):
        layer.step = -1
    with pytest.raises(TypeError, match="step has to be an integer"):
        layer.step = 1.5


def test_two_masks_of_one_generator_differ():
    generator = seeded(1)
    layers = [Backdrop(0.5, group="world", generator=generator) for _ in range(2)]
    masks = [[gradient(layer, 32).tolist() for _ in range(3)] for layer in layers]
    assert len({tuple(mask) for each in masks for mask in each}) == 6


def test_a_stored_layer_goes_on_with_its_step():
    layer = make("generator")
    for _ in range(3):
        gradient(layer)
    expected = gradient(layer)
    layer.step = 3
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.step == 3
    loaded.generator = seeded(4)
    assert torch.equal(gradient(loaded), expected)
    assert list(layer.state_dict()) == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_checkpoints(reentrant, skips):
    """Run again in the backward pass, a forward pass has the mask of the first time, and the step goes on once."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    found, steps = [], []
    for checkpointed in (False, True):
        mask = make("generator")
        model = Skip(body, mask, when="always") if skips else nn.Sequential(body, mask)
        grads = []
        for step in range(4):
            x = torch.randn(16, 2, dtype=torch.float64, generator=seeded(step)).requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            grads.append(torch.autograd.grad(y.square().sum(), x)[0] if not reentrant else back(y, x))
            steps.append(mask.step)
            if checkpointed and reentrant:
                mask.step = step + 1  # the first forward pass, without gradients, counts as well
        found.append(grads)
    if not reentrant:
        assert steps == [1, 2, 3, 4] * 2
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    for grads in found:
        assert len({tuple(g.flatten().tolist()) for g in grads}) == 4
        assert all((g == 0).all(1).any() for g in grads)


def back(y, x):
    y.square().sum().backward()
    return x.grad


def test_groups_of_positions():
    """With axis 0 and others every sample is a group of its own, also over many processes."""
    layer = Backdrop1d(0.5, group="world", generator=seeded(0), exact=True)
    x = torch.zeros(3, 2, 8, requires_grad=True)
    layer(x).sum().backward()
    assert (x.grad[:, 0] != 0).sum(1).tolist() == [4, 4, 4]
    assert torch.equal(x.grad[:, 0], x.grad[:, 1])


def test_inside_transforms():
    layer = make("generator")
    x = torch.randn(ROWS, 2)
    one = torch.func.grad(lambda x: layer(x).sum())(x)
    two = torch.func.grad(lambda x: layer(x).sum())(x)
    assert not torch.equal(one, two)
    assert one.sum().item() == pytest.approx(2 * ROWS)


def test_second_derivatives_use_the_drawn_mask():
    layer = Backdrop(0.5, group="world", generator=seeded(2))
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    weight = first.detach() / (3 * x.detach() ** 2)
    torch.testing.assert_close(second, 6 * x.detach() * weight**2)


def test_the_mask_comes_from_a_generator_of_its_own():
    layer, state = make("generator"), torch.get_rng_state()
    before = layer.generator.get_state()
    gradient(layer)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layer.generator.get_state(), before)
    seed = layer._across.agreed.seed
    own = generator_for(torch.device("cpu"), seed, 1, 0)
    assert torch.equal(gradient(layer), draw_weight((ROWS, 2), P, generator=own)[:, 0])


def test_agree_lets_them_exchange_again():
    layer = make("generator")
    gradient(layer)
    agree(nn.Sequential(layer))  # one process: nothing to agree on
    assert layer.step == 1
    with pytest.raises(TypeError, match="model has to be a DistributedDataParallel, but got Linear"):
        Joined(nn.Linear(1, 1))
