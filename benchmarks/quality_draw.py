"""The pictures of docs/evidence.md, each for a wide window and for a phone.

python benchmarks/quality_pages.py --plot docs/images
"""

from quality_pages import (
    BATCHES,
    MEASURES,
    PARTS,
    SIZES,
    TITLES,
    TOO_SMALL,
    chosen,
    compared,
    curve,
    interval,
    known,
    sizes,
    trainings,
)
from quality_tasks import TASKS

INK, BLUE, BROWN, PALE, PURPLE = "#37323e", "#2a7fb8", "#b3541e", "#a98fd0", "#5b2c91"


def shown(rows, name):
    """Five ways at most: what they are called, their colour and line."""
    found = compared(rows, name)
    batch, part = chosen(found, BATCHES), chosen(found, PARTS)
    ways = {"whole": ("whole batch", INK, "-"), batch["way"]: ("best minibatches", BLUE, "-")}
    if part:
        ways[part["way"]] = ("crops or a subsample", BROWN, "-")
    return {**ways, "uniform": ("uniform masks", PALE, "--"), "informed": ("informed masks", PURPLE, "-")}


def panel(axes, rows, name):
    runs, ends = trainings(rows, name), []
    for way, (label, colour, line) in shown(rows, name).items():
        times, points = curve(runs, way)
        found = [interval(values) for values in points]
        means = [mean for mean, _ in found]
        axes.plot(times, means, line, color=colour, label=label, linewidth=1.8)
        bounds = ([m + sign * half for m, half in found] for sign in (-1, 1))
        axes.fill_between(times, *bounds, color=colour, alpha=0.13, linewidth=0)
        ends += [m + sign * half for m, half in found[4:] for sign in (-1, 1)]
    room = 0.05 * (max(ends) - min(ends))
    axes.set(xlim=(0, None), ylim=(min(ends) - room, max(ends) + room))
    axes.set_title(TITLES[name], fontsize="medium", loc="left", color=INK)
    axes.set_ylabel(MEASURES.get(TASKS[name].said, TASKS[name].said))
    axes.spines[["top", "right"]].set_visible(False)


def time_picture(rows, path, columns, size, font):
    from matplotlib import pyplot as plt

    names = known(rows)
    lines = -(-len(names) // columns)
    with plt.rc_context({"font.size": font, "axes.edgecolor": "#9a94a3"}):
        figure, axes = plt.subplots(
            lines, columns, figsize=(size[0], size[1] * lines + 0.7), layout="constrained", squeeze=False
        )
        labels = {}
        for axis, name in zip(axes.flat, names, strict=False):
            panel(axis, rows, name)
            handles, texts = axis.get_legend_handles_labels()
            labels |= dict(zip(texts, handles, strict=True))
        for axis in axes.flat[len(names) :]:
            axis.set_visible(False)
        for axis in axes.flat[max(0, len(names) - columns) : len(names)]:
            axis.set_xlabel("seconds of one core")
        order = ["whole batch", "best minibatches", "crops or a subsample", "uniform masks", "informed masks"]
        figure.legend(
            [labels[x] for x in order], order, loc="outside upper center", ncols=5 if columns > 1 else 2, frameon=False
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def memory_picture(path, columns, size, font):
    from matplotlib import pyplot as plt

    styles = {"plain": ("plain", INK, "-"), "engine": ("engine, input in memory", PALE, "--")}
    styles |= dict.fromkeys(("tiles", "parts"), ("engine, input on the disk", PURPLE, "-"))
    with plt.rc_context({"font.size": font, "axes.edgecolor": "#9a94a3"}):
        found, labels = sizes(), {}
        lines = -(-len(found) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(size[0], size[1] * lines + 0.7), layout="constrained", squeeze=False
        )
        for axis, (name, ways) in zip(axes.flat, found.items(), strict=True):
            for way, known in ways.items():
                label, colour, line = styles[way]
                points = sorted((at, gib) for at, gib in known.items() if gib and at not in TOO_SMALL)
                (labels[label],) = axis.loglog(*zip(*points, strict=True), f"o{line}", color=colour, markersize=5)
            ticks = sorted({at for known in ways.values() for at in known} - TOO_SMALL)
            axis.set_xticks(ticks, [f"{at / 1e6:g} M" if at >= 10**6 else f"{at:,}" for at in ticks])
            axis.set_yticks([0.1, 0.25, 0.5, 1, 2, 4, 8], ["0.1", "0.25", "0.5", "1", "2", "4", "8"])
            axis.minorticks_off()
            axis.set(xlabel=SIZES[name].split(", ")[-1], ylabel="GiB of a step")
            axis.set_title(SIZES[name].rsplit(", ", 1)[0], fontsize="medium", loc="left", color=INK)
            axis.spines[["top", "right"]].set_visible(False)
        labels, place = {label: labels[label] for label, *_ in styles.values()}, "outside upper center"
        figure.legend(labels.values(), labels, loc=place, ncols=3 if columns > 1 else 1, frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw(rows, folder):
    import matplotlib as mpl

    mpl.use("Agg")
    time_picture(rows, folder / "evidence-time.png", 4 if len(known(rows)) > 6 else 3, (10, 2.6), 10)
    time_picture(rows, folder / "evidence-time-narrow.png", 1, (4.7, 2.1), 11)
    memory_picture(folder / "evidence-memory.png", 3, (10, 2.6), 10)
    memory_picture(folder / "evidence-memory-narrow.png", 1, (4.7, 2.3), 11)
