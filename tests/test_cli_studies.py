"""`backdrop run`, `worker`, `status`, `tune` and `report`: what they do and say, and how they fail."""

import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("optuna", reason="Optuna is not installed")

from backdrop import cli
from backdrop.experiments import cost, live, runs
from backdrop.experiments.records import Record
from backdrop.experiments.study import plan as plan_module
from backdrop.experiments.study.plan import plan
from backdrop.experiments.train import Options
from tiny_task import FILE, noted


@pytest.fixture(autouse=True)
def _wide(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "noted.txt"))
    monkeypatch.setattr(plan_module, "MOST_WORKERS", 1)  # in this process, which is quicker
    monkeypatch.chdir(tmp_path)


def run(*args, code=0):
    """What a command writes."""
    result = CliRunner().invoke(cli.app, list(map(str, args)))
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit | None)  # not what went wrong inside
    assert "Traceback" not in result.output
    return result.output


def status(*args):
    return json.loads(run("status", *args, "--json"))


def test_run_ends_with_a_table_and_where_to_go_from_there(tmp_path):
    output = run("run", FILE)
    rows = [line.split() for line in output.splitlines() if line.strip().startswith(("0 ", "0.5 "))]
    assert [row[0] for row in rows] == ["0", "0.5"]
    assert rows[1][4] == "+0.693"  # the gain: log 2, since p is half as far from what is planted
    assert "complete: p 0.5, seed 1, score -1.61" in output
    assert "(4 of 4 trials done)" in output
    assert "trials are in runs/tiny-quick; a page about them: runs/tiny-quick/report.html\n" in output
    assert output.startswith("4 trials to run: about ")
    assert "with 1 worker on this machine" in output.splitlines()[0]
    assert sorted(noted(tmp_path / "noted.txt", "begin").values()) == [1] * 4


def test_run_writes_its_page_unless_told_not_to(tmp_path):
    output = run("run", FILE, "--seeds", "1", "--no-report")
    assert "a page about them: backdrop report tiny-quick\n" in output
    assert not (tmp_path / "runs" / "tiny-quick" / "report.html").exists()
    output = run("run", FILE, "--seeds", "1")
    assert "to run" not in output  # nothing is left
    assert "a page about them: runs/tiny-quick/report.html\n" in output
    assert "Report by backdrop" in (tmp_path / "runs" / "tiny-quick" / "report.html").read_text()


def test_a_report_that_cannot_be_written_fails_no_study(tmp_path):
    (tmp_path / "runs" / "tiny-quick" / "report.html").mkdir(parents=True)
    output = run("run", FILE, "--seeds", "1")
    assert "the report could not be written" in output
    assert "a page about them: backdrop report tiny-quick\n" in output


def test_what_cannot_be_measured_runs_all_the_same(tmp_path):
    output = run("run", FILE, "--set", "broken_seed=0", "--no-report", code=1)
    assert "4 trials to run; how long that takes could not be measured: ValueError: this seed is broken" in output
    assert status()[0]["complete"] == 2


def test_how_long_it_takes_is_what_each_trial_costs(monkeypatch):
    """Lengths and batch sizes count, and what is alike is measured once."""
    measured = []

    def measure(task, options):
        measured.append(task.settings.batch_size)
        return cost.Cost(begin=1.0, step=0.5 * task.settings.batch_size, evaluation=2.0, steps=3)

    monkeypatch.setattr(cost, "measure", measure)
    spec, points = plan(FILE, "quick", ["batch_size=2,4", "epochs=3,5", "evaluations=4"], seeds="2")
    # an evaluation after each epoch for 3 of them, 4 for 5; three steps to a pass
    one = {(size, n): 1 + 3 * n * 0.5 * size + 2 * min(n, 4) for size in (2, 4) for n in (3, 5)}
    assert cost.seconds(spec.find_task(FILE), points, Options()) == pytest.approx(
        4 * sum(one.values())
    )  # two p, two seeds
    assert sorted(measured) == [2, 4]


