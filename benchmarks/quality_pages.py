"""What came of quality.py: tables to look at, and what docs/evidence.md has of them.

python benchmarks/quality_pages.py [--pages] [--plot FOLDER]

Figures are those of benchmarks/results/quality*.json. `--pages` writes tables and numbers into docs/evidence.md,
between markers; `--plot` draws its pictures, each for a wide window and for a phone. `quality.py --again FILE` shows
the table of a file.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from quality import MASKED, RATES, SAMPLED, best_of
from quality_tasks import TASKS

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "evidence.md", ROOT / "benchmarks" / "results"
FILES = ("quality", "quality-2")
T95 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179), 1))
BATCHES = ("small", "medium", "balanced")
PARTS = ("subsample", "crops")
TITLES = {
    "latent": "class distances",
    "gp": "textures, 27 large images",
    "survival": "survival from images",
    "rare": "ROC AUC, 1% dogs",
    "auc": "ROC AUC, cats and dogs 5:1",
    "table": "ROC AUC, table, 1% positives",
    "decorrelation": "decorrelation",
    "contrast": "contrastive pairs",
    "bags": "bags of instances",
}
MEASURES = {"1 - ROC AUC, %": "1 - AUC, %", "not found among 1,000, %": "not found, %"}
SIZES = {  # of bench_size.py
    "ResNet-18, mask behind layer3": "one image, ResNet-18, pixels a side",
    "series": "one series, steps",
    "rank statistic, rows": "ROC AUC of a table, rows",
}
TOO_SMALL = {768}


def interval(values):
    """The mean, and half of a 95% interval by Student's t."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), T95[min(len(values) - 1, 12)] * statistics.stdev(values) / math.sqrt(len(values))


def trainings(rows, name):
    return sorted((row for row in rows if (row["task"], row["kind"]) == (name, "train")), key=lambda row: row["seed"])


def apart(runs, way, other):
    """By how much `way` is better than `other`, seed by seed."""
    return interval([best_of(row["ways"][other])[1] - best_of(row["ways"][way])[1] for row in runs])


def compared(rows, name):
    """For each way: quality at the end and how it differs from "whole", and when it reaches what "whole" ends with."""
    runs = trainings(rows, name)
    if not runs:
        return []
    goal = statistics.fmean(best_of(row["ways"]["whole"])[1] for row in runs)
    full, found = TASKS[name].seconds * runs[0]["scale"], []
    for way in TASKS[name].ways:
        one = [row["ways"][way] for row in runs]
        times, points = curve(runs, way)
        means = [statistics.fmean(values) for values in points]
        reached = next((s for s, mean in zip(times, means, strict=True) if mean <= goal), math.inf)
        found.append(
            {
                "way": way,
                "rate": one[0]["rate"],
                "at an end": one[0]["rate"] in (RATES[0], RATES[-1]),
                "steps": round(statistics.median(x["steps"] for x in one)),
                "valid": statistics.fmean(best_of(x)[0] for x in one),
                "end": interval([best_of(x)[1] for x in one]),
                "better": apart(runs, way, "whole"),
                "reached": reached / full,  # of the time of "whole"
                "seeds": len(runs),
            }
        )
    return found


def curve(runs, way):
    """Up to when each point is known for all seeds, and what stopping there gives for each."""
    one = [row["ways"][way] for row in runs]
    times = [max(at) for at in zip(*(x["seconds"] for x in one), strict=True)]
    return times, [[best_of(x, s)[1] for x in one] for s in times]


def bias_of(rows, name, way):
    """Bias over the gradient, cosine, and noise: medians over seeds and three times of a training."""
    points = [x for row in rows if (row["task"], row["kind"]) == (name, "bias") for x in row["rows"] if x["way"] == way]
    found = [[x[key] for x in points if x[key] is not None] for key in ("bias", "cosine", "noise")]
    return [statistics.median(values) if values else math.nan for values in found]


def told(pair):
    return f"{pair[0]:.2f} ± {pair[1]:.2f}"


def show(rows):
    for name, task in TASKS.items():
        found = compared(rows, name)
        if not found:
            continue
        scale = next(row["scale"] for row in rows if row["task"] == name)
        print(f"\n{task.name}: {task.said}, {task.seconds * scale:.1f} s, {found[0]['seeds']} seeds")
        print(f"{'way':10} {'rate':>16} {'steps':>7} {'test':>16} {'less than whole':>16}  time to reach whole's end")
        for one in found:
            rate = f"{'(an end) ' if one['at an end'] else ''}{one['rate']:g}"
            reached = "never" if one["reached"] == math.inf else f"{one['reached']:.0%}"
            cells = f"{one['way']:10} {rate:>16} {one['steps']:7} {told(one['end']):>16} {told(one['better']):>16}"
            print(f"{cells}  {reached}")
        for way in [way for way in SAMPLED if way in task.ways]:
            bias, cosine, noise = bias_of(rows, name, way)
            print(f"  batches of {way!r}: bias {bias:.2f} of the gradient, cosine {cosine:.3f}, noise {noise:.1f}")


