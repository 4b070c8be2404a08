"""Units chosen by gradient: how much less noise at equal numbers of kept units, on real data, and what it costs.

    python benchmarks/bench_informed.py [--only speed | --only noise] [--data FOLDER] [--rounds N] [--json FILE]
    python benchmarks/bench_informed.py --again benchmarks/results/informed-cpu.json --pages

`--pages` writes the tables into docs/masks.md, `--again` takes the figures of a file instead of measuring.

**Noise.** The variance of the gradient of all parameters below a mask, over that of uniform exact masks which keep as
many units, by draws: "informed" is `choose="gradient", exact=True`; "optimum" is the same with the contributions
themselves in place of the gradients that arrive, which nobody knows in time; "VCAS" keeps each unit by itself with a
probability in proportion to its gradient and no floor (Wang et al., 2024); "Selective Backprop" keeps each sample with
a probability that grows with the rank of its loss and weighs all alike (Jiang et al., 2019), which is biased: its
figure is the mean squared error. CIFAR-10 and the UIUC textures have to be there (`backdrop data fetch`).

**Speed.** Time of a step with an informed mask over one with a uniform mask, in one run in which they take turns, for
the layer alone and in the engine, beside what counting forward passes says: (1 + 3a) / (1 + 2a) for a share a of the
samples. "Units again" is what the engine ran again for the gradient, in the last step: units whose gradient is zero are
left out, which under max pooling are nearly all that a uniform mask keeps.
"""

import json
import math
import platform
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop, Backdrop2d, Skip
from backdrop._core import informed
from backdrop.experiments.data import cifar10, uiuc
from backdrop.experiments.models import all_cnn
from backdrop.functional import choose_weight, draw_weight
from backdrop.losses import contrastive_loss, rank_statistic_loss
from bench_layer import machine, medians, options

DRAWS, POSITION_DRAWS = 4000, 200
KEPT = 0.06  # of the samples: 120 of 2,048, as in the paper's example
WAYS = ("uniform", "informed", "optimum", "VCAS", "Selective Backprop")


def weights(way, sizes, contributions, losses, draws, share=KEPT):
    """(draws, units)."""
    rows, p = sizes.double().expand(draws, -1), 1 - share
    if way == "uniform":
        return draw_weight(rows.shape, p, (0, 1), exact=True).double()
    if way == "Selective Backprop":
        rank = (losses.argsort().argsort() + 1) / len(losses)
        return (torch.rand(rows.shape) < rank ** (1 / share - 1)).double() / share
    by = contributions.double().expand(draws, -1) if way == "optimum" else rows
    exact, floor = way != "VCAS", 0.1 if way == "informed" else 0.0
    return informed.weigh_norms(by, p, exact, "count", floor, None)


def per_sample(model, inputs, gradient):
    """What every sample adds to the gradient, one after the other: they do not depend on each other."""
    parameters, rows = list(model.parameters()), []
    for x, g in zip(track(inputs, "contributions", transient=True), gradient, strict=True):
        found = torch.autograd.grad(model(x[None]), parameters, g[None])
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


def compare(name, goal, sizes, contributions, losses):
    """A row of the table, from the products of the contributions."""
    products = (contributions @ contributions.T).double()
    found = {}
    for way in WAYS:
        off = weights(way, sizes, contributions.norm(dim=1), losses, DRAWS) - 1
        found[way] = ((off @ products) * off).sum(1).mean().item()
    return row(name, goal, found, effective=informed.effective_number(sizes[None].double()), units=len(sizes))


def row(name, goal, found, **more):
    times = {way: found["uniform"] / found[way] if way in found else None for way in WAYS[1:]}
    return {"case": name, "goal": goal, "variance": found, "times_less": times, **more}


def scores_loss(outputs, labels):
    return rank_statistic_loss(outputs.flatten(), labels, temperature=1.0)


def losses_of_scores(scores, labels):
    """Of each sample: the share of pairs that it is wrong in."""
    wrong = torch.sigmoid(scores[labels == 0] - scores[labels == 1][:, None])
    found = torch.empty(len(scores))
    found[labels == 1], found[labels == 0] = wrong.mean(1), wrong.mean(0)
    return found


