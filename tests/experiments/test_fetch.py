"""Downloads from a server that is good, bad or gone: what is in place is whole, and what was begun is continued."""

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from backdrop._core import files
from backdrop._core.files import held
from backdrop.experiments import fetch
from backdrop.experiments.fetch import CHUNK, Archive, DownloadError, checksum, download, forget, npm_tarball
from outside import Server, send, serve

CONTENT = random.Random(0).randbytes(3_000_000)
HALF = len(CONTENT) // 2
SUM = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def archive(url, **changes):
    return Archive(**{"file": "a.tgz", "checksum": SUM, "url": url, "size": len(CONTENT), **changes})


def get(url, folder, **changes):
    return download(archive(url, **changes), folder, progress=False, timeout=30)


def begin(folder, headers, content=CONTENT):
    """Leaves a download that was cut off in the middle."""
    with (
        Server(serve(content, most=HALF, **headers)) as server,
        pytest.raises(DownloadError, match="closed the connec"),
    ):
        get(server.url, folder)
    assert (folder / "a.tgz.part").read_bytes() == content[:HALF]


def only_the_archive_is_in(folder):
    return [path.name for path in folder.iterdir()] == ["a.tgz"] and (folder / "a.tgz").read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
@pytest.mark.parametrize("algorithm", ["sha256", "sha1", "md5"])
@pytest.mark.parametrize("late", [False, True])
def test_a_download(tmp_path, size, algorithm, late):
    expected = f"{algorithm}:{hashlib.new(algorithm, CONTENT).hexdigest()}"
    with Server(serve(CONTENT)) as server:
        url = (lambda: server.url) if late else server.url
        path = get(url, tmp_path / "new" / "folder", checksum=expected, size=size)
        assert len(server.requests) == 1
        assert "Range" not in server.requests[0]
    assert path == tmp_path / "new" / "folder" / "a.tgz"
    assert only_the_archive_is_in(path.parent)
    assert checksum(path, algorithm) == expected


def test_a_download_without_a_known_length(tmp_path):
    with Server(lambda handler: send(handler, CONTENT, Content_Length=None)) as server:
        get(server.url, tmp_path, size=None)
    assert only_the_archive_is_in(tmp_path)


