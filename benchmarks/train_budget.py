"""Does a budget of variance find p without a search? Trainings with each of some fixed p, and with `VarianceBudget`.

    python benchmarks/train_budget.py [--data FOLDER] [--seeds N] [--json FILE] [--pages]
    python benchmarks/train_budget.py --again benchmarks/results/train-budget-cpu.json --pages

The task `auc` in small, minutes on one core: cats against dogs of CIFAR-10 in 8x8 pixels, 5 to 1, by the AUC loss at
batches of 512, with a mask on samples. (The preset `quick` has 40 steps, and the same batch at each of them, so that
there is no noise of batches to have a share of.) Masks are uniform and exact, and steps as many for all. A budget of a
half begins at p = 0.5. The learning rate, and for the best p that as well, is chosen by the median on validation images
over the seeds; intervals are 95%, differences of pairs with the same seed.
"""

import json
import platform
import statistics
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from backdrop import Backdrop
from backdrop.schedules import VarianceBudget
from bench_coverage import put_between_markers
from bench_layer import options
from train_informed import T95, FiveToOne, finite, told

FIXED, SHARE, STEPS = (0.0, 0.5, 0.75, 0.9, 0.97), 0.5, 250
RATES = (0.003, 0.01)
BUDGET = "budget"
PAGE = Path(__file__).parent.parent / "docs" / "schedules.md"


class Scores(FiveToOne):
    name, batch = "AUC, cats and dogs 5:1", 512

    def network(self, p):
        layers = [nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
        return nn.Sequential(*layers, Backdrop(p, exact=True))


CASES = (Scores,)


def train(kind, way, rate, seed, root):
    case = kind(root, seed)
    torch.manual_seed(seed)
    model = case.network(0.5 if way == BUDGET else way)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=STEPS + 1, cycle_momentum=False)
    budget = VarianceBudget(model, share=SHARE, memory=150, start=40) if way == BUDGET else None
    for _ in range(STEPS):
        optimizer.zero_grad()
        case.loss(model).backward()
        optimizer.step()
        schedule.step()
        if budget is not None:
            budget.step()
    ends = [odds / (1 + odds) for odds in budget.state_dict()["_odds"]] if budget else []
    return {**case.measured(model), "p": ends}


def middle(rows):
    return statistics.median(finite(rows, "validation"))


def best(row):
    """Of a row's learning rates."""
    return min(row["trials"], key=lambda rate: middle(row["trials"][rate]))


def of_test(row):
    return [one["test"] for one in row["trials"][best(row)]]


HEADINGS = ("case", "lower is better", "p", "learning rate", "test", "test, less than the best p")


def table(figures):
    lines = []
    for kind in CASES:
        rows = [row for row in figures["rows"] if row["case"] == kind.name]
        chosen = min((row for row in rows if row["way"] != BUDGET), key=lambda row: middle(row["trials"][best(row)]))
        for row in rows:
            ends = [one["p"] for one in row["trials"][best(row)]]
            found = ", ".join(f"{statistics.median(mask):.2f}" for mask in zip(*ends, strict=True))
            p = f"budget: ends at {found}" if row["way"] == BUDGET else f"{row['way']:g}"
            apart = told([a - b for a, b in zip(of_test(chosen), of_test(row), strict=True)])
            p, apart = (f"{p} (best)", "") if row is chosen else (p, apart)
            lines.append([kind.name, kind.said, p, best(row), told(of_test(row)), apart])
    return lines


def pages(figures):
    lines = [HEADINGS, ["---"] * 3 + ["---:"] * 3, *table(figures)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = f"{figures['seeds']} seeds, {STEPS} steps, torch {figures['versions']['torch']}"
    put_between_markers(PAGE, f"{said}:\n\n{text}\n", ("<!-- budget -->", "<!-- end of budget -->"))


def main():
    parser = options(__doc__)
    parser.add_argument("--data", help="where data sets lie")
    parser.add_argument("--seeds", type=int, choices=[number + 1 for number in T95], default=8)
    parser.add_argument("--again", type=Path, help="take the figures from this file instead of training")
    parser.add_argument("--pages", action="store_true", help="write the table into docs/schedules.md")
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    figures = {"versions": versions, "seeds": arguments.seeds, "share": SHARE, "rows": []}
    kept = arguments.again or arguments.json
    if kept and kept.exists():
        figures = json.loads(kept.read_text())
    for kind in [] if arguments.again else CASES:
        figures["rows"] = [row for row in figures["rows"] if row["case"] != kind.name]
        for way in (BUDGET, *FIXED):
            run = partial(train, kind, way, root=arguments.data)
            trials = {
                f"{rate:g}": [
                    run(rate, seed) for seed in track(range(figures["seeds"]), f"{kind.name}, {way}", transient=True)
                ]
                for rate in RATES
            }
            figures["rows"].append({"case": kind.name, "measured": kind.said, "way": way, "trials": trials})
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    shown = Table(title="p found by a budget, and fixed")
    for heading in HEADINGS:
        shown.add_column(heading)
    for row in table(figures):
        shown.add_row(*row)
    Console(width=140).print(shown)
    if arguments.pages:
        pages(figures)


if __name__ == "__main__":
    main()
