"""Archives that are broken or made to do harm: each is refused with one clear error, and nothing happens."""

import contextlib
import gzip
import io
import os
import pickle
import stat
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

from backdrop.experiments import archives
from backdrop.experiments.archives import (
    ArchiveError,
    Member,
    PickledArray,
    members,
    read_image,
    read_json,
    read_pickle,
)
from outside import picture, python2_pickle, tar, zipped

FILES = {"a/one.txt": b"first" * 100, "a/two.txt": b"second", "b/other.bin": b"\x00" * 1000}
GOOD = {name: content for name, content in FILES.items() if name.endswith(".txt")}


def write(tmp_path, content, name="archive"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def texts(path):
    return {member.name: member.content for member in members(path, lambda name: name.endswith(".txt"))}


@pytest.mark.parametrize(
    "content",
    [tar(FILES), tar(FILES, "w"), zipped(FILES), zipped(FILES, zipfile.ZIP_STORED)],
    ids=str.__class__.__name__.format,
)
def test_wanted_files_of_an_archive(tmp_path, content):
    assert texts(write(tmp_path, content)) == GOOD
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_wanted_files_of_a_folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert texts(tmp_path) == GOOD


def special(kind, target=""):
    info = tarfile.TarInfo("bad")
    info.type, info.linkname = kind, target
    return tar({"a/one.txt": b"", "bad": info})


def zip_entry(name="bad", mode=0, compression=zipfile.ZIP_DEFLATED):
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = mode << 16, compression
    return zipped({"a/one.txt": b"", info: b"/etc/passwd"})


def sparse(size):
    """A file with holes, which takes no space in the archive."""
    info = tarfile.TarInfo("bad")
    info.size = 0
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:482] = b"\x00" * 96
    header[483:495] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def encrypted():
    content = bytearray(zipped({"one.txt": b"text"}))
    for place in (6, content.index(b"PK\x01\x02") + 8):
        content[place] |= 1
    return bytes(content)


def lying():
    """A file that says it is small and is not."""
    content = bytearray(zipped({"one.txt": bytes(1 << 20)}))
    place = content.index(b"PK\x01\x02") + 24
    content[place : place + 4] = struct.pack("<I", 10)
    return bytes(content)


def twice():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for text in (b"a", b"b"):
            info = tarfile.TarInfo("one.txt")
            info.size = 1
            archive.addfile(info, io.BytesIO(text))
    return stream.getvalue()


