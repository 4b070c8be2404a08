"""What fits: the largest image, batch and cohort of which a training step can be done in 2, 4 and 8 GiB.

    python benchmarks/quality_memory.py [--only image batch cohort] [--limits 2 4 8] [--patience S] [--json FILE]
    python benchmarks/quality_memory.py --again FILE

Every try is a process of its own, whose memory is limited to what it has before the input and the step, and so much
more. The size is doubled until a step does not fit, or takes longer than `--patience`, and then halved in between until
it is known to a quarter. What time ends, not memory, is not tried again with more memory. Seconds are those of the
processor, of all threads. Inputs count; those of "tiles" stay on the disk.

- image: a side of one image, for a ResNet-18 with normalisations by running statistics and a mask behind its third
  stage. Ways: plain, "checkpoint" (torch's, a part for each two blocks), "engine" (skipping, the image in memory),
  "tiles" (skipping, from the disk). Crops have no limit: what they look at at a time is what fits in "plain".
- batch: pairs of images of 64 x 64 for the same network and a contrastive loss. Ways: plain, "checkpoint", "gradcache"
  (Skip with p = 0 and at_once = 32), "engine" (p = 0.9, at_once = 32).
- cohort: images of 1024 x 1024 and Cox's loss, the network of quality_flagship.py. Ways: plain, "checkpoint",
  "gradcache" (an image at a time, in memory), "tiles" (skipping, from the disk).
"""

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from backdrop import Backdrop, Backdrop2d, Skip, skip_blocked
from backdrop.losses import contrastive_loss, cox_loss
from bench_size import GIB, Raw, begin, kilobytes, resnet
from quality_flagship import network

WAYS = {
    "image": ("plain", "checkpoint", "engine", "tiles"),
    "batch": ("plain", "checkpoint", "gradcache", "engine"),
    "cohort": ("plain", "checkpoint", "gradcache", "tiles"),
}
FIRST = {"image": 1024, "batch": 128, "cohort": 8}
STEP = {"image": 64, "batch": 8, "cohort": 1}  # sizes are multiples of it
MOST = {"image": 32768, "batch": 2**20, "cohort": 4096}  # larger ones are not tried
PARTS = 6  # of checkpointing


def shape_of(kind, size):
    return {"image": (1, 3, size, size), "batch": (size, 3, 64, 64), "cohort": (size, 1, 1024, 1024)}[kind]


class Checkpointed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint_sequential(self.model, PARTS, x, use_reentrant=False)