def batch(images, labels, positives, size, generator):
    """So many images of both classes."""
    places = [(labels == i).nonzero().flatten() for i in (0, 1)]
    counts = size - positives, positives
    chosen = [x[torch.randperm(len(x), generator=generator)[:n]] for x, n in zip(places, counts, strict=True)]
    chosen = torch.cat(chosen)
    return images[chosen], labels[chosen]


def cats_and_dogs(root, size=2048, width=8):
    """An AUC loss at three stages of training."""
    for positives, said, goals in ((size // 6, "5:1", (2, 2.5, 4)), (round(size / 100), "1% positives", (15, 15, 15))):
        torch.manual_seed(0)
        train, _ = cifar10(root, subset="cats-dogs")
        images = train.images.float().div(127.5).sub(1)
        generator, model = torch.Generator().manual_seed(0), all_cnn(classes=1, width=width, norm="group")
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        done = 0
        for stage, goal in zip((0, 40, 160), goals, strict=True):
            for _ in track(range(done, stage), f"cats and dogs {said}", transient=True):
                x, y = batch(images, train.labels, positives, size // 4, generator)
                optimizer.zero_grad()
                scores_loss(model(x), y).backward()
                optimizer.step()
            done = stage
            x, y = batch(images, train.labels, positives, size, generator)
            with torch.no_grad():
                scores = model(x).flatten()
            g = torch.autograd.grad(scores_loss(scores.requires_grad_(), y), scores)[0][:, None]
            c = per_sample(model, x, g)
            told = f"AUC, cats and dogs {said}, {size} images, after {stage} steps"
            yield compare(told, goal, g.flatten(), c, losses_of_scores(scores.detach(), y))


def augmented(images, generator):
    shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
    moved = images.roll(shift, (2, 3))
    noise = 0.1 * torch.randn(images.shape, generator=generator)
    return (moved.flip(3) if torch.rand((), generator=generator) < 0.5 else moved) * 0.9 + noise


def contrastive(root, size=256, width=8):
    torch.manual_seed(0)
    train, _ = cifar10(root)
    generator, model = torch.Generator().manual_seed(0), all_cnn(classes=32, width=width, norm="group")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def embedded(x):
        return F.normalize(model(x), dim=1)

    for stage, goal in ((0, 2), (80, 2)):
        for _ in track(range(stage), "contrastive pairs", transient=True):
            x = train.images[torch.randint(len(train.images), (size,), generator=generator)].float().div(127.5).sub(1)
            optimizer.zero_grad()
            contrastive_loss(*(embedded(augmented(x, generator)) for _ in "ab"), temperature=0.1).backward()
            optimizer.step()
        x = train.images[torch.randint(len(train.images), (2 * size,), generator=generator)].float().div(127.5).sub(1)
        x = torch.cat([augmented(x, generator), augmented(x, generator)])
        with torch.no_grad():
            outputs = model(x)
        outputs.requires_grad_()
        a, b = F.normalize(outputs, dim=1).chunk(2)
        g = torch.autograd.grad(contrastive_loss(a, b, temperature=0.1), outputs)[0]
        each = F.cross_entropy(a.detach() @ b.detach().T / 0.1, torch.arange(len(a)), reduction="none").repeat(2)
        told = f"contrastive, CIFAR-10, {2 * size} pairs, after {stage} steps"
        yield compare(told, goal, g.norm(dim=1), per_sample(model, x, g), each)


class Pooled(nn.Module):
    """Textures through a small network; above the mask gated attention (Ilse et al., 2018) over positions, or means."""

    def __init__(self, attention, width=16):
        super().__init__()
        below = [nn.Conv2d(1, width, 7, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 32, 5), nn.ReLU()]
        self.below = nn.Sequential(*below, nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.ReLU())
        self.seen, self.gate, self.attention = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 1)
        self.pool = "attention" if attention else "mean"
        self.last = nn.Linear(32, 25)

    def above(self, features):
        tokens = features.flatten(2).transpose(1, 2)
        if self.pool == "mean":
            return self.last(tokens.mean(1))
        scores = self.attention(self.seen(tokens).tanh() * self.gate(tokens).sigmoid())
        return self.last((tokens * scores.softmax(1)).sum(1))

    def forward(self, x):
        return self.above(self.below(x))


def textures(root, attention, size=16):
    """Masks of positions: the gradient itself, drawn again and again."""
    torch.manual_seed(0)
    train, _ = uiuc(root)
    images = F.avg_pool2d(train.images.float().div(255), 2)
    images, model = (images - images.mean()) / images.std(), Pooled(attention)
    generator, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(model.parameters(), 2e-3)
    done = 0
    for stage in (0, 300, 1500) if attention else (0, 300):
        for _ in track(range(done, stage), "textures", transient=True):
            chosen = torch.randperm(len(images), generator=generator)[:size]
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), train.labels[chosen]).backward()
            optimizer.step()
        done = stage
        chosen = torch.randperm(len(images), generator=generator)[:size]
        features = model.below(images[chosen])
        value = F.cross_entropy(model.above(features), train.labels[chosen])
        (g,) = torch.autograd.grad(value, features, retain_graph=True)
        parameters, found = list(model.below.parameters()), {}

        def gradient(weighted, features=features, parameters=parameters):
            parts = torch.autograd.grad(features, parameters, weighted, retain_graph=True)
            return torch.cat([part.flatten() for part in parts])

        whole, dims, p = gradient(g), (0, 2, 3), 1 - KEPT
        draw = {
            "uniform": partial(draw_weight, g.shape, p, dims, exact=True),
            "informed": partial(choose_weight, g, p, dims, exact=True),
            "VCAS": partial(choose_weight, g, p, dims, floor=0.0),
        }
        for way, make in draw.items():
            squares = [
                (gradient(g * make()) - whole).square().sum().item()
                for _ in track(range(POSITION_DRAWS), way, transient=True)
            ]
            found[way] = sum(squares) / POSITION_DRAWS
        pool = "attention" if attention else "mean"
        told = f"UIUC textures, {pool} pooling, {size} images, after {stage} steps"
        sizes = g.norm(dim=1).flatten(1)
        worth = sum(informed.effective_number(one[None].double()) for one in sizes) / len(sizes)
        yield row(told, 3 if attention else 0.95, found, effective=worth, units=sizes.shape[1])


