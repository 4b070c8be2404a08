"""Whole models: residual and branching networks, copies and storage, compilation, processes, the report."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import processes
from backdrop import Backdrop, Backdrop2d, Skip, skip_blocked
from backdrop.graph import cost
from backdrop.schedules import LinearP
from backdrop.skip import Report
from foreign import import_or_skip
from skipping import ChannelNorm, assert_close, assert_same_gradients, captures, check, ran_windows, step

pytestmark = captures


OTHER_MASK = "another mask ends here"


def network(mask=None):
    stage = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *stage, mask or Backdrop2d(0.95), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).double()


def images(count=2, size=24):
    return torch.randn(count, 1, size, size, dtype=torch.float64)


def with_masks(model, names, p=0.9):
    """The model with a mask behind each of these children."""
    for name in names:
        setattr(model, name, nn.Sequential(getattr(model, name), Backdrop2d(p)))
    return model


def eval_norms(model):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return model


def test_resnet():
    timm = import_or_skip("timm")
    model = eval_norms(
        with_masks(timm.create_model("resnet18", num_classes=5).double(), ["layer1", "layer2", "layer3"])
    )
    fast = check(model, torch.randn(2, 3, 65, 70, dtype=torch.float64))
    assert [ran_windows(fast, i) for i in range(3)] == [True, True, True]
    ends = [[], [("layer1.1", OTHER_MASK)], [("layer2.1", OTHER_MASK)]]
    assert [entry.kept for entry in fast.skip_report] == ends
    assert "conv1" in fast.skip_report[0].skipped


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
def test_resnet_with_batch_statistics(policy):
    """Everything is skipped, outputs and running statistics are plain, and the last stage's gradients too."""
    timm = import_or_skip("timm")
    model = with_masks(timm.create_model("resnet18", num_classes=5).double(), ["layer1", "layer2"])
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    fast = skip_blocked(model, statistics=policy, when="always")
    a, b = step(model, x), step(fast, x)
    assert_close(a.output, b.output, 1e-10)
    assert [ran_windows(fast, i) for i in range(2)] == [True, True]
    for name, buffer in a.buffers.items():
        assert_close(buffer.double(), b.buffers[name].double(), 1e-10, name)
    for name, grad in a.parameters.items():
        if name.startswith(("layer3", "layer4", "fc")):
            assert_close(grad, b.parameters[name], 1e-10, name)


def test_vgg():
    timm = import_or_skip("timm")
    features = timm.create_model("vgg11", num_classes=5).features.double()
    model = nn.Sequential(*features[:6], Backdrop2d(0.98), *features[6:11], Backdrop2d(0.9), *features[11:])
    fast = check(model, torch.randn(1, 3, 64, 70, dtype=torch.float64))
    assert [ran_windows(fast, i) for i in range(2)] == [True, True]


def test_convnext():
    timm = import_or_skip("timm")
    model = timm.create_model("convnext_tiny", num_classes=5, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)).double()
    for i in (0, 1):
        model.stages[i] = nn.Sequential(model.stages[i], Backdrop2d(0.9))
    fast = check(model, torch.randn(2, 3, 64, 70, dtype=torch.float64))
    assert [ran_windows(fast, i) for i in range(2)] == [True, True]
    assert [entry.kept for entry in fast.skip_report] == [[], [("stages.0.1", OTHER_MASK)]]


def test_position_and_sample_masks_together():
    stage = [nn.Conv2d(1, 4, 3, padding=1), ChannelNorm(4, 2), nn.GELU(), nn.MaxPool2d(2)]
    head = [nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)]
    model = nn.Sequential(*stage, Backdrop2d(0.9), *head, Backdrop(0.7)).double()
    fast = check(model, images(8))
    assert [entry.drops for entry in fast.skip_report] == ["positions", "samples"]


