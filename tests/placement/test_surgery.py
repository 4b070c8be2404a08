"""Masks put in and taken out: keys, outputs, the gradients of a model written by hand, and what Skip makes of it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d
from backdrop.functional import mask_gradient
from backdrop.graph.capture import Capture
from backdrop.placement import insert, remove
from backdrop.schedules import LinearP
from foreign import import_or_skip
from skipping import always_skip, assert_same_gradients, check, ran_windows, step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own


def network(inplace=False):
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(inplace)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double()


def images(count=3, size=12):
    return torch.randn(count, 1, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_hand(model, places):
    """The same Sequential with masks as layers of their own."""
    layers = []
    for i, layer in enumerate(model):
        layers += [layer] + ([places[i]] if i in places else [])
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Adds in place to what its branch gives."""

    def __init__(self, branch):
        super().__init__()
        self.branch = branch
        self.end = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.branch(x)
        out += x
        return self.end(out)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 6)

    def forward(self, x):
        return self.first(x), {"second": self.second(x)}


class Decides(nn.Module):
    """What torch.compile's front end cannot follow: a graph break."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.sum() < float("inf") else x


def gradients(model, x, seed=0):
    return step(model.train(), x, seed=seed)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("places", [{0: 0.9}, {1: 0.9}, {3: 0.8}, {2: 0.8, 4: 0.9}, {7: 0.5}])
def test_gradients_are_those_of_layers_written_by_hand(places, inplace):
    model = network(inplace)

    def masks():
        return {i: Backdrop(p) if i == 7 else Backdrop2d(p) for i, p in places.items()}

    hand = by_hand(network(), masks())
    hand.load_state_dict(dict(zip(hand.state_dict(), model.state_dict().values(), strict=True)))
    expected = gradients(hand, images())
    actual = gradients(insert(model, {str(i): mask for i, mask in masks().items()}), images())
    assert torch.equal(actual.output, expected.output)
    for a, b in zip(actual.parameters.values(), expected.parameters.values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(actual.inputs[0], expected.inputs[0])


def test_a_copy_is_changed_and_the_model_is_not():
    model = network(inplace=True)
    before = pickle.dumps(model)
    masked = insert(model, {"0": Backdrop2d(0.9), "4": Backdrop2d(0.5)})
    assert pickle.dumps(model) == before
    assert type(masked) is nn.Sequential
    assert type(masked[0]) is nn.Conv2d
    assert masked[1].inplace, "what follows a mask gets a copy"
    assert masked[4].inplace
    assert masked.state_dict().keys() == model.state_dict().keys()
    masked.load_state_dict(model.state_dict())
    assert [name for name, m in masked.named_modules() if isinstance(m, Backdrop)] == ["0.backdrop", "4.backdrop"]


def test_masks_are_the_layers_that_were_given():
    mask = Backdrop2d(0.9)
    masked = insert(network(), {"3": mask})
    assert masked.get_submodule("3.backdrop") is mask
    schedule = LinearP(masked, start=0.9, end=0.1, steps=10)
    schedule.step()
    assert mask.p == pytest.approx(0.82)
    masked.eval()
    assert not mask.training


@pytest.mark.parametrize("inplace", [False, True])
def test_removing_is_the_inverse(inplace):
    model = network(inplace)
    masked = insert(model, {"0": Backdrop2d(0.9), "4": Backdrop2d(0.5)})
    plain = remove(masked)
    assert repr(plain) == repr(model)
    assert not any(isinstance(m, Backdrop) for m in plain.modules())
    assert [name for name, m in masked.named_modules() if isinstance(m, Backdrop)], "a copy was changed"
    a, b = gradients(model, images()), gradients(plain, images())
    for name, gradient in a.parameters.items():
        assert torch.equal(gradient, b.parameters[name])
    again = insert(plain, {"0": Backdrop2d(0.9), "4": Backdrop2d(0.5)})
    assert_same_gradients(gradients(masked, images()), gradients(again, images()), 0)


def test_masks_of_the_models_own_stay():
    model = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5), nn.Linear(3, 3))
    assert isinstance(remove(insert(model, {"2": Backdrop(0.5)}))[1], Backdrop)
    with pytest.raises(ValueError, match="nothing to remove"):
        remove(model)


def test_behind_a_sequential():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(2, 2, 3))).double()
    masked = insert(model, {"0": Backdrop2d(0.9)})
    assert masked.state_dict().keys() == model.state_dict().keys()
    plain = nn.Sequential(*model[0], Backdrop2d(0.9), *model[1])
    a, b = gradients(masked, images()), gradients(plain, images())
    for left, right in zip(a.parameters.values(), b.parameters.values(), strict=True):
        assert torch.equal(left, right)
    assert repr(remove(masked)) == repr(model)


@pytest.mark.parametrize("branch", ["plain", "sequential", "followed by an identity"])
def test_outputs_that_are_changed_in_place_by_code(branch):
    conv = nn.Conv2d(1, 1, 3, padding=1).double()
    inner = {"plain": conv, "sequential": nn.Sequential(conv), "followed by an identity": conv}[branch]
    model = nn.Sequential(Block(inner if branch != "followed by an identity" else nn.Sequential(conv, nn.Identity())))
    name = "0.branch.0" if branch == "followed by an identity" else "0.branch"
    x = images().requires_grad_()
    masked = insert(model, {name: Backdrop2d(0.9)})
    torch.manual_seed(0)
    masked(x).sum().backward()
    torch.manual_seed(0)
    mask = Backdrop2d(0.9)
    weight = mask.draw_weight(torch.empty(3, 1, 12, 12, dtype=torch.float64))
    conv.zero_grad()
    torch.relu(mask_gradient(conv(x), weight) + x).sum().backward()
    found = dict(masked.named_parameters())
    assert torch.equal(next(iter(found.values())).grad, conv.weight.grad)
    assert repr(remove(masked)) == repr(model)
    with torch.no_grad():
        assert torch.equal(masked.eval()(x), model.eval()(x))


def test_models_that_cannot_be_followed():
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3)).double()
    model = Decides(inner)
    masked = insert(model, {"inner.0": Backdrop2d(0.9)})
    plain = nn.Sequential(inner[0], Backdrop2d(0.9), nn.ReLU(), inner[2])
    a, b = gradients(masked, images()), gradients(plain, images())
    for left, right in zip(a.parameters.values(), b.parameters.values(), strict=True):
        assert torch.equal(left, right)


def test_modules_that_call_whatever_is_in_them():
    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

    class ByHelper(All):
        def forward(self, x):
            return self.run(x)

        def run(self, x):
            for name in [name for name, _ in self.named_children()]:
                x = self.get_submodule(name)(x)
            return x

    for model in (All(), ByHelper()):
        with pytest.raises(ValueError, match=r"'0', whose forward calls all modules in it, .* name the last module in"):
            insert(nn.Sequential(model), {"0": Backdrop(0.5)})
    insert(nn.Sequential(All()), {"0.second": Backdrop(0.5)})
    twice = nn.Linear(3, 3)
    insert(nn.Sequential(twice, nn.Tanh(), twice), {"0": Backdrop(0.5)})


def test_outputs_that_are_no_tensor():
    masked = insert(nn.Sequential(Pair()), {"0": Backdrop(0.5)})
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(0)
    first, rest = masked(x)
    (first.sum() + rest["second"].sum()).backward()
    torch.manual_seed(0)
    weight = Backdrop(0.5).draw_weight(torch.empty(64))
    expected = weight[:, None] * (masked[0].first.weight.sum(0) + masked[0].second.weight.sum(0))
    torch.testing.assert_close(x.grad, expected)
    with pytest.raises(TypeError, match="Backdrop2d was put behind a module and needs a tensor, but got tuple"):
        insert(nn.Sequential(Pair()), {"0": Backdrop2d(0.5)})(x)


def test_skipping_with_outputs_that_are_no_tensor(monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.pair, self.last = nn.Linear(4, 4), Pair(), nn.Linear(11, 2)

        def forward(self, x):
            a, b = self.pair(torch.tanh(self.first(x)))
            return self.last(torch.cat([a, b["second"]], 1))

    always_skip(monkeypatch)
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for places in (["pair"], ["first", "pair"], ["pair", "last"]):
        masked = insert(Model().double(), {name: Backdrop(0.75) for name in places})
        fast = check(masked, x)
        assert [entry.mask for entry in fast.skip_report] == [f"{name}.backdrop" for name in places]
        assert all(entry.last.endswith("of 32 samples ran with gradients") for entry in fast.skip_report)


def test_skipping_several_outputs_before_a_graph_break(monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            a, b = self.pair(x)
            return torch.cat([a, b["second"]], 1) if x.sum() < float("inf") else a

    always_skip(monkeypatch)
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fast = check(insert(Model().double(), {"pair": Backdrop(0.75)}), x)
    (entry,) = fast.skip_report
    assert entry.mask == "pair.backdrop"
    assert entry.skipped == ["pair.first", "pair.second"]
    assert entry.last.endswith("of 32 samples ran with gradients")


def test_copies_and_storage():
    masked = insert(network(), {"0": Backdrop2d(0.9), "3": Backdrop2d(0.8)})
    expected = gradients(masked, images())
    file = io.BytesIO()
    torch.save(masked, file)
    file.seek(0)
    for other in (copy.deepcopy(masked), pickle.loads(pickle.dumps(masked)), torch.load(file, weights_only=False)):
        assert_same_gradients(expected, gradients(other, images()), 0)
        other.get_submodule("0.backdrop").p = 0.0
        assert masked.get_submodule("0.backdrop").p == 0.9


@pytest.mark.parametrize("inplace", [False, True])
def test_skipping(monkeypatch, inplace):
    always_skip(monkeypatch)
    masked = insert(network(inplace), {"1": Backdrop2d(0.95), "3": Backdrop2d(0.95)})
    fast = check(masked, images(2, 24))
    assert [entry.mask for entry in fast.skip_report] == ["1.backdrop", "3.backdrop"]
    assert [entry.skipped for entry in fast.skip_report] == [["0", "1"], ["2", "3"]]
    assert ran_windows(fast, 0)
    assert ran_windows(fast, 1)


def test_skipping_samples(monkeypatch):
    always_skip(monkeypatch)
    masked = insert(network(), {"3": Backdrop(0.75), "7": Backdrop(0.75)})
    fast = check(masked, images(16, 12))
    assert [entry.skipped for entry in fast.skip_report] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert all(entry.last.endswith("of 16 samples ran with gradients") for entry in fast.skip_report)
    assert [entry.kept for entry in fast.skip_report] == [[], [("3.backdrop", "another mask ends here")]]


def test_skipping_behind_a_graph_break(monkeypatch):
    always_skip(monkeypatch)
    masked = insert(Decides(network()), {"inner": Backdrop(0.9), "inner.1": Backdrop2d(0.9)})
    fast = check(masked, images(16, 24))
    assert [entry.mask for entry in fast.skip_report] == ["inner.1.backdrop", "inner.backdrop"]
    masked = insert(Decides(Block(nn.Conv2d(1, 1, 3, padding=1)).double()), {"inner": Backdrop2d(0.95)})
    fast = check(masked, images(2, 24))
    assert fast.skip_report[0].mask == "inner.backdrop"
    assert fast.skip_report[0].skipped
    assert ran_windows(fast, 0)


def test_a_resnet():
    timm = import_or_skip("timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=5, zero_init_last=False)
    names = [
        "bn1",
        "act1",
        "layer1.0.bn1",
        "layer1.0.bn2",
        "layer1.1.act2",
        "layer2.0",
        "layer2",
        "layer3.0.downsample",
    ]
    for name in names:
        masked = insert(model, {name: Backdrop2d(0.9)})
        masked.load_state_dict(model.state_dict())
        x = torch.randn(2, 3, 64, 64)
        torch.manual_seed(0)
        out = masked(x)
        out.sum().backward()
        assert masked.conv1.weight.grad.any()
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), out), name
        copied.zero_grad()
        copied(x).sum().backward()
        assert not torch.equal(copied.conv1.weight.grad, masked.conv1.weight.grad), name
        assert repr(remove(masked)) == repr(model)


@pytest.mark.parametrize("places", [["0"], ["0.first"], ["0.wide"], ["0.wide", "0"]])
def test_captured_in_one_graph(places):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.wide, self.pair = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Pair()

        def forward(self, x):
            return self.pair(self.wide(self.first(x)).mul_(2))

    graphs = []

    def backend(graph):
        graphs.append(graph)
        return lambda *_: [torch.zeros(3, width) for width in (5, 6)]

    capture = Capture(insert(nn.Sequential(Wide()), {name: Backdrop(0.5) for name in places}).train().forward, backend)
    capture(torch.randn(3, 4))
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert len(graphs) == 1, capture.breaks
    assert calls.count("backdrop.mask") == len(places) + ("0" in places)  # the pair is two tensors
    assert "clone" not in calls


def test_inserting_changes_no_state():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    masked = insert(model, {"1": Backdrop(0.5)})
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(masked.state_dict()[name], value)


@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        ([], TypeError, "masks has to be a dictionary .* but got list"),
        ({}, ValueError, "masks has to name at least one module"),
        ({"features.11": Backdrop(0.5)}, ValueError, "'features.11', but Model has no such module; .*'features.1'"),
        ({"": Backdrop(0.5)}, ValueError, "names '', but Model has no such module"),
        ({"features.1": 0.9}, TypeError, r"masks\['features.1'\] is the number 0.9: give input_shape=, such as"),
        ({"features.1": True}, TypeError, r"masks\['features.1'\] has to be a Backdrop layer, but got bool"),
        ({"features.1": nn.ReLU()}, TypeError, r"masks\['features.1'\] has to be a Backdrop layer, but got ReLU"),
        ({"mask": Backdrop(0.5)}, ValueError, "is a mask itself; set its p"),
        ({"blocks": Backdrop(0.5)}, ValueError, "a ModuleList, which is never called itself"),
        ({"own": Backdrop(0.5)}, ValueError, "a Own, which is a Sequential with a forward of its own"),
        ({"named": Backdrop(0.5)}, ValueError, "has something else called backdrop"),
        ({"masked": Backdrop(0.5)}, ValueError, "has a mask behind it already; remove"),
    ],
)
def test_refused(masks, error, message):
    class Own(nn.Sequential):
        def forward(self, x):
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.mask = Backdrop(0.5)
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])
            self.own = Own(nn.Linear(2, 2))
            self.named = nn.Linear(2, 2)
            self.named.backdrop = 3
            self.masked = insert(nn.Sequential(nn.Linear(2, 2)), {"0": Backdrop(0.1)})[0]

    with pytest.raises(error, match=message):
        insert(Model(), masks)
    with pytest.raises(TypeError, match=r"model has to be a torch\.nn\.Module, but got int"):
        insert(3, masks)


class Rearranged(nn.Module):
    """Channels last, then tokens, then one vector for each sample."""

    def __init__(self):
        super().__init__()
        self.conv, self.last, self.tokens, self.head = (
            nn.Conv2d(1, 4, 3),
            nn.LayerNorm(4),
            nn.Linear(4, 5),
            nn.Linear(5, 2),
        )

    def forward(self, x):
        x = self.tokens(self.last(self.conv(x).permute(0, 2, 3, 1)))
        return self.head(x.flatten(1, 2).mean(1))


@pytest.mark.parametrize("shape", [(2, 1, 9, 8), torch.zeros(2, 1, 9, 8)])
@pytest.mark.parametrize(
    ("name", "kind", "dims"),
    [
        ("conv", Backdrop2d, (0, 2, 3)),
        ("last", Backdrop, (0, 1, 2)),
        ("tokens", Backdrop, (0, 1, 2)),
        ("head", Backdrop, 0),
    ],
)
def test_a_number_is_the_p_of_a_mask_where_positions_are(name, kind, dims, shape):
    masked = insert(Rearranged(), {name: 0.75}, input_shape=shape)
    mask = masked.get_submodule(name).backdrop
    assert (type(mask), mask.dims, mask.p, mask.exact) == (kind, dims, 0.75, False)
    masked(torch.randn(2, 1, 9, 8)).sum().backward()


def test_numbers_and_layers_go_together():
    masked = insert(network(), {"1": 0, "4": Backdrop2d(0.5)}, input_shape=(1, 1, 12, 12))
    assert (masked[1].backdrop.p, masked[4].backdrop.p) == (0, 0.5)
    with pytest.raises(ValueError, match="p has to be in"):
        insert(network(), {"1": 90}, input_shape=(1, 1, 12, 12))
    with pytest.raises(ValueError, match="has no such module"):
        insert(network(), {"nowhere": 0.5}, input_shape=(1, 1, 12, 12))
    with pytest.raises(ValueError, match="cannot take an input of shape"):
        insert(network(), {"1": 0.5}, input_shape=(1, 3, 12, 12))
