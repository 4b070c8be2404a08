"""Studies under attack: processes that are killed or stopped, anywhere, a thousand times.

    python tests/chaos.py --kills 1000          # or: make chaos
    python tests/chaos.py --kills 40 --seed 7

Studies are begun, worked on by one to three commands at once, of which some are killed or stopped, until enough were;
then one command more finishes them. After each study it is asserted that
- no trial is lost, and none is complete twice,
- metrics and curves are those of a run that nothing happened to, bit for bit,
- every command that was not killed ended as it should,
- no file is left that a quiet run does not leave, and the journal can be read by Optuna alone.

Processes are killed at a random moment, or by themselves, at the n-th time that they come to a point: before and
after each fsync, rename, removal, change of a trial's state, claim and new trial, each commit of a database, and in the
middle of a write to the journal. Some are stopped there instead (SIGSTOP), past the time after which others take over,
and then go on or are killed. Some pretend to be on another machine. Some begin with others at the same moment, some
have workers of their own and are killed alone.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from spawned import CONTEXT
from tiny_task import FILE

GRACE, BEAT = 1.0, 0.1  # seconds, of the processes here
PATIENCE = 900.0  # until a process counts as hanging
EPOCHS = 3
# Seconds of CPU time until a process is killed that does not come to its point.
LONGEST = {"journal": 0.2, "postgresql": 0.8}
AT_ONCE = {"journal": [1, 1, 2, 3, 4], "postgresql": [1, 4, 6, 8]}  # processes; those of a database mostly wait
POINTS = {"fsync": 8, "rename": 4, "unlink": 2, "claim": 4, "state": 3, "enqueue": 3}  # at the n-th time at most
OF_STORAGE = {"journal": {"torn": 8}, "postgresql": {"commit": 12}}


@dataclass(frozen=True)
class Doom:
    """What will happen to a process.

    Args:
        number: the signal.
        point: where, at which it will send itself the signal; None for a moment that comes from outside.
        nth: the time that it comes there.
        after: the point's action, else before it.
        delay: seconds of CPU time until it is killed from outside, if it has not come to its point, or earlier if it
            only waits.
    """

    number: int
    point: str | None = None
    nth: int = 1
    after: bool = False
    delay: float = 0.0


@dataclass
class Tally:
    """What was done."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    studies: int = 0
    trials: int = 0

    @property
    def kills(self):
        return sum(number for name, number in self.counts.items() if name.startswith("kill"))

    def as_dict(self):
        return {
            "kills": self.kills,
            "studies": self.studies,
            "trials": self.trials,
            **dict(sorted(self.counts.items())),
        }


# --- the processes


class Victim:
    """A command in a process of its own, which may be doomed."""

    def __init__(self, args, output, doom=None, machine=None):
        self.args, self.output, self.doom, self.machine, self.met = args, output, doom, machine, False
        order = (list(map(str, args)), str(output), doom, machine)
        self.process = CONTEXT.Process(target=_command, args=order)
        self.process.start()
        self.begun = self.moved = time.monotonic()
        self.seconds = 0.0

    def state(self):
        """That of the process: running, stopped or over."""
        if self.process.exitcode is not None:
            return "over"
        try:
            letter = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its file is read
            return "over"
        return "stopped" if letter in "Tt" else "running"

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def is_due(self):
        """Whether it had its time."""
        seconds, idle = 0.0, time.monotonic() - self.moved
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            seconds = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        if seconds > self.seconds:
            self.seconds, self.moved, idle = seconds, time.monotonic(), 0.0
        return seconds > self.doom.delay or idle > 3.0

    def meet(self):
        """Waits until its doom has come, or the process is over without."""
        self.at = self.doom.point or "any moment"
        while (state := self.state()) == "running" and not self.is_due():
            self.process.join(0.02)
        if state == "running":
            self.at = "any moment"
            self.send(self.doom.number)
        end = time.monotonic() + PATIENCE
        while (state := self.state()) == "running":
            assert time.monotonic() < end, f"{self} hangs"
            self.process.join(0.02)
        if state == "over":
            self.process.join(PATIENCE)
        doom = self.doom
        self.met = state == "stopped" or self.process.exitcode == -doom.number
        if not self.met:
            self.check()
        return self.met

    def wait(self):
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"{self} hangs"
        self.check()

    def check(self):
        text = self.output.read_text() if self.output.exists() else ""
        assert self.process.exitcode == 0, f"{self} ended with {self.process.exitcode}:\n{text}"
        assert "Traceback" not in text, f"{self} wrote:\n{text}"

    def end(self):
        if self.process.exitcode is None:
            self.send(signal.SIGKILL)
            self.process.join(PATIENCE)

    def __str__(self):
        return f"{' '.join(map(str, self.args))} (process {self.process.pid}, machine {self.machine}, {self.doom})"


