"""Makes the tables and pictures of the docs about results and experiments from the trials: `python results/make.py`.

`TASK/trials.json` is a study, `TASK/choice.json` the one on validation data by which learning rates were chosen, and
others go further. All are as `backdrop report STUDY --format json` writes them; what is beside them is made here.
"""

import json
import math
import re
import shutil
import statistics
from pathlib import Path

import claims
from matplotlib.figure import Figure

from backdrop.experiments.report import drawing, tables, wording
from backdrop.experiments.report.statistics import CHOSEN, Results, estimate, paired
from backdrop.experiments.report.write import markdown_table, write_report
from backdrop.experiments.study.archive import Archive
from backdrop.experiments.study.plan import again
from backdrop.experiments.tasks import TASKS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
PAGES = [PAGE, ROOT / "docs" / "experiments.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
IMAGES = ROOT / "docs" / "images"
FOLLOWS = {"small", "large", "blocks"}  # settings of textures that their size says
SCALES = {"accuracy": 1, "small": 1, "large": 1}
ADAPTED = {"adapted_accuracy": 1, "adapted_small": 1, "adapted_large": 1}
HIDDEN = {"xe": 3, "dist": 2, "dist_minibatch": 2, "accuracy": 1}
MORE = {  # metrics of studies that the page shows besides the main one, and with how many decimals
    ("gp", "trials"): ADAPTED,
    ("gp", "turned-crops"): {**SCALES, **ADAPTED},
    ("gp", "small"): SCALES,
    ("gp", "small-short"): SCALES,
    ("gp", "half"): SCALES,
    ("cifar10", "trials"): {"loss": 3, "accuracy": 1, "clean": 1, "fgsm_2": 1, "fgsm_8": 1, "pgd_2": 1, "pgd_8": 1},
    ("latent", "trials"): HIDDEN,
    ("latent", "same"): HIDDEN,
}
USUAL = {  # how textures are trained
    "optimizer": "adamw",
    "lr_schedule": "one-cycle",
    "batch_size": 4,
    "norm": "batch",
    "exact": False,
    "p_warmup": 0.0,
    "flips": False,
}
QUICK = ("gp", "auc")  # quick presets in which both arms are trained as is best for them
POLICIES = {"gp": "gp, 4 images of 1024", "auc": "auc, 2048"}  # and how their case begins among the times of steps
STEPS = ROOT / "benchmarks" / "results" / "steps-h200.json"
MOVED = {  # searches, and the setting whose best value moves with p
    "auc, batches of 2048": ("auc", "choice", {"batch_size": 2048}, "lr"),
    "gp, small": ("gp", "small-choice", {}, "lr"),
    "cifar10, batches of 16": ("cifar10", "choice", {"batch_size": 16, "lr": 0.0003}, "epochs"),
}


def study(task, name="trials"):
    return Archive(ROOT / "results" / task / f"{name}.json")


def table(headings, rows, words=0):
    """In Markdown: rows of cells, as they are, with words in the first columns and numbers in the others."""
    rule = "|" + "".join("---|" if place < words else "---:|" for place in range(len(headings)))
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (headings, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def change(found, digits):
    return f"{wording.number(found.mean, digits, signed=True)} [{wording.interval(found, digits)}]"


def judged():
    """By task, what becomes of each claim of the paper."""
    return {name: claims.CLAIMS[name](Results(task, study(name).records())) for name, task in TASKS.items()}


def verdict(claim, many):
    """In bold where it stands with intervals for all claims at once as well."""
    word = f"**{claim.verdict}**" if claim.among(many) == claim.verdict != claims.OPEN else claim.verdict
    less = ", but surely less than the paper's" if claim.verdict == claims.OPEN and claim.is_less else ""
    return word + less


def decides(claim):
    if claim.decides is None:
        return ""
    return f"{claim.decides}" if claim.decides <= claims.MOST else f"over {claims.MOST}"


def claims_table(found, many):
    """A row per claim of the paper about a task."""
    rows = [[each.claim, each.paper, each.here, verdict(each, many), decides(each)] for each in found]
    return table(["claim", "the paper", "here", "verdict", "seeds that would decide"], rows, words=4)


def verdicts(found):
    """How many claims of each task held, and how many of these stand with intervals for all at once."""
    many, rows = sum(map(len, found.values())), []
    total = {word: [0, 0] for word in claims.VERDICTS}
    for name, each in found.items():
        cells = []
        for word in claims.VERDICTS:
            here = [claim for claim in each if claim.verdict == word]
            sure = sum(claim.among(many) == word for claim in here)
            total[word] = [total[word][0] + len(here), total[word][1] + sure]
            cells.append(_counted(word, len(here), sure))
        rows.append([f"[{name}](results/{name}.md)", *cells])
    rows.append(["all", *(_counted(word, *total[word]) for word in claims.VERDICTS)])
    return table(["experiment", *claims.VERDICTS], rows, words=1)


def _counted(word, count, sure):
    return f"{count}" if word == claims.OPEN or not sure else f"{count} ({sure})"


def made_by(task):
    """How a study was made: command, trials, machine, time."""
    found = study(task)
    records = found.records()
    done = [record for record in records if record.state == "complete"]
    points = {repr({**record.settings, "seed": None}) for record in records}
    wanted = len(points) * len({record.settings["seed"] for record in records})
    machine = done[0].machine
    time = wording.duration(math.fsum(record.seconds for record in done))
    return (
        f"`{again(found.name, found.spec, records)}`: {len(done)} of {wanted} trials, {time} of training, on one "
        f"{machine['device']} with torch {machine['torch']}. Tables, curves and trials are in `results/{task}`."
    )


def chosen(task, search):
    """What a search found best on validation data for every mask, by the settings that are no choice."""
    results = Results(TASKS[task], study(task, search).records())
    names = [name for name in results.varied if name not in CHOSEN and name not in FOLLOWS]
    options = [name for name in CHOSEN if name in results.varied]
    found = {}
    for each in results.measured:
        found.setdefault(tuple(each.settings[name] for name in names), []).append(each)
    metric = wording.metric_name(TASKS[task].metric)
    digits = wording.decimals(results.estimate(each).mean for each in results.measured)
    headings = [*map(wording.setting_name, [*names, *options]), f"validation {metric}", "seeds", "tried"]
    rows = []
    for place, tried in sorted(found.items(), key=lambda item: [value or 0 for value in item[0]]):  # none is first
        best = results.best(tried)
        mean = results.estimate(best)
        cells = [*map(wording.value, place), *(wording.value(best.settings[name]) for name in options)]
        rows.append([*cells, wording.plus_minus(mean, digits), mean.n, len(tried)])
    return table(headings, rows)


def more(task, name, metrics):
    """Metrics of every configuration of a study."""
    results = Results(TASKS[task], study(task, name).records())
    rows = []
    for each in results.measured:
        cells = [wording.value(each.settings[name]) for name in results.axes]
        means = [wording.plus_minus(results.estimate(each, metric), digits) for metric, digits in metrics.items()]
        rows.append([*cells, *means])
    return table([*map(wording.setting_name, results.axes), *map(wording.metric_name, metrics)], rows)


def earlier(task):
    """What was judged by test images before the search went on, and what became of it."""
    then, now = (Results(TASKS[task], study(task, name).records()) for name in ("earlier", "trials"))
    latest = {tuple(c.settings[name] for name in now.axes): c for c in now.measured}
    options = [name for name in CHOSEN if name in then.varied or name in now.varied]
    digits = wording.decimals(now.estimate(each).mean for each in now.measured)
    metric = wording.metric_name(TASKS[task].metric)
    names, rows = [*now.axes, *options], []
    cells = {each: tuple(each.settings[name] for name in now.axes) for each in then.measured}
    for each in sorted(cells, key=lambda each: [*latest].index(cells[each])):
        its = latest[cells[each]]
        means = [wording.plus_minus(then.estimate(each), digits), wording.plus_minus(now.estimate(its), digits)]
        rows.append([*(wording.value(each.settings[name]) for name in names), *means])
    return table([*map(wording.setting_name, names), f"{metric} then", f"{metric} now"], rows)


def variants():
    """Other ways to train textures, without masks and with them."""
    results = Results(TASKS["gp"], study("gp", "variants").records())
    found = {}
    for masked in (False, True):
        tried = [c for c in results.measured if c.settings["crop"] is None and results.is_masked(c) is masked]
        (usual,) = (c for c in tried if USUAL.items() <= c.settings.items())
        for each in tried:
            changed = [name for name in results.varied if each.settings[name] != usual.settings[name]]
            way = ", ".join(f"{wording.setting_name(name)} {wording.value(each.settings[name])}" for name in changed)
            found.setdefault(way or "as chosen", []).append(each)
    rows = []
    for way, (plain, masked) in sorted(found.items(), key=lambda item: -results.estimate(item[1][1]).mean):
        gain = estimate(paired(masked.values("accuracy"), plain.values("accuracy")).values())
        rows.append([way, *(wording.plus_minus(results.estimate(c), 1) for c in (plain, masked)), change(gain, 1)])
    return table(["training", "without masks", "with (0.99, 0.94)", "gain"], rows, words=1)


def training(results, masked):
    """Whether masks have the settings that were chosen without them."""
    ours, its = masked.settings, results.control(masked).settings
    return "the same" if all(ours[name] == its[name] for name in CHOSEN if name in ours) else "another"


def attacks():
    """What masks change in accuracy under attack, paired by seed."""
    results = Results(TASKS["cifar10"], study("cifar10").records())
    metrics = ["clean", "fgsm_2", "pgd_2", "fgsm_8"]
    rows = []
    for each in filter(results.is_masked, results.measured):
        cells = [*(wording.value(each.settings[name]) for name in results.axes), training(results, each)]
        rows.append([*cells, *(change(results.difference(each, metric), 1) for metric in metrics)])
    headings = [*map(wording.setting_name, results.axes), "training", *map(wording.metric_name, metrics)]
    return table(headings, rows)


def policies():
    """What Skip's policies for batch statistics make of accuracy and time, against the same masks without Skip."""
    steps, rows = json.loads(STEPS.read_text())["rows"], []
    for task, case in POLICIES.items():
        metric, results = TASKS[task].metric, Results(TASKS[task], study(task, "policies").records())
        like = {name: value for name, value in results.measured[0].settings.items() if name != "skip"}.items()
        (plain,) = (c for c in Results(TASKS[task], study(task).records()).measured if like <= c.settings.items())
        found = {c.settings["skip"]: c.values(metric) for c in results.measured}
        found["plain"] = {seed: value for seed, value in plain.values(metric).items() if seed in found["sampled"]}
        (row,) = (row for row in steps if row["case"].startswith(case))
        digits = wording.decimals([results.estimate(plain).mean])
        for policy in ("plain", "exact", "sampled", "frozen"):
            mean = wording.plus_minus(estimate(found[policy].values()), digits)
            less = estimate(paired(found[policy], found["plain"]).values())
            name, by = ("without Skip", "") if policy == "plain" else (policy, change(less, digits))
            ms = row[f"{policy}_ms"]
            rows.append([task, name, mean, by, f"{ms:.1f}", f"{row['plain_ms'] / ms:.2f}"])
    headings = ["task", "batch statistics", "metric", "less what it is without Skip", "ms of a step", "times as fast"]
    return table(headings, rows, words=2)


def small_policies():
    """The same for textures on two CPU cores, where "exact" is what plain masks are, bit for bit."""
    results = Results(TASKS["gp"], study("gp", "small-policies").records())
    order = ("exact", "sampled", "frozen")
    found = sorted(results.measured, key=lambda c: (order.index(c.settings["skip"]), -c.settings["lr"]))
    times = [statistics.mean(record.seconds for record in c.complete) for c in found]
    rows = []
    for c, time in zip(found, times, strict=True):
        less = estimate(paired(c.values("accuracy"), found[0].values("accuracy")).values())
        means = [wording.plus_minus(results.estimate(c, metric), digits) for metric, digits in SCALES.items()]
        cells = [c.settings["skip"], wording.value(c.settings["lr"]), *means, change(less, 1) if rows else ""]
        rows.append([*cells, f"{time:.0f}", f"{times[0] / time:.2f}"])
    headings = ["batch statistics", "lr", *map(wording.metric_name, SCALES), 'less what it is with "exact"']
    return table([*headings, "seconds of training", "times as fast"], rows, words=1)


def half_gains():
    """What masks gain at half the side over none and over each other, by training set."""
    results = Results(TASKS["gp"], study("gp", "half").records())
    cells = {tuple(c.settings[name] for name in TASKS["gp"].masks): c for c in results.measured}
    none, weak, strong, both = (cells[p] for p in ((0.0, 0.0), (0.0, 0.75), (0.0, 0.94), (0.99, 0.94)))
    pairs = {
        "the large mask, 0.75, over none": (weak, none),
        "the large mask, 0.94, over none": (strong, none),
        "both over none": (both, none),
        "both over the large one, 0.94": (both, strong),
    }
    rows = []
    for what, (first, second) in pairs.items():
        found = [estimate(paired(first.values(m), second.values(m)).values()) for m in SCALES]
        rows.append([what, *(both_intervals(each, 1) for each in found), found[0].n])
    return table(["gain of", *map(wording.metric_name, SCALES), "training sets"], rows, words=1)


def moved(task, search, wanted, name):
    """For the p of all masks, what a search has found at best with each value of a setting."""
    results = Results(TASKS[task], study(task, search).records())
    found = {}
    for each in results.measured:
        if wanted.items() <= each.settings.items():
            p = tuple(each.settings[mask] for mask in TASKS[task].masks)
            found.setdefault(p, {}).setdefault(each.settings[name], []).append(each)
    return {
        p: {value: results.estimate(results.best(tried)).mean for value, tried in sorted(values.items())}
        for p, values in sorted(found.items())
    }


def moved_picture():
    """How the best learning rate and the best length of training move with p; rings are around the best."""
    with drawing.style():
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        for axes, (title, (task, *where, name)) in zip(figure.subplots(1, len(MOVED)), MOVED.items(), strict=True):
            found = moved(task, *where, name)
            better = max if TASKS[task].maximize else min
            for i, (p, means) in enumerate(found.items()):
                colour, marker = drawing.shades(len(found))[i], drawing.MARKERS[i]
                label = ", ".join(map(wording.value, p))
                axes.plot(*zip(*means.items(), strict=True), color=colour, marker=marker, label=f"p = {label}")
                best = better(means, key=means.get)
                axes.plot(best, means[best], "o", color=colour, markersize=14, fillstyle="none", markeredgewidth=1.5)
            drawing.logarithmic(axes.xaxis)
            axes.set_xlabel("learning rate" if name == "lr" else wording.setting_name(name))
            axes.set_ylabel(f"validation {wording.metric_name(TASKS[task].metric)}")
            axes.set_title(title)
            axes.legend(fontsize=9, handlelength=1.2)
    return drawing.Picture("moved", "", "", figure).png()


def whose(results, configuration):
    """The settings of a quick study that differ between its configurations, but for masks."""
    names = [name for name in CHOSEN if name in results.varied]
    return ", ".join(f"{wording.setting_name(name)} {wording.value(configuration.settings[name])}" for name in names)


def both_intervals(found, digits):
    t = wording.interval(claims.t_interval(found), digits)
    return f"{wording.number(found.mean, digits, signed=True)} [{t}; {wording.interval(found, digits)}]"


def quick():
    """The quick studies: the best without masks against the best with them, and the most they gain at one setting."""
    rows = []
    for task in QUICK:
        kind = TASKS[task]
        results = Results(kind, study("quick", task).records())
        arms = {m: [c for c in results.measured if results.is_masked(c) is m] for m in (False, True)}
        plain, masked = (results.best(arms[m]) for m in (False, True))
        sign = 1 if kind.maximize else -1
        digits = 1 if kind.metric == "accuracy" else 3
        values = [c.values(kind.metric) for c in (masked, plain)]
        best = estimate(sign * gain for gain in paired(*values).values())
        same = [gain for c in arms[True] if len(arms[True]) > 1 and (gain := results.gain(c)) is not None]
        most = both_intervals(max(same, key=lambda gain: gain.mean), digits) if same else ""
        masks = ", ".join(f"{m} {wording.value(masked.settings[m])}" for m in kind.masks if masked.settings[m])
        cells = [f"{results.estimate(c).mean:.{digits}f} ({whose(results, c)})" for c in (plain, masked)]
        minutes = math.fsum(record.seconds for record in results.records) / 120
        row = [
            f"`{task}`",
            masks,
            wording.metric_name(kind.metric),
            *cells,
            both_intervals(best, digits),
            most,
            best.n,
            f"{minutes:.0f}",
        ]
        rows.append(row)
    headings = [
        "task",
        "mask",
        "metric",
        "best without",
        "best with",
        "gain",
        "most at one setting",
        "seeds",
        "minutes",
    ]
    return table(headings, rows, words=3)


def demo():
    """What `make demo` prints."""
    results = Results(TASKS["gp"], study("quick", "gp").records())
    rows = []
    for each in results.measured:
        found, gain = results.estimate(each), results.gain(each)
        masks = [wording.value(each.settings[name]) for name in TASKS["gp"].masks]
        mean = f"{wording.plus_minus(found, 1)} [{wording.interval(found, 1)}]"
        rows.append([*masks, whose(results, each), mean, change(gain, 1) if gain else ""])
    return table(["p_small", "p_large", "trained with", "accuracy in percent", "gain over no masks"], rows)


def filled(pages):
    """The pages, by their paths, with everything between their markers made anew."""
    pages = dict(pages)

    def put(name, content):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
        counts = 0
        for path, page in pages.items():
            pages[path], count = marked.subn(lambda found: f"{found[1]}\n{content}\n{found[2]}", page)
            counts += count
        assert counts == 1, f"docs/results.md and its pages have to have one place for {name}, but have {counts}"

    put("demo", demo())
    put("quick", quick())
    found = judged()
    put("verdicts", verdicts(found))
    for name, each in found.items():
        put(f"{name} claims", claims_table(each, sum(map(len, found.values()))))
    put("gp table", markdown_table(tables.gp_table(Results(TASKS["gp"], study("gp").records()))))
    put("gp variants", variants())
    put("gp turned", chosen("gp", "turned"))
    put("gp small-choice", chosen("gp", "small-choice"))
    put("gp half-choice", chosen("gp", "half-choice"))
    put("gp half gains", half_gains())
    for task in ("ponce", "cifar10", "auc", "latent"):
        put(f"{task} quick-choice", chosen(task, "quick-choice"))
    put("gp small-mask", chosen("gp", "small-mask"))
    put("policies", policies())
    put("gp small-policies", small_policies())
    put("cifar10 attacks", attacks())
    for task in TASKS:
        put(task, made_by(task))
        put(f"{task} choice", chosen(task, "choice"))
    for task in ("ponce", "cifar10", "auc"):
        put(f"{task} earlier", earlier(task))
    for (task, name), metrics in MORE.items():
        put(f"{task} metrics" if name == "trials" else f"{task} {name}", more(task, name, metrics))
    return pages


def main():
    for name, task in TASKS.items():
        folder, found = ROOT / "results" / name, study(name)
        command = again(found.name, found.spec, found.records())
        for kind in ("md", "csv"):
            path, more = folder / f"report.{kind}", {"command": command, "claims": claims.table}
            write_report(task, found.name, found.records(), path, format=kind, **more)
        for kind in ("metric", "accuracy", "loss-ratio"):
            for picture in folder.glob(f"report-{kind}*.png"):
                shutil.copyfile(picture, IMAGES / picture.name.replace(f"report-{kind}", f"results-{name}"))
        for kind in ("dist", "dist-map", "xe-map"):
            for picture in folder.glob(f"report-{kind}.png"):
                shutil.copyfile(picture, IMAGES / picture.name.replace("report", f"results-{name}"))
        for path in folder.glob("*.json"):
            if path.stem != "trials":
                other = Archive(path)
                write_report(task, other.name, other.records(), path.with_suffix(".csv"), format="csv")
    for path in (ROOT / "results" / "quick").glob("*.json"):
        other = Archive(path)
        write_report(
            TASKS[path.stem.split("-")[0]], other.name, other.records(), path.with_suffix(".csv"), format="csv"
        )
    (IMAGES / "results-moved.png").write_bytes(moved_picture())
    for path, page in filled({path: path.read_text() for path in PAGES}).items():
        path.write_text(page)


if __name__ == "__main__":
    main()
