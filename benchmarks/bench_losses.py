"""Losses over the whole batch: time and memory of one forward and backward pass, from a hundred scores to a million.

    python benchmarks/bench_losses.py [--device cuda] [--json FILE] [--plot FILE] [--pages] [--only NAME] [--threads N]

Beside each loss of this library the same as a matrix of all pairs, written as one would, and what other libraries have,
where they are installed (`pip install --no-deps libauc pytorch-metric-learning torchsurv torchsort allrank`): LibAUC's
pairwise losses (its logistic one stands beside the rank statistic, which it does not have), soft ranks of torchsort,
allRank's ApproxNDCG, torchsurv's Cox loss, InfoNCE of pytorch-metric-learning. Each up to the size that fits into some
seconds and gigabytes.

All in one run, in rounds in which the ways take turns. On a CPU with one thread (the default) the figures are CPU time,
which counts nothing else that the machine does; with more threads, and on a GPU, the time on the clock. The median of
the rounds; memory is the peak above what lay there before. The slope is that of log(time) over log(n) from ten thousand
scores on: 1 is time that grows as n does, 2 as the pairs do.
"""

import json
import math
import platform
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from backdrop import losses
from bench_layer import machine, options, peak_bytes

SIZES = [100, 256, 1_000, 3_000, 10_000, 100_000, 1_000_000]
T = 0.5
PAIRWISE, SQUARE, CONTRASTIVE = 10_000, 3_000, 10_000  # sizes up to which matrices are measured


def scores_and_labels(n, device):
    labels = torch.arange(n, device=device) % 5 == 0
    return (torch.randn(n, device=device) + labels).requires_grad_(), labels.long()


def one_in_many(n, device):
    labels = torch.arange(n, device=device) == n // 2
    return torch.randn(n, device=device).requires_grad_(), labels.long()


def scores_and_relevance(n, device):
    relevance = torch.randint(5, (n,), device=device)
    return (torch.randn(n, device=device) + relevance / 2).requires_grad_(), relevance


def two_kinds_of_scores(n, device):
    a = torch.randn(n, device=device)
    return a.requires_grad_(), a.detach() + torch.randn(n, device=device)


def survival(n, device):
    hazards = torch.randn(n, device=device)
    times = torch.empty(n, device=device).exponential_() * torch.exp(-hazards)
    return hazards.requires_grad_(), times, torch.rand(n, device=device) < 0.6


def embeddings(n, device):
    a = nn.functional.normalize(torch.randn(n, 64, device=device))
    return a.requires_grad_(), nn.functional.normalize(a.detach() + 0.1 * torch.randn(n, 64, device=device))


def pairs(function):
    def loss(scores, labels):
        positive = labels == 1
        return function(scores[~positive] - scores[positive][:, None]).mean()

    return loss


def partial_auc_matrix(scores, labels):
    positive = labels == 1
    negative = scores[~positive]
    wanted = 0.1 * len(negative)
    highest = negative.topk(math.ceil(wanted))[0]
    share = (wanted - torch.arange(len(highest), device=highest.device)).clamp(max=1)  # the last counts in part
    return torch.sigmoid((highest - scores[positive][:, None]) / T).mean(0) @ share / wanted


def average_precision_matrix(scores, labels):
    positive = labels == 1
    above = torch.sigmoid((scores - scores[positive][:, None]) / T)
    return 1 - ((above[:, positive].sum(1) + 0.5) / (above.sum(1) + 0.5)).mean()


def soft_rank_matrix(scores):
    return torch.sigmoid((scores[:, None] - scores) / T).sum(1) + 0.5


def ndcg_matrix(scores, relevance):
    gain = 2.0**relevance - 1
    ideal = gain.sort(descending=True)[0] / torch.log2(torch.arange(2, len(gain) + 2, device=gain.device))
    return 1 - (gain / torch.log2(1 + soft_rank_matrix(-scores))).sum() / ideal.sum()


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()


def spearman_matrix(a, b):
    return correlation(soft_rank_matrix(a), soft_rank_matrix(b))


