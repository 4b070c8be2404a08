"""A PostgreSQL server of our own: in a temporary folder, on a free port, with a password."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

PASSWORD = "s3cret"


def _programs():
    """The folder with the server's programs, or None."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


def _user():
    """Whom to run it as, since it refuses to run as root."""
    if os.getuid():
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


class Server(str):
    """The address of a server, which can be restarted and stopped."""

    def restart(self):
        self.run("pg_ctl", "-m", "immediate", "-w", "-t", "60", "-l", self.log, "-o", self.settings, "restart")

    def send(self, number):
        """Sends a signal to all of the server's processes, SIGSTOP for instance."""
        (postmaster, *_) = Path(self.data, "postmaster.pid").read_text().splitlines()
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)


@contextlib.contextmanager
def running():
    """The address of an empty server, without a database: postgresql://user:password@host:port."""
    programs, user = _programs(), _user()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed")
    folder = tempfile.mkdtemp(prefix="backdrop-postgres-")
    try:
        if user:
            os.chown(folder, user["user"], user["group"])
        secret = Path(folder, "secret")
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        data = f"{folder}/data"

        def run(program, *args):
            subprocess.run(
                [programs / program, "-D", data, *args], check=True, stdout=subprocess.DEVNULL, cwd=folder, **user
            )

        run("initdb", "-U", "tester", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync", "-E", "UTF8")
        settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        run("pg_ctl", "-w", "-t", "60", "-l", f"{folder}/server.log", "-o", settings, "start")
        try:
            address = Server(f"postgresql://tester:{PASSWORD}@127.0.0.1:{port}")
            address.data, address.log, address.settings, address.run = data, f"{folder}/server.log", settings, run
            yield address
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server():
    with running() as address:
        yield address


@pytest.fixture
def database(server, request):
    """The address of an empty database."""
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    name = f"db{abs(hash(request.node.nodeid))}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return f"{server}/{name}"
