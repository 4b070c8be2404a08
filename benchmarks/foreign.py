"""Skip on models that others wrote, for `bench_skip.py --foreign`: how fast, and how much of what is possible.

A step of training, in rounds in which all ways take turns: plain and Skip, and with `--compiled` both by Inductor.
*Possible* is what the multiplications allow: 3 / (3 B + A (1 + 3 a)) with A and B the shares of the multiplications
before and behind the mask and a the share of A that the kept units need (for samples the kept share, and 3 / (1 + 2
a)). *New size* is the first step at an image size that was not there yet over a plain step. Then texts: a four-layer
BERT and a contrastive loss over the whole batch, against GradCache with the same parts; and two masks on one trunk, at
the p of the paper's latent task.
"""

import copy
import json
import math
import statistics
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import zoo
from backdrop import Backdrop, Backdrop2d, insert, skip_blocked
from backdrop.skip.engine import Engine
from backdrop.skip.positions import Positions
from bench_layer import machine

MODELS = {  # of timm, and behind which module a mask of positions lies
    "resnet18": "layer2",
    "resnet50": "layer2",
    "convnext_atto": "stages.1",
    "efficientnet_b0": "blocks.2",
    "seresnet18": "layer2",
    "vgg11_bn": "features.14",
    "mobilenetv3_small_100": "blocks.1",
    "regnetx_002": "s2.b1",
    "densenet121": "features.transition2",
}
SHARE = 0.85  # of what is possible: the goal
TEXTS, PART, WORDS = 2048, 64, 32


def timm_cases():
    timm = zoo.foreign("timm")
    for name, place in MODELS.items():
        torch.manual_seed(0)
        plain = timm.create_model(name)
        zoo.shake(plain)  # branches that begin at zero let no gradient through, so that there is less to compute
        masked = insert(plain, {place: Backdrop2d(0.995, exact=True)})
        yield {"case": f"{name}, positions", "p": 0.995, "drops": "positions"}, masked, torch.randn(1, 3, 512, 512)
        masked = nn.Sequential(plain, Backdrop(0.9, exact=True))
        yield {"case": f"{name}, samples", "p": 0.9, "drops": "samples"}, masked, torch.randn(32, 3, 128, 128)


class Texts(nn.Module):
    """A BERT of four layers, the mean of its hidden states, and a mask of samples."""

    def __init__(self, p):
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            vocab_size=2000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
        )
        self.bert, self.mask = transformers.BertModel(config, add_pooling_layer=False), Backdrop(p, exact=True)

    def embed(self, words):
        return self.bert(words).last_hidden_state.mean(1)

    def forward(self, words):
        return self.mask(self.embed(words))


def contrastive(z):
    """Neighbours belong together, against all others of the batch."""
    z = nn.functional.normalize(z, dim=1)
    targets = torch.arange(len(z), device=z.device) ^ 1
    scores = (z @ z.T / 0.1).fill_diagonal_(-math.inf)
    return nn.functional.cross_entropy(scores, targets)


class Trunk(nn.Module):
    """Two masks on one trunk, as in Eq. 4 of the paper: on the logits, and on the hidden states."""

    def __init__(self, p_x=0.94, p_d=0.97):
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.head = nn.Linear(64, 10)
        self.mask_x, self.mask_d = Backdrop(p_x, exact=True), Backdrop(p_d, exact=True)

    def forward(self, x):
        hidden = self.trunk(x)
        return torch.cat([self.mask_x(self.head(hidden)), self.mask_d(hidden)], 1)


def square(model, x):
    out = model(x)
    (out if isinstance(out, torch.Tensor) else out[0]).square().mean().backward()


def step(model, x, loss=square):
    model.zero_grad()
    loss(model, x)


def cached(model, words, part):
    """GradCache: embeddings without gradients part by part, their gradient, and each part again."""
    model.zero_grad()
    states, found = [], []
    with torch.no_grad():
        for rows in words.split(part):
            states.append(torch.get_rng_state())
            found.append(model.embed(rows))
    z = torch.cat(found).requires_grad_()
    contrastive(model.mask(z)).backward()
    for rows, grad, state in zip(words.split(part), z.grad.split(part), states, strict=True):
        torch.set_rng_state(state)
        model.embed(rows).backward(grad)


def take_turns(case, runs, rounds):
    """Median seconds of each way, from rounds in which they take turns."""
    for run in runs.values():
        run()
        run()
    times = {key: [] for key in runs}
    from bench_skip import seconds

    for _ in track(range(rounds), case, transient=True):
        for key, run in runs.items():
            times[key].append(seconds(run, False))
    return {key: statistics.median(values) for key, values in times.items()}


def possible(model, p):
    """How many times faster than plain a step can be, by the multiplications of the segment and of the rest."""
    engine = model.forward
    assert isinstance(engine, Engine)
    (plan,) = [plan for graph in engine.graphs for plan in graph.plans.values()]
    costs = plan.traced.costs
    whole = sum(cost.multiplications for cost in costs.values())
    (part,) = plan.parts
    a = part.segment.before.multiplications / whole
    if isinstance(part.way, Positions):
        needed = part.way.windows_cost(part.way.kept_units(p)).multiplications / max(1, part.cost.multiplications)
        return 3 / (3 * (1 - a) + a * (1 + 3 * needed)), a, needed
    return 3 / (1 + 2 * (1 - p)), a, 1 - p