def model_of(kind, way, limit):
    """A function of the input, that does a step."""
    if kind == "batch":
        body = resnet(nn.Identity())
        body[-1] = nn.Linear(512, 64)
        if way == "checkpoint":
            body = Checkpointed(body)
        if way in ("gradcache", "engine"):
            body = Skip(body, Backdrop(0.9 if way == "engine" else 0.0, exact=True), at_once=32)
        return body
    if kind == "cohort":
        mask = Backdrop2d(1 - 16 / 256, exact=True) if way == "tiles" else nn.Identity()
        plain = network(mask)
        if way == "gradcache":
            return Skip(plain, Backdrop(0.0), at_once=1)
    else:
        plain = resnet(Backdrop2d(0.9995) if way in ("engine", "tiles") else nn.Identity())
    if way == "checkpoint":
        return Checkpointed(plain)
    if way in ("engine", "tiles"):
        return skip_blocked(plain, **({"tile": "auto", "memory": limit * 3 // 4} if way == "tiles" else {}))
    return plain


def loss_of(kind, out):
    if kind == "batch":
        a, b = F.normalize(out, dim=1).chunk(2)
        return contrastive_loss(a, b, temperature=0.1)
    if kind == "cohort":
        times = torch.arange(len(out), 0, -1)
        return cox_loss(out.flatten(), times.float(), torch.ones(len(out)))
    return out.square().sum()


def step(kind, way, size, limit, path, patience):
    """In a process of its own: seconds of a step, and the memory it took."""
    torch.manual_seed(0)
    model, shape = model_of(kind, way, limit), shape_of(kind, size)
    small = torch.randn(shape_of(kind, {"image": 256, "batch": 8, "cohort": 2}[kind]))
    loss_of(kind, model(small)).backward()  # what torch loads with the first step is there before
    model.zero_grad()
    source = Raw(path, shape)
    base = begin(limit)
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(start + patience), resource.RLIM_INFINITY))
    if way == "tiles":
        x = source
    else:
        x = torch.empty(shape)
        for n in range(shape[0]):
            x[n] = source.read(n, (0, 0), shape[2:])
    loss_of(kind, model(x)).backward()
    used = (kilobytes("VmHWM:") - base) / 2**20
    if used > 1.02 * limit / GIB:  # addresses that were there before may hold memory that was not
        raise MemoryError(f"{used:.2f} GiB")
    return {"seconds": round(time.process_time() - start, 2), "gib": round(used, 3)}


def tried(kind, way, size, limit, folder, patience, threads):
    path = Path(folder) / "input"
    with path.open("wb") as file:  # sparse: zeros, which take no disk
        file.truncate(math.prod(shape_of(kind, size)))
    told = json.dumps([kind, way, size, limit, str(path), patience])
    command = [sys.executable, __file__, "--unit", told, "--threads", str(threads)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == -signal.SIGXCPU:
        return {"failed": "takes too long"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        full = "allocate memory" in done.stderr or "MemoryError" in done.stderr or "memory is" in done.stderr
        return {"failed": "does not fit" if full else lines[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def largest(kind, way, limit, folder, patience, threads, first, less):
    """By doubling, then by halves, to a quarter; `less` is what was found with less memory, which fits with more."""
    if less and less["more"] == "takes too long":
        return {name: less[name] for name in ("size", "seconds", "gib", "more")}
    best = {name: less[name] for name in ("size", "seconds", "gib")} if less else {"size": 0}
    bad, why, size = None, "", 2 * best["size"] or first
    while True:
        found = tried(kind, way, size, limit, folder, patience, threads)
        print(f"  {kind}, {way}, {limit / GIB:g} GiB, {size}: {found}", file=sys.stderr, flush=True)
        if "failed" in found:
            bad, why = size, found["failed"]
        else:
            best = {"size": size, **found}
        good = best["size"]
        if bad is None:
            size *= 2
            if size > MOST[kind]:
                return {**best, "more": "not tried"}
        else:
            size = round((good + bad) / 2 / STEP[kind]) * STEP[kind]
            if bad - good <= max(STEP[kind], good / 4) or size in (good, bad):
                return {**best, "more": why}


def show(rows):
    for kind, ways in WAYS.items():
        own = [row for row in rows if row["kind"] == kind]
        limits = sorted({row["limit"] for row in own})
        if own:
            print(f"\n{kind:12} " + " ".join(f"{f'{limit:g} GiB':>30}" for limit in limits))
        for way in ways:
            cells = {
                row["limit"]: f"{row['size']} ({row.get('seconds')} s; {row['more']})"
                for row in own
                if row["way"] == way
            }
            if cells:
                print(f"{way:12} " + " ".join(f"{cells.get(limit, ''):>30}" for limit in limits))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limits", nargs="+", type=float, default=[2, 4, 8], help="in GiB")
    parser.add_argument("--patience", type=float, default=30, help="seconds that a step may take")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write figures to this file, or go on with it")
    parser.add_argument("--again", type=Path, help="show the figures of this file")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.unit:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(step(*json.loads(arguments.unit))))
        return
    kept = arguments.again or arguments.json
    figures = {"torch": torch.__version__, "threads": arguments.threads, "patience": arguments.patience, "rows": []}
    if kept and kept.exists():
        figures = json.loads(kept.read_text())
    done = {(row["kind"], row["way"], row["limit"]) for row in figures["rows"]}
    cases = [(kind, way, limit) for kind in arguments.only for way in WAYS[kind] for limit in arguments.limits]
    with tempfile.TemporaryDirectory() as folder:
        for kind, way, limit in [] if arguments.again else cases:
            if (kind, way, limit) in done:
                continue
            own = [row for row in figures["rows"] if (row["kind"], row["way"]) == (kind, way)]
            less = max((row for row in own if row["limit"] < limit), key=lambda row: row["limit"], default=None)
            same = [row for row in figures["rows"] if (row["kind"], row["limit"]) == (kind, limit)]
            first = max((row["size"] for row in same if row["way"] == "plain"), default=FIRST[kind])
            found = largest(kind, way, int(limit * GIB), folder, arguments.patience, arguments.threads, first, less)
            figures["rows"].append({"kind": kind, "way": way, "limit": limit, **found})
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures["rows"])


if __name__ == "__main__":
    main()
