"""What comes from outside, made for tests: archives with the layout of the real ones, and a server on this machine."""

import contextlib
import copy
import io
import math
import os
import re
import struct
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

from backdrop.experiments.fetch import Archive
from backdrop.experiments.sources import DATA_SETS, Source

os.environ["no_proxy"] = "*"  # this machine is not to be reached through another


def tar(files, mode="w:gz"):
    """An archive of a dict from names to bytes, or to a TarInfo for anything else than a file."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, content in files.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if not isinstance(content, tarfile.TarInfo):
                info.size = len(content)
            archive.addfile(info, None if isinstance(content, tarfile.TarInfo) else io.BytesIO(content))
    return stream.getvalue()


def zipped(files, compression=zipfile.ZIP_DEFLATED):
    """An archive of a dict from names, or ZipInfos, to bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def picture(pixels, kind):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def python2_pickle(pixels, labels):
    """A batch of CIFAR-10 as Python 2 with an old NumPy pickled it, opcode by opcode."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def integer(value):
        return b"J" + struct.pack("<i", value)

    def dtype(name):
        make = b"cnumpy\ndtype\n" + text(name) + integer(0) + integer(1) + b"\x87R"
        return make + b"(" + integer(3) + text(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"

    rows = pixels.reshape(len(pixels), -1)
    make = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"\x87R"
    content = b"T" + struct.pack("<i", rows.size) + rows.tobytes()
    state = b"(" + integer(1) + integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86" + dtype(b"u1") + b"\x89"
    array = make + state + content + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    items = text(b"batch_label") + text(b"a batch") + text(b"labels") + numbers + text(b"data") + array
    return b"\x80\x02}(" + items + b"u."


def small_cifar10():
    """CIFAR-10 with as many images, but of 2x2 pixels: (data set, images, labels) without sources."""
    generator = np.random.default_rng(0)
    labels = np.concatenate([generator.permutation(np.arange(10).repeat(n)) for n in (5000, 1000)])
    images = generator.integers(0, 256, (60000, 3, 2, 2), np.uint8)
    mean = tuple((images[:50000].astype(float).mean((0, 2, 3)) / 255).round(8).tolist())
    return replace(DATA_SETS["cifar10"], shape=(3, 2, 2), mean=mean, sources=()), images, labels


def official(images, labels):
    """The files of the archive of pickles, in another order than that of the images."""
    parts = {f"data_batch_{i + 1}": slice(i * 10000, i * 10000 + 10000) for i in (3, 0, 4, 2, 1)}
    parts["test_batch"] = slice(50000, None)
    batches = {name: python2_pickle(images[rows], labels[rows].tolist()) for name, rows in reversed(parts.items())}
    return {"cifar-10-batches-py/readme.html": b"", **{f"cifar-10-batches-py/{k}": v for k, v in batches.items()}}


def npm(images, labels):
    """The files of the archive of pictures."""
    rows = images.reshape(len(images), 3, -1).transpose(0, 2, 1)  # (image, pixel, channel)
    files = {"package/package.json": b"{}"}
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        files[f"package/{name}.png"] = picture(np.ascontiguousarray(rows[i * 10000 : i * 10000 + 10000]), "PNG")
    files["package/train_lables.json"] = str(labels[:50000].tolist()).encode()
    files["package/test_lables.json"] = str(labels[50000:].tolist()).encode()
    return files


def textures(per_class=40, size=(4, 3), named=True):
    """Flat grey JPEGs, each class a little lighter than the one before: a dict from names to bytes."""
    files = {}
    for i, name in enumerate(DATA_SETS["uiuc"].classes, 1):
        for k in range(1, per_class + 1):
            grey = np.full(size[::-1], 8 * i + k // 8, np.uint8)
            files[f"T{i:02}{f'_{name}' if named else ''}/T{i:02}_{k:02}.jpg"] = picture(grey, "JPEG")
    return files


def small_uiuc():
    return replace(DATA_SETS["uiuc"], shape=(1, 3, 4), sources=())


def source(title, read, files, checksum, url="http://127.0.0.1:9/closed"):
    """A source of one archive, for `replace(data_set, sources=...)`."""
    return Source(title, (Archive(files, checksum, url),), read)


class Server:
    """Answers every request with `answer(handler)`; remembers the headers it was sent."""

    def __init__(self, answer):
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests.append(dict(self.headers))
                with contextlib.suppress(OSError):  # clients may go away
                    answer(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/file"

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def send(handler, body, status=200, **headers):
    """An answer; names of headers with _ for -, None leaves one out that is sent otherwise."""
    handler.send_response(status)
    for name, value in {"Content_Length": len(body), **headers}.items():
        if value is not None:
            handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


def serve(content, most=None, **headers):
    """An answer that knows ranges, and that ends after `most` bytes although it promises more."""

    def answer(handler):
        start, status, extra = 0, 200, dict(headers)
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        if wanted and handler.headers.get("If-Range") in (None, *headers.values()):
            start, status = int(wanted[1]), 206
            if start >= len(content):
                return send(handler, b"", 416)
            extra["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:] if most is None else content[start:][:most]
        return send(handler, body, status, **{"Content_Length": len(content) - start, **extra})

    return answer


WEIRD = [None, True, 0, -1, 1e308, math.nan, math.inf, 10**400, -0.0]
WEIRD += ["", "x" * 1000, "\x1b[2J", "a\nb", "$x$", "evil.py:X", "../../evil", "\ud800"]
WEIRD += [[], {}, [1], {"a": 1}, [[[]]], {"a": {"b": [None]}}]


def parts_of(content, path=()):
    """Where its parts are, at any depth."""
    yield path
    for name in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        yield from parts_of(content[name], (*path, name))


def changed(content, random):
    """One or two parts left out, replaced, or added to."""
    found = copy.deepcopy(content)
    for _ in range(int(random.integers(1, 3))):
        places = [place for place in parts_of(found) if place]
        if not places:
            break
        *path, last = places[int(random.integers(len(places)))]
        parent = found
        for name in path:
            parent = parent[name]
        kind, value = random.integers(3), WEIRD[int(random.integers(len(WEIRD)))]
        if kind == 0:
            del parent[last]
        elif kind == 1 or isinstance(parent, list):
            parent[last] = value
        else:
            parent[("more", "", "seed", "p_small")[int(random.integers(4))]] = value
    return found