def test_the_same_command_again_has_nothing_to_do_and_more_seeds_extend(tmp_path):
    run("run", FILE)
    run("run", FILE)
    assert sum(noted(tmp_path / "noted.txt", "begin").values()) == 4
    run("run", FILE, "--seeds", "3", "--set", "p=0,0.5,0.75")
    assert noted(tmp_path / "noted.txt", "begin") == {(p, seed): 1 for p in (0.0, 0.5, 0.75) for seed in range(3)}
    (found,) = status()
    assert (found["name"], found["task"], found["preset"], found["complete"]) == ("tiny-quick", "tiny", "quick", 9)


def test_failures_are_told_and_run_again_only_if_asked(tmp_path):
    output = run("run", FILE, "--set", "bad_seed=1", code=1)
    assert "the loss was nan in epoch 1 of 3" in output
    assert "failed trials are run again with --retry-failed" in output
    assert sum(noted(tmp_path / "noted.txt", "begin").values()) == 4
    run("run", FILE, "--set", "bad_seed=1", code=1)
    assert sum(noted(tmp_path / "noted.txt", "begin").values()) == 4
    run("run", FILE, "--set", "bad_seed=1", "--retry-failed", code=1)
    assert noted(tmp_path / "noted.txt", "begin") == {(p, seed): 1 + seed for p in (0.0, 0.5) for seed in (0, 1)}
    (found,) = status("tiny-quick")
    assert (found["complete"], found["failed"]) == (2, 2)
    assert [trial["state"] for trial in found["trials"]] == ["complete", "complete", "failed", "failed"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "gq"], "task has to be one of gp, ponce, cifar10, auc, latent"),
        (["run", "nowhere.py:Task"], "there is no file"),
        (["run", FILE, "--preset", "papr"], "did you mean 'paper'?"),
        (["run", FILE, "--set", "widht=3"], "there is no setting 'widht'; did you mean 'width'?"),
        (["run", FILE, "--set", "lr=fast"], "setting lr has to be a number, but got 'fast'"),
        (["run", FILE, "--precision", "32"], "setting precision has to be one of"),
        (["run", FILE, "--skip", "sampeld"], "did you mean 'sampled'?"),
        (["run", FILE, "--set", "skip=off", "--skip", "off"], "setting skip is given twice"),
        (["run", FILE, "--log", "paper"], "log has to be json or tensorboard, but got 'paper'"),
        (["run", FILE, "--name", "a/b"], "the name of a study has to consist of"),
        (["run", FILE, "--storage", "sqlite:///x.db"], "storage cannot be SQLite"),
        (["run", FILE, "--set", "epochs=5"], "epochs is 3 there and 5 here"),
        (["run", FILE, "--preset", "paper", "--name", "tiny-quick"], "epochs is 3 there and 4 here"),
        (["tune", FILE, "--name", "tiny-quick"], "is of another kind"),
        (["tune", FILE, "--set", "p=0.5"], "tune looks for the best p"),
        (["worker", "tiny-quikc"], "there is no study 'tiny-quikc' in runs; did you mean 'tiny-quick'?"),
        (["report", "."], "there is no study '.' in runs"),
        (["worker", "tiny-quikc", "--storage", "runs/tiny-quick"], "did you mean 'tiny-quick'?"),
        (["status", "tiny-quikc"], "there is no study 'tiny-quikc' in runs; did you mean 'tiny-quick'?"),
        (["report", "tiny-quikc"], "there is no study 'tiny-quikc' in runs; did you mean 'tiny-quick'?"),
        (["report", "tiny-quick", "--format", "pdf"], "format has to be one of"),
    ],
)
def test_errors_are_one_message(tmp_path, args, message):
    run("run", FILE, "--seeds", "1", "--set", "p=0")
    begun = noted(tmp_path / "noted.txt", "begin")
    output = run(*args, code=1)
    assert message in output
    assert len(output.strip().splitlines()) == 1
    assert noted(tmp_path / "noted.txt", "begin") == begun