def measure_model(case, model, x, rounds, compiled):
    fast = skip_blocked(model, statistics="sampled")
    first = _once(lambda: step(fast, x))
    runs = {"plain": lambda: step(model, x), "skip": lambda: step(fast, x)}
    if compiled:
        for key, made in (("compiled", model), ("compiled_skip", fast)):
            runs[key] = partial(step, torch.compile(copy.deepcopy(made)), x)
    medians = take_turns(case["case"], runs, rounds)
    limit, before, needed = possible(fast, case["p"])
    said, share = fast.skip_report[0].last, fast.skip_report[0].share
    return {
        **case,
        "device": machine("cpu"),
        **{f"{key}_ms": 1e3 * value for key, value in medians.items()},
        "first_ms": 1e3 * first,
        **{f"faster_{key}": medians["plain"] / medians[key] for key in list(medians)[2:]},
        "faster": medians["plain"] / medians["skip"],
        "possible": limit,
        "before": before,
        "needed": needed,
        "share": share,
        "report": said,
        "new_size": new_size(model, fast, x),
    }


def new_size(model, fast, x):
    """The first step at a size that is new over a plain one. With the second size torch captures a graph for all."""
    for less in (32, 64):
        other = x[..., :-less, :]
        first = _once(lambda part=other: step(fast, part))
    return first / min(_once(lambda: step(model, other)) for _ in range(3))


def _once(run):
    from bench_skip import seconds

    return seconds(run, False)


def measure_texts(rounds):
    torch.manual_seed(0)
    words = torch.randint(2000, (TEXTS, WORDS))
    rows = []

    def loss(model, x):
        contrastive(model(x)).backward()

    for p in (0.9, 0.0):
        model = Texts(p)
        fast = skip_blocked(model, at_once=PART)
        runs = {"gradcache": lambda m=model: cached(m, words, PART), "skip": lambda m=fast: step(m, words, loss)}
        medians = take_turns(f"BERT, {TEXTS} texts, p={p:g}", runs, rounds)
        memory = {}
        for key, run in runs.items():
            memory[key] = peak_of_tensors(run)
        rows.append(
            {
                "case": f"BERT of four layers, {TEXTS} texts, parts of {PART}, p={p:g}",
                "device": machine("cpu"),
                **{f"{key}_ms": 1e3 * value for key, value in medians.items()},
                **{f"{key}_mb": value / 1e6 for key, value in memory.items()},
                "faster_than_gradcache": medians["gradcache"] / medians["skip"],
                "memory_of_gradcache": memory["skip"] / memory["gradcache"],
                "report": fast.skip_report[0].last,
            }
        )
    return rows


def peak_of_tensors(run):
    """The most bytes that torch had in use on a CPU in a step, by its own count of what is taken and given back."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measure_trunk(rounds):
    torch.manual_seed(0)
    model, x = Trunk(), torch.randn(512, 3, 32, 32)
    fast = skip_blocked(model)
    medians = take_turns("two masks", {"plain": lambda: step(model, x), "skip": lambda: step(fast, x)}, rounds)
    return {
        "case": "two masks on one trunk, 512 images, p=(0.94, 0.97)",
        "device": machine("cpu"),
        **{f"{key}_ms": 1e3 * value for key, value in medians.items()},
        "faster": medians["plain"] / medians["skip"],
        "report": [entry.last for entry in fast.skip_report],
    }


def run(arguments):
    from bench_skip import earlier, put, write

    if arguments.again:
        rows = json.loads(arguments.again.read_text())["rows"]
        show(rows)
        put(arguments, [MODELS_HEADINGS, *map(cells, filter(is_model, rows))])
        return
    found = earlier(arguments)

    def keep(row):
        found[row["case"]] = row
        write(list(found.values()), arguments)

    def wanted(name):
        return arguments.only is None or arguments.only in name

    for case, model, x in timm_cases():
        if wanted(case["case"]):
            keep(measure_model(case, model.train(), x, arguments.rounds, arguments.compiled))
            torch._dynamo.reset()
    if wanted("BERT"):
        for row in measure_texts(max(2, arguments.rounds // 2)):
            keep(row)
    if wanted("two masks"):
        keep(measure_trunk(arguments.rounds))
    show(list(found.values()))


MODELS_HEADINGS = ["case", "plain ms", "faster", "possible", "of it", "new size", "first step", "last step"]


def is_model(row):
    return "possible" in row


def cells(row):
    """Of the table on the page."""
    return [
        row["case"],
        f"{row['plain_ms']:.0f}",
        *(f"{row[key]:.2f}" for key in ("faster", "possible")),
        of_possible(row).replace("<", "&lt;"),
        f"{row['new_size']:.2f}",
        f"{row['first_ms'] / row['plain_ms']:.1f}",
        row["report"],
    ]


def of_possible(row):
    """How much of what is possible, marked where that is less than the goal."""
    share = row["faster"] / row["possible"]
    return f"{share:.2f}{'' if share >= SHARE else f' < {SHARE}'}"


def show(rows):
    from bench_skip import of_best

    console = Console(width=170)
    table = Table(title=f"Models that others wrote, one training step, {rows[0]['device']}, torch {torch.__version__}")
    headings = ["case", "plain ms", "Skip ms", "first step ms", "new size", "times faster", "possible", "of it"]
    for heading in [*headings, "compiled", "compiled Skip", "best", "last step"]:
        table.add_column(heading, justify="left" if heading in ("case", "last step") else "right")
    for row in rows:
        if is_model(row):
            table.add_row(
                row["case"],
                f"{row['plain_ms']:.0f}",
                f"{row['skip_ms']:.0f}",
                f"{row['first_ms']:.0f}",
                f"{row['new_size']:.2f}",
                f"{row['faster']:.2f}",
                f"{row['possible']:.2f}",
                of_possible(row),
                *(f"{row[key]:.2f}" if key in row else "" for key in ("faster_compiled", "faster_compiled_skip")),
                of_best(row) if "compiled_ms" in row else "",
                str(row["report"]),
            )
    console.print(table)
    for row in rows:
        if not is_model(row):
            console.print(row)