# The page.


def chosen(found, ways):
    """The way of these that is best on validation samples."""
    return min((one for one in found if one["way"] in ways), key=lambda one: one["valid"], default=None)


def verdict(rows, name):
    """The best mask against the best of what needs none, both chosen on validation samples, and what follows."""
    runs, found = trainings(rows, name), compared(rows, name)
    mask, other = chosen(found, MASKED), chosen(found, ("whole", *SAMPLED))
    mean, half = apart(runs, mask["way"], other["way"])
    gained = mask["better"][0] - mask["better"][1] > 0
    word = "use" if mean - half > 0 else "don't" if mean + half < 0 or not gained else "try"
    return word, mask["way"], other["way"], (mean, half)


def ranks(values):
    order = sorted(values)
    return [statistics.fmean([i for i, x in enumerate(order) if x == value]) for value in values]


def bias_and_gain(rows, ways=(*BATCHES, "subsample")):
    """For each task and kind of minibatch: the bias, and by which share of what it has informed masks have less."""
    points = []
    for name in TASKS:
        runs = trainings(rows, name)
        for way in ways if runs else ():
            if way in TASKS[name].ways:
                bias = bias_of(rows, name, way)[0]
                gain = apart(runs, "informed", way)[0] / statistics.fmean(best_of(row["ways"][way])[1] for row in runs)
                points.append((name, way, max(bias, 0.0), gain))
    return points


def correlation(points):
    """Spearman's, of bias and gain."""
    return statistics.correlation(ranks([x[2] for x in points]), ranks([x[3] for x in points]))


def loaded():
    files = [RESULTS / f"{name}.json" for name in FILES]
    return [row for file in files if file.exists() for row in json.loads(file.read_text())["rows"]]


def known(rows):
    return [name for name in TITLES if trainings(rows, name)]


def named(name, way):
    """A way as a reader of the page calls it."""
    sizes = TASKS[name].sizes
    return {"small": f"{sizes[0]}", "medium": f"{sizes[1]}", "balanced": f"{sizes[0]} balanced"}.get(way, way)


def cell(name, one, prefix=True):
    """Quality with its interval; bold where it is surely better than the whole batch, slanted where surely worse."""
    if one is None:
        return ""
    mean, half = one["better"]
    mark = "" if one["way"] == "whole" else "**" if mean - half > 0 else "*" if mean + half < 0 else ""
    said = f"{mark}{one['end'][0]:.1f} ± {one['end'][1]:.1f}{mark}{'†' if one['at an end'] else ''}"
    said += f", {min(1.0, one['reached']):.0%}" if one["way"] != "whole" and one["reached"] < math.inf else ""
    return f"{named(name, one['way'])}: {said}" if prefix else said


def advice(rows, name):
    word, mask, other, (mean, _) = verdict(rows, name)
    if word == "use":
        return f"**use**, {mask}"
    if word == "try":
        return f"try, {mask}" + (f"; {named(name, other)} first" if mean < 0 else "")
    what = {"whole": "nothing gained", "crops": "crops", "subsample": "subsample"}
    return f"don't: {what.get(other, f'batches of {named(name, other)}')}"