def test_a_worker_joins_by_name_and_leaves_if_asked(tmp_path):
    run("run", FILE, "--seeds", "1")
    assert run("worker", "tiny-quick") == "tiny-quick: 2 complete\n"
    assert run("worker", "tiny-quick", "--storage", "runs/tiny-quick/journal.log", "--no-wait", "--folder", "other")
    assert run("worker", "tiny-quick", "--task", "gp", code=1) == "this study is of the task tiny, but got gp\n"


def test_settings_of_their_own(tmp_path):
    run(
        "run", FILE, "--seeds", "0,7", "--set", "p=0.25", "--precision", "64-true", "--name", "mine", "--folder", "else"
    )
    (found,) = status("mine", "--folder", "else")
    assert [trial["settings"]["seed"] for trial in found["trials"]] == [0, 7]
    assert {trial["settings"]["precision"] for trial in found["trials"]} == {"64-true"}
    assert {trial["settings"]["p"] for trial in found["trials"]} == {0.25}
    assert status() == []
    assert "there are no studies in runs" in run("status")


def test_the_default_of_skip(monkeypatch):
    spec, _ = plan(FILE, "paper")
    sampled, off = [plan(FILE, "paper", [f"skip={skip}"])[0] for skip in ("sampled", "off")]
    options, cpu = Options(), Options(accelerator="cpu")
    for cuda in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda cuda=cuda: cuda)
        assert runs._skip([], None, spec, options) == (["skip=sampled"] if cuda else [])
        assert runs._skip([], None, spec, cpu) == []
        assert runs._skip([], None, plan(FILE, "quick")[0], options) == []
        assert runs._skip(["skip=off"], None, off, options) == []
        assert runs._skip([], sampled, spec, options) == ["skip=sampled"]  # as the study that is there
        assert runs._skip([], off, spec, options) == ["skip=off"]


def test_status_shows_studies_and_trials():
    run("run", FILE, "--seeds", "1", "--set", "bad_seed=0", code=1)
    run("run", FILE, "--seeds", "1", "--name", "other")
    output = run("status")
    assert "tiny-quick" in output
    assert "2 of 2 trials done, 2 failed" in output
    assert "other" in output
    output = run("status", "tiny-quick")
    assert "no masks, seed 0" in output
    assert "the loss was nan" in output


def test_progress_shows_running_trials():
    spec, points = plan(FILE, "quick")
    row = {"epoch": 2, "epochs": 3, "loss": 0.5, "score": 0.25, "left": 75.0}
    records = [
        Record("a", "complete", points[0]),
        Record("b", "running", points[1], progress=row),
        Record("c", "running", points[2]),
        Record("d", "waiting", points[3]),
    ]

    class Shown:
        name = "shown"

    Shown.spec = spec
    console = live.Console(width=200)
    with console.capture() as captured:
        console.print(live.progress(Shown, records))
    head, *lines = captured.get().splitlines()
    assert "1 of 4 trials done, 2 running, 1 waiting" in head
    for text in ("p 0.5, seed 0", "epoch 2/3", "loss 0.5", "score 0.25", "1 min left"):
        assert text in lines[0]
    assert "no masks, seed 1" in lines[1]
    assert "begins" in lines[1]
    with console.capture() as captured:
        console.print(live.progress(Shown, [Record(str(i), "running", points[0]) for i in range(20)]))
    assert "and 8 more" in captured.get()


def test_report_in_all_formats(tmp_path):
    run("run", FILE)
    assert run("report", "tiny-quick") == "runs/tiny-quick/report.html\n"
    page = (tmp_path / "runs/tiny-quick/report.html").read_text()
    assert "backdrop run" in page
    assert run("report", "runs/tiny-quick", "--format", "md", "--out", "text.md").splitlines()[-1] == "text.md"
    assert len(run("report", "tiny-quick", "--format", "csv", "--out", "tables").splitlines()) == 2
    assert run("report", "tiny-quick", "--storage", "runs/tiny-quick", "--format", "png", "--out", "pictures")
    assert list((tmp_path / "pictures").glob("*.png"))