LARGE = bytes(archives.MEMBER_LIMIT + 1)
REFUSED = {
    "up": (lambda: tar({"../bad": b""}), "../bad", "leads out"),
    "up from within": (lambda: tar({"a/../../bad": b""}), "a/../../bad", "leads out"),
    "absolute": (lambda: tar({"/tmp/bad": b""}), "/tmp/bad", "leads out"),
    "drive": (lambda: tar({"C:bad": b""}), "C:bad", "leads out"),
    "backslash": (lambda: tar({"..\\bad": b""}), "bad", "leads out"),
    "symlink": (lambda: special(tarfile.SYMTYPE, "/etc/passwd"), "bad", "neither a file nor"),
    "hardlink": (lambda: special(tarfile.LNKTYPE, "a/one.txt"), "bad", "neither a file nor"),
    "device": (lambda: special(tarfile.CHRTYPE), "bad", "neither a file nor"),
    "pipe": (lambda: special(tarfile.FIFOTYPE), "bad", "neither a file nor"),
    "sparse": (lambda: sparse(100), "bad", "neither a file nor"),
    "sparse and large": (lambda: sparse(2**60), "bad", "too large"),
    "large": (lambda: tar({"bad": LARGE}), "bad", "too large"),
    "twice": (twice, "one.txt", "twice"),
    "zip up": (lambda: zip_entry("../bad"), "../bad", "leads out"),
    "zip absolute": (lambda: zip_entry("/tmp/bad"), "/tmp/bad", "leads out"),
    "zip backslash": (lambda: zip_entry("a\\..\\..\\bad"), "bad", "leads out"),
    "zip symlink": (lambda: zip_entry(mode=stat.S_IFLNK | 0o777), "bad", "neither a file nor"),
    "zip device": (lambda: zip_entry(mode=stat.S_IFCHR), "bad", "neither a file nor"),
    "zip large": (lambda: zipped({"bad": LARGE}), "bad", "too large"),
    "zip bzip2": (lambda: zip_entry(compression=zipfile.ZIP_BZIP2), "bad", "only deflated"),
    "zip lzma": (lambda: zip_entry(compression=zipfile.ZIP_LZMA), "bad", "only deflated"),
    "zip encrypted": (encrypted, "one.txt", "encrypted"),
    "zip lying": (lying, "one.txt", "cannot be read"),
    "empty": (lambda: b"", "archive", "cannot be read"),
    "text": (lambda: b"<html>" * 1000, "archive", "cannot be read"),
    "almost zip": (lambda: b"PK\x03\x04" + bytes(100), "archive", "cannot be read"),
    "almost gzip": (lambda: b"\x1f\x8b" + bytes(100), "archive", "cannot be read"),
    "gzip of text": (lambda: gzip.compress(b"text" * 500), "archive", "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    make, member, why = REFUSED[case]
    path = write(tmp_path, make())
    with pytest.raises(ArchiveError, match=why) as error:
        texts(path)
    assert str(path) in str(error.value)
    assert member in str(error.value).replace("\\\\", "\\")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize("pack", [tar, zipped])
def test_many_files_that_are_too_large_together(tmp_path, monkeypatch, pack):
    files = {f"{i}.txt": bytes(1000) for i in range(30)}
    assert len(texts(write(tmp_path, pack(files)))) == 30
    monkeypatch.setattr(archives, "ARCHIVE_LIMIT", 25_000)
    with pytest.raises(ArchiveError, match="25,000"):
        texts(write(tmp_path, pack(files)))


def test_a_header_that_would_fill_the_memory(tmp_path, monkeypatch):
    info = tarfile.TarInfo("one.txt")
    info.pax_headers = {"comment": "x" * 1_000_000}
    monkeypatch.setattr(archives, "ARCHIVE_LIMIT", 100_000)
    with pytest.raises(ArchiveError, match="holds more than 100,000 bytes"):
        texts(write(tmp_path, tar({"one.txt": info})))


@pytest.mark.parametrize("content", [tar(FILES), zipped(FILES)], ids=["tar.gz", "zip"])
def test_cut_off_anywhere(tmp_path, content):
    for length in range(len(content)):
        with pytest.raises(ArchiveError):
            texts(write(tmp_path, content[:length]))


@pytest.mark.parametrize("content", [tar(FILES), zipped(FILES)], ids=["tar.gz", "zip"])
def test_any_byte_changed(tmp_path, content):
    """Dates and the like may change unnoticed, but no content does."""
    refused = 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x41
        try:
            found = texts(write(tmp_path, bytes(changed)))
        except ArchiveError:
            refused += 1
        else:
            assert found.items() <= GOOD.items()
    assert refused > len(content) / 3


def member(tmp_path, content):
    return Member(tmp_path / "archive", "member", content)


def refused(tmp_path, why):
    return pytest.raises(ArchiveError, match=rf"archive, 'member': {why}")


PIXELS = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)


def test_an_image(tmp_path):
    found = read_image(member(tmp_path, picture(PIXELS, "PNG")), "PNG", "RGB", [(40, 30)])
    assert found.dtype == np.uint8
    assert np.array_equal(found, PIXELS)


def test_an_image_is_made_smaller_without_aliasing(tmp_path):
    stripes = np.zeros((480, 640), np.uint8)
    stripes[:, ::2] = 255  # too fine for the small image: there they have to become grey
    small = read_image(member(tmp_path, picture(stripes, "PNG")), "PNG", "L", [(640, 480)], resize=(400, 300))
    assert small.shape == (300, 400)
    assert abs(small[:, 10:-10].astype(float) - 127.5).max() < 32
    assert small.mean() == pytest.approx(127.5, abs=1)


def png_of(width, height):
    """A picture of zeros that claims to be large."""
    start = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", start), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    parts = [struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("content", "kind", "why"),
    [
        (picture(PIXELS, "PNG"), "JPEG", "is not a whole JPEG image"),
        (picture(PIXELS, "GIF"), "PNG", "is not a whole PNG image"),
        (picture(PIXELS[:29], "PNG"), "PNG", "has to be an image of 40x30 pixels, but is 40x29"),
        (png_of(9000, 9000), "PNG", "has to be an image of 40x30 pixels, but is 9000x9000"),
        (png_of(12000, 12000), "PNG", "is not a whole PNG image: .*decompression bomb"),
        (png_of(100_000, 100_000), "PNG", "is not a whole PNG image: .*decompression bomb"),
        (png_of(40, 30), "PNG", "is not a whole PNG image"),
        (b"", "PNG", "is not a whole PNG image"),
    ],
)
def test_images_that_are_refused(tmp_path, content, kind, why):
    with refused(tmp_path, why):
        read_image(member(tmp_path, content), kind, "L", [(40, 30)])


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_cut_off_anywhere(tmp_path, kind):
    content = picture(PIXELS, kind)
    for length in range(0, len(content) - 12, 7):  # a PNG ends with 12 bytes of no interest
        with refused(tmp_path, f"is not a whole {kind} image"):
            read_image(member(tmp_path, content[:length]), kind, "RGB", [(40, 30)])


