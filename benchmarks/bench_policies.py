"""What the policies for batch statistics cost: how well gradients agree, and how accurate networks get, in one run.

    python benchmarks/bench_policies.py [--device cuda] [--p 0.99] [--seeds 6] [--epochs 100] [--json FILE]

The task is the paper's two-scale Gaussian-process textures, made smaller, with its network and a mask for each scale.
Agreement: gradients of the fine stage under "sampled" and "frozen" against the plain ones ("exact") with the same mask,
for one batch and for the whole training set, at initialisation and after training. For scale, "another mask" compares
plain gradients under two masks. Accuracy: networks trained from a few images without masks and with masks under each
policy, tested on many images. A seed stands for its training images, first weights, order of images and masks, which
all variants share. To split seeds over processes: --only accuracy --seeds 3 --seed-from 0, then with --seed-from 3.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from backdrop import Backdrop2d, skip_blocked
from backdrop.experiments import models
from backdrop.graph import cost
from backdrop.textures import PAPER_WEIGHTS, Texture, TextureDataset
from bench_layer import machine

cost.pays = lambda spent, saved: spent < 4 * saved  # windows in the fine stage, whether or not they save time here

SMALL, LARGE = (4.0, 5.0), (20.0, 35.0)  # lengths in pixels
TRAIN, TEST = 10, 100  # images per class
RATE = 1e-3
COARSE_P = 0.75
POLICIES = ("sampled", "frozen")
VARIANTS = ("no mask", "exact", *POLICIES)
NEGLIGIBLE = 1e-5  # of the whole gradient's norm: smaller tensors are left out, as "zero"


def textures(per_class, size, seed, split, device):
    """Images (n, 1, size, size) and labels (n,), whose lowest bit is the small scale and the next the large one."""
    data = TextureDataset(
        Texture.grid((SMALL, LARGE), PAPER_WEIGHTS), per_class, size, seed, split=split, device=device
    )
    return data.images, data.labels


def network(seed, p, device):
    """The GP network with a fine and a coarse mask, or with none where p is 0."""
    torch.manual_seed(seed)
    small, large = Backdrop2d(p, exact=True), Backdrop2d(COARSE_P if p else 0.0, exact=True)
    return models.gp_network(small, large, padded=True).to(device)


def epoch_orders(count, seed, device):
    """For ever: the order of images in the next epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(count, generator=generator).to(device)


def check_skipped(model):
    """What the fine mask skipped in the last step; a policy that was not used must not be reported on."""
    last = model.skip_report[0].last
    if "were computed again" not in last:
        raise RuntimeError(f"the fine mask skipped nothing ({last}), so there is no policy to measure; raise --p")
    return last