def test_the_bar_shows_the_file(tmp_path, capsys):
    with Server(serve(CONTENT)) as server:
        download(archive(server.url), tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert "a.tgz" in err
    assert "3.0/3.0 MB" in err


@pytest.mark.parametrize(
    ("headers", "if_range"),
    [
        ({"ETag": '"one"'}, '"one"'),
        ({"Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, "Mon, 01 Jan 2024 00:00:00 GMT"),
        ({"ETag": 'W/"weak"', "Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, "Mon, 01 Jan 2024 00:00:00 GMT"),
        ({"ETag": 'W/"weak"'}, None),
        ({}, None),
    ],
)
def test_what_was_begun_is_continued(tmp_path, headers, if_range):
    begin(tmp_path, headers)
    with Server(serve(CONTENT, **headers)) as server:
        get(server.url, tmp_path)
        (request,) = server.requests
    assert request["Range"] == f"bytes={HALF}-"
    assert request.get("If-Range") == if_range
    assert only_the_archive_is_in(tmp_path)


def test_another_version_is_not_mixed_with_what_was_begun(tmp_path):
    begin(tmp_path, {"ETag": '"old"'}, content=bytes(len(CONTENT)))
    with Server(serve(CONTENT, ETag='"new"')) as server:
        get(server.url, tmp_path)
        assert server.requests[0]["If-Range"] == '"old"'
    assert only_the_archive_is_in(tmp_path)


def another_part(handler):
    if "Range" in handler.headers:
        return send(handler, CONTENT[7:], 206, Content_Range=f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}")
    return send(handler, CONTENT)


def no_part(handler):
    return send(handler, b"", 416) if "Range" in handler.headers else send(handler, CONTENT)


@pytest.mark.parametrize(
    ("answer", "requests"), [(lambda handler: send(handler, CONTENT), 1), (another_part, 2), (no_part, 2)]
)
def test_a_server_that_does_not_continue_starts_anew(tmp_path, answer, requests):
    begin(tmp_path, {})
    with Server(answer) as server:
        get(server.url, tmp_path)
        assert len(server.requests) == requests
    assert only_the_archive_is_in(tmp_path)


def test_nothing_is_asked_for_what_is_there(tmp_path):
    (tmp_path / "a.tgz").write_bytes(CONTENT)
    get("http://127.0.0.1:9/closed", tmp_path)
    (tmp_path / "a.tgz").rename(tmp_path / "a.tgz.part")  # killed before it could be renamed
    get("http://127.0.0.1:9/closed", tmp_path)
    assert only_the_archive_is_in(tmp_path)


def test_a_spoilt_file_is_replaced(tmp_path):
    (tmp_path / "a.tgz").write_bytes(CONTENT[:-1] + b"?")
    with Server(serve(CONTENT)) as server:
        get(server.url, tmp_path)
    assert only_the_archive_is_in(tmp_path)


def say(line):
    return lambda handler: handler.wfile.write(line)


# what the server does, what the error says, how many bytes of the download are kept
FAILURES = [
    (lambda handler: send(handler, b"gone", 404), "answered 404 Not Found", None),
    (lambda handler: send(handler, b"", 500), "answered 500", None),
    (say(b"\x00garbage\r\n\r\n"), "garbage", None),
    (say(b""), "closed connection without", None),
    (say(b"HTTP/1.0 200 OK\r\nContent-Length: many\r\n\r\n"), "many", None),
    (
        lambda handler: send(handler, b"<html>log in first</html>"),
        "3,000,000 bytes long, but the server offers 25",
        None,
    ),
    (lambda handler: send(handler, CONTENT + b"?"), "the server offers 3,000,001", None),
    (serve(CONTENT, most=0), "after 0 of 3,000,000 bytes", 0),
    (serve(CONTENT, most=HALF), "after 1,500,000 of 3,000,000 bytes; 1,500,000 bytes are kept, run", HALF),
    (lambda handler: send(handler, CONTENT[:HALF], Content_Length=None), "after 1,500,000 of 3,000,000", HALF),
    (
        lambda handler: send(handler, CONTENT * 2, Content_Length=None),
        "sends more than 3,000,000",
        len(CONTENT) // CHUNK * CHUNK,
    ),
    (say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nhalf"), "IncompleteRead", 0),
    (lambda handler: send(handler, bytes(len(CONTENT))), f"checksum {SUM}, but it has sha256:", None),
]


@pytest.mark.parametrize(("answer", "message", "kept"), FAILURES)
def test_failures_are_clear_and_nothing_half_is_in_place(tmp_path, answer, message, kept):
    with Server(answer) as server, pytest.raises(DownloadError) as error:
        get(server.url, tmp_path / "downloads")
    assert server.url in str(error.value)
    assert message in str(error.value)
    part = tmp_path / "downloads" / "a.tgz.part"
    assert not (tmp_path / "downloads" / "a.tgz").exists()
    assert (part.stat().st_size if part.exists() else None) == kept
    with Server(serve(CONTENT)) as server:
        get(server.url, tmp_path / "downloads")  # nor is anything in the way of the next try
    assert only_the_archive_is_in(tmp_path / "downloads")


def test_a_failed_checksum_leaves_nothing(tmp_path):
    zeros, message = bytes(len(CONTENT)), "it was deleted, run the command again"
    with Server(serve(zeros, ETag='"x"')) as server, pytest.raises(DownloadError, match=message):
        get(server.url, tmp_path / "downloads")
    assert list(tmp_path.iterdir()) == []


def test_a_download_of_unknown_size_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "LIMIT", HALF)
    message = "sends more than 1,500,000 bytes"
    with Server(serve(CONTENT, Content_Length=None)) as server, pytest.raises(DownloadError, match=message):
        get(server.url, tmp_path, size=None)


def test_what_was_begun_survives_a_wrong_answer(tmp_path):
    begin(tmp_path, {})
    page, message = b"<html>log in first</html>", "1,500,000 bytes are kept"
    with Server(lambda handler: send(handler, page)) as server, pytest.raises(DownloadError, match=message):
        get(server.url, tmp_path)
    assert (tmp_path / "a.tgz.part").read_bytes() == CONTENT[:HALF]


@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_falls_silent_is_given_up(tmp_path, answers):
    end = threading.Event()

    def answer(handler):
        if answers:
            send(handler, CONTENT[:HALF], Content_Length=len(CONTENT))
        end.wait()

    with Server(answer) as server:
        try:
            with pytest.raises(DownloadError, match="timed out"):
                download(archive(server.url), tmp_path, progress=False, timeout=0.2)
        finally:
            end.set()
    assert not (tmp_path / "a.tgz").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/closed", "refused"),
        ("file:///etc/passwd", "http:// or https://"),
        ("http://127.0.0.1:port/", "port"),
    ],
)
def test_addresses_that_lead_nowhere(tmp_path, url, message):
    with pytest.raises(DownloadError, match=message):
        get(url, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_what_can_be_continued(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Server(serve(CONTENT, ETag='"x"')) as server:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_234_567, before[1]))  # writing more fails, as on a full disk
        try:
            with pytest.raises(DownloadError, match="too large; 1,234,567 bytes are kept"):
                get(server.url, tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        get(server.url, tmp_path)
        assert server.requests[1]["Range"] == "bytes=1234567-"
    assert only_the_archive_is_in(tmp_path)


def test_a_killed_process_leaves_what_can_be_continued(tmp_path):
    end, part = threading.Event(), tmp_path / "a.tgz.part"

    def answer(handler):
        if "Range" in handler.headers:
            return serve(CONTENT)(handler)
        send(handler, CONTENT[:CHUNK], Content_Length=len(CONTENT))
        return end.wait()

    code = "import sys; from pathlib import Path; from backdrop.experiments.fetch import CHUNK, Archive, download\n"
    code += "download(Archive(*sys.argv[1:4]), Path(sys.argv[4]), progress=False, timeout=600)"
    with Server(answer) as server:
        command = [sys.executable, "-c", code, "a.tgz", SUM, server.url, str(tmp_path)]
        process = subprocess.Popen(command)
        try:
            while process.poll() is None and not (part.exists() and part.stat().st_size):
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
            end.set()
        assert part.stat().st_size == CHUNK
        get(server.url, tmp_path)
        assert server.requests[1]["Range"] == f"bytes={CHUNK}-"
    assert only_the_archive_is_in(tmp_path)


def test_forget_removes_whole_and_begun_downloads(tmp_path):
    folder = tmp_path / "downloads"
    begin(folder, {"ETag": '"x"'})
    (folder / "a.tgz").touch()
    (folder / "other").touch()
    forget(archive(""), folder)
    assert [path.name for path in folder.iterdir()] == ["other"]
    (folder / "other").unlink()
    forget(archive(""), folder)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_lets_in_one_after_the_other(tmp_path):
    pytest.importorskip("fcntl")
    path, inside, entered, waited = tmp_path / "lock", threading.Lock(), 0, set()

    def work(number):
        nonlocal entered
        with held(path, waiting=lambda: waited.add(number)):
            assert inside.acquire(blocking=False)  # or pytest reports that a thread failed
            entered += 1
            inside.release()

    with held(path, waiting=lambda: None):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        while len(waited) < len(threads):
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert entered == 8
    assert not path.exists()
    with contextlib.suppress(KeyError), held(path, waiting=lambda: None):
        raise KeyError
    assert not path.exists()


def test_a_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path):
    pytest.importorskip("fcntl")
    path, first, third, seen = tmp_path / "lock", contextlib.ExitStack(), contextlib.ExitStack(), []
    first.enter_context(held(path, waiting=lambda: None))

    def waiting():
        seen.append("waiting")
        if len(seen) == 1:  # the first leaves and another comes in before the second gets its turn
            first.close()
            third.enter_context(held(path, waiting=lambda: None))
        else:
            third.close()

    with held(path, waiting=waiting):
        seen.append("inside")
    assert seen == ["waiting", "waiting", "inside"]


@pytest.mark.parametrize("failure", [None, OSError("no locks here")])
def test_without_locks_everyone_is_let_in(tmp_path, monkeypatch, failure):
    if failure:

        def flock(*_):
            raise failure

        monkeypatch.setattr(files.fcntl, "flock", flock)
    else:
        monkeypatch.setattr(files, "fcntl", None)
    with held(tmp_path / "lock", waiting=lambda: None), held(tmp_path / "lock", waiting=lambda: None):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a shell script")
@pytest.mark.parametrize(
    ("script", "result"),
    [
        ('echo "http://$2/$3"', "http://some@1.0/dist.tarball"),
        ("echo 'npm warn something' >&2; echo http://x/y", "http://x/y"),
        ("echo 'E404 is not in the registry' >&2; exit 1", "E404 is not in the registry"),
        ("", "the registry has no such package"),
        ("exec sleep 60", "no answer within"),
        (None, "the command npm, which is not installed"),
    ],
)
def test_the_address_of_an_npm_package(tmp_path, monkeypatch, script, result):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.1 if script and "sleep" in script else 10)
    if script is not None:
        (tmp_path / "npm").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "npm").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin" if script is not None else str(tmp_path)
    monkeypatch.setenv("PATH", path)
    if result.startswith("http"):
        assert npm_tarball("some@1.0") == result
    else:
        with pytest.raises(DownloadError, match=result) as error:
            npm_tarball("some@1.0")
        assert "some@1.0" in str(error.value)


def test_no_registry_is_named_in_the_package():
    for path in Path(fetch.__file__).parent.glob("*.py"):
        assert "registry." not in path.read_text()