def test_any_byte_of_a_png_changed(tmp_path):
    content = picture(PIXELS, "PNG")
    for place in range(len(content) - 12):
        changed = bytearray(content)
        changed[place] ^= 0x41
        with refused(tmp_path, "is not a whole PNG image|has to be"):
            read_image(member(tmp_path, bytes(changed)), "PNG", "RGB", [(40, 30)])


def test_json(tmp_path):
    assert read_json(member(tmp_path, b"[1, 2]")) == [1, 2]
    for content in (b"[1, 2", b"", b"\xff\xfe\xfa", b"[" * 200_000):
        with refused(tmp_path, "is not JSON"):
            read_json(member(tmp_path, content))


def test_arrays_pickled_by_python_2(tmp_path):
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 12)
    batch = read_pickle(member(tmp_path, python2_pickle(pixels, [3, 1])))
    assert batch[b"labels"] == [3, 1]
    assert np.array_equal(batch[b"data"].bytes(), pixels)
    real = pickle.loads(python2_pickle(pixels, [3, 1]), encoding="bytes")  # it is a pickle that NumPy itself can read
    assert np.array_equal(real[b"data"], pixels)


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickled_arrays(tmp_path, protocol, dtype, order):
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    found = read_pickle(member(tmp_path, pickle.dumps(array, protocol)))
    if (dtype, order) == (np.uint8, "C"):
        assert np.array_equal(found.bytes(), array)
    else:
        with pytest.raises(ValueError, match="array of bytes"):
            found.bytes()


class Runs:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "attack",
    [
        lambda path: Runs(os.mkdir, path),
        lambda path: Runs(os.system, f"mkdir {path}"),
        lambda path: Runs(eval, f"__import__('os').mkdir({path!r})"),
        lambda path: Runs(np.save, path, 1),
        lambda path: {b"data": [Runs(os.mkdir, path)]},
    ],
)
def test_a_pickle_runs_nothing(tmp_path, attack, protocol):
    victim = tmp_path / "harm"
    content = pickle.dumps(attack(str(victim)), protocol)
    with refused(tmp_path, "is not a pickle of plain arrays: it asks for .*, which is not allowed"):
        read_pickle(member(tmp_path, content))
    assert list(tmp_path.iterdir()) == []
    pickle.loads(content)  # does harm, so the test is one
    assert list(tmp_path.iterdir()) != []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}",
        python2_pickle(PIXELS[:2], [1, 2])[:-20],
        b"\x80\x04\x8c\x05numpy\x8c\x15ndarray.__init__.__doc\x93.",  # a path of attributes
        b"cnumpy\nload\n.",
        b"cbuiltins\ngetattr\n.",
        b"Pid\n.",  # an object from elsewhere
        b"\x82\x01.",  # a registered extension
        b"(" * 1000,
        b"\x8a\xff",
        b"K\x01r\xff\xff\xff\x7f.",  # a memo of 32 GB
        b"K\x01p4000000000\n.",
        b"\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",  # bytes that are not there
    ],
)
def test_pickles_that_are_refused(tmp_path, content):
    with refused(tmp_path, "is not a pickle of plain arrays"):
        read_pickle(member(tmp_path, content))


# --- a thousand damages


SMALL = np.random.default_rng(0).integers(0, 256, (6, 8), np.uint8)
OF_ALL_KINDS = {
    "T01/one.jpg": picture(SMALL, "JPEG"),
    "two.png": picture(SMALL, "PNG"),
    "three.json": b"[1, 2, 3]",
    "four": python2_pickle(SMALL[:2], [1, 2]),
}


def read_all(path):
    for found in members(path, lambda name: True):
        if found.name.endswith(".jpg"):
            read_image(found, "JPEG", "L", [(8, 6)])
        elif found.name.endswith(".png"):
            read_image(found, "PNG", "L", [(8, 6)])
        elif found.name.endswith(".json"):
            read_json(found)
        else:
            batch = read_pickle(found)
            if isinstance(batch, dict) and isinstance(batch.get(b"data"), PickledArray):
                with contextlib.suppress(ValueError):
                    batch[b"data"].bytes()