def test_a_study_in_one_file_gives_the_same_report(tmp_path):
    run("run", FILE)
    assert run("report", "tiny-quick", "--format", "json", "--out", "kept/tiny.json") == "kept/tiny.json\n"
    for kind in ("md", "csv"):
        run("report", "tiny-quick", "--format", kind, "--out", f"first/report.{kind}")
        assert run("report", "kept/tiny.json", "--format", kind, "--out", f"again/report.{kind}")
    first, again = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("first", "again"))
    texts = [name for name in first if not name.endswith(".png")]
    assert len(texts) == 3
    assert first.keys() == again.keys()
    assert {name: first[name] for name in texts} == {name: again[name] for name in texts}
    assert run("report", "kept/tiny.json") == "kept/report.html\n"
    (tmp_path / "other.json").write_text('{"format": "other"}')
    assert "has to be of the format 'backdrop study 1'" in run("report", "other.json", code=1)
    (tmp_path / "other.json").write_text("[")
    assert "has to be a study as `backdrop report --format json` writes it" in run("report", "other.json", code=1)


def test_tune_ends_with_the_command_that_runs_the_best(tmp_path):
    output = run("tune", FILE, "--trials", "4")
    assert "4 of 4 trials done" in output
    command = output.splitlines()[-1].partition("on the test set: ")[2]
    words = shlex.split(command)
    assert words[:2] == ["backdrop", "run"]
    (tuned,) = status("tiny-quick-tune")
    best = max(tuned["trials"], key=lambda trial: trial["metrics"]["score"])["settings"]
    run(*words[1:])
    (found,) = status("tiny-quick-tune-best")
    settings = [trial["settings"] for trial in found["trials"]]
    assert len(settings) == 10
    assert sorted({s["seed"] for s in settings}) == list(range(5))
    assert {s["judge"] for s in settings} == {"test"}
    assert sorted({s["p"] for s in settings}) == pytest.approx([0.0, best["p"]], abs=1e-6)
    assert [s["lr"] for s in settings] == pytest.approx([best["lr"]] * 10, rel=1e-5)
    run("tune", FILE, "--trials", "6")
    assert status("tiny-quick-tune")[0]["trials"][:4] == tuned["trials"]


def test_as_many_workers_as_suit_the_machine(monkeypatch):
    monkeypatch.setattr(plan_module, "MOST_WORKERS", 8)
    monkeypatch.setattr(plan_module, "_cores", lambda: 4)
    assert plan_module.workers_for("cpu", 1, trials=100) == 4
    assert plan_module.workers_for("cpu", 1, trials=3) == 3
    assert plan_module.workers_for("cpu", 1, trials=0) == 1
    assert plan_module.workers_for("cpu", 2, trials=100) == 1  # they share one trial
    monkeypatch.setattr(plan_module, "_cores", lambda: 64)
    assert plan_module.workers_for("cpu", 1, trials=100) == 8
    assert [plan_module.threads_for(workers) for workers in (1, 8, 100)] == [64, 8, 1]


def test_what_is_missing_without_optuna_is_said(tmp_path):
    code = "import sys; sys.modules['optuna'] = None; from backdrop import cli; cli.main()"
    result = subprocess.run([sys.executable, "-c", code, "run", FILE], text=True, capture_output=True)
    assert result.returncode == 1
    assert "optuna" in result.stderr
    assert "it comes with: pip install '.[experiments]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["run", "worker", "status", "tune", "report"])
def test_help_names_the_options(name):
    output = run(name, "--help")
    for option in ("--storage", "--folder"):
        assert option in output
    extra = {"run": "--retry-failed", "worker": "--no-wait", "status": "--watch", "tune": "--trials", "report": "--out"}
    assert extra[name] in output


