"""The cached ranking loss with a backward pass for some of the texts, against that loss itself."""

import copy

import pytest
import torch
from torch import nn

from foreign import import_or_skip

sentence_transformers = import_or_skip("sentence_transformers")

from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss  # noqa: E402

from backdrop.functional import choose_weight  # noqa: E402
from backdrop.integrations.sentence_transformers import BackdropMultipleNegativesRankingLoss  # noqa: E402

PAIRS = 24


class Embed(nn.Module):
    """The mean of the vectors of words, through a layer with dropout, as sentence-transformers calls its modules."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.words, self.dropout = nn.Embedding(50, 8), nn.Dropout(dropout)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.seen = []

    def forward(self, features):
        mask = features["attention_mask"][..., None]
        mean = (self.words(features["input_ids"]) * mask).sum(1) / mask.sum(1)
        self.seen.append((len(mean), torch.is_grad_enabled()))
        features["sentence_embedding"] = self.outer(self.dropout(torch.tanh(self.inner(mean))))
        return features


def model(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return Embed(dropout).to(dtype)


def texts(number=PAIRS, columns=2):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(columns):
        mask = torch.arange(7) < torch.randint(1, 8, (number, 1), generator=generator)
        ids = torch.randint(1, 50, (number, 7), generator=generator) * mask
        found.append({"input_ids": ids, "attention_mask": mask.double(), "modality": "text"})
    return found


@pytest.fixture(autouse=True)
def _plain_models(monkeypatch):
    """Models that are no SentenceTransformer, which the losses look into when they are made."""
    for name in ("cached_multiple_negatives_ranking",):
        module = f"sentence_transformers.sentence_transformer.losses.{name}"
        monkeypatch.setattr(f"{module}.has_static_embedding_input", lambda model: False)


def gradient(loss, columns, times=1.0):
    loss.model.zero_grad()
    value = loss(columns, None)
    (times * value).backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in loss.model.parameters()])


def masked_by_hand(embed, columns, weights, **settings):
    """All texts at once, with the gradient at each embedding multiplied by its weight."""
    embed.zero_grad()
    plain = CachedMultipleNegativesRankingLoss(embed, mini_batch_size=1000, **settings)
    reps = [embed(dict(column))["sentence_embedding"] for column in columns]
    cut = [x.detach().requires_grad_() for x in reps]
    plain.calculate_loss([[x] for x in cut], None, with_backward=True)
    for x, y, weight in zip(reps, cut, weights, strict=True):
        x.backward(y.grad * weight[:, None])
    return torch.cat([p.grad.flatten() for p in embed.parameters()])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "settings", [{}, {"directions": ("query_to_doc", "doc_to_query")}, {"mini_batch_num_tokens": 20}]
)
@pytest.mark.parametrize("columns", [2, 3])
def test_the_gradient_is_that_of_a_mask_on_the_embeddings(settings, columns, dtype, atol):
    embed, batch = model(dtype=dtype), texts(columns=columns)
    for column in batch:
        column["attention_mask"] = column["attention_mask"].to(dtype)
    loss = BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=5, p=0.75, **settings)
    torch.manual_seed(3)
    value, found = gradient(loss, batch, times=0.5)
    torch.manual_seed(3)
    weights = loss.mask.draw_weight(torch.empty(columns * PAIRS, 1)).flatten().to(dtype).split(PAIRS)
    assert sum(int((weight > 0).sum()) for weight in weights) == columns * PAIRS // 4
    settings = {name: value for name, value in settings.items() if name != "mini_batch_num_tokens"}
    torch.testing.assert_close(found, 0.5 * masked_by_hand(embed, batch, weights, **settings), rtol=1e-4, atol=atol)
    plain, _ = gradient(CachedMultipleNegativesRankingLoss(embed, mini_batch_size=5, **settings), batch)
    torch.testing.assert_close(value, plain)


def test_texts_chosen_by_gradients():
    embed, batch = model(), texts()
    loss = BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=5, p=0.75, choose="gradient")
    torch.manual_seed(3)
    _, found = gradient(loss, batch)
    reps = [embed(dict(column))["sentence_embedding"].detach().requires_grad_() for column in batch]
    CachedMultipleNegativesRankingLoss(embed).calculate_loss([[x] for x in reps], None, with_backward=True)
    torch.manual_seed(3)
    weights = choose_weight(torch.cat([x.grad for x in reps]), 0.75, exact=True).flatten().split(PAIRS)
    torch.testing.assert_close(found, masked_by_hand(embed, batch, weights))


@pytest.mark.parametrize("choose", ["uniform", "gradient"])
def test_the_gradient_is_unbiased(choose):
    """Over many draws, in each direction of a few; the bound is exceeded with a probability below 1e-6."""
    embed, batch = model(), texts(8)
    _, exact = gradient(CachedMultipleNegativesRankingLoss(embed, mini_batch_size=3), batch)
    loss = BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=3, p=0.5, choose=choose)
    torch.manual_seed(0)
    draws = torch.stack([gradient(loss, batch)[1] @ exact for _ in range(400)])
    error = draws.std() / 400**0.5
    assert abs(draws.mean() - exact @ exact) < 6 * error


def test_dropout_draws_the_same_numbers_again():
    """The gradient is that of the embeddings that the loss saw: so with p near 0 it is that of the loss itself."""
    embed, batch = model(dropout=0.5), texts()
    loss = BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=100, p=1e-9)
    torch.manual_seed(5)
    weights = loss.mask.draw_weight(torch.empty(2 * PAIRS, 1))
    assert weights.all()
    state = torch.get_rng_state()
    _, expected = gradient(CachedMultipleNegativesRankingLoss(embed, mini_batch_size=100), batch)
    torch.manual_seed(5)
    _, found = gradient(loss, batch)
    torch.testing.assert_close(found, expected)
    torch.set_rng_state(state)
    loss = BackdropMultipleNegativesRankingLoss(embed, choose="gradient")
    with pytest.raises(ValueError, match="the model drew random numbers"):
        loss(batch, None)


def test_only_kept_texts_run_again_a_mini_batch_at_a_time():
    embed, batch = model(), texts()
    gradient(BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=4, p=0.75), batch)
    assert max(size for size, _ in embed.seen) <= 4
    assert sum(size for size, wanted in embed.seen if wanted) == PAIRS // 2
    assert sum(size for size, wanted in embed.seen if not wanted) == 2 * PAIRS


def test_it_is_the_loss_itself_where_nothing_is_masked():
    embed, batch = model(), texts()
    plain = gradient(CachedMultipleNegativesRankingLoss(embed, mini_batch_size=5), batch)
    found = gradient(BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=5, p=0.0), batch)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    loss = BackdropMultipleNegativesRankingLoss(embed, mini_batch_size=5, p=0.9)
    torch.testing.assert_close(gradient(loss.eval(), batch), plain, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(loss.train()(batch, None), plain[0])


def test_its_settings_are_those_of_the_loss_and_two_more():
    embed = model()
    theirs = CachedMultipleNegativesRankingLoss(embed, 10.0, mini_batch_size=7)
    ours = BackdropMultipleNegativesRankingLoss(embed, 10.0, mini_batch_size=7, p=0.6)
    assert ours.get_config_dict() == {**theirs.get_config_dict(), "p": 0.6, "choose": "uniform"}
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    copied = copy.deepcopy(ours)
    assert copied.mask.p == 0.6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda column: column.update(cu_seq_lens_q=torch.arange(PAIRS)), "a row for each text"),
        (lambda column: column.update(pixel_values=torch.ones(3, 5)), "a row for each text"),
    ],
)
def test_inputs_without_rows_are_refused(change, words):
    batch = texts()
    change(batch[1])
    with pytest.raises(ValueError, match=words):
        BackdropMultipleNegativesRankingLoss(model())(batch, None)
    with pytest.raises(ValueError, match="p has to be"):
        BackdropMultipleNegativesRankingLoss(model(), p=1.0)
    with pytest.raises(ValueError, match="choose has to be"):
        BackdropMultipleNegativesRankingLoss(model(), choose="best")