def concordance_matrix(hazards, times, events):
    comparable = (times[:, None] < times) & events[:, None]
    return (torch.sigmoid((hazards - hazards[:, None]) / T) * comparable).sum() / comparable.sum()


def cox_matrix(hazards, times, events):
    """Breslow's, which without ties in time is Efron's."""
    at_risk = torch.where(times >= times[:, None], hazards, -math.inf)
    return (events * (at_risk.logsumexp(1) - hazards)).sum() / events.sum()


def contrastive_matrix(a, b):
    scores, same = a @ b.T / 0.1, torch.arange(len(a), device=a.device)
    return (nn.functional.cross_entropy(scores, same) + nn.functional.cross_entropy(scores.T, same)) / 2


def others():
    """What other libraries have: for each loss, a name, a function and up to which size."""
    found = {}

    def add(loss, name, function, most):
        found.setdefault(loss, {})[name] = (function, most)

    try:
        from libauc.losses import PairwiseAUCLoss

        add("rank statistic", "LibAUC, logistic", PairwiseAUCLoss("logistic"), PAIRWISE)
        add("one positive", "LibAUC, logistic", PairwiseAUCLoss("logistic"), 100_000)
        add("squared hinge", "LibAUC", PairwiseAUCLoss("squared_hinge"), PAIRWISE)
    except ImportError:
        pass
    try:
        from torchsort import soft_rank

        add("soft ranks", "torchsort", lambda x: soft_rank(x[None]).square().mean(), 1_000_000)
        add("Spearman", "torchsort", lambda a, b: correlation(soft_rank(a[None]), soft_rank(b[None])), 1_000_000)
    except ImportError:
        pass
    try:
        from allrank.models.losses.approxNDCG import approxNDCGLoss

        add("NDCG", "allRank", lambda x, y: 1 + approxNDCGLoss(x[None], y[None].float(), alpha=1 / T), SQUARE)
    except ImportError:
        pass
    try:
        from torchsurv.loss.cox import neg_partial_log_likelihood

        add("Cox", "torchsurv", lambda h, t, e: neg_partial_log_likelihood(h, e, t), 1_000_000)
    except ImportError:
        pass
    try:
        from pytorch_metric_learning.losses import NTXentLoss

        own = NTXentLoss(temperature=0.1)

        def info_nce(a, b):
            same = torch.arange(len(a), device=a.device)
            return own(torch.cat([a, b]), torch.cat([same, same]))

        add("contrastive", "pytorch-metric-learning", info_nce, 100)  # its time and memory grow as n^3
    except ImportError:
        pass
    return found


def cases():
    """For each loss: what it is given, and its ways, each with the size up to which it is measured."""
    million = 1_000_000
    table = {
        "rank statistic": (
            scores_and_labels,
            lambda x, y: losses.rank_statistic_loss(x, y, temperature=T),
            (pairs(lambda apart: torch.sigmoid(apart / T)), PAIRWISE),
        ),
        "one positive": (
            one_in_many,
            lambda x, y: losses.rank_statistic_loss(x, y, temperature=T),
            (pairs(lambda apart: torch.sigmoid(apart / T)), million),
        ),
        "squared hinge": (
            scores_and_labels,
            losses.squared_hinge_auc_loss,
            (pairs(lambda apart: (1 + apart).clamp(min=0).square()), PAIRWISE),
        ),
        "partial AUC": (
            scores_and_labels,
            lambda x, y: losses.partial_auc_loss(x, y, max_fpr=0.1, temperature=T),
            (partial_auc_matrix, PAIRWISE),
        ),
        "average precision": (
            scores_and_labels,
            lambda x, y: losses.average_precision_loss(x, y, temperature=T),
            (average_precision_matrix, PAIRWISE),
        ),
        "soft ranks": (
            lambda n, device: (torch.randn(n, device=device).requires_grad_(),),
            lambda x: losses.soft_rank(x, temperature=T).square().mean(),
            (lambda x: soft_rank_matrix(x).square().mean(), SQUARE),
        ),
        "NDCG": (
            scores_and_relevance,
            lambda x, y: losses.ndcg_loss(x, y, temperature=T),
            (ndcg_matrix, SQUARE),
        ),
        "Spearman": (
            two_kinds_of_scores,
            lambda a, b: losses.spearman_loss(a, b, temperature=T),
            (spearman_matrix, SQUARE),
        ),
        "concordance": (
            survival,
            lambda h, t, e: losses.concordance_loss(h, t, e, temperature=T),
            (concordance_matrix, SQUARE),
        ),
    }
    if hasattr(losses, "cox_loss"):
        table["Cox"] = (survival, losses.cox_loss, (cox_matrix, SQUARE))
    if hasattr(losses, "contrastive_loss"):
        contrastive = lambda a, b: losses.contrastive_loss(a, b, temperature=0.1)  # noqa: E731
        table["contrastive"] = (embeddings, contrastive, (contrastive_matrix, CONTRASTIVE))
    peers, found = others(), {}
    for name, (data, ours, plain) in table.items():
        most = {"contrastive": 30_000}.get(name, million)
        found[name] = data, {"backdrop": (ours, most), "matrix": plain, **peers.get(name, {})}
    return found


