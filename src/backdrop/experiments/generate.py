"""Texture data sets on the disk: `FOLDER/images.npy`, `labels.npy` and `manifest.json`.

They hold what `TextureDataset` draws with the same settings, bit for bit. The work is done in a folder beside,
`.NAME.partial`, which is renamed when it is whole; a run that was killed is continued by the next one with the same
settings.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import backdrop
from backdrop._core.checks import check_int, check_size
from backdrop._core.files import held, replace
from backdrop.experiments.cache import listed
from backdrop.textures.sampler import Sampler
from backdrop.textures.texture import PAPER_WEIGHTS, Combine, Progress, Texture, split_seed

__all__ = ["generate"]


def generate(
    folder: str | os.PathLike[str],
    groups: Sequence[Sequence[float]],
    *,
    per_class: int,
    size: int | Sequence[int] = 1024,
    seed: int = 0,
    split: str = "train",
    weights: Sequence[float] | None = None,
    combine: Combine = "sum",
    patchwork: bool = False,
    periodic: bool = False,
    device: torch.device | str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Texture]:
    """Draws a data set into a new folder, and returns its classes.

    Args:
        folder: where to.
        groups: the lengths of each scale; a class is one choice from every group, the first running fastest.
        per_class: images per class.
        size: pixels per axis, or of a square.
        seed: of all images.
        split: images of one split are independent of those of another.
        weights: one per group; those of the paper for two groups by default, else 1.
        combine: as for `Texture`.
        patchwork: take the lengths for those of the authors' program.
        periodic: whether opposite borders fit together.
        device: where to draw; a GPU has other numbers than a CPU.
        force: replace a data set that is there, or one that was begun with other settings.
        progress: what to wrap the loop over images in.
        say: is told what is going on.
    """
    if weights is None and len(groups) == len(PAPER_WEIGHTS):
        weights = PAPER_WEIGHTS
    classes = Texture.grid(groups, weights, combine, patchwork=patchwork)
    count = len(classes) * check_int("per_class", per_class, 1)
    samplers = [Sampler(texture, size, count, kept=1, device=device, periodic=periodic) for texture in classes]
    settings: dict[str, Any] = {
        "groups": [list(map(float, group)) for group in groups],
        "weights": list(classes[0].weights),
        "combine": combine,
        "patchwork": patchwork,
        "periodic": periodic,
        "size": list(check_size(size)),
        "per_class": int(per_class),
        "seed": check_int("seed", seed),
        "split": split,
        "device": torch.device(device).type,  # numbers of a GPU are not those of a CPU
    }
    drawn_from = split_seed(seed, split)
    target = Path(folder).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    guard = target.with_name(f".{target.name}.lock")
    with held(guard, waiting=lambda: say(f"another process writes {target}: waiting for it")):
        _check_target(target, force)
        partial = target.with_name(f".{target.name}.partial")
        _begin(partial, settings, force)
        images, labels = partial / "images.npy", partial / "labels.npy"
        np.save(labels, np.arange(count) % len(classes))
        shape = (count, *settings["size"])
        indices = range(_begin_images(images, shape), count)
        needed, free = 4 * math.prod(shape[1:]) * len(indices), shutil.disk_usage(partial).free
        if needed > free:
            raise OSError(
                f"{len(indices)} images need {needed / 1e9:.1f} GB, but {partial} has {free / 1e9:.1f} GB free"
            )
        if indices.start:
            say(f"{indices.start} of {count} images are there already, going on")
        out = torch.empty(settings["size"], device=samplers[0].device)
        with images.open("ab") as file:
            for i in (progress or iter)(indices):
                samplers[i % len(classes)].draw(drawn_from, i, out)
                file.write(out.cpu().numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "settings": settings,
            "classes": [[kernel.length for kernel in texture.kernels] for texture in classes],
            "files": {
                "images.npy": listed(images, shape, "float32"),
                "labels.npy": listed(labels, (count,), "int64"),
            },
            "backdrop": backdrop.__version__,
            "torch": torch.__version__,
        }
        _write_json(partial / "manifest.json", manifest)
        old = target.with_name(f".{target.name}.old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)  # of a run that was killed while it removed it
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    say(f"images: {count}, classes: {len(classes)}, now in {target}")
    return classes


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / "manifest.json").is_file() or not (target / "images.npy").is_file():
        raise FileExistsError(f"{target} holds something else than textures; name a folder that is empty or not there")
    if not force:
        raise FileExistsError(f"{target} holds a data set; name another folder, or use --force to replace it")


def _begin(partial: Path, settings: dict[str, Any], force: bool) -> None:
    """Makes the folder to work in, or finds it as an earlier run with these settings has left it."""
    manifest = partial / "manifest.json"
    if manifest.is_file():
        if json.loads(manifest.read_text())["settings"] == settings:
            return
        if not force:
            raise FileExistsError(
                f"{partial} holds a data set that was begun with other settings; run with those to complete it, or use "
                "--force to begin anew"
            )
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    _write_json(manifest, {"settings": settings})


def _begin_images(path: Path, shape: tuple[int, ...]) -> int:
    """Makes the file without images, or cuts off what is not a whole one; returns how many there are."""
    header = io.BytesIO()
    what = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, what)
    image = 4 * math.prod(shape[1:])
    start = len(header.getvalue())
    done = max(0, path.stat().st_size - start) // image if path.exists() else 0
    with path.open("r+b" if done else "wb") as file:
        file.write(header.getvalue())
        file.truncate(start + done * image)
    return done


def _write_json(path: Path, content: dict[str, Any]) -> None:
    replace(path, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))
