"""The page on natural mistakes: each is made, and says what the page quotes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d, gradient_noise, insert, skip_blocked
from backdrop.losses import rank_statistic_loss
from processes import run

PAGE = (Path(__file__).parent.parent / "docs" / "mistakes.md").read_text()
QUOTES = {
    int(number): " ".join(quote.split())
    for number, quote in re.findall(r"^## (\d+)\.(?:(?!^## ).)*?```text\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
}


def said(make, kind=ValueError):
    with pytest.raises(kind) as caught:
        make()
    return " ".join(str(caught.value).split())


def convolutions(*more):
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2), *more, nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_all_ten_are_there():
    assert re.findall(r"^## (\d+)\.", PAGE, re.MULTILINE) == [str(i) for i in range(1, 11)]
    assert set(QUOTES) == set(range(1, 10))
    assert PAGE.count("**Instead:**") == 10


def test_p_as_percent():
    assert QUOTES[1] in said(lambda: Backdrop(90))


def test_a_mask_on_positions_behind_flatten():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), Backdrop2d(0.9))
    assert QUOTES[2] in said(lambda: model(torch.randn(2, 1, 9, 9)))


def test_wrong_axes():
    x = torch.ones(3, 4, 8, requires_grad=True)
    assert QUOTES[3] in said(lambda: Backdrop(0.9, (0, 2, 3))(x))
    Backdrop(0.5, 1, exact=True)(x).sum().backward()
    assert sorted(x.grad[:, :, 0].sum(0).tolist()) == [0, 0, 6, 6]  # channels, in all samples


def test_eval_mode():
    model = skip_blocked(nn.Sequential(nn.Linear(3, 3), Backdrop(0.5))).eval()
    model(torch.randn(4, 3)).sum().backward()
    assert QUOTES[4] in str(model.skip_report)


def test_one_class():
    scores = torch.randn(4, requires_grad=True)
    assert QUOTES[5] in said(lambda: rank_statistic_loss(scores, torch.zeros(4)))
    rank_statistic_loss(scores, torch.zeros(4), single_class="zero").backward()


def test_batch_normalisation():
    masked = insert(convolutions(nn.BatchNorm2d(4)), {"2": Backdrop2d(0.9, exact=True)})
    model = skip_blocked(masked, when="always")
    model(torch.randn(2, 1, 32, 32)).sum().backward()
    assert QUOTES[6] in str(model.skip_report)
    model = skip_blocked(masked, when="always", statistics="sampled")
    model(torch.randn(2, 1, 32, 32)).sum().backward()
    assert "couple" not in str(model.skip_report)


def test_in_place():
    model = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5), nn.ReLU(inplace=True))
    assert QUOTES[7] in said(lambda: model(torch.randn(4, 3)), RuntimeError)
    insert(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), {"0": Backdrop(0.5)})(
        torch.randn(4, 3)
    ).sum().backward()


def test_two_masks_on_one_branch():
    torch.manual_seed(0)
    x, sizes = torch.randn(256, 8), []
    for first in (0.0, 0.75):
        layers = [nn.Linear(8, 1, bias=False), Backdrop(first, exact=True), nn.Tanh(), Backdrop(0.75, exact=True)]
        noise = gradient_noise(nn.Sequential(*layers), lambda out: out.square().mean(), x, seed=0, draws=200)
        assert QUOTES[8] in noise.sentence
        sizes.append(noise.total.effective_batch_size)
    assert sizes[0] > 2 * sizes[1]


def _uneven(rank):
    x = torch.randn(4 + rank, 2, requires_grad=True)
    mask = Backdrop(0.5, group="world")
    try:
        for _ in range(2):
            mask(x).sum().backward()
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    return ""


def test_uneven_batches():
    assert any(QUOTES[9] in text for text in run(_uneven, 2))


def test_what_to_do_instead_works():
    Backdrop1d(0.9)(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    Backdrop(0.9, dims=(0, 1))(torch.randn(2, 8, 3, requires_grad=True)).sum().backward()
