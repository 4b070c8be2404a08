"""sentence-transformers: its cached ranking loss over the whole batch, with a backward pass for a few of the texts.

    loss = BackdropMultipleNegativesRankingLoss(model, mini_batch_size=64, p=0.8)
    SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()

It drops in for CachedMultipleNegativesRankingLoss. That one embeds all texts without gradients, one mini-batch at a
time, takes the gradient of the loss at the embeddings, and embeds all texts again with gradients: 4 forward passes,
counting a backward pass as two. Here only the texts that the mask keeps are embedded again, each weighted so that the
expected gradient is the same: 1 + 3 (1 - p) forward passes, and the memory of one mini-batch as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    from sentence_transformers.base.losses.gradcache import _backward_hook, _minibatch_ranges
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
except ImportError as error:
    raise ImportError(
        f"backdrop.integrations.sentence_transformers needs sentence-transformers 6 or newer ({error}); "
        "install it with: pip install 'sentence-transformers>=6'"
    ) from error

from backdrop._core.checks import Choose, Probability
from backdrop._core.draw import is_zero
from backdrop.layers import Backdrop

__all__ = ["BackdropMultipleNegativesRankingLoss"]


class BackdropMultipleNegativesRankingLoss(CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
    """`CachedMultipleNegativesRankingLoss` with a gradient through a share 1 - p of the texts of a batch, unbiased.

    The loss is the same number. With p = 0, in evaluation and where no gradient is wanted it is that loss in all else.

    Args:
        model: the SentenceTransformer.
        *args: as for `CachedMultipleNegativesRankingLoss`, and so are all other arguments.
        p: probability that a text's gradient is dropped; just so many texts of a batch are. `loss.mask.p` may change.
        choose: "uniform", or "gradient" for the texts with large gradients, which has less variance. These are known
            when all texts have been embedded, so that the model must not have dropout in training.
    """

    def __init__(self, model: Any, *args: Any, p: Probability = 0.8, choose: Choose = "uniform", **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.mask = Backdrop(p, exact=True, choose=choose)

    def forward_cached(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        if not torch.is_grad_enabled() or not self.mask.training or is_zero(self.mask.p):
            found: Tensor = super().forward_cached(columns, labels)
            return found
        sizes = [_texts(column) for column in columns]
        device = next(value.device for value in columns[0].values() if isinstance(value, Tensor))
        if self.mask.choose == "uniform":
            drawn = self.mask.draw_weight(torch.empty(sum(sizes), 1, device=device)).flatten()
            weights = torch.split(drawn, sizes)
            kept = [_Part(self, column, weight > 0) for column, weight in zip(columns, weights, strict=True)]
            rest = [_Part(self, column, weight == 0) for column, weight in zip(columns, weights, strict=True)]
            embedded = [_embedded(self, *parts) for parts in zip(kept, rest, strict=True)]
            loss, grads = self._loss_and_gradients(embedded, labels)
        else:
            before = _random_states(device)
            whole = [_Part(self, c, torch.ones(n, dtype=torch.bool)) for c, n in zip(columns, sizes, strict=True)]
            embedded = [_embedded(self, part) for part in whole]
            if not all(map(torch.equal, before, _random_states(device))):
                raise ValueError(
                    "choose='gradient' embeds texts again in other mini-batches, but the model drew random numbers "
                    "(dropout), which would be others then; set its dropout to 0, or choose 'uniform'"
                )
            loss, grads = self._loss_and_gradients(embedded, labels)
            weights = torch.split(self.mask.choose_weight(torch.cat(grads)).flatten(), sizes)
            kept = [_Part(self, column, weight > 0) for column, weight in zip(columns, weights, strict=True)]
        cache = [
            list(torch.split((grad * weight[:, None].to(grad.dtype))[part.rows], part.sizes))
            for grad, weight, part in zip(grads, weights, kept, strict=True)
        ]
        loss.register_hook(  # type: ignore[no-untyped-call]
            partial(
                _backward_hook,
                sentence_features=[part.features for part in kept],
                loss_obj=self,
                cache=cache,
                random_states=[part.states for part in kept],
                ranges=[part.ranges for part in kept],
            )
        )
        return loss

    def _loss_and_gradients(self, embedded: list[Tensor], labels: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The loss, cut off from what it was computed from, and its gradients at the embeddings."""
        loss = self.calculate_loss([[x] for x in embedded], labels, with_backward=True)
        grads = [x.grad for x in embedded]
        if any(grad is None for grad in grads):
            raise ValueError("the loss does not use all columns of the data set; remove those that it does not use")
        return loss.detach().requires_grad_(), grads  # type: ignore[return-value]

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "p": float(self.mask.p), "choose": self.mask.choose}


class _Part:
    """Some texts of a column, in mini-batches."""

    def __init__(self, loss: Any, column: dict[str, Any], chosen: Tensor) -> None:
        self.rows = chosen.nonzero()[:, 0]
        self.features = {
            name: value[self.rows.to(value.device)] if isinstance(value, Tensor) else value
            for name, value in column.items()
        }
        limits = (loss.mini_batch_size, loss.mini_batch_num_tokens)
        self.ranges = _minibatch_ranges(self.features, *limits) if len(self.rows) else []
        self.sizes = [end - begin for begin, end in self.ranges]
        self.states: list[Any] = [None] * len(self.ranges)  # of random numbers, at the beginning of each mini-batch

    def embed(self, loss: Any, *, replayed: bool) -> Iterator[Tensor]:
        found = loss.embed_minibatch_iter(
            sentence_feature=self.features, with_grad=False, copy_random_state=replayed, ranges=self.ranges
        )
        for i, (embeddings, state) in enumerate(found):
            self.states[i] = state
            yield embeddings


def _embedded(loss: Any, first: _Part, *others: _Part) -> Tensor:
    """The embeddings of all texts in order, without gradients; only the first part will run again."""
    parts = [torch.cat(list(part.embed(loss, replayed=part is first))) for part in (first, *others) if part.ranges]
    rows = torch.cat([part.rows for part in (first, *others)])
    found = torch.cat(parts)
    return torch.empty_like(found).index_copy_(0, rows.to(found.device), found).detach().requires_grad_()


def _texts(column: dict[str, Any]) -> int:
    """How many there are, each a row of every tensor."""
    sizes = {len(value) if value.ndim else 0 for value in column.values() if isinstance(value, Tensor)}
    if len(sizes) != 1 or "cu_seq_lens_q" in column:
        raise ValueError(
            "masks on texts need inputs with a row for each text: padded ones, without images or flattening; use "
            "CachedMultipleNegativesRankingLoss for others"
        )
    return sizes.pop()


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