def train(variant, seed, images, labels, settings, epochs):
    model = network(seed, 0.0 if variant == "no mask" else settings.p, images.device)
    if variant in POLICIES:
        model = skip_blocked(model, statistics=variant)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * settings.batches))
    orders = epoch_orders(len(images), seed, images.device)
    torch.manual_seed(seed)
    for _ in range(epochs):
        for rows in next(orders).tensor_split(settings.batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
        if variant in POLICIES:
            check_skipped(model)
    return model


def test(model, images, labels):
    """Share of images whose class, small scale and large scale are right, in percent."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in images.split(50)])
    right = {"total": found == labels, "small": found % 2 == labels % 2, "large": found // 2 == labels // 2}
    return {key: 100 * value.double().mean().item() for key, value in right.items()}


def accuracy(settings, save):
    images, labels = textures(TEST, settings.size, 0, "test", settings.device)
    seeds = range(settings.seed_from, settings.seed_from + settings.seeds)
    rows = []
    for seed, variant in track([(s, v) for s in seeds for v in VARIANTS], "training", transient=True):
        data = textures(TRAIN, settings.size, seed, "train", settings.device)
        begin = time.perf_counter()
        model = train(variant, seed, *data, settings, settings.epochs)
        row = {"variant": variant, "seed": seed, **test(model, images, labels)}
        row["train"] = test(model, *data)["total"]
        row["seconds"] = time.perf_counter() - begin
        rows.append(row)
        save(accuracy=rows)
    return rows


def fine_stage(model):
    """Its parameters by name."""
    end = next(i for i, layer in enumerate(model) if isinstance(layer, Backdrop2d))
    layers = enumerate(model[:end])
    return {f"{i} {type(m).__name__} {name}": p for i, m in layers for name, p in m.named_parameters()}


def gradients(model, images, labels, mask):
    model.zero_grad()
    torch.manual_seed(mask)
    nn.functional.cross_entropy(model(images), labels).backward()
    found = {name: p.grad.clone() for name, p in fine_stage(model).items()}
    return {**found, "all": torch.cat([grad.flatten() for grad in found.values()])}


def compare(grad, exact):
    """Relative error and cosine."""
    grad, exact = grad.double().flatten(), exact.double().flatten()
    norm, cosine = exact.norm(), torch.dot(grad, exact) / (grad.norm() * exact.norm())
    return {"norm": norm.item(), "error": ((grad - exact).norm() / norm).item(), "cosine": cosine.item()}


def agreement_of(model, when, images, labels, masks):
    """One row per policy and tensor, with numbers for each mask."""
    model.train()
    copies = {policy: skip_blocked(model, statistics=policy) for policy in POLICIES}
    rows = {}
    for mask in track(range(masks), f"{len(images)} images, {when}", transient=True):
        exact = gradients(model, images, labels, mask)
        others = {policy: gradients(copy, images, labels, mask) for policy, copy in copies.items()}
        reports = [check_skipped(copy) for copy in copies.values()]
        others["another mask"] = gradients(model, images, labels, masks + mask)
        for policy, grads in others.items():
            for tensor, grad in exact.items():
                row = {"when": when, "images": len(images), "report": reports[0], "policy": policy, "tensor": tensor}
                row = rows.setdefault((policy, tensor), row)
                for key, value in compare(grads[tensor], grad).items():
                    row.setdefault(key, []).append(value)
    return list(rows.values())


def agreement(settings, save):
    seed = settings.seed_from
    images, labels = textures(TRAIN, settings.size, seed, "train", settings.device)
    order = next(epoch_orders(len(images), seed, settings.device))
    rows = []
    for when, epochs in (("at initialisation", 0), ("after training", settings.epochs)):
        tf32(True)
        model = train("exact", seed, images, labels, settings, epochs)
        tf32(False)
        parts = (order.tensor_split(settings.batches)[0], order)
        for part in {len(part): part for part in parts}.values():
            rows += agreement_of(model, when, images[part], labels[part], settings.masks)
            save(agreement=rows)
    return rows


def tf32(allowed):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def show_agreement(rows, console):
    for when, images in dict.fromkeys((row["when"], row["images"]) for row in rows):
        show_tensors([row for row in rows if (row["when"], row["images"]) == (when, images)], console)


def show_tensors(rows, console):
    """One table: means over masks, tensor by tensor."""
    means = {
        (row["tensor"], row["policy"]): {key: statistics.mean(row[key]) for key in ("norm", "error", "cosine")}
        for row in rows
    }
    title = f'Gradients of the fine stage against "exact", {rows[0]["when"]}, {rows[0]["images"]} images'
    table = Table("tensor", title=title, caption=rows[0]["report"])
    columns = [(policy, key) for key in ("error", "cosine") for policy in (*POLICIES, "another mask")]
    for policy, key in columns:
        table.add_column(f"{policy}: {key}", justify="right")
    least = NEGLIGIBLE * means["all", POLICIES[0]]["norm"]
    for tensor in dict.fromkeys(row["tensor"] for row in rows):
        if means[tensor, POLICIES[0]]["norm"] > least:
            table.add_row(tensor, *(f"{means[tensor, policy][key]:.3f}" for policy, key in columns))
        else:
            table.add_row(tensor, "zero")
    console.print(table)


def spread(values):
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


def show_accuracy(rows, console):
    table = Table(title="Test accuracy in percent, mean ± standard deviation over seeds; median time")
    for heading in ("variant", "total", "minus exact", "small scale", "large scale", "training images", "seconds"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    by_seed = {(row["variant"], row["seed"]): row for row in rows}
    for variant in VARIANTS:
        runs = [row for row in rows if row["variant"] == variant]
        less = [row["total"] - by_seed["exact", row["seed"]]["total"] for row in runs]
        spreads = [spread([row[key] for row in runs]) for key in ("total", "small", "large", "train")]
        spreads.insert(1, "" if variant == "exact" else spread(less))
        table.add_row(variant, *spreads, f"{statistics.median(row['seconds'] for row in runs):.1f}")
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["agreement", "accuracy"], help="measure one of the two")
    parser.add_argument("--p", type=float, default=0.99, help="of the fine mask")
    parser.add_argument("--size", type=int, default=256, help="of images, in pixels")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batches", type=int, default=4, help="per epoch")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--seed-from", type=int, default=0, help="the first seed")
    parser.add_argument("--masks", type=int, default=8, help="over which agreement is averaged")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    settings = parser.parse_args()
    results = {
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": machine(settings.device),
        "settings": {key: value for key, value in vars(settings).items() if key != "json"},
        "constants": {
            name: globals()[name] for name in ("SMALL", "LARGE", "PAPER_WEIGHTS", "TRAIN", "TEST", "RATE", "COARSE_P")
        },
    }

    def save(**rows):
        results.update(rows)
        if settings.json:
            settings.json.write_text(json.dumps(results, indent=1))

    console = Console(width=140)
    if settings.only != "accuracy":
        show_agreement(agreement(settings, save), console)
    if settings.only != "agreement":
        tf32(True)
        show_accuracy(accuracy(settings, save), console)


if __name__ == "__main__":
    main()