class Around(nn.Module):
    """A way around the mask: what enters it also gets gradient from elsewhere."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 2, 3, padding=1) for n in (1, 2, 2))
        self.mask = Backdrop2d(0.9)

    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        return self.mask(y) + y + self.c(x)


def test_what_also_goes_around_the_mask_is_left_alone():
    fast = check(Around().double(), images())
    assert fast.skip_report[0].last == "plain: its result goes elsewhere too: add uses it"


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(6, 2, 3)
        self.mask = Backdrop2d(0.95)

    def forward(self, x, scale=None, bias: float = 0.5):
        x = self.down(x)
        y = torch.relu(self.deep(x)) * (1.0 if scale is None else scale)
        return self.mask(self.up(torch.cat([x, y], 1))) + bias


def test_joined_ways_and_other_arguments():
    model = Unet().double()
    check(model, images())
    fast, x = skip_blocked(model, when="always"), images()
    for kwargs in ({}, {"bias": 2.0}, {"scale": torch.tensor(2.0)}):
        torch.manual_seed(0)
        expected = model(x, **kwargs)
        torch.manual_seed(0)
        assert_close(expected, fast(x, **kwargs), 1e-12)


class Unfollowable(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return self.body(x) if x.sum() < 1e9 else x


def test_the_largest_parts_that_can_be_followed():
    fast = check(Unfollowable(), images())
    assert ran_windows(fast)
    assert fast.skip_report[0].mask == "body.5"
    assert fast.skip_report[0].skipped[0] == "body.0"


def test_state_dict_goes_both_ways():
    plain, other = network(), network()
    fast = skip_blocked(plain, when="always")
    assert type(fast) is type(plain)
    assert list(fast.state_dict()) == list(plain.state_dict())
    other.load_state_dict(fast.state_dict())
    fast.load_state_dict(other.state_dict(), assign=True)
    x = images()
    assert_same_gradients(step(other, x), step(fast, x))


def test_the_original_is_left_alone():
    plain = network()
    before = copy.deepcopy(plain.state_dict())
    fast = skip_blocked(plain, when="always")
    step(fast, images())
    assert "forward" not in plain.__dict__
    assert not hasattr(plain, "skip_report")
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    assert all(parameter.grad is None for parameter in plain.parameters())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch"])
def test_copies_and_storage(way):
    fast, x = skip_blocked(network(), when="always"), images()
    step(fast, x)
    if way == "torch":
        buffer = io.BytesIO()
        torch.save(fast, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = way(fast)
    with torch.no_grad():
        twin[0].weight.zero_()  # not that of the original
    assert fast[0].weight.any()
    plain = network()
    plain.load_state_dict(twin.state_dict())
    assert_same_gradients(step(plain, x), step(twin, x))
    assert ran_windows(twin)


def test_train_and_eval_and_schedules():
    model, x = network(Backdrop2d(0.95)), images()
    fast = skip_blocked(model, when="always")
    fast.eval()
    state = torch.get_rng_state()
    assert torch.equal(fast(x), model.eval()(x))
    assert torch.equal(torch.get_rng_state(), state)
    fast.train()
    model.train()
    schedules = [LinearP(each, start=0.0, end=0.9, steps=2) for each in (model, fast)]
    for _ in range(3):
        assert_same_gradients(step(model, x), step(fast, x))
        for schedule in schedules:
            schedule.step()
    assert fast[5].p == pytest.approx(0.9)


def test_p_as_a_tensor():
    check(network(Backdrop2d(torch.tensor(0.95))), images())
    check(nn.Sequential(nn.Linear(3, 2), Backdrop(torch.tensor(0.5), exact=True)).double(), torch.randn(9, 3).double())


CHANGES = {
    "p": lambda model, x: (setattr(model[5], "p", 0.9), x)[1],
    "p as a tensor": lambda model, x: (model[5].p.fill_(0.9), x)[1],
    "inputs": lambda model, x: x[..., 1:],
    "mode": lambda model, x: (model[1].eval(), x)[1],
    "layer": lambda model, x: (model.__setitem__(1, nn.Tanh()), x)[1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_ran_plain_may_be_skipped_after_a_change(change, monkeypatch):
    """Whether skipping pays is not asked again in every step, but whenever the answer may be another one."""
    p = torch.tensor(0.95) if change == "p as a tensor" else 0.95
    model, x = network(Backdrop2d(p)), images()
    if change == "mode":
        model[1] = nn.Dropout(0.5)
    fast = skip_blocked(model)
    monkeypatch.setattr(cost, "pays", lambda spent, saved: False)
    for _ in range(3):
        assert_same_gradients(step(model, x), step(fast, x))
        assert "plain" in fast.skip_report[0].last
    monkeypatch.setattr(cost, "pays", lambda spent, saved: True)
    y, x = CHANGES[change](model, x), CHANGES[change](fast, x)
    assert_same_gradients(step(model, y), step(fast, x))
    assert ran_windows(fast)


def test_checkpointing_around_it():
    fast, model, x = skip_blocked(network(), when="always"), network(), images()
    model.load_state_dict(fast.state_dict())
    gradients = []
    for run in (lambda: model(x), lambda: checkpoint(fast, x, use_reentrant=False)):
        torch.manual_seed(0)
        run().square().sum().backward()
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, fast)]
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, 1e-10)


def test_torch_func_runs_the_plain_model():
    fast, model, x = skip_blocked(network(), when="always"), network(), images(1)
    model.load_state_dict(fast.state_dict())

    def loss(each, x):
        return lambda parameters: torch.func.functional_call(each, parameters, (x,)).square().sum()

    grads = []
    for each in (model, fast):
        torch.manual_seed(0)
        grads.append(torch.func.grad(loss(each, x))(dict(each.named_parameters())))
    for name in grads[0]:
        assert_close(grads[0][name], grads[1][name], 1e-10, name)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_models():
    torch._dynamo.reset()
    model, x = network(), images()
    fast = torch.compile(skip_blocked(model, when="always"), backend="aot_eager")
    assert_same_gradients(step(model, x), _without_prefix(step(fast, x)))
    outer = torch.compile(nn.Sequential(skip_blocked(model, when="always"), nn.Softmax(1)), backend="aot_eager")
    a, b = step(nn.Sequential(model, nn.Softmax(1)), x), _without_prefix(step(outer, x))
    assert_same_gradients(a, b)


def _without_prefix(result):
    result.parameters = {name.removeprefix("_orig_mod."): grad for name, grad in result.parameters.items()}
    return result


def _train(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    calls = []

    def count(state, bucket):
        calls.append(1)
        return allreduce_hook(None, bucket)

    torch.manual_seed(0)
    model = network()
    found = []
    for each in (copy.deepcopy(model), skip_blocked(model, when="always")):
        calls.clear()
        parallel = DistributedDataParallel(each)
        parallel.register_comm_hook(None, count)
        torch.manual_seed(rank)
        parallel(images()).square().sum().backward()
        found.append(([parameter.grad for parameter in each.parameters()], len(calls)))
    return found


def test_distributed_data_parallel():
    for (plain, reductions), (fast, as_many) in processes.run(_train, 2):
        assert reductions == as_many
        for a, b in zip(plain, fast, strict=True):
            assert_close(a, b, 1e-10)


def test_report():
    fast = skip_blocked(network(), when="always")
    assert str(fast.skip_report) == "no training step was run yet"
    step(fast, images())
    assert isinstance(fast.skip_report, Report)
    assert str(fast.skip_report).splitlines()[:2] == ["5: drops positions", "  skipped: 0, 1, 2, 3, 4"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: skip_blocked(nn.Linear(2, 2)), ValueError, "no Backdrop layer"),
        (lambda: skip_blocked(Backdrop(0.5)), ValueError, "what lies before it"),
        (lambda: skip_blocked("model"), TypeError, r"torch\.nn\.Module, but got str"),
        (
            lambda: skip_blocked(network(), statistics="none"),
            ValueError,
            "statistics has to be one of 'exact'",
        ),
        (lambda: skip_blocked(network(), when="never"), ValueError, "when has to be one of 'pays'"),
        (lambda: skip_blocked(network(), at_once=0), ValueError, "at_once has to be at least 1"),
        (lambda: skip_blocked(network(), at_once=True), TypeError, "at_once has to be a whole number or None"),
        (lambda: skip_blocked(skip_blocked(network())), ValueError, "made by skip_blocked already"),
        (lambda: Skip(nn.Linear(2, 2), nn.Dropout()), TypeError, "Backdrop layer, but got Dropout"),
        (lambda: Skip(lambda x: x, Backdrop(0.5)), TypeError, "but got function"),
        (
            lambda: Skip(nn.Linear(2, 2), Backdrop(0.5), statistics=None),
            ValueError,
            "statistics has to be one of",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mask = nn.Linear(3, 3), Backdrop(0.5)

    def forward(self, x):
        x = self.linear(x)
        return self.mask(x) if x.sum() > -1e9 else x


def test_a_model_that_cannot_be_followed_at_all():
    fast = check(Odd().double(), torch.randn(8, 3, dtype=torch.float64))
    assert fast.skip_report[0].last.startswith("plain: torch did not follow")


class FromDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, batch):
        return self.body(batch["image"]) + batch["offset"]


def test_inputs_in_a_dictionary():
    model = FromDictionary()
    fast = skip_blocked(model, when="always")
    for size in (24, 30):
        batch = {"image": images(size=size), "offset": torch.tensor(1.0)}
        for each in (model, fast):
            torch.manual_seed(0)
            each.zero_grad()
            each(batch).square().sum().backward()
        assert ran_windows(fast)
        for a, b in zip(model.parameters(), fast.parameters(), strict=True):
            assert_close(a.grad, b.grad, 1e-10)


def test_parameters_that_are_replaced():
    model = network()
    fast, x = skip_blocked(model, when="always"), images()
    step(fast, x)
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
    fast.load_state_dict(model.state_dict(), assign=True)
    fast[0].weight.requires_grad_()
    assert_same_gradients(step(model, x), step(fast, x))


def test_parametrized_layers():
    from torch.nn.utils import parametrizations

    model = network()
    parametrizations.weight_norm(model[0])
    assert ran_windows(check(model, images()))
    model = network()
    parametrizations.spectral_norm(model[3])
    for _ in range(2):  # its buffers change with every step
        assert ran_windows(check(model, images()))
    fast, x = skip_blocked(model, when="always"), images()
    for _ in range(3):
        a, b = step(model, x), step(fast, x)
        assert_same_gradients(a, b)
        for name, buffer in a.buffers.items():
            assert_close(buffer, b.buffers[name], 1e-10, name)


class OverwritesEntry(nn.Module):
    """What a rectifier overwrites is read again afterwards."""

    def __init__(self, mask):
        super().__init__()
        self.a, self.b, self.relu, self.mask = nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(inplace=True), mask

    def forward(self, x):
        h = self.a(x)
        y = self.mask(self.b(self.relu(h)))
        return y + h


class OverwritesMeanwhile(OverwritesEntry):
    """The input is changed after the segment has read it and before its mask."""

    def forward(self, x):
        h = x * 2
        y = self.b(torch.tanh(h))
        h.mul_(3)
        return self.mask(y) + h


@pytest.mark.parametrize("kind", [OverwritesEntry, OverwritesMeanwhile])
@pytest.mark.parametrize("mask", [Backdrop(0.7), Backdrop(0.9, (0, 1))])
def test_operations_in_place_that_others_see(kind, mask):
    x = torch.randn(8, 5, 3, dtype=torch.float64)
    check(kind(mask).double(), x)


class FromIntegers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mask = nn.Conv2d(1, 2, 3), Backdrop2d(0.9)

    def forward(self, x):
        return self.mask(self.conv(x.double() / 255))


def test_images_of_integers():
    fast = check(FromIntegers().double(), torch.randint(256, (2, 1, 20, 20), dtype=torch.uint8))
    assert ran_windows(fast)


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mask = nn.Conv2d(1, 2, 3), Backdrop2d(0.9)

    def forward(self, x):
        y = self.conv(x)
        return self.mask(torch.relu(y) / y.shape[1])


def test_arguments_that_are_sizes():
    fast = check(Sized().double(), images())
    assert fast.skip_report[0].skipped == ["conv", "relu", "truediv"]
    assert not fast.skip_report[0].kept
    assert ran_windows(fast)


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mask = nn.Conv2d(1, 2, 3), Backdrop2d(0.9)

    def forward(self, x):
        return self.mask(self.conv(cut_rows(x)))


def cut_rows(x):
    return x[:, :, : int(x[0, 0, 0, 0])]


def test_shapes_that_change_by_themselves():
    model, x = DataDependent().double(), images()
    fast = skip_blocked(model, when="always")
    for rows in (12, 9, 15, 12):
        x[0, 0, 0, 0] = rows
        assert_same_gradients(step(model, x), step(fast, x))
        assert ran_windows(fast)


def test_synchronised_batch_norm():
    """With one process it is the usual one."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.SyncBatchNorm(2), Backdrop2d(0.9)).double()
    check(model, images())
    usual = copy.deepcopy(model)
    usual[1] = nn.BatchNorm2d(2).double()
    x = images()
    results = [step(skip_blocked(each, statistics="sampled", when="always"), x) for each in (model, usual)]
    assert_same_gradients(*results)