def main_table(rows):
    lines = [
        "| task, measure (less is better) | whole batch | best minibatch | part of the data | uniform masks "
        "| informed masks | budget | bias of minibatches | masks? |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in known(rows):
        task, found = TASKS[name], compared(rows, name)
        by = {one["way"]: one for one in found}
        cells = [
            f"{TITLES[name]}, {MEASURES.get(task.said, task.said)}",
            cell(name, by["whole"], prefix=False),
            cell(name, chosen(found, BATCHES)),
            cell(name, chosen(found, PARTS)),
            *(cell(name, by[way], prefix=False) for way in ("uniform", "informed", "budget")),
            ", ".join(f"{max(0.0, bias_of(rows, name, way)[0]):.2g}" for way in ("small", "medium")),
            advice(rows, name),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bias_words(rows):
    points = bias_and_gain(rows)
    small = [x for x in points if x[1] == "small"]
    name, _, most, gain = max(small, key=lambda x: x[2])
    others, gains = ([x[k] for x in small if x[0] != name] for k in (2, 3))
    return (
        f"Where the loss of the smallest minibatches is another one ({TITLES[name]}: a bias of {most:.0f} times the "
        f"gradient), informed masks\nend {gain:.0%} below them; where that bias is at most {max(others):.2f}, they end "
        f"between {max(gains):.0%} below and {-min(gains):.0%} above. A huge\nbias decides, a small one tells little: "
        f"the rank correlation of bias and gain is {correlation(small):.2f} over the {len(small)} tasks, "
        f"{correlation(points):.2f} over all\n{len(points)} kinds of minibatch."
    )


def also_words(rows):
    """What the loss of "latent" does not say."""
    runs = trainings(rows, "latent")
    ways = ("whole", "small", "medium", "informed")
    ends = {way: interval([row["ways"][way]["also"]["errors, %"] for row in runs]) for way in ways}
    said = {way: f"{mean:.1f}% ± {half:.1f}" for way, (mean, half) in ends.items()}
    return (
        f"Of its test images {said['informed']} are put into a wrong class with informed masks, {said['whole']} with "
        f"the whole\nbatch, but {said['small']} and {said['medium']} with minibatches of 32 and 256, which give up "
        "the distances."
    )


def setup(rows):
    """On which machine what was measured."""
    lines = [
        "| | seconds | whole batch, steps | best minibatch, steps | seeds | machine |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name in known(rows):
        found, run = compared(rows, name), trainings(rows, name)[0]
        cells = [
            TITLES[name],
            f"{TASKS[name].seconds * run['scale']:.1f}",
            f"{found[0]['steps']}",
            f"{chosen(found, BATCHES)['steps']:,}",
            f"{found[0]['seeds']}",
            run["machine"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def boosting_words(rows):
    """The outsider beside the table."""
    runs = sorted((row for row in rows if row["kind"] == "outsider"), key=lambda row: row["seed"])
    mean, half = interval([best_of(row)[1] for row in runs])
    spent = statistics.fmean(row["seconds"][row["validation"].index(min(row["validation"]))] for row in runs)
    return (
        f"On the table scikit-learn's `HistGradientBoostingClassifier` has {mean:.1f} ± {half:.1f} after {spent:.0f} s "
        f"({len(runs)} seeds)."
    )


def sizes():
    """Of bench_size.py: for each case and way, sizes and the memory of a step; None where it does not fit."""
    rows = json.loads((RESULTS / "size-cpu.json").read_text())["rows"]
    found = {}
    for row in rows:
        if row["name"] in SIZES and row["way"] != "lean" and not row["more"]:
            found.setdefault(row["name"], {}).setdefault(row["way"], {})[row["side"]] = row.get("gib")
    return found


def memory_table():
    lines = ["| | size | plain | engine | from the disk |", "|---|---:|---:|---:|---:|"]
    for name, ways in sizes().items():
        for size in sorted({size for points in ways.values() for size in points} - TOO_SMALL):
            cells = []
            for way in ("plain", "engine", "tiles" if "tiles" in ways else "parts"):
                known = ways.get(way, {})
                gib = known.get(size)
                cells.append(f"{gib:.2f} GiB" if gib else "does not fit" if size in known else "")
            lines.append(f"| {SIZES[name]} | {size:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fits_table():
    """Of quality_memory.py: the largest that fits, and what a step takes."""
    rows = json.loads((RESULTS / "quality-memory-cpu.json").read_text())["rows"]
    names = {"image": "side of one image", "batch": "images in a batch", "cohort": "images of 1024² in a cohort"}
    ways = ("plain", "checkpoint", "gradcache", "engine", "tiles")
    lines = [f"| largest | memory | {' | '.join(ways)} |", f"|---|---:|{'---:|' * len(ways)}"]
    cases = {(row["kind"], row["limit"]): None for row in rows}
    for kind, limit in cases:
        by = {row["way"]: row for row in rows if (row["kind"], row["limit"]) == (kind, limit)}
        cells = [""] * len(ways)
        for i, way in enumerate(ways):
            if way in by:
                more = "≥ " if by[way]["more"] == "takes too long" else ""
                cells[i] = f"{more}{by[way]['size']:,}, {by[way]['seconds']:.0f} s"
        lines.append(f"| {names[kind]} | {limit:g} GiB | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts(rows):
    """What stands between the markers of the page."""
    found = {"table": main_table(rows), "bias": bias_words(rows), "also": also_words(rows), "setup": setup(rows)}
    if any(row["kind"] == "outsider" for row in rows):
        found["boosting"] = boosting_words(rows)
    found["memory"], found["fits"] = memory_table(), fits_table()
    return found


def pages(rows):
    text = PAGE.read_text()
    for name, part in parts(rows).items():
        begin, end = f"<!-- evidence-{name} -->", f"<!-- end of evidence-{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}" if rest else text
    PAGE.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="write tables and numbers into docs/evidence.md")
    parser.add_argument("--plot", type=Path, help="draw the pictures into this folder")
    arguments = parser.parse_args()
    rows = loaded()
    show(rows)
    if arguments.pages:
        pages(rows)
    if arguments.plot:
        import quality_draw  # which imports this file

        quality_draw.draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
