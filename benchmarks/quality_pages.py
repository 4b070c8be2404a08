"""What came of quality.py: tables to look at.

python benchmarks/quality.py --again FILE
"""

import math
import statistics

from quality import RATES, SAMPLED, best_of
from quality_tasks import TASKS

T95 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179), 1))


def interval(values):
    """The mean, and half of a 95% interval by Student's t."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), T95[min(len(values) - 1, 12)] * statistics.stdev(values) / math.sqrt(len(values))


def compared(rows, name):
    """For each way: quality at the end and how it differs from "whole", and when it reaches what "whole" ends with."""
    runs = sorted((row for row in rows if (row["task"], row["kind"]) == (name, "train")), key=lambda row: row["seed"])
    if not runs:
        return []
    ends = {way: [best_of(row["ways"][way])[1] for row in runs] for way in TASKS[name].ways}
    goal, full = statistics.fmean(ends["whole"]), TASKS[name].seconds * runs[0]["scale"]
    found = []
    for way in TASKS[name].ways:
        one, apart = [row["ways"][way] for row in runs], [a - b for a, b in zip(ends["whole"], ends[way], strict=True)]
        means = [statistics.fmean(best_of(x, s)[1] for x in one) for s in _seconds(one)]
        reached = next((s for s, value in zip(_seconds(one), means, strict=True) if value <= goal), math.inf)
        found.append(
            {
                "way": way,
                "rate": one[0]["rate"],
                "at an end": one[0]["rate"] in (RATES[0], RATES[-1]),
                "steps": round(statistics.median(x["steps"] for x in one)),
                "end": interval(ends[way]),
                "better": interval(apart),
                "reached": reached / full,  # of the time of "whole"
                "seeds": len(runs),
            }
        )
    return found


def _seconds(curves):
    """Up to when each point of the curves is known in all of them."""
    return [max(times) for times in zip(*(curve["seconds"] for curve in curves), strict=True)]


def told(pair):
    return f"{pair[0]:.2f} ± {pair[1]:.2f}"


def show(rows):
    for name, task in TASKS.items():
        found = compared(rows, name)
        if not found:
            continue
        scale = next(row["scale"] for row in rows if row["task"] == name)
        print(f"\n{task.name}: {task.said}, {task.seconds * scale:.0f} s, {found[0]['seeds']} seeds")
        print(f"{'way':10} {'rate':>16} {'steps':>7} {'test':>16} {'less than whole':>16}  time to reach whole's end")
        for one in found:
            rate = f"{'(an end) ' if one['at an end'] else ''}{one['rate']:g}"
            reached = "never" if one["reached"] == math.inf else f"{one['reached']:.0%}"
            cells = f"{one['way']:10} {rate:>16} {one['steps']:7} {told(one['end']):>16} {told(one['better']):>16}"
            print(f"{cells}  {reached}")
        for way in SAMPLED:
            points = [x for row in rows if (row["task"], row["kind"]) == (name, "bias") for x in row["rows"]]
            points = [x for x in points if x["way"] == way]
            if points:
                found = [[x[key] for x in points if x[key] is not None] for key in ("bias", "cosine", "noise")]
                bias, cosine, noise = (statistics.median(values or [math.nan]) for values in found)
                print(f"  batches of {way!r}: bias {bias:.2f} of the gradient, cosine {cosine:.3f}, noise {noise:.1f}")