def step(loss, data):
    data[0].grad = None
    value = loss(*data)
    value.backward()
    if value.is_cuda:
        torch.cuda.synchronize()
    return value


def measure(name, data, ways, n, device, rounds, clock):
    torch.manual_seed(0)
    given = data(n, device)
    ways = {way: loss for way, (loss, most) in ways.items() if n <= most}
    times, values, gradients = {way: [] for way in ways}, {}, {}
    rounds = max(2, rounds if n <= 10_000 else rounds // 4)
    repeat = max(1, 3_000 // n)  # short steps several times, so that the clock does not matter
    for i in track(range(1 + rounds), f"{name}, {n:,}", transient=True):
        for way, loss in ways.items():
            begin = clock()
            for _ in range(repeat):
                value = step(loss, given)
            if i:  # one round to warm up
                times[way].append((clock() - begin) / repeat)
            values[way], gradients[way] = value.item(), given[0].grad
    rows = []
    for way, loss in ways.items():
        memory = peak_bytes(lambda loss=loss: step(loss, given), given[0]) if n >= 10_000 else None
        error = None
        if way == "backdrop" and "matrix" in ways:
            apart = (gradients["backdrop"] - gradients["matrix"]).norm() / gradients["matrix"].norm()
            error = max(abs(values["backdrop"] / values["matrix"] - 1), apart.item())
        rows.append(
            {
                "loss": name,
                "n": n,
                "way": way,
                "milliseconds": statistics.median(times[way]) * 1e3,
                "megabytes": None if memory is None else memory / 1e6,
                "error": error,
            }
        )
    return rows


def slope(rows, name, way="backdrop"):
    """Of log(time) over log(n) from ten thousand on, by least squares; None for fewer than two sizes."""
    found = [(math.log(r["n"]), math.log(r["milliseconds"])) for r in rows if r["loss"] == name and r["way"] == way]
    found = [each for each in found if each[0] >= math.log(10_000)]
    return statistics.linear_regression(*zip(*found, strict=True)).slope if len(found) > 1 else None


def cells(row):
    """A row of the table, as text."""
    return (
        row["loss"],
        f"{row['n']:,}",
        row["way"],
        f"{row['milliseconds']:.2f}",
        "" if row["megabytes"] is None else f"{row['megabytes']:.1f}",
        "" if row["error"] is None else f"{row['error']:.0e}",
    )


def show(figures):
    table = Table(title=f"One forward and backward pass, {figures['device']}, torch {figures['torch']}")
    for heading in ("loss", "scores", "way", "ms", "MB", "from the matrix"):
        table.add_column(heading, justify="left" if heading in ("loss", "way") else "right")
    for row in figures["rows"]:
        table.add_row(*cells(row))
    console = Console(width=120)
    console.print(table)
    for name in dict.fromkeys(row["loss"] for row in figures["rows"]):
        if (steep := slope(figures["rows"], name)) is not None:
            console.print(f"{name}: time grows as n^{steep:.2f}")


def pages(figures):
    """Write the table into the page on losses."""
    page = Path(__file__).parent.parent / "docs" / "losses" / "costs.md"
    heads = ("loss", "scores", "way", "ms", "MB", "from the matrix")
    rows = [cells(row) for row in figures["rows"] if row["n"] in SIZES]
    lines = [heads, ["---" if head in ("loss", "way") else "---:" for head in heads], *rows]
    steep = {name: slope(figures["rows"], name) for name in dict.fromkeys(row["loss"] for row in figures["rows"])}
    told = ", ".join(f"{name} {value:.2f}" for name, value in steep.items() if value is not None)
    block = [
        "<!-- losses-cpu -->\n",
        f"{figures['device']}, torch {figures['torch']}:\n",
        *(f"| {' | '.join(line)} |" for line in lines),
        f"\nTime grows as a power of n, from ten thousand scores on: {told}.\n",
        "<!-- end of losses-cpu -->",
    ]
    before, _, rest = page.read_text().partition("<!-- losses-cpu -->")
    page.write_text(before + "\n".join(block) + rest.partition("<!-- end of losses-cpu -->")[2])


def draw(figures, path):
    """A panel for each loss: time over n, a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["loss"] for row in figures["rows"]))
    across = 3
    figure, axes = plt.subplots(
        -(-len(names) // across),
        across,
        figsize=(11, 2.7 * -(-len(names) // across)),
        layout="constrained",
        squeeze=False,
    )
    colours = {"backdrop": "#6a3fa0", "matrix": "#b3541e"}
    for panel, name in zip(axes.flat, names, strict=False):
        for way in dict.fromkeys(row["way"] for row in figures["rows"] if row["loss"] == name):
            rows = [row for row in figures["rows"] if (row["loss"], row["way"]) == (name, way)]
            panel.loglog(
                [row["n"] for row in rows],
                [row["milliseconds"] for row in rows],
                marker="o",
                markersize=3,
                label=way,
                color=colours.get(way, "#3f7a5b"),
            )
        panel.set_title(name, fontsize=10)
        panel.legend(fontsize=7, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes.flat)[len(names) :]:
        panel.axis("off")
    figure.supxlabel("scores", fontsize=9)
    figure.supylabel("milliseconds, forward and backward", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = options(__doc__)
    parser.add_argument("--plot", type=Path, help="also draw time over n into this file")
    parser.add_argument("--pages", action="store_true", help="write the table into docs/losses/costs.md")
    parser.add_argument("--only", help="measure this loss; what FILE has of the others stays")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; with one the figures are CPU time")
    parser.add_argument("--again", type=Path, help="take the figures from this file instead of measuring")
    arguments = parser.parse_args()
    if arguments.again:
        figures = json.loads(arguments.again.read_text())
    else:
        torch.set_num_threads(arguments.threads)
        alone = arguments.device == "cpu" and arguments.threads == 1
        figures = {
            "device": "CPU, 1 thread, CPU time" if alone else machine(arguments.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rows": [],
        }
        if arguments.only and arguments.json and arguments.json.exists():
            known = json.loads(arguments.json.read_text())
            if known["device"] != figures["device"]:
                parser.error(f"{arguments.json} was measured on {known['device']}, not on {figures['device']}")
            figures["rows"] = [row for row in known["rows"] if row["loss"] != arguments.only]
        clock = time.process_time if alone else time.perf_counter
        for name, (data, ways) in cases().items():
            for n in SIZES:
                if arguments.only in (None, name):
                    figures["rows"] += measure(name, data, ways, n, arguments.device, arguments.rounds, clock)
                    if arguments.json:
                        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)
    if arguments.pages:
        pages(figures)
    if arguments.plot:
        draw(figures, arguments.plot)


if __name__ == "__main__":
    main()
