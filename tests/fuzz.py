"""New random examples at every run, where the tests have the same ones every time.

    python tests/fuzz.py --examples 50000          a long run
    python tests/fuzz.py --seconds 60              as long as that
    python tests/fuzz.py --seed 7 --example 1234   one example again

Every example is a call, or a few, with values that are right, on the edge, or nonsense. It has to work, with what the
documentation promises of it, or to raise a TypeError, ValueError or RuntimeError that our own code raised for it, with
a message. Anything else is a failure: an error from the depths of torch, another kind of error, a hang. The seed is
printed first, and with every failure the command that tries it again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import linecache
import logging
import math
import os
import random
import resource
import secrets
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import backdrop
from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, functional, placement, schedules, textures
from fuzz_losses import a_loss
from fuzz_values import NONSENSE, WrongError, a_shape, a_tensor, check, mostly

HERE = str(Path(backdrop.__file__).parent)
OURS = (TypeError, ValueError, RuntimeError)
HANG = 60  # seconds of work, and ten times as many on the clock
MEMORY = 16 * 2**30


class Hang(BaseException):
    """An example took too long."""


def a_p(r):
    return r.choice(
        [0, 0.0, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53, torch.tensor(0.5), torch.tensor(0.25).double(), r.random()]
    )


def a_patch(r, axes):
    def one():
        return r.choice([1, 1, 2, 3, 7, 10**9, 2**62, 2**70])

    return one() if r.random() < 0.75 else tuple(one() for _ in range(r.choice([axes, axes, 1, 2])))


def some_dims(r, ndim):
    axes = r.sample(range(-ndim, ndim), r.randint(1, min(3, 2 * ndim))) if ndim else [0]
    return axes[0] if len(axes) == 1 and r.random() < 0.7 else tuple(axes)


def settings(r, ndim, spatial=False):
    found = {"exact": mostly(r, lambda: r.random() < 0.5, 0.97), "scale": mostly(r, lambda: r.choice(SCALES), 0.95)}
    found["patch"] = mostly(r, lambda: a_patch(r, max(1, ndim - 2 if spatial else ndim - 1)), 0.97)
    if r.random() < 0.5:
        found["generator"] = mostly(r, lambda: torch.Generator().manual_seed(r.randrange(2**31)), 0.95)
    return found


def choice(r):
    """How units are chosen: half of the time by the gradient that arrives."""
    found = {"choose": mostly(r, lambda: r.choice(["uniform", "gradient"]), 0.98)}
    if r.random() < 0.4:
        found["floor"] = mostly(r, lambda: r.choice([0.1, 0, 0.0, 1e-9, 0.5, 1, 1.0]), 0.9)
    return found


SCALES = ["count", "eq1", "probability", None]


def layers(r):
    kind = r.choice([Backdrop, Backdrop, functional.backdrop, Backdrop1d, Backdrop2d, Backdrop3d])
    fits = {Backdrop1d: 3, Backdrop2d: 4, Backdrop3d: 5}.get(kind, r.randint(0, 5))
    shape = a_shape(r, 5) if r.random() < 0.05 else tuple(r.choice([1, 2, 3, 5, 8]) for _ in range(fits))
    x = mostly(r, lambda: a_tensor(r, shape, r.random() < 0.97), 0.98)
    ndim = x.ndim if isinstance(x, torch.Tensor) else 2
    p, more = mostly(r, lambda: a_p(r), 0.95), settings(r, ndim, kind in (Backdrop1d, Backdrop2d, Backdrop3d))
    more |= choice(r) if r.random() < 0.5 else {}
    dims = mostly(r, lambda: some_dims(r, ndim), 0.95)
    group = r.random()
    if group < 0.2 and kind is not functional.backdrop:
        more["group"] = mostly(r, lambda: "world", 0.95)
        more["uneven"] = r.random() < 0.5
    if kind in (Backdrop1d, Backdrop2d, Backdrop3d):
        layer = kind(p, shared=r.random() < 0.5, **more)
    elif kind is Backdrop:
        layer = Backdrop(p, dims, **more)
    else:
        layer = lambda x: functional.backdrop(x, p, dims, **more)  # noqa: E731
    if kind is not functional.backdrop:
        check(isinstance(repr(layer), str), "repr")
        if r.random() < 0.2:
            layer.p = mostly(r, lambda: a_p(r))
            p = layer.p
        if r.random() < 0.1:
            layer.step = mostly(r, lambda: r.randrange(2**40))
    if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
        x = x.clone().requires_grad_(r.random() < 0.9)
    training = r.random() < 0.9
    if isinstance(layer, nn.Module):
        layer.train(training)
    else:
        training = True
    y = layer(x)
    check(y.shape == x.shape and torch.equal(y.detach().nan_to_num(), x.detach().nan_to_num()), "forward changes x")
    if not y.requires_grad:
        return
    arriving = torch.ones_like(y)
    if more.get("choose") == "gradient" and y.numel() and y.dtype in (torch.float32, torch.float64):
        arriving = torch.randn_like(y) * r.choice([1, 1, 0, 1e-30, 1e20])
    (g,) = torch.autograd.grad(y, x, arriving)
    check(g.shape == x.shape and g.dtype == x.dtype, "gradient of another shape or type")
    check(not g.isnan().any(), "nan")
    check(bool(((g == 0) | (g.sign() == arriving.sign()) if not g.is_complex() else g == g).all()), "a sign was turned")
    if not training or p == 0:
        check(torch.equal(g, arriving), "masked, but it should not be")
    elif bool((arriving == 0).any()):
        pass
    elif g.numel() and more["scale"] != "eq1":  # which may be too small for the type
        check(bool((g != 0).any()), "an empty mask")


def functions(r):
    shape = mostly(r, lambda: list(a_shape(r, 5)), 0.97)
    ndim = len(shape) if isinstance(shape, (list, tuple)) else 2
    p, dims, more = mostly(r, lambda: a_p(r)), mostly(r, lambda: some_dims(r, ndim), 0.97), settings(r, ndim)
    which = r.randrange(5)
    if which == 4:
        grad = mostly(r, lambda: a_tensor(r, a_shape(r, 5), r.random() < 0.95), 0.97)
        weight = functional.choose_weight(grad, p, dims, **more, **{k: v for k, v in choice(r).items() if k == "floor"})
        check(not weight.isnan().any() and bool((weight >= 0).all()), "weight")
    elif which == 0:
        more.pop("scale")
        mask = functional.draw_mask(shape, p, dims, **more)
        check(mask.dtype == torch.bool and mask.ndim == len(shape), "mask")
        check(not mask.numel() or bool(mask.any()), "an empty mask")
    elif which == 1:
        weight = functional.draw_weight(shape, p, dims, **more)
        check(bool(weight.isfinite().all()) and bool((weight >= 0).all()), "weight")
    elif which == 2:
        x = mostly(r, lambda: a_tensor(r, a_shape(r), r.random() < 0.9), 0.95)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
        weight = mostly(r, lambda: a_tensor(r, a_shape(r), False), 0.95)
        y = functional.mask_gradient(x, weight)
        if y.requires_grad:
            torch.autograd.grad(y, x, torch.ones_like(y))
    else:
        functional.effective_batch_size(r.choice([1, 8, 2048, 2.5]), p)


def a_schedule(r):
    model = nn.Sequential(*(Backdrop(r.choice([0.0, 0.5, 0.9])) for _ in range(r.randint(1, 3))))
    target = mostly(
        r, lambda: r.choice([model, list(model), iter(list(model)), nn.Linear(1, 1), [nn.Linear(1, 1)]]), 0.95
    )
    steps = mostly(r, lambda: r.choice([1, 2, 7, 10**6]))
    ends = {k: mostly(r, lambda: r.choice([None, 0.0, 0.3, 0.99])) for k in ("start", "end") if r.random() < 0.6}

    value = mostly(r, lambda: 0.5)

    def make():
        return r.choice(
            [
                lambda: schedules.ConstantP(target, mostly(r, lambda: 0.3)),
                lambda: schedules.LinearP(target, steps=steps, **ends),
                lambda: schedules.CosineP(target, steps=steps, **ends),
                lambda: schedules.StepP(
                    target, mostly(r, lambda: {r.choice([2, 2, -1, "x", 1.5]): mostly(r, lambda: 0.5)})
                ),
                lambda: schedules.LambdaP(target, r.choice([lambda step: value, 0.5, None])),
            ]
        )()

    schedule = make()
    for _ in range(r.randint(0, 5)):
        schedule.step()
        check(all(0 <= p < 1 for p in schedule.get_last_p()), "p out of range")
    state = schedule.state_dict()
    if r.random() < 0.4:
        schedule.load_state_dict(state)
        check(schedule.state_dict() == state, "another state")
    elif r.random() < 0.5:
        key = r.choice([*state, "more"])
        state[key] = mostly(r, lambda: r.choice([0.5, 3, [0.5], [0.5, 0.5, 0.5]]), 0.5)
        before = schedule.state_dict(), [layer.p for layer in schedule.layers]
        try:
            schedule.load_state_dict(state)
        except OURS:
            check((schedule.state_dict(), [layer.p for layer in schedule.layers]) == before, "half a state was taken")
            raise


def a_texture(r):
    def number():
        return mostly(r, lambda: r.choice([0.5, 1, 2.5, 9.5, 80, 1e-3]), 0.93)

    def kernel():
        if r.random() < 0.5:
            return textures.SquaredExponential(number())
        return textures.Matern(number(), nu=mostly(r, lambda: r.choice([0.5, 1.5, 2.5, math.inf, 3.3])))

    which = r.randrange(4)
    size = mostly(r, lambda: r.choice([2, 8, (4, 6), (8,), (4, 4, 4), [3, 2], 1, (0, 4)]), 0.95)
    periodic = r.random() < 0.5 or size == (4, 4, 4)  # else through a torus of many lengths along all three axes
    if which == 0:
        textures.patchwork_length(number())
        return
    if which == 1:
        groups = mostly(r, lambda: [[number() for _ in range(r.randint(0, 2))] for _ in range(r.randint(0, 2))], 0.95)
        found = textures.Texture.grid(groups, combine=mostly(r, lambda: r.choice(["sum", "product", "convolve"])))
    elif which == 2:
        weights = mostly(r, lambda: r.choice([None, [1.0], [0.75, 1.25], [math.nan], [0.0, 0.0]]))
        combine = mostly(r, lambda: r.choice(["sum", "product", "convolve"]), 0.97)
        found = [textures.Texture([kernel() for _ in range(r.randint(0, 2))], weights, combine)]
    else:
        found = mostly(r, lambda: [textures.Texture(kernel())], 0.97)
        many, seed = mostly(r, lambda: r.choice([0, 1, 2])), mostly(r, lambda: r.randrange(9))
        data = textures.TextureDataset(found, many, size, seed, periodic=periodic)
        if len(data):
            image, _ = data[r.randrange(len(data))]
            check(bool(image.isfinite().all()), "an image that is not finite")
        return
    for texture in found[:1]:
        n, seed = mostly(r, lambda: r.choice([0, 1, 2])), mostly(r, lambda: r.choice([0, 7, -3, 2**62, 2**63]))
        image = texture.sample(n, size, seed=seed, periodic=periodic)
        check(bool(image.isfinite().all()), "an image that is not finite")


def a_network(r):
    parts, channels = [], 1
    for _ in range(r.randint(1, 4)):
        width = r.choice([1, 2, 4])
        parts += [nn.Conv2d(channels, width, r.choice([1, 2, 3]), r.choice([1, 1, 2]), r.choice([0, 1]))]
        parts += [
            r.choice([nn.ReLU(), nn.Tanh(), nn.BatchNorm2d(width), nn.MaxPool2d(2), nn.Identity(), nn.Dropout(0.1)])
        ]
        if r.random() < 0.4:
            parts += [
                Backdrop2d(r.choice([0.0, 0.5, 0.9]), patch=r.choice([1, 2, 10**9, 2**70]), exact=r.random() < 0.5)
            ]
        channels = width
    if r.random() < 0.5:
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2), Backdrop(0.5)]
    return nn.Sequential(*parts)


def a_placement(r):
    model = a_network(r)
    shape = mostly(r, lambda: (r.choice([1, 2, 3]), 1, r.choice([8, 16, 25, 3]), r.choice([8, 16, 9])), 0.95)
    which = r.randrange(6)
    try:
        model(torch.randn(2, 1, 16, 16))
    except RuntimeError:  # which is the model's own
        return
    names = [name for name, _ in model.named_modules()]
    if which == 0:
        str(placement.receptive_fields(model, shape))
    elif which == 1:
        str(placement.suggest(model, shape, mostly(r, lambda: r.choice([[2], [4, 16], [0.5], [1e9], []]))))
    elif which == 2:
        wrong = [3, None, "x", ""]
        masks = {r.choice(names * 2 + wrong): mostly(r, lambda: Backdrop2d(0.5)) for _ in range(r.randint(0, 2))}
        masked = placement.insert(model, masks)
        masked(torch.randn(2, 1, 16, 16))
        check(list(masked.state_dict()) == list(model.state_dict()), "other keys")
        placement.remove(masked)
    elif which == 3:
        str(placement.inspect(model, shape))
    elif which == 4:
        str(placement.savings(model, shape))
    else:
        x = torch.randn(r.choice([1, 2, 3]), 1, 16, 16)
        at_once = mostly(r, lambda: r.choice([None, 1, 2]), 0.95)
        when = mostly(r, lambda: r.choice(["pays", "always", "lean"]), 0.95)
        statistics = mostly(r, lambda: r.choice(["exact", "sampled", "frozen"]), 0.95)
        skipping = backdrop.skip_blocked(model, when=when, at_once=at_once, statistics=statistics)
        check(list(skipping.state_dict()) == list(model.state_dict()), "other keys")
        y = skipping(x)
        y.sum().backward()
        str(skipping.skip_report)


def a_task(r):
    from backdrop.experiments.tasks import TASKS

    task = TASKS[r.choice(list(TASKS))]
    import dataclasses

    names = [f.name for f in dataclasses.fields(task.Settings)]
    values = [*NONSENSE, 1, 2, 8, 0.5, 0.9, 1e-3, "sgd", "adamw", "none", "batch", "off", "sampled", 10**12, -0.5]
    chosen = {str(mostly(r, lambda: r.choice(names), 0.97)): r.choice(values) for _ in range(r.randint(0, 3))}
    preset = mostly(r, lambda: r.choice(["quick", "paper"]), 0.95)
    seed = mostly(r, lambda: r.choice([0, 3, 99999999999]), 0.95)
    made = task.with_preset(preset, chosen, seed=seed)
    check(isinstance(made.key, str), "a task without a key")


NETS = """
from torch import nn
from backdrop import Backdrop2d
def network():
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), nn.ReLU(), Backdrop2d(0.9), nn.Flatten())
def fails():
    return nn.Linear("x", 2)