def noise(root):
    yield from cats_and_dogs(root)
    yield from contrastive(root)
    yield from textures(root, attention=True)
    yield from textures(root, attention=False)


def layer_steps(kind, shape):
    x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    layers = {choose: kind(0.9, exact=True, choose=choose) for choose in ("uniform", "gradient")}

    def step(layer):
        return torch.autograd.grad(layer(x), x, upstream)

    return {choose: partial(step, layer) for choose, layer in layers.items()}, None


def engine_steps(below, mask, above, shape, loss):
    """One model, with a mask of each kind; and what they say that they ran again."""
    model, x = nn.Sequential(below, above), torch.randn(shape)
    skips = {choose: Skip(below, mask(choose=choose), when="always") for choose in ("uniform", "gradient")}

    def step(skip):
        model.zero_grad()
        loss(above(skip(x))).backward()

    def again(choose):
        return int(skips[choose].report[0].last.split()[0])

    return {choose: partial(step, skip) for choose, skip in skips.items()}, again


def speed(rounds):
    torch.manual_seed(0)
    labels = torch.arange(1024) % 6 == 0
    scores = partial(rank_statistic_loss, labels=labels.long(), temperature=1.0)
    network = all_cnn(classes=1, width=8, norm="group")
    maps = nn.Sequential(nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, 2))
    above = {
        "all with a gradient": nn.Conv2d(32, 1, 3),
        "max pooling": nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 1)),
    }
    cases = [
        ("layer, positions, 16x64x64x64", 1.3, layer_steps(Backdrop2d, (16, 64, 64, 64))),
        ("layer, samples, 2048x1024", 1.3, layer_steps(Backdrop, (2048, 1024))),
    ]
    for share in (0.1, 0.25):
        allowed = 1.05 * (1 + 3 * share) / (1 + 2 * share)
        mask = partial(Backdrop, 1 - share, exact=True)
        steps = engine_steps(network, mask, nn.Flatten(0), (1024, 3, 32, 32), scores)
        cases.append((f"engine, samples, all-CNN, 1024 images, a = {share}", allowed, steps))
    mask = partial(Backdrop2d, 0.99, exact=True)
    for said, last in above.items():
        steps = engine_steps(maps, mask, last, (4, 3, 256, 256), lambda out: out.square().mean())
        cases.append((f"engine, positions, 4 images of 256x256, a = 0.01, {said}", 1.05 * 1.03 / 1.02, steps))
    for name, allowed, (steps, again) in cases:
        found = medians(steps, rounds, 1, False, name)
        ratio = found["gradient"] / found["uniform"]
        yield {
            "case": name,
            "uniform_milliseconds": found["uniform"] * 1e3,
            "informed_milliseconds": found["gradient"] * 1e3,
            "informed_over_uniform": ratio,
            "goal": allowed,
            "uniform_again": again("uniform") if again else None,
            "informed_again": again("gradient") if again else None,
        }


