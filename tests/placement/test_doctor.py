"""`doctor`: what does not depend on how fast the machine is."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from backdrop import Backdrop, Backdrop2d, Skip, doctor, gradient_noise, insert
from backdrop.losses import rank_statistic_loss, squared_hinge_auc_loss
from backdrop.placement import sites
from backdrop.placement.diagnosis import _needs
from backdrop.placement.rooms import check_memory, fitting, random_batch
from backdrop.placement.sites import Way
from backdrop.placement.steps import Batch, Reading, peak, take_turns


def table(samples=128):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.randn(samples, 8), torch.arange(samples) % 5 == 0


def images(norm=True):
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(8)] if norm else []
    layers = [nn.Conv2d(1, 8, 5, stride=2), *middle, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def needs(model, x, y, loss):
    return _needs(model, Batch(x, (y,), loss))


def first(scores, labels):
    return rank_statistic_loss(scores[:, 0], labels)


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr("backdrop.placement.diagnosis.ROUNDS", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x, y: mse_loss(x[:, 0], y.to(x.dtype)), "is a mean over samples"),
        (lambda x, y: mse_loss(x[:, 0], y.to(x.dtype), reduction="sum"), "is a mean over samples"),
        (lambda x, y: cross_entropy(torch.cat([x, -x], 1), y.long()), "is a mean over samples"),
        (lambda x, y: squared_hinge_auc_loss(x[:, 0], y), "needs the whole batch"),
        (lambda x, y: (x.T @ x).logdet(), "needs the whole batch"),
    ],
)
def test_what_the_loss_needs(loss, words, dtype):
    model, x, y = table()
    assert needs(model.to(dtype), x.to(dtype), y, loss)[0] == words


def test_a_loss_that_small_batches_cannot_compute_needs_the_whole_batch():
    model, x, _ = table()
    words, distortion, why = needs(model, x, torch.arange(128) == 0, first)
    assert words == "needs the whole batch"
    assert math.isinf(distortion)
    assert "on 32 samples the loss says" in why


def test_sorted_labels_tell_nothing_about_the_loss():
    model, x, y = table()
    found = needs(model, x, y.sort()[0], lambda s, t: mse_loss(s[:, 0], t.float()))
    assert found[0] == "is a mean over samples"


def test_fewer_samples_are_a_half_a_quarter_and_so_on():
    model, x, y = table()
    steps = Batch(x, (y,), first)
    taken = peak(lambda: steps.first(2).without_loss().step(model), torch.device("cpu")) / 2
    for times, rows in ((1000, 128), (70, 64), (40, 32), (0, 2)):
        some, notes = fitting(model, steps, int(2 * taken * times), torch.device("cpu"))
        assert (some.rows, bool(notes)) == (rows, rows < 128)


def test_samples_are_tried_for_losses_over_the_batch_alone():
    model, x, y = table()
    (site,) = doctor(model, (x, y), first).sites
    assert site.after == ""
    assert not site.problem
    assert [way.p for way in site.ways[:3]] == [0.5, 0.8, 0.9]
    assert "samples ran with gradients" in site.report
    assert site.informed > 1
    assert doctor(model, (x, y.float()), lambda s, t: mse_loss(s[:, 0], t)).sites == ()


def test_batch_statistics_are_sampled_where_they_are_in_the_way():
    batch = torch.randn(2, 1, 96, 96), torch.tensor([0, 1])
    (site,) = doctor(images(), batch, cross_entropy, sizes=9).sites
    assert (site.after, site.statistics) == ("4", "sampled")
    assert "skipped: 0, 1, 2, 3, 4" in site.report
    (site,) = doctor(images(), batch, cross_entropy, sizes=9, statistics="exact").sites
    assert site.statistics == "exact"
    assert "its batch statistics couple all samples" in site.report
    (site,) = doctor(images(norm=False), batch, cross_entropy, sizes=9).sites
    assert site.statistics == "exact"


def test_masks_that_are_there_are_taken():
    model = insert(images(norm=False), {"4": Backdrop2d(0.9, exact=True)})
    (site,) = doctor(model, torch.randn(2, 1, 64, 64)).sites
    assert site.after == "4.backdrop"
    assert site.rule == 0.9
    assert site.ways[0].p == 0.9


def test_the_model_and_the_random_state_stay_as_they_are():
    model, x = images(), torch.randn(4, 1, 64, 64)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    doctor(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 1)

    def forward(self, words, present=None):
        values = self.embedding(words)
        return {"scores": self.head(values.mean(1) if present is None else (values * present[..., None]).mean(1))}


def test_inputs_in_a_dictionary_and_outputs_in_another():
    torch.manual_seed(0)
    inputs = {"words": torch.randint(20, (64, 5)), "present": torch.ones(64, 5)}
    labels = torch.arange(64) % 3 == 0
    found = doctor(Words(), (inputs, labels), lambda out, y: rank_statistic_loss(out["scores"][:, 0], y))
    (site,) = found.sites
    assert not site.problem
    assert found.inputs == ((64, 5), (64, 5))
    assert any("positions are looked for" in note for note in found.notes)


def test_a_model_that_takes_a_dictionary_as_it_is_gets_it():
    noise = gradient_noise(Whole(), lambda out: out.square().mean(), ({"x": torch.randn(8, 3)},), draws=2)
    assert noise.batch_size == 8
    assert not doctor(Whole(), ({"x": torch.randn(8, 3)},)).sites[0].problem


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mask = nn.Linear(3, 1), Backdrop(0.5)

    def forward(self, batch):
        return self.mask(self.linear(batch["x"]))


def test_a_model_that_cannot_be_skipped_is_told_why():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return self.linear(x), object()

    found = doctor(Odd(), torch.randn(16, 3), lambda out: out[0].square().mean().sqrt())
    assert [bool(site.problem) for site in found.sites] == [True]
    assert "Not measured: " in str(found)


@pytest.mark.parametrize("informed", [False, True])
@pytest.mark.parametrize("site", [sites.samples(), *sites.sites_of_positions(images(), (2, 1, 64, 64), 9)])
def test_the_lines_to_paste_run(site, informed):
    code = site._code(Way(0.9, 1.0, 1.0, 1, informed), "sampled", "always")
    names = {"model": images()}
    exec(code, names)
    model = names["model"]
    model(torch.randn(8, 1, 64, 64)).square().mean().backward()
    (mask,) = (each for each in model.modules() if isinstance(each, Backdrop))
    assert (mask.p, mask.exact, mask.choose) == (0.9, True, "gradient" if informed else "uniform")
    assert (model.statistics if isinstance(model, Skip) else "sampled") == "sampled"


def test_lines_for_masks_that_are_there_run():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), Backdrop(0.9))
    site = sites.own_masks(model)
    names = {"model": model}
    exec(site._code(Way(0.9, 1.0, 1.0, 1), "exact", "pays"), names)
    names["model"](torch.randn(8, 3)).sum().backward()
    assert sites.own_masks(images()) is None


@pytest.mark.parametrize(
    ("seconds", "pays"), [((0.6, 0.4, 0.2), 0.0), ((2.0, 1.2, 0.4), 0.84), ((2.0, 1.9, 1.8), None)]
)
def test_from_which_p_it_pays(seconds, pays):
    ways = [Way(p, s, 1 / s, 1) for p, s in zip((0.7, 0.8, 0.9), seconds, strict=True)]
    found = sites._pays_from(ways, Reading(1.0, 1))
    if pays is None:
        assert found is None
    else:
        expected = max(0.0, 0.9 - (1 / 1.1 - seconds[2]) / ((seconds[0] - seconds[2]) / 0.2))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 5])
def test_memory_is_what_tensors_hold_at_once(count):
    def run():
        held = [torch.ones(1000, 1000) for _ in range(count)]
        del held
        torch.ones(100, 100)

    assert peak(run, torch.device("cpu")) == pytest.approx(4e6 * count, rel=0.01)


def test_memory_of_a_step_grows_with_what_it_keeps():
    model, x = nn.Sequential(nn.Linear(100, 1000), nn.Sigmoid(), nn.Linear(1000, 1)), torch.randn(500, 100)
    batch = Batch(x, (), None)
    reading = take_turns({"": lambda: batch.step(model)}, torch.device("cpu"), 1)[""]
    assert 2 * 4 * 500 * 1000 <= reading.memory <= 5 * 4 * 500 * 1000


def test_memory_is_the_same_whatever_was_measured_before():
    """Gradients that an earlier measurement left, and that a step gives back, do not count."""
    model, x = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1)), torch.randn(8, 1000)
    batch = Batch(x, (), None)
    seen = [peak(lambda: batch.step(model), torch.device("cpu")) for _ in range(3)]

    def leaves_gradients():
        model.zero_grad()
        model(x).sum().backward()

    seen += [peak(leaves_gradients, torch.device("cpu")) for _ in range(3)]
    assert min(seen) >= 4 * 1000 * 1000
    assert max(seen) == pytest.approx(min(seen), rel=0.05)


def test_what_fits_is_where_memory_ends():
    model, x = images(norm=False), torch.randn(8, 1, 96, 96)
    for room in doctor(model, x, memory="64M").rooms:
        other = torch.randn(room.plain[0], 1, 96, 96) if room.what == "samples" else torch.randn(8, 1, *room.plain)
        batch = Batch(other, (), None)
        batch.step(model)
        assert peak(lambda batch=batch: batch.step(model), torch.device("cpu")) == pytest.approx(2**26, rel=0.1)


def test_it_prints_and_saves(tmp_path):
    found = doctor(images(), (torch.randn(2, 1, 64, 64), torch.tensor([0, 1])), cross_entropy, sizes=9)
    text = str(found)
    assert text.startswith("Sequential on 2 x 1 x 64 x 64, measured on cpu\n\nA plain step takes ")
    assert found.advice in text.replace("\n", " ")
    assert all(len(line) <= 180 for line in text.splitlines())
    pytest.importorskip("matplotlib")
    found.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "Mask behind 4" in page
    with pytest.raises(ValueError, match=r"has to end in \.html"):
        found.save("page.png")


@pytest.mark.parametrize(
    ("memory", "size"), [("8G", 8 * 2**30), ("1.5 GB", 3 * 2**29), ("500MiB", 500 * 2**20), (1000, 1000), ("12", 12)]
)
def test_memory_in_words(memory, size):
    assert check_memory(memory, torch.device("cpu")) == size


@pytest.mark.parametrize("memory", ["much", "", "-1G", "0", 0, -5, "8X"])
def test_memory_that_is_none(memory):
    with pytest.raises(ValueError, match=re.escape(f"such as '8G' or '500M', but got {memory!r}")):
        check_memory(memory, torch.device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((nn.Linear(2, 1), "x"), TypeError, "batch has to be"),
        ((nn.Linear(2, 1), ()), TypeError, "is empty"),
        ((nn.Linear(2, 1), torch.ones(())), ValueError, "axis 0 is the batch"),
        ((nn.Linear(2, 1), torch.ones(3, 2), "mse"), TypeError, "loss has to be a function"),
        ((nn.ReLU(), torch.ones(3, 2)), ValueError, "nothing to train"),
        (("model", torch.ones(3, 2)), TypeError, r"torch\.nn\.Module"),
        ((nn.Linear(2, 1), torch.ones(3, 2), mse_loss), TypeError, r"batch has 0: .*'target'; batch has to be"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        doctor(*arguments)
    with pytest.raises(TypeError, match="memory has to be"):
        doctor(nn.Linear(2, 1), torch.ones(3, 2), memory=1.5)


def test_random_batches_are_of_words_or_smaller_where_that_has_to_be():
    batch, said = random_batch(Words(), [4, 5], 2**30)
    assert (batch.dtype, batch.max() < 20, said) == (torch.int64, True, "")
    batch, said = random_batch(images(), [2, 1, 64, 64], 2**30)
    assert (tuple(batch.shape), said) == ((2, 1, 64, 64), "")
    batch, said = random_batch(images(), [2, 1, 2048, 1024], 2**25)
    assert batch.shape[2] < 2048
    assert batch.shape[2] == pytest.approx(2 * batch.shape[3], abs=64)
    assert said.startswith("Measured with 2 x 1 x ")
