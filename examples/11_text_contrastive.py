"""A text encoder of Transformers, a contrastive loss over the whole batch, and the memory of a small batch.

    pip install transformers        where it is missing; nothing is downloaded
    python examples/11_text_contrastive.py

A contrastive loss compares every text with every other, so large batches are better, and memory is the limit. GradCache
keeps it low: all texts run without gradients, the loss gives the gradient of each embedding, then all texts run again
in chunks, with gradients. `Skip(encoder, Backdrop(p))` runs each text once, and only the share 1 - p of them with
gradients: the loss is that of the whole batch, and the gradient an unbiased estimate of its gradient.

The encoder is a tiny BERT with random weights. A pair of texts speaks of the same four things, of 48, with synonyms, in
another order and among other small words; the loss has to find out which words belong together.

Measured on one core: for 512 pairs autograd keeps 46.5 MB, with GradCache 4.7, with Skip and p = 0.9 6.7; in 50 MB fit
512 pairs, or with Skip 2048. A step takes 39 ms with Skip and 135 with GradCache. After 120 steps (mean of 3 seeds)
3.4% of test pairs are missed with batches of 52, and 0.9% with Skip and batches of 512, which need about the same
memory. GradCache gets to 7.3% in that time, and to 0.5% in the same number of steps. But so little text does not need
large batches: three times as many steps with batches of 52 take as long as Skip, and miss 0.6%. Takes a minute.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from backdrop import Backdrop, Skip

TINY = bool(os.environ.get("TINY"))  # for tests
SEEDS, STEPS, TEST = (1, 3, 64) if TINY else (3, 120, 2048)
BATCH, P, SMALL = 512, 0.9, 52  # the small batch, a chunk of GradCache and what p keeps are of about the same size
THINGS, SMALL_WORDS, LENGTH = 48, 20, 10
BATCHES, BUDGET = (512, 1024) if TINY else (512, 1024, 2048), 50

Texts = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Token numbers of questions and answers, (N, LENGTH) each, to embeddings (N, 2, 32) of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(
            BertConfig(
                vocab_size=2 * THINGS + SMALL_WORDS,
                hidden_size=32,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,  # so that gradients can be compared below; Skip does not need it
                attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        )

    def forward(self, questions: Tensor, answers: Tensor) -> Tensor:
        means = [self.bert(input_ids=texts).last_hidden_state.mean(1) for texts in (questions, answers)]
        return F.normalize(torch.stack(means, 1), dim=-1)


def pairs(number: int, generator: torch.Generator) -> Texts:
    """Things 0, 1, 2, ... are called 0, 2, 4, ... in questions and 1, 3, 5, ... in answers."""
    things = torch.rand(number, THINGS, generator=generator).argsort(1)[:, :4]
    texts = []
    for synonym in (0, 1):
        small = 2 * THINGS + torch.randint(SMALL_WORDS, (number, LENGTH - 4), generator=generator)
        order = torch.rand(number, LENGTH, generator=generator).argsort(1)
        texts.append(torch.cat([2 * things + synonym, small], 1).gather(1, order))
    return texts[0], texts[1]


def contrastive_loss(embeddings: Tensor) -> Tensor:
    """Every question should be nearest to its own answer among all answers, and the other way round."""
    questions, answers = embeddings.unbind(1)
    likeness, own = questions @ answers.T / 0.05, torch.arange(len(questions))
    return (F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)) / 2


def grad_cache(encoder: nn.Module, texts: Texts) -> None:
    """The gradient of the whole batch, in chunks."""
    chunks = list(zip(*(part.split(SMALL) for part in texts), strict=True))
    with torch.no_grad():
        embeddings = torch.cat([encoder(*chunk) for chunk in chunks])
    contrastive_loss(embeddings.requires_grad_()).backward()
    for chunk, gradient in zip(chunks, embeddings.grad.split(SMALL), strict=True):
        encoder(*chunk).backward(gradient)


def most_saved(step: Callable[[Texts], object], texts: Texts) -> float:
    """Megabytes that autograd keeps for the backward pass, at the most, while a step runs; each memory counts once."""
    holders, sizes, most = Counter(), {}, 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.at = storage.data_ptr()
            holders[self.at] += 1
            sizes[self.at] = storage.nbytes()
            most = max(most, sum(sizes.values()))

        def __del__(self) -> None:
            holders[self.at] -= 1
            if not holders[self.at]:
                del sizes[self.at]

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        step(texts)
    return most / 1e6


def ways(encoder: nn.Module, mask: Backdrop) -> dict[str, Callable[[Texts], object]]:
    """Four ways to take the gradient of a batch."""
    skip = Skip(encoder, mask)
    return {
        "plain": lambda texts: contrastive_loss(encoder(*texts)).backward(),
        "GradCache": lambda texts: grad_cache(encoder, texts),
        "plain, masked": lambda texts: contrastive_loss(mask(encoder(*texts))).backward(),
        "Skip": lambda texts: contrastive_loss(skip(*texts)).backward(),
    }


def one_step() -> None:
    encoder, mask = Encoder(), Backdrop(P, exact=True)
    texts, gradients = pairs(BATCH, torch.Generator().manual_seed(0)), {}
    print(f"One step on {BATCH} pairs, p = {P}    ms   MB kept for the backward pass")
    for name, way in ways(encoder, mask).items():
        megabytes, seconds = most_saved(way, texts), []
        for _ in range(3):
            encoder.zero_grad()
            torch.manual_seed(1)  # the same mask
            begin = time.perf_counter()
            way(texts)
            seconds.append(time.perf_counter() - begin)
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()])
        print(f"{name:30} {1000 * min(seconds):6.0f} {megabytes:6.1f}")
    for one, other in (("GradCache", "plain"), ("Skip", "plain, masked")):
        far = (gradients[one] - gradients[other]).abs().max() / gradients[other].abs().max()
        print(f"{one} and {other}: the same gradient, to {far:.0e} of the largest")

    print(f"\nBatch   MB plain   MB with Skip, {SMALL} pairs kept   in a budget of {BUDGET} MB")
    for batch in BATCHES:
        texts, mask.p = pairs(batch, torch.Generator().manual_seed(0)), 1 - SMALL / batch
        plain, skipped = (most_saved(ways(encoder, mask)[name], texts) for name in ("plain", "Skip"))
        fits = ["fits" if megabytes <= BUDGET else "too large" for megabytes in (plain, skipped)]
        print(f"{batch:5} {plain:10.1f} {skipped:14.1f} {'':16} plain {fits[0]}, with Skip {fits[1]}")


def misses(way: str, batch: int, steps: int, seed: int) -> tuple[float, float]:
    """After training: the share of test questions whose nearest answer is another's, in percent; ms per step."""
    torch.manual_seed(seed)
    generator, encoder = torch.Generator().manual_seed(seed), Encoder()
    step = ways(encoder, Backdrop(P, exact=True))[way]
    optimizer = torch.optim.AdamW(encoder.parameters(), 3e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, cycle_momentum=False)
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        step(pairs(batch, generator))
        optimizer.step()
        rates.step()
    seconds = (time.perf_counter() - begin) / steps
    with torch.no_grad():
        questions, answers = encoder(*pairs(TEST, torch.Generator().manual_seed(1000 + seed))).unbind(1)
    wrong = (questions @ answers.T).argmax(1) != torch.arange(TEST)
    return 100 * wrong.double().mean().item(), 1000 * seconds


def main() -> None:
    one_step()
    print(f"\nTraining   batch   steps   ms per step   misses among {TEST} test pairs: mean, and each seed", flush=True)
    for way, batch, steps in (
        ("plain", SMALL, STEPS),
        ("plain", SMALL, 3 * STEPS),
        ("Skip", BATCH, STEPS),
        ("GradCache", BATCH, STEPS // 3),  # the three last take about the same time
    ):
        missed, ms = zip(*(misses(way, batch, steps, seed) for seed in range(SEEDS)), strict=True)
        each = ", ".join(f"{m:.2f}" for m in missed)
        print(f"{way:10} {batch:5} {steps:7} {fmean(ms):13.0f}   {fmean(missed):.2f}% ({each})", flush=True)


if __name__ == "__main__":
    main()