NOISE_COLUMNS = {
    "case": "{case}",
    "units": "{units}",
    "worth": "{effective:.0f}",
    "informed": "{informed:.2f}",
    "goal": "{goal}",
    "optimum": "{optimum:.2f}",
    "VCAS": "{VCAS:.2f}",
    "Selective Backprop": "{selective:.2f}",
}
SPEED_COLUMNS = {
    "case": "{case}",
    "uniform ms": "{uniform_milliseconds:.2f}",
    "informed ms": "{informed_milliseconds:.2f}",
    "informed / uniform": "{informed_over_uniform:.2f}",
    "goal": "{goal:.2f}",
    "units again, uniform": "{uniform_again:.0f}",
    "units again, informed": "{informed_again:.0f}",
}


TABLES = {  # the columns of each, in the page and on the screen
    "noise": NOISE_COLUMNS,
    "speed": SPEED_COLUMNS,
}
TITLES = {
    "noise": f"Times less variance than uniform exact masks, {KEPT:.0%} of units kept",
    "speed": "Time of a step, informed over uniform masks",
}
PAGE = Path(__file__).parent.parent / "docs" / "masks.md"


def cells(columns, row):
    """A row of a table, "-" for what was not measured."""
    row = {**row, **row.get("times_less", {})}
    row["selective"] = row.get("Selective Backprop")
    known = {key: math.nan if value is None else value for key, value in row.items()}
    return [text.format(**known).replace("nan", "-") for text in columns.values()]


def table(figures, name):
    """In Markdown."""
    columns = TABLES[name]
    head = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines = [f"| {' | '.join(row)} |" for row in [*head, *(cells(columns, row) for row in figures[name])]]
    return f"{figures['device'][name]}, torch {figures['versions']['torch']}:\n\n" + "\n".join(lines)


def pages(figures):
    """Write the tables into the page on masks."""
    text = PAGE.read_text()
    for name in [name for name in TABLES if name in figures]:
        begin, end = f"<!-- informed-{name} -->", f"<!-- end of informed-{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table(figures, name)}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


def main():
    parser = options(__doc__)
    parser.add_argument("--again", type=Path, help="take the figures from this file instead of measuring")
    parser.add_argument("--pages", action="store_true", help="write the tables into docs/masks.md")
    parser.add_argument("--only", choices=["noise", "speed"], help="measure this, and leave the other as it is in FILE")
    parser.add_argument("--data", help="where data sets lie")
    arguments = parser.parse_args()
    kept = arguments.again or arguments.json
    figures = json.loads(kept.read_text()) if kept and kept.exists() else {"device": {}}
    begin, measured = time.perf_counter(), [arguments.only] if arguments.only else list(TABLES)
    for name in [] if arguments.again else measured:
        figures[name] = list(speed(arguments.rounds)) if name == "speed" else list(noise(arguments.data))
        figures["device"][name], figures["kept"] = machine("cpu"), KEPT
        figures["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    for name, title in TITLES.items():
        shown = Table(title=title)
        for heading in TABLES[name]:
            shown.add_column(heading, justify="left" if heading == "case" else "right")
        for row in figures.get(name, []):
            shown.add_row(*cells(TABLES[name], row))
        Console(width=130).print(shown)
    if arguments.pages:
        pages(figures)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