def test_the_command_knows_them_and_help_is_quick():
    code = """
import atexit, sys
atexit.register(lambda: print(sorted({"optuna", "lightning"} & set(sys.modules))))
sys.argv = ["backdrop", "--help"]
from backdrop.cli import main
main()
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("run", "worker", "status", "tune", "report", "textures", "data"):
        assert f" {name} " in output
    assert output.strip().endswith("[]")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "gp", "--set", "size=0"], "setting size has to be at least 2, but got 0"),
        (["run", "gp", "--set", "channels=-1"], "setting channels has to be at least 1, but got -1"),
        (["run", "gp", "--set", "per_class=0"], "setting per_class has to be at least 1, but got 0"),
        (["run", "gp", "--set", "small=nan/1"], "setting small has to be finite, but got nan/1"),
        (["run", "gp", "--seeds", "99999999999"], "seeds have to be at most 100,000, but got 99999999999"),
        (["tune", "gp", "--trials", "99999999999"], "a study has to have at most 100,000 trials"),
        (["tune", "gp", "--set", "lr=inf"], "setting lr has to be finite, but got inf"),
        (["run", "auc", "--set", "temperature=0"], "setting temperature has to be at least 1e-30, but got 0.0"),
        (["run", "latent", "--set", "distance=-1"], "setting distance has to be at least 0"),
        (["run", "ponce", "--set", "shrink=21"], "setting shrink has to be at most 20, but got 21"),
        (["run", "gp", "--accelerator", "abacus"], "accelerator and strategy have to be some of this machine"),
        (["run", "gp", "--strategy", "x"], "accelerator and strategy have to be some of this machine"),
    ],
)
def test_nonsense_is_refused_before_the_first_trial(tmp_path, args, message):
    output = run(*args, code=1)
    assert message in " ".join(output.split())
    assert not (tmp_path / "runs").exists()


def test_a_damaged_journal_is_named_with_its_line_and_what_to_do(tmp_path):
    run("run", FILE, "--seeds", "1", "--name", "other")
    run("run", FILE, "--seeds", "1")
    before = status("tiny-quick")
    path = tmp_path / "runs/tiny-quick/journal.log"
    rows = path.read_text().splitlines(keepends=True)
    for bad in ("\n", "{\n", '{"op_code": 8}\n'):
        path.write_text("".join([*rows[:7], bad, *rows[7:]]))
        for args in (["status", "tiny-quick"], ["run", FILE], ["worker", "tiny-quick"], ["report", "tiny-quick"]):
            output = run(*args, code=1)
            assert output.startswith(f"{path}, line 8, is ")
            assert f"backdrop repair {path} rebuilds the journal" in output
            assert len(output.splitlines()) == 1
        output = run("status", code=1)  # the other study is shown all the same
        assert "other" in output
        assert f"{path}, line 8" in output
        output = run("repair", "tiny-quick")
        assert output.startswith("1 line of runs/tiny-quick/journal.log could not be read: 8; the old file is kept as ")
        assert "the old file is kept as runs/tiny-quick/journal.log.damaged-" in output
        assert "tiny-quick: 2 complete; the command that began the study runs what is missing" in output
        assert status("tiny-quick") == before
    assert "there is nothing to repair" in run("repair", str(path))
    assert "there is no study 'tiny-quikc' in runs; did you mean 'tiny-quick'?" in run("repair", "tiny-quikc", code=1)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00" * 50, '{"key": 3}'])
def test_a_broken_result_fails_no_trial(tmp_path, content):
    run("run", FILE, "--seeds", "1", "--set", "p=0.5")
    (before,) = status("tiny-quick")[0]["trials"]
    home = tmp_path / "runs/tiny-quick"
    (home / "journal.log").unlink()
    (home / before["key"] / "result.json").write_text(content)
    run("run", FILE, "--seeds", "1", "--set", "p=0.5")
    (after,) = status("tiny-quick")[0]["trials"]
    assert (after["state"], after["metrics"]) == ("complete", before["metrics"])
    events = [json.loads(line) for line in (home / "log.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "damaged file"]
    assert f"{before['key']}/result.json" in told["reason"]
