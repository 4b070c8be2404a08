"""Commands as real processes, which can be killed. They are forked from a server that has imported torch already."""

import multiprocessing
import os
import signal
import sys
import time

DEADLINE = 120


class _Process(multiprocessing.get_context("forkserver").Process):
    """Python before 3.12.4 does not tell its server where to find what it has to import, and says nothing of it."""

    def start(self):
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        try:
            super().start()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


CONTEXT = type(multiprocessing.get_context("forkserver"))()
CONTEXT.Process = _Process
CONTEXT.set_forkserver_preload(["torch.distributed", "backdrop", "warmed"])  # as far as they can be imported


class Command:
    """`backdrop ARGS` in a process.

    Args:
        args: of the command.
        output: a file for what it writes.
        env: environment variables.
        limit: the most bytes that a file of it can have, as on a full disk.
    """

    def __init__(self, *args, output, env=None, limit=None):
        self.output = output
        environment = {name: str(value) for name, value in (env or {}).items()}
        order = (list(map(str, args)), str(output), environment, limit)
        self.process = CONTEXT.Process(target=_command, args=order, daemon=True)  # ends with the tests
        self.process.start()

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join(DEADLINE)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self):
        """The exit code, and what was written."""
        self.process.join(DEADLINE)
        assert self.process.exitcode is not None, "the command has not ended"
        return self.process.exitcode, self.output.read_text()


def _command(args, output, env, limit):
    os.environ.update(env, COLUMNS="200", TERM="dumb")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if limit is not None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it from the start; the server may not
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    from backdrop.cli import app

    sys.argv = ["backdrop", *args]
    app(args)


def wait_until(condition):
    """Until something is true, with a generous deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.01)