def mutated(content, random):
    """One to three changes: bits, bytes, parts left out, put in, zeroed, repeated or swapped."""
    changed = bytearray(content)
    for _ in range(int(random.integers(1, 4))):
        kind, place, length = random.integers(7), int(random.integers(len(changed))), int(2 ** random.integers(9))
        end = min(place + length, len(changed))
        if kind == 0:
            changed[place] ^= 1 << int(random.integers(8))
        elif kind == 1:
            changed[place] = int(random.integers(256))
        elif kind == 2:
            del changed[place:end]
        elif kind == 3:
            changed[place:place] = random.bytes(length)
        elif kind == 4:
            changed[place:end] = bytes(end - place)
        elif kind == 5:
            changed[place:place] = changed[max(0, place - length) : place]
        else:
            other = int(random.integers(len(changed)))
            changed[place], changed[other] = changed[other], changed[place]
        changed = changed or bytearray(b"x")
    return bytes(changed)


def mutated_header(content, random):
    """A header of a tar archive with other fields and a right checksum."""
    changed = bytearray(content)
    starts = [i for i in range(0, len(changed) - 511, 512) if changed[i + 257 : i + 262] == b"ustar"]
    start = starts[int(random.integers(len(starts)))]
    fields = [(0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (265, 32), (329, 8), (345, 155)]
    for _ in range(int(random.integers(1, 3))):
        place, length = fields[int(random.integers(len(fields)))]
        made = (
            random.bytes(length),
            bytes(length),
            b"9" * length,
            b"\x80" + random.bytes(length - 1),
            b"LKxgSVN10"[:length],
        )
        chosen = (
            made[int(random.integers(5))] if length > 1 else bytes([b"LKxgSVMDN012345678"[int(random.integers(18))]])
        )
        changed[start + place : start + place + len(chosen)] = chosen
    changed[start + 148 : start + 156] = b" " * 8
    changed[start + 148 : start + 156] = b"%06o\0 " % sum(changed[start : start + 512])
    return bytes(changed)


def mutated_directory(content, random):
    """A zip archive with another table of contents."""
    changed, start = bytearray(content), content.index(b"PK\x01\x02")
    for _ in range(int(random.integers(1, 4))):
        place = int(random.integers(start, len(changed)))
        changed[place] = (0, 1, 0x7F, 0xFF, int(random.integers(256)))[int(random.integers(5))]
    return bytes(changed)


FUZZED = {
    "tar": (tar(OF_ALL_KINDS, "w"), mutated),
    "tar header": (tar(OF_ALL_KINDS, "w"), mutated_header),
    "tar.gz": (tar(OF_ALL_KINDS), mutated),
    "tar in gz": (tar(OF_ALL_KINDS, "w"), lambda content, random: gzip.compress(mutated_header(content, random), 1)),
    "zip": (zipped(OF_ALL_KINDS), mutated),
    "zip directory": (zipped(OF_ALL_KINDS), mutated_directory),
    "stored": (zipped(OF_ALL_KINDS, zipfile.ZIP_STORED), mutated),
    "stored directory": (zipped(OF_ALL_KINDS, zipfile.ZIP_STORED), mutated_directory),
}


@pytest.mark.parametrize("kind", FUZZED)
def test_mutated_archives_are_read_or_refused(tmp_path, kind):
    """1,000 in all: nothing but `ArchiveError`, with the file's name; nothing is left on the disk."""
    content, mutate = FUZZED[kind]
    refused = 0
    for seed in range(125):
        path = write(tmp_path, mutate(content, np.random.default_rng(seed)))
        try:
            read_all(path)
        except ArchiveError as error:
            refused += str(path) in str(error)
        assert [file.name for file in tmp_path.iterdir()] == ["archive"]
    assert refused >= 10


def test_mutated_pickles_are_read_or_refused(tmp_path):
    content = python2_pickle(SMALL[:2], [1, 2])
    read = 0
    for seed in range(500):
        found = member(tmp_path, mutated(content, np.random.default_rng(seed)))
        try:
            batch = read_pickle(found)
            batch[b"data"].bytes()
        except (ArchiveError, KeyError, TypeError, ValueError, AttributeError):
            continue
        read += 1
    assert 0 < read < 400


@pytest.mark.parametrize(
    "state",
    [None, (), (1, 2, 3), (1, (2,), PickledArray(), False, b"ab"), (1, (-1, -2), PickledArray("u1"), False, b"ab")],
)
def test_arrays_that_are_none(state):
    array = PickledArray()
    array.state = state
    with pytest.raises(ValueError, match="array of bytes"):
        array.bytes()
