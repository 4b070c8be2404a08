"""Few positives in a table: train what is reported, and compare with cross-entropy and with a balanced sampler.

    python examples/07_auc_tabular.py

The data set is scikit-learn's diabetes study (it comes with the library): ten measurements of 442 patients, and how far
the disease has gone a year later. The question here: who is in the tenth that fares worst? So there are 47 positives
and 395 negatives. The ROC AUC is what counts, and it compares every positive with every negative: a minibatch of 32 has
about three positives, so the loss wants all of the training data at once. `Backdrop` then makes the gradient stochastic
again.

Every split of the patients into training, validation and test data is one row of the comparison. All settings (when to
stop, learning rate, p) are chosen on validation data, for each split by itself; the table is about test data.

Measured over 20 splits, ROC AUC: 0.853 with cross-entropy, 0.869 with cross-entropy and a sampler that draws as many
of each class, 0.878 with the rank statistic, 0.873 with the rank statistic and a mask, through which 22 or 55 of 220
patients carry gradient, 0.870 with average precision. Split by split the rank statistic gains 0.026 +- 0.008
(standard error) over cross-entropy, with the mask 0.020 +- 0.007, average precision 0.018 +- 0.008, and the sampler
alone 0.017 +- 0.008: most of what there is to gain. As average precision all are alike, 0.44 to 0.46 with a standard
deviation of 0.1: 13 positives in the test data cannot tell them apart. So the loss is worth it here, try the sampler
first; the mask neither helps nor harms as far as can be told. Do not take it for a rule: on two other tables of
scikit-learn that networks separate nearly perfectly, the rank statistic gained nothing (breast cancer with 10
positives in the training data: 0.994 with either loss) or lost (the digit 8 against the others, with 15 positives:
0.97 against 0.98). Takes one and a half minutes on one core.
"""

import os

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop
from backdrop.losses import average_precision_loss, rank_statistic_loss

SPLITS, STEPS = (2, 50) if os.environ.get("TINY") else (20, 300)  # TINY=1 is for tests
LOOK = 25  # at validation data, every so many steps

ARMS = {  # the loss, the probabilities to choose from
    "cross-entropy, minibatches of 32": ("cross-entropy", [0.0]),
    "the same, as many of each class": ("balanced", [0.0]),
    "rank statistic, whole batch": ("rank", [0.0]),
    "rank statistic, whole batch, mask": ("rank", [0.75, 0.9]),
    "average precision, whole batch": ("precision", [0.0]),
}
LEARNING_RATES = (3e-4, 3e-3)

Areas = tuple[float, float, float]  # under the ROC curve on validation and test data; average precision on the latter


def table() -> tuple[torch.Tensor, torch.Tensor]:
    x, progression = (torch.from_numpy(part).float() for part in load_diabetes(return_X_y=True))
    return (x - x.mean(0)) / x.std(0), progression >= progression.quantile(0.9)


def split(x: torch.Tensor, labels: torch.Tensor, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Half of the patients for training, a quarter for validation, a quarter for the test, of each class."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[torch.Tensor]] = [[], [], []]
    for label in (True, False):
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        half, quarter = len(rows) // 2, len(rows) // 4
        for part, some in zip(parts, rows.split([half, quarter, len(rows) - half - quarter]), strict=True):
            part.append(some)
    return [(x[torch.cat(rows)], labels[torch.cat(rows)]) for rows in parts]


def area(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Under the ROC curve: the share of pairs in the right order."""
    return 1 - rank_statistic_loss(scores, labels, temperature=1e-6).item()


def precision(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Average precision: of the list from the top down to each positive the share of positives, on average."""
    return 1 - average_precision_loss(scores, labels, temperature=1e-6).item()


def train(loss: str, p: float, rate: float, parts: list[tuple[torch.Tensor, torch.Tensor]], seed: int) -> Areas:
    """The areas on validation and test data, and the precision, when the area on validation data was largest."""
    torch.manual_seed(seed)
    (x, labels), *others = parts
    model = nn.Sequential(
        *(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)),
        Backdrop(p, exact=True),  # behind the scores: the loss sees all of them, the gradient goes through a few
    )
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    seen = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        if loss == "rank":
            rank_statistic_loss(model(x), labels).backward()
        elif loss == "precision":
            average_precision_loss(model(x), labels, temperature=0.5).backward()
        else:
            share = torch.where(labels, 1 / labels.sum(), 1 / (~labels).sum())
            rows = torch.randint(len(x), (32,)) if loss == "cross-entropy" else share.multinomial(32, replacement=True)
            F.binary_cross_entropy_with_logits(model(x[rows]), labels[rows].float()).backward()
        optimizer.step()
        if step % LOOK == 0:
            model.eval()
            with torch.no_grad():
                (_, known), (_, kept_back) = others
                validation, test = (model(x_other) for x_other, _ in others)
                seen.append((area(validation, known), area(test, kept_back), precision(test, kept_back)))
            model.train()
    return max(seen)


def main() -> None:
    x, labels = table()
    areas, precisions = torch.zeros(2, len(ARMS), SPLITS)
    for seed in range(SPLITS):
        parts = split(x, labels, seed)
        for arm, (loss, choices) in enumerate(ARMS.values()):
            _, areas[arm, seed], precisions[arm, seed] = max(
                train(loss, p, rate, parts, seed) for p in choices for rate in LEARNING_RATES
            )
        if seed % 4 == 3:
            print(f"{seed + 1} of {SPLITS} splits", flush=True)
    print(f"\n{'':35} ROC AUC on test data    gain over the first, split by split    average precision")
    for arm, name in enumerate(ARMS):
        gain = areas[arm] - areas[0]
        shown = f"{gain.mean():+.3f} +- {gain.std() / SPLITS**0.5:.3f}" if arm else ""
        print(
            f"{name:35} {areas[arm].mean():.3f} (sd {areas[arm].std():.3f})        {shown:38}"
            f"{precisions[arm].mean():.3f} (sd {precisions[arm].std():.3f})"
        )


if __name__ == "__main__":
    main()