number = 3
"""
JOURNAL = b'{"op_code":0,"worker_id":"x","study_name":"study","directions":[2]}\n'  # of a study that is not ours


def a_command(r):
    from typer.testing import CliRunner

    from backdrop.cli import app

    words = [
        "",
        "x",
        "-1",
        "0",
        "3",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "2,2",
        ",",
        "é",
        "\0",
        "--",
        "=",
        "1" * 40,
        "a=b",
        "/",
    ]

    def word(*good):
        return r.choice(good) if r.random() < 0.75 else r.choice(words)

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("nets.py").write_text(NETS)
        Path("study").mkdir()
        if r.random() < 0.5:
            Path("study/journal.log").write_bytes(
                r.choice([b"", b"\n", b"{}\n", b"\x00" * 50, b'{"op_code":0}\n', JOURNAL])
            )
        Path("bad.json").write_text(r.choice(["", "{", "[]", "{}", '{"task": 3}', "null", "\x00", '{"trials": []}']))
        which = r.choice(
            ["textures", "inspect", "status", "report", "run", "data", "worker", "tune", "repair", word("textures")]
        )
        if which == "textures":
            args = ["--out", word("out"), "--size", word("8", "4 6", "2"), "--per-class", word("1", "0", "2")]
            args += ["--small", word("2", "2 3")] if r.random() < 0.8 else []
            args += ["--seed", word("0", "5")] if r.random() < 0.3 else []
            args += ["--weights", word("1", "1 2")] if r.random() < 0.2 else []
            args += ["--split", word("test")] if r.random() < 0.2 else []
            args += ["--combine", word("product")] if r.random() < 0.2 else []
            args += ["--device", word("cpu")] if r.random() < 0.2 else []
            args += ["--preview", word("a.png", "a/b.png")] if r.random() < 0.05 else []
        elif which == "inspect":
            model = word("nets.py:network", "nets.py:fails", "nets.py:number", "nets.py:none", "torch:nn", ":", "nets")
            args = [model, "--input", word("1,1,16,16", "1,1,4,4", "1,16,16")]
            args += ["--sizes", word("4", "2,8")] if r.random() < 0.3 else []
            args += ["--statistics", word("exact", "sampled")] if r.random() < 0.3 else []
            args += ["--device", word("cpu", "meta")] if r.random() < 0.2 else []
        elif which == "run" or which == "tune":  # nothing that could begin to train: p is refused
            args = [word("gp", "auc", "nets.py:network"), "--set", "p=7", "--set", word("epochs=1", "lr=x", "p=0.5")]
            args += ["--seeds", word("1", "0,1")] if r.random() < 0.4 else []
            args += ["--preset", word("quick")] if r.random() < 0.4 else []
            args += ["--folder", "runs"]
        elif which == "data":
            args = [word("info", "fetch"), word("cifar10"), "--root", "root", "--source", word("bad.json", "study")]
            args = args[:1] + args[2:4] if args[0] == "info" else args
        else:
            args = [word("study", "bad.json")] + (["--format", word("md", "csv")] if r.random() < 0.3 else [])
            args += ["--folder", word(".", "study")] if which != "report" or r.random() < 0.3 else []
            args += ["--no-wait"] if which == "worker" else []
            args += ["--storage", word("study", "study/journal.log")] if which != "repair" and r.random() < 0.3 else []
            args += (
                ["--task", word("gp", "nets.py:network")] if which in ("worker", "report") and r.random() < 0.3 else []
            )
        result = CliRunner().invoke(app, [which, *args])
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            raise WrongError(f"backdrop {which} {args}: {type(error).__name__}: {error}") from error
        check("Traceback" not in result.output, f"backdrop {which} {args}: a traceback")
        check(result.exit_code in (0, 1, 2), f"backdrop {which} {args}: exit code {result.exit_code}")
        if result.exit_code:
            check(len(result.output.strip()) > 15, f"backdrop {which} {args}: {result.output!r}")


TARGETS = {  # and how often they come
    layers: 32,
    functions: 18,
    a_loss: 30,
    a_schedule: 13,
    a_texture: 7,
    a_task: 7,
    a_placement: 0.8,
    a_command: 0.5,
}


def is_ours(error):
    """Whether our own code raised it, for the user to read."""
    if not isinstance(error, OURS) or isinstance(error, (UnicodeError, RecursionError, NotImplementedError)):
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    name = frame.f_code.co_filename
    raised = linecache.getline(name, line).strip().startswith("raise")
    return name.startswith(HERE) and raised and len(str(error)) > 20


def try_one(seed, example):
    """What was tried, whether it was refused, and what is wrong with it."""
    r = random.Random(f"{seed} {example}")
    torch.manual_seed(r.randrange(2**63))
    (target,) = r.choices(list(TARGETS), TARGETS.values())
    signal.setitimer(signal.ITIMER_PROF, HANG)
    signal.alarm(10 * HANG)
    try:
        target(r)
    except WrongError as error:
        return target, False, error
    except Exception as error:
        return target, True, None if is_ours(error) else error
    except Hang as error:
        return target, False, error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return target, False, None


def stop(*_):
    raise Hang(f"longer than {HANG} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--example", type=int, default=None, help="this one only")
    parser.add_argument("--first", type=int, default=0, help="go on from this one")
    parser.add_argument("--failures", type=int, default=10, help="after how many to give up")
    parser.add_argument("--memory", type=int, default=MEMORY, help="bytes of address space")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (options.memory, resource.RLIM_INFINITY))
    os.environ |= {"COLUMNS": "200", "TERM": "dumb"}
    torch.set_num_threads(1)
    faulthandler.enable(sys.stdout)
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    begin, tried, refused, failures = time.monotonic(), Counter(), Counter(), 0
    numbers = range(options.first, options.first + options.examples)
    numbers = numbers if options.example is None else [options.example]
    for number in numbers:
        if time.monotonic() - begin > options.seconds:
            break
        target, was_refused, error = try_one(seed, number)
        tried[target.__name__] += 1
        refused[target.__name__] += was_refused
        if error is not None:
            failures += 1
            print(f"\n{target.__name__}: python tests/fuzz.py --seed {seed} --example {number}")
            traceback.print_exception(error, limit=-6, file=sys.stdout)
            sys.stdout.flush()
            if failures >= options.failures:
                break
        if number % 5000 == 4999:
            print(f"{number + 1} examples, {failures} failures, {time.monotonic() - begin:.0f} s", flush=True)
    each = ", ".join(f"{name} {n} ({refused[name]} refused)" for name, n in tried.items())
    print(f"{tried.total()} examples with the seed {seed}: {failures} failures; {each}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
