"""Does training do what `backdrop doctor` predicts? python benchmarks/bench_doctor.py [--only unet] [--json FILE]

For a BERT, a ResNet-50, a U-Net and a one-dimensional network: the doctor examines a model, then the lines that it
prints are run on a fresh one, and both are trained by AdamW, taking turns. Predicted and measured are compared: how
many times faster a step of forward, loss and backward is, its memory, the time at a p and the memory at a number of
samples that the doctor had not measured.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import zoo
from backdrop import Backdrop, doctor
from backdrop.losses import contrastive_loss, rank_statistic_loss
from backdrop.placement.gradients import call
from backdrop.placement.steps import Batch, peak, take_turns
from bench_size import UNet

CLOSE = 0.2  # how far off a prediction may be


def bert():
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=192, num_hidden_layers=4, num_attention_heads=4, intermediate_size=768
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    words = torch.randint(1, 2000, (128, 32))

    def loss(out):
        z = nn.functional.normalize(out.last_hidden_state.mean(1), dim=1)
        a, b = z[0::2], z[1::2]
        return contrastive_loss(a, b, temperature=0.1)

    return model, (words,), loss, {}


def resnet():
    torch.manual_seed(0)
    model = zoo.foreign("timm").create_model("resnet50", num_classes=1)
    labels = torch.arange(24) % 4 == 0
    return (
        model,
        (torch.randn(24, 3, 96, 96), labels),
        lambda out, y: rank_statistic_loss(out[:, 0], y),
        {"statistics": "sampled"},
    )


def unet():
    torch.manual_seed(0)
    labels = torch.randint(2, (2, 384, 384))
    return UNet(nn.Identity(), inputs=1), (torch.randn(2, 1, 384, 384), labels), nn.functional.cross_entropy, {}


def series():
    torch.manual_seed(0)
    layers, width = [], 1
    for outputs in (32, 64, 64, 64):
        layers += [nn.Conv1d(width, outputs, 9, padding=4), nn.ReLU(), nn.MaxPool1d(4)]
        width = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 3))
    return model, (torch.randn(4, 1, 65536), torch.tensor([0, 1, 2, 0])), nn.functional.cross_entropy, {}


CASES = {"bert": bert, "resnet50": resnet, "unet": unet, "series": series}


def trained(model, batch):
    """A step as training takes it, but for the optimiser's, which changes the model between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    for _ in range(2):
        optimizer.zero_grad()
        batch.value(call(model, batch.inputs)).backward()
        optimizer.step()
    return lambda: batch.step(model)


def examine(name, rounds):
    model, batch, loss, settings = CASES[name]()
    found = doctor(model, batch, loss, **settings)
    print(found, flush=True)
    site = next(site for site in found.sites if site.advised)
    way = site.advised
    between = round(1 - (1 - way.p) * 1.5, 6)
    torch._dynamo.reset()
    whole = Batch(batch[0], tuple(batch[1:]), loss)
    plain, names = CASES[name]()[0].train(), {"model": CASES[name]()[0].train()}
    exec(site.code, names)
    made = names["model"].train()
    masks = [module for module in made.modules() if isinstance(module, Backdrop)]
    runs = {"plain": trained(plain, whole), "skip": trained(made, whole)}
    measured = take_turns(runs, torch.device("cpu"), rounds)
    for mask in masks:
        mask.p = between
    other = take_turns({"plain": runs["plain"], "skip": runs["skip"]}, torch.device("cpu"), rounds)
    uniform = [w for w in site.ways if w.informed == way.informed and w.at_once is None]
    rows = [
        ("times faster", way.faster, measured["plain"].seconds / measured["skip"].seconds),
        ("memory of a plain step", found.plain.memory, measured["plain"].memory),
        ("memory of a skipped step", way.memory, measured["skip"].memory),
    ]
    if len(uniform) > 1:
        predicted = 1 / on_line(uniform, between)
        rows.append((f"times faster at p = {between:g}", predicted, other["plain"].seconds / other["skip"].seconds))
    room = next((room for room in found.rooms if room.what == "samples"), None)
    rows += memory_of_more(CASES[name], room, found, loss) if room else []
    result = []
    for what, predicted, seen in rows:
        off = predicted / seen - 1
        result.append({"case": name, "what": what, "predicted": predicted, "measured": seen, "off": off})
        mark = "" if abs(off) <= CLOSE else " <--"
        print(f"{name}: {what}: predicted {predicted:.4g}, measured {seen:.4g}, {off:+.0%}{mark}", flush=True)
    return result


def on_line(ways, p):
    """The share of a plain step's time, on a line through what was measured."""
    shares, times = [1 - way.p for way in ways], [1 / way.faster for way in ways]
    middle, mean = sum(shares) / len(shares), sum(times) / len(times)
    slope = sum((s - middle) * (t - mean) for s, t in zip(shares, times, strict=True)) / sum(
        (s - middle) ** 2 for s in shares
    )
    return mean + slope * (1 - p - middle)


def memory_of_more(make, room, found, loss):
    """Twice as many samples: what the line through two measurements says, and what a step takes."""
    model, batch, _, _ = make()
    twice = Batch(torch.cat([batch[0]] * 2), tuple(torch.cat([t] * 2) for t in batch[1:]), loss)
    model.train()
    each = (room.memory - 4 * sum(p.numel() * p.element_size() for p in model.parameters())) / room.plain[0]
    twice.step(model)
    seen = peak(lambda: twice.step(model), torch.device("cpu"))
    return [("memory of a plain step, twice the samples", found.plain.memory + each * found.samples, seen)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    if arguments.only and arguments.json and arguments.json.exists():  # the other cases stay as they were
        rows = [row for row in json.loads(arguments.json.read_text())["rows"] if row["case"] != arguments.only]
    for name in CASES:
        if arguments.only in (None, name):
            rows += examine(name, arguments.rounds)
            if arguments.json:
                arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    far = [row for row in rows if abs(row["off"]) > CLOSE]
    print(f"{len(rows) - len(far)} of {len(rows)} predictions are within {CLOSE:.0%}")


if __name__ == "__main__":
    main()
