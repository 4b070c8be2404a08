"""Search for masks with a training function of your own.

    python examples/04_tune_masks.py                          takes about four minutes on two cores
    python examples/04_tune_masks.py --trials 30 --seeds 40   takes half an hour, and can tell them apart

The problem is that of `backdrop run gp --preset quick`: tell textures with four pairs of lengths apart, from one image
of each. The network has a mask for each scale, on 32x32 and on 4x4 units. `tune_masks` hands the training function a
fresh copy of the network with other masks each time, in two processes that share a study, and judges masks on
validation images. Then no masks, those that the paper chose by hand for its larger images, and those that were found
are compared on other training sets and on test images. The last lines say honestly what came of it.
"""

import argparse
import copy
import multiprocessing
import tempfile
import time
from statistics import fmean

import optuna
import torch
from torch.nn import functional as F

from backdrop import Backdrop, Backdrop2d
from backdrop.experiments import tune_masks
from backdrop.experiments.models import gp_network
from backdrop.experiments.report.statistics import estimate, paired
from backdrop.textures import PAPER_WEIGHTS, Texture, TextureDataset

SIZE = 256
CLASSES = Texture.grid(((2.5, 3.3), (8.0, 14.0)), PAPER_WEIGHTS)
PAPER = (0.99, 0.94)  # chosen by hand, for images of 1024x1024
LEARNING_RATE = 3e-3
FIRST_SEARCH_SEED, FIRST_TEST_SEED = 1000, 2000  # training sets for the search, and for the comparison


def network():
    """With the paper's masks: the search tries those early."""
    small, large = (Backdrop2d(p, exact=True) for p in PAPER)
    return gp_network(small, large, channels=12, blocks=(3, 2)).to(memory_format=torch.channels_last)


def masks_of(model):
    """The paths of the small and of the large mask."""
    return [path for path, module in model.named_modules() if isinstance(module, Backdrop)]


def images(seed, split, per_class):
    drawn = TextureDataset(CLASSES, per_class, SIZE, seed, split=split)
    return drawn.images.contiguous(memory_format=torch.channels_last), drawn.labels


def train(model, seed, steps):
    """Trains a copy of the model, from new weights, on the training set of this seed: one image of each class."""
    x, labels = images(seed, "train", 1)
    model = copy.deepcopy(model).train()
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, cycle_momentum=False
    )
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model, seed, split, per_class):
    """In percent, on images that were not trained on."""
    x, labels = images(seed, split, per_class)
    found = torch.cat([model(part).argmax(1) for part in x.split(4)])
    return 100 * (found == labels).double().mean().item()


def search(order):
    """One of the processes that search; each returns when all trials are done."""
    worker, storage, args = order

    def objective(model, trial):
        scores = []
        for i in range(args.repeats):  # the same training sets for all masks, so that they can be compared
            seed = FIRST_SEARCH_SEED + 100 * args.seed + i
            scores.append(accuracy(train(model, seed, args.steps), seed, "validation", args.images))
            trial.report(fmean(scores), i)
            if trial.should_prune():  # worse than the median of the trials before
                raise optuna.TrialPruned
        return fmean(scores)

    tuned = tune_masks(
        objective,
        network(),
        input_shape=(len(CLASSES), 1, SIZE, SIZE),
        trials=args.trials,
        direction="maximize",
        storage=storage,
        seed=args.seed,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        progress=None if worker == 0 else False,
    )
    return tuned.p, str(tuned)


def compare(order):
    """The accuracy of one set of masks on one training set."""
    p, seed, args = order
    model = network()
    for path, value in p.items():
        model.get_submodule(path).p = value
    return accuracy(train(model, seed, args.steps), seed, "test", args.images)


def interval(found, sign=""):
    return f"{found.mean:{sign}.1f} [{found.low:{sign}.1f} to {found.high:{sign}.1f}]"


def verdict(gain):
    """Whether the masks that were found are at least as good as the paper's, as far as can be told."""
    words = {
        True: "are better than the paper's",
        False: "are worse than the paper's",
        None: "cannot be told from the paper's with so few training sets (--seeds)",
    }
    return f"The masks found {words[gain.beyond()]}: {interval(gain, '+')} points over {gain.n} training sets."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8, help="masks to try")
    parser.add_argument("--repeats", type=int, default=2, help="training sets for each of them")
    parser.add_argument("--seeds", type=int, default=7, help="training sets for the comparison")
    parser.add_argument("--steps", type=int, default=100, help="of a training")
    parser.add_argument("--images", type=int, default=25, help="of each class to judge on")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="another search and other training sets")
    parser.add_argument("--storage", help="of the study, which others may join; by default a temporary file")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds has to be at least 2 for an interval")

    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(args.workers, torch.set_num_threads, (1,)) as pool,
    ):
        storage = args.storage or f"{folder}/masks.log"
        (p, words), *_ = pool.map(search, [(i, storage, args) for i in range(args.workers)], chunksize=1)
        print(words)
        print(f"This took {time.perf_counter() - begin:.0f} seconds.\n")

        paths = masks_of(network())
        arms = {
            "no masks": dict.fromkeys(paths, 0.0),
            "the paper's": dict(zip(paths, PAPER, strict=True)),
            "found": p,
        }
        seeds = [FIRST_TEST_SEED + 100 * args.seed + i for i in range(args.seeds)]
        orders = [(arm, seed) for seed in seeds for arm in arms]
        found = pool.map(compare, [(arms[arm], seed, args) for arm, seed in orders], chunksize=1)

    values = {arm: {} for arm in arms}
    for (arm, seed), value in zip(orders, found, strict=True):
        values[arm][seed] = value
    print(f"Accuracy in percent on test images, over {args.seeds} other training sets: mean and 95% interval, spread")
    for arm, scores in values.items():
        known = estimate(scores.values())
        masks = ", ".join(f"{value:.4g}" for value in arms[arm].values())
        print(f"  {arm:12} p = {masks:16} {interval(known):22} sd {known.sd:.1f}")
    gains = {arm: estimate(paired(values["found"], values[arm]).values()) for arm in ("no masks", "the paper's")}
    for arm, gain in gains.items():
        print(f"  found less {arm}, set by set: {interval(gain, '+')}")
    print(verdict(gains["the paper's"]))
    print(f"All this took {time.perf_counter() - begin:.0f} seconds.")


if __name__ == "__main__":
    main()