def _command(args, output, doom, machine):
    os.environ.update(COLUMNS="200", TERM="dumb")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from backdrop.cli import app
    from backdrop.experiments.study import alive, worker

    alive.GRACE, alive.HEARTBEAT, worker.POLL = GRACE, BEAT, 0.05
    with contextlib.suppress(ImportError):
        from backdrop.experiments.study import database

        database.STALLED = 3 * GRACE
    if machine is not None:
        alive._machine = lambda: machine
    if doom is not None and doom.point is not None:
        _arm(doom)
    sys.argv = ["backdrop", *args]
    app(args)


def _arm(doom):
    """Has this process send itself a signal when it comes to a point."""
    from optuna.storages import JournalStorage
    from optuna.storages._rdb.storage import RDBStorage

    from backdrop.experiments.study import journal, study

    came, here = [0], os.getpid()

    def strikes(after):
        if os.getpid() != here or after != doom.after:
            return False
        came[0] += 1
        return came[0] == doom.nth

    def strike(after):
        if strikes(after):
            os.kill(here, doom.number)

    def around(owner, name, when=lambda *args, **kwargs: True):
        action = getattr(owner, name)

        def watched(*args, **kwargs):
            counts = when(*args, **kwargs)
            if counts:
                strike(False)
            result = action(*args, **kwargs)
            if counts:
                strike(True)
            return result

        setattr(owner, name, watched)

    if doom.point == "fsync":
        around(os, "fsync")
    elif doom.point == "rename":
        around(os, "replace")
    elif doom.point == "unlink":
        around(os, "unlink")
    elif doom.point == "enqueue":
        around(study.Study, "enqueue")
    elif doom.point == "claim":
        around(study.Study, "store", lambda self, number, **values: any(_is_claim(name) for name in values))
    elif doom.point == "state":
        for owner in (JournalStorage, RDBStorage):
            around(owner, "set_trial_state_values")
        with contextlib.suppress(ImportError):
            from backdrop.experiments.study.database import _Database

            around(_Database, "set_trial_state_values")
    elif doom.point == "commit":
        import psycopg

        around(psycopg.Connection, "commit")
    else:
        append = journal._write

        def torn(file, data):
            if strikes(doom.after):
                file.seek(0, os.SEEK_END)
                file.write(data[: len(data) // 2])
                os.kill(here, doom.number)
                file.write(data[len(data) // 2 :])  # it was stopped, and goes on
                os.fsync(file.fileno())
                return
            append(file, data)

        journal._write = torn


def _is_claim(name):
    from backdrop.experiments.study.study import CLAIM

    return name == "worker" or name.startswith(CLAIM)


# --- the studies


class Siege:
    """One study under attack.

    Args:
        path: an empty folder.
        kind: "journal" or "postgresql".
        database: the address of an empty database, or None.
        seed: of what happens.
        tally: of what was done.
        size: how many seeds the study has; it has twice as many trials.
    """

    def __init__(self, path, kind, database, seed, tally, size=4):
        self.path, self.kind, self.database, self.tally, self.size = path, kind, database, tally, size
        self.random = random.Random(f"{kind} {seed}")
        self.seed, self.count, self.victims, self.begun, self.seeds = seed, 0, [], False, size
        self.points = POINTS | OF_STORAGE[kind]

    def home(self, machine):
        """Where a machine has its folder: its own with a database, a shared one with a journal."""
        return self.path / (machine if machine and self.database else "runs")

    def start(self, *, doom=None, machine=None, joins=False, workers=1):
        args = ["worker", "tiny-quick"] if joins else ["run", FILE, "--no-report", "--seeds", self.seeds]
        args += ["--folder", self.home(machine), "--workers", workers]
        args += ["--storage", self.database] if self.database else []
        self.count += 1
        self.victims.append(Victim(args, self.path / f"output-{self.count}.txt", doom, machine))
        return self.victims[-1]

    def doom(self, number=signal.SIGKILL):
        """A moment or a point, at random."""
        pick = self.random
        if pick.random() < 0.2:
            return Doom(number, delay=pick.uniform(0.0, LONGEST[self.kind]))
        point = pick.choice(sorted(self.points))
        return Doom(number, point, pick.randint(1, self.points[point]), pick.random() < 0.5, LONGEST[self.kind])

    def machine(self):
        return self.random.choice([None, None, "machine-2"])

    def assail(self, kills, parents=True):
        """Begins the study, has so many processes killed, and sees that it gets finished all the same."""
        begun, self.seeds = self.tally.kills, max(1, self.size - 2)
        while self.tally.kills - begun < kills:
            before = self.tally.kills
            if parents and self.random.random() < 0.04:
                self.behead()
            else:
                self.kill(self.random.choice(AT_ONCE[self.kind]), survivors=self.random.random() < 0.02)
            if self.tally.kills == before and self.is_done():
                break
        self.seeds = self.size  # it is extended
        if self.random.random() < 0.8:
            self.stop()
        for machine in (None, "machine-2"):
            if machine is None or self.home(machine).exists():
                self.start(machine=machine).wait()
        self.tally.studies += 1

    def is_done(self):
        try:
            return all(record.state == "complete" for record in self.study()[0])
        except (FileNotFoundError, ValueError):  # not even begun
            return False

    def kill(self, many, survivors):
        """Commands that are killed, at once or one after the other, beside some that are not."""
        self.begun = self.begun or (self.count > 0 and self.has_begun())
        doomed = [
            self.start(doom=self.doom(), machine=self.machine(), joins=self.begun and self.random.random() < 0.3)
            for _ in range(many)
        ]
        rest = [self.start(machine=self.machine()) for _ in range(survivors)]
        for victim in doomed:
            if victim.meet():
                self.tally.counts[f"kill at {victim.at}"] += 1
                self.tally.counts[f"{self.kind}: {'any moment' if victim.at == 'any moment' else 'chosen point'}"] += 1
                self.tally.counts["on another machine"] += victim.machine is not None
        self.tally.counts["several at once"] += many + survivors > 1
        for victim in rest:
            victim.wait()

    def stop(self, doom=None, go_on=None):
        """A command that is stopped, and another that has to finish the study meanwhile; whether it got so far."""
        victim = self.start(doom=doom or self.doom(signal.SIGSTOP), machine=None if doom else self.machine())
        if not victim.meet():
            return False
        self.tally.counts["stop"] += 1
        self.start().wait()
        assert self.is_done(), "a process that was stopped held up the others"
        if self.random.random() < 0.5 if go_on is None else go_on:
            self.tally.counts["stop and go on"] += 1
            victim.send(signal.SIGCONT)
            victim.wait()
        else:
            self.tally.counts["kill of a stopped one"] += 1
            victim.end()
        return True

    def behead(self):
        """A command with workers of its own, killed without them; they have to end by themselves."""
        victim = self.start(doom=Doom(signal.SIGKILL, delay=self.random.uniform(0.5, 8.0)), workers=2)
        time.sleep(0.3)
        children = set()
        while victim.process.exitcode is None and time.monotonic() < victim.begun + victim.doom.delay:
            children |= _children(victim.process.pid)
            victim.process.join(0.05)
        if victim.meet():
            self.tally.counts["kill of a parent"] += 1
        end = time.monotonic() + PATIENCE
        while any(_is_there(pid) for pid in children):
            assert time.monotonic() < end, "workers outlive the command that started them"
            time.sleep(0.05)

    # --- what is asserted

    def study(self):
        """Records, and all trials as Optuna has them."""
        from backdrop.experiments.study.storage import open_storage
        from backdrop.experiments.study.study import Study

        with open_storage(self.database or self.path / "runs" / "tiny-quick") as storage:
            found = Study(storage, "tiny-quick")
            return found.records(), found.optuna.trials

    def has_begun(self):
        try:
            return bool(self.study()[0])
        except (FileNotFoundError, ValueError):
            return False

    def check(self, undisturbed):
        records, trials = self.study()
        assert len(records) == 2 * self.size, f"{2 * self.size - len(records)} trials were lost"
        found = outcomes(records)
        assert found == {key: undisturbed[key] for key in found}, "results are not those of a quiet run"
        assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
        complete = collections.Counter(trial.user_attrs["key"] for trial in trials if trial.state.name == "COMPLETE")
        assert complete == dict.fromkeys((record.key for record in records), 1), "a trial is complete twice"
        self.check_files({record.key for record in records})
        self.tally.trials += len(records)
        self.tally.counts["attempts given back"] += len(trials) - len(records)

    def check_files(self, keys):
        for home in {self.home(None), self.home("machine-2")}:
            folder = home / "tiny-quick"
            if not folder.exists():
                continue
            there = {path.name for path in folder.iterdir()} - keys
            usual = {"log.jsonl"} | (set() if self.database else {"journal.log"})
            assert there <= usual, f"left over in {folder}: {there - usual}"
            for key in keys:
                files = {path.name for path in (folder / key).iterdir()} if (folder / key).exists() else set()
                assert files <= {"log.jsonl", "result.json"}, f"left over in {folder / key}: {files}"
                if "result.json" in files:
                    lines = (folder / key / "log.jsonl").read_text().splitlines()
                    assert [json.loads(line)["epoch"] for line in lines] == list(range(1, EPOCHS + 1))
        if not self.database:
            from optuna.storages.journal import JournalFileBackend

            journal = self.path / "runs" / "tiny-quick" / "journal.log"
            assert len(list(JournalFileBackend(str(journal)).read_logs(0))) == journal.read_bytes().count(b"\n")

    def close(self):
        for victim in self.victims:
            victim.end()


def outcomes(records):
    """Metrics and curves of complete trials, without times."""
    unfinished = [f"{record.key}: {record.state}, {record.reason}" for record in records if record.state != "complete"]
    assert not unfinished, unfinished
    return {
        record.key: (record.metrics, [{k: v for k, v in row.items() if k != "seconds"} for row in record.curve])
        for record in records
    }


def _children(pid):
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return set()


def _is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def quiet(path, size):
    """What comes of the study if nothing happens to it."""
    siege = Siege(path, "journal", None, 0, Tally(), size)
    siege.start().wait()
    return outcomes(siege.study()[0])


def besiege(path, kind, database, seed, tally, undisturbed, *, kills, size=4, parents=True):
    """One study, from its beginning to what is asserted of it."""
    siege = Siege(path, kind, database, seed, tally, size)
    try:
        siege.assail(kills, parents)
        siege.check(undisturbed)
    except BaseException:
        print(f"study {seed} ({kind}) in {path}", file=sys.stderr)
        raise
    finally:
        siege.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first study; each one more")
    parser.add_argument("--per-study", type=int, default=40, help="kills")
    parser.add_argument("--size", type=int, default=12, help="seeds of a study, each of which is two trials")
    parser.add_argument("--storage", choices=["journal", "postgresql", "both"], default="both")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no study after so many")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # which ends what was begun
    tally, begin, size = Tally(), time.monotonic(), options.size
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="backdrop-chaos-"))
        server = None
        if options.storage != "journal":
            import psycopg

            from postgres import running

            server = stack.enter_context(running())
        (root / "quiet").mkdir()
        undisturbed = quiet(root / "quiet", size)
        seed = options.seed
        while tally.kills < options.kills and time.monotonic() - begin < options.minutes * 60:
            kind = ("journal", "postgresql")[seed % 2] if options.storage == "both" else options.storage
            database = None
            if kind == "postgresql":
                with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
                    connection.execute(f"create database chaos{seed}")
                database = f"{server}/chaos{seed}"
            path = root / f"study-{seed}"
            path.mkdir()
            wanted = min(options.per_study, options.kills - tally.kills)
            besiege(path, kind, database, seed, tally, undisturbed, kills=wanted, size=size)
            tally.counts[f"studies: {kind}"] += 1
            shutil.rmtree(path)
            seed += 1
            print(f"{time.monotonic() - begin:.0f} s: {json.dumps(tally.as_dict())}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(tally.as_dict(), indent=1) + "\n")
        shutil.rmtree(root)
    done = f"{tally.kills} kills, {tally.studies} studies, {tally.trials} trials"
    print(f"{done}: none lost, none complete twice, all equal, nothing left over")


if __name__ == "__main__":
    main()
