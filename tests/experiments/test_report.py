"""Reports: what they say is in the records, whatever these are like, and the page shows it."""

import base64
import csv
import dataclasses
import errno
import html.parser
import io
import json
import math
import os
import re
import statistics as standard
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import made_up
from backdrop._core import files
from backdrop.experiments import live
from backdrop.experiments.records import Record
from backdrop.experiments.report import headline
from backdrop.experiments.report import write as report
from backdrop.experiments.report.figures import pictures
from backdrop.experiments.report.statistics import Results
from backdrop.experiments.report.tables import GP_TABLE
from backdrop.experiments.report.write import write_report
from backdrop.experiments.study.archive import Archive, pack
from backdrop.experiments.study.plan import again, plan
from backdrop.experiments.task import Task
from backdrop.experiments.tasks import AUC, CIFAR10, GP, TASKS
from outside import changed

STUDIES = {**{name: (task, getattr(made_up, name)) for name, task in TASKS.items()}, "search": (GP, made_up.search)}
PICTURES = {
    "gp": ["accuracy", "scales"],
    "ponce": ["metric"],
    "cifar10": ["loss-ratio"],
    "auc": ["metric"],
    "latent": ["dist", "xe-map", "dist-map"],
    "search": ["search-p_small", "search-p_large"],
}
CURVES = ["curve-training", "curve-evaluation"]


class Own(Task):
    """Somebody's task."""

    masks = ("p_a", "p_b")
    metric = "score"
    data = model = loss = evaluate = None


def own(seeds=5, **changes):
    settings = [{"p_a": a, "p_b": b, "depth": n} for n in (2, 3) for a in (0.0, 0.5, 0.9) for b in (0.0, 0.9)]
    noise = np.random.default_rng(0).normal(size=(len(settings), seeds))
    return [
        made_up.record({**s, **changes, "seed": seed}, {"score": s["p_a"] + 0.1 * noise[i, seed]}, metric="score")
        for i, s in enumerate(settings)
        for seed in range(seeds)
    ]


class Page(html.parser.HTMLParser):
    """The tags, texts and tables of a page."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.texts, self.rows = [], [], []
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "small" and self.rows and self.rows[-1]:
            self.rows[-1][-1] += " "

    def handle_data(self, data):
        self.texts.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def make(name, tmp_path, records=None, **options):
    task, records_of = STUDIES[name]
    records = records_of() if records is None else records
    (path,) = write_report(task, f"{name}-study", records, tmp_path / f"{name}.html", format="html", **options)
    return path.read_text(encoding="utf-8")


def quick(task, records, **options):
    """What a page would show, without drawing it."""
    return report._page(Results(task, records), "study", None, (), **options)


@pytest.mark.parametrize("name", STUDIES)
def test_page_has_everything_and_needs_nothing(name, tmp_path):
    page = Page(make(name, tmp_path, command="backdrop run it"))
    images = page.all("img")
    assert len(images) == len(PICTURES[name]) + len(CURVES)
    for image in images:
        assert len(image["alt"]) > 40
        assert re.search(r"\d", image["alt"])
    sources = [image["src"] for image in images] + [source["srcset"] for source in page.all("source")]
    assert len(sources) == 2 * len(images)
    for source in sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        picture = base64.b64decode(data).decode()
        assert picture.startswith("<svg ")
        assert not re.search(r'(href|src)="(?!#|data:)|url\((?!#)|<!DOCTYPE|<script|@import', picture)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    assert {a["href"] for a in page.all("a")} == {"https://arxiv.org/abs/1806.01337"}
    style = "".join(page.texts)
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "backdrop run it" in page.texts
    outside = [key for _, attributes in page.tags for key in attributes if key in ("background", "poster", "action")]
    assert not outside
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]


@pytest.mark.parametrize("name", STUDIES)
def test_which_pictures_there_are(name):
    task, records = STUDIES[name]
    page = quick(task, records())
    assert [picture.name for picture in page.figures] == PICTURES[name]
    assert [picture.name for picture in page.curves] == CURVES


def test_pictures_say_what_is_seen():
    alt = {picture.name: picture.alt for picture in quick(TASKS["latent"], made_up.latent()).figures}
    assert "best masks, test set: 0.3" in alt["dist"]
    assert alt["xe-map"].endswith("at p_x 0.94, p_d 0.97.")
    assert alt["dist-map"].endswith("at p_x 0.97, p_d 0.97.")
    records = made_up.cifar10()
    page = quick(CIFAR10, records)
    assert re.search(
        r"Lowest 0.600 at batch size 16, p 0.75; highest 1.000 at batch size \d+, p 0\.", page.figures[0].alt
    )
    training, evaluation = (picture.alt for picture in page.curves)
    ends = [r.curve[-1]["test loss"] for r in records if r.settings["batch_size"] == 16 and r.settings["p"] == 0]
    assert training.startswith("training loss over epochs, 8 configurations.")
    assert evaluation.startswith("test loss over epochs, 8 configurations.")
    assert f"batch size 16, no masks {standard.fmean(ends):.3f};" in evaluation
    assert f"batch size 16, no masks {standard.fmean([1 / 3 + 0.01 * seed for seed in range(5)]):.3f};" in training


def test_two_configurations_are_compared_seed_by_seed():
    rows = [GP_TABLE[0], GP_TABLE[1]._replace(p_small=0.95, p_large=0.5)]
    records = made_up.gp(seeds=5, rows=rows)
    worse = next(r for r in records if r.settings["p_small"] and r.settings["seed"] == 3)
    worse.metrics["accuracy"] = 1.0
    missing = [r for r in records if r.settings["p_small"] or r.settings["seed"] != 4]
    (picture,) = pictures(Results(GP, missing))
    assert picture.name == "by-seed"
    assert "3 of 4 seeds are better with masks" in picture.alt  # the seed in one arm alone drops out
    lines = picture.figure.axes[0].lines
    assert len(lines) == 5
    means = [
        [r.metrics["accuracy"] for r in missing if r.settings["p_small"] == p and r.settings["seed"] < 4]
        for p in (0, 0.95)
    ]
    assert list(lines[-1].get_ydata()) == pytest.approx([sum(part) / 4 for part in means])
    assert [picture.name for picture in pictures(Results(GP, made_up.gp(seeds=5)))] != ["by-seed"]


def test_own_tasks_have_tables_and_pictures():
    page = quick(Own, own())
    assert [picture.name for picture in page.figures] == ["metric", "score-map"]
    assert page.claims is None
    assert page.paper_table is None
    assert len(page.all.rows) == 12
    assert page.title == "Somebody's task"
    one = quick(Own, [r for r in own() if r.settings["p_b"] == 0 and r.settings["depth"] == 2])
    assert [picture.name for picture in one.figures] == ["metric"]
    none = quick(Own, [r for r in own() if r.settings["p_a"] == r.settings["p_b"] == 0])
    assert [picture.name for picture in none.figures] == ["configurations"]


def test_table_2_beside_the_papers(tmp_path):
    page = Page(make("gp", tmp_path))
    rows = {row[0]: row for row in page.rows if len(row) == 8}
    masks = [f"({row.p_small:g}, {row.p_large:g})" for row in GP_TABLE if not row.crop]
    crops = [f"{size} \N{MULTIPLICATION SIGN} {size} crop" for size in (512, 256)]
    assert list(rows) == ["(p_small, p_large)", *masks, *crops]
    records = [r for r in made_up.gp() if r.settings["p_small"] == 0.99 and r.settings["p_large"] == 0.94]
    plain = [r for r in made_up.gp() if not (r.settings["p_small"] or r.settings["p_large"] or r.settings["crop"])]
    values, others = ([r.metrics["accuracy"] for r in group] for group in (records, plain))
    cells = rows["(0.99, 0.94)"]
    assert cells[1].startswith(f"{standard.fmean(values):.1f} ± {standard.stdev(values):.1f} [")
    assert [cells[2], cells[5], cells[7]] == ["66.2", "78.7", "84.6"]
    gain = standard.fmean(a - b for a, b in zip(values, others, strict=True))
    assert cells[3].startswith(f"+{gain:.1f} [")
    assert rows["(0, 0)"][3] == "\N{EN DASH}"


def test_table_2_of_a_part_has_that_part():
    rows = (GP_TABLE[0], GP_TABLE[6])
    records = [r if r.settings["p_small"] else dataclasses.replace(r, state="waiting") for r in made_up.gp(rows=rows)]
    table = quick(GP, records).paper_table
    assert [row[0].text for row in table.rows] == ["(0, 0)", "(0.99, 0.94)"]
    assert table.rows[0][1].text == "\N{EN DASH}"  # planned, but not run yet
    assert table.rows[1][1].best
    assert "11 rows" in table.note


def test_best_of_a_column_is_marked_where_less_is_better():
    page = quick(CIFAR10, made_up.cifar10())
    (best,) = (row for row in page.all.rows if any(cell.best for cell in row))
    assert [cell.text for cell in best[:2]] == ["16", "0.75"]


def gains(by_seed, task=GP, metric="accuracy", **settings):
    masks = dict.fromkeys(task.masks, 0.9)
    pairs = [(dict.fromkeys(task.masks, 0.0), 0.0), (masks, 1.0)]
    return [
        made_up.record({**settings, **m, "seed": seed}, {metric: 50.0 + seed + on * gain}, metric=metric)
        for m, on in pairs
        for seed, gain in enumerate(by_seed)
    ]


@pytest.mark.parametrize(
    ("records", "task", "expected"),
    [
        (
            gains([9.0, 11.0, 10.0, 10.0, 12.0, 8.0]),
            GP,
            r"Masks \(p_small 0.9, p_large 0.9\) beat no masks by 10.0 points of accuracy "
            r"\(95% interval [89]\.\d to 1[01]\.\d, 6 seeds\)\.",
        ),
        (gains([-5.0] * 6), GP, r"Masks do not help: the best, .* are 5.0 points of accuracy behind .*6 seeds\)\."),
        (
            gains([1.0, -1.0] * 3),
            GP,
            r"No configuration is significantly better than .* difference of 0.0 .*",
        ),
        (
            gains([5.0, 6.0]),
            GP,
            r"Too few seeds for .* \+5.5 points .* \(95% interval 5.0 to 6.0, 2 seeds\)\.",
        ),
        (gains([5.0]), GP, r"Too few seeds for a verdict: .* \(1 seed\)\."),
        (gains([-0.5] * 5, CIFAR10, "loss"), CIFAR10, r"Masks \(p 0.9\) beat no masks by 0.5 in loss .*5 seeds\)\."),
        (gains([0.5] * 5, CIFAR10, "loss"), CIFAR10, r"Masks do not help: .* are 0.5 in loss behind .*"),
        ([r for r in gains([1.0] * 5) if r.settings["p_small"]], GP, r"Accuracy is 53.0 .* no trial without masks .*"),
        ([r for r in gains([1.0] * 5) if not r.settings["p_small"]], GP, r"Accuracy is 52.0 .* no trial with masks .*"),
        (made_up.ponce(), TASKS["ponce"], r".* at batch size 8 .* Compared were 20 configurations with masks\."),
        (
            made_up.search(),
            GP,
            r"The best of 24 trials has accuracy 63.1, with .*p_small 0.999.*; 8 were .*",
        ),
        ([], GP, r"There are no trials yet\."),
    ],
)
def test_headlines(records, task, expected):
    found = headline.sentence(Results(task, records))
    assert re.fullmatch(expected, found), found


def test_a_sure_gain_goes_before_a_larger_one_that_is_not():
    wild = [r for r in gains([40.0, -30.0, 50.0, -20.0, 30.0]) if r.settings["p_small"]]
    wild = [dataclasses.replace(r, settings={**r.settings, "p_large": 0.5}) for r in wild]
    found = headline.sentence(Results(GP, [*gains([2.0] * 5), *wild]))
    assert found.startswith("Masks (p_small 0.9, p_large 0.9) beat no masks by 2.0 points")
    assert found.endswith("Compared were 2 configurations with masks.")


def test_the_table_of_a_search():
    records = made_up.search()
    table = quick(GP, records).search
    assert [row[0].text for row in table.rows] == [str(i + 1) for i in range(15)]
    found = [float(row[2].text) for row in table.rows]
    assert found == sorted((round(r.metrics["accuracy"], 1) for r in records if r.metrics), reverse=True)[:15]
    assert "first 15 of 24" in table.note
    short = quick(GP, records[:3]).search
    assert [row[1].text for row in short.rows] == ["complete", "complete", "pruned"]
    assert short.rows[2][2].text == f"{records[2].curve[-1]['accuracy']:.1f}"


def test_tiles_show_both_arms_and_the_gain():
    tiles = headline.tiles(Results(GP, gains([2.0, 4.0])))
    assert [(tile.title, tile.number) for tile in tiles] == [
        ("without masks", "50.5"),
        ("with masks", "53.5"),
        ("accuracy higher by", "3.0"),
    ]
    assert tiles[2].detail == "2.0 to 4.0, 2 paired seeds"
    assert headline.tiles(Results(CIFAR10, gains([-2.0, -4.0], CIFAR10, "loss")))[2][:2] == ("loss lower by", "3.0")


STATES = ("waiting", "running", "failed", "pruned")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["gp", "latent"])
def test_studies_without_a_result(name, state, tmp_path):
    task, records = STUDIES[name][0], [dataclasses.replace(r, state=state, metrics={}) for r in STUDIES[name][1](2)]
    content = make(name, tmp_path, [dataclasses.replace(r, curve=()) for r in records])
    assert f"{len(records)} {state}" in content
    assert "No trial has a result yet" in content
    for kind in ("csv", "md"):
        write_report(task, "study", records, tmp_path / "other", format=kind)


def test_an_empty_study(tmp_path):
    assert "There are no trials yet." in make("gp", tmp_path, [])
    with pytest.raises(ValueError, match="nothing to draw of study s yet: no trial has a result"):
        write_report(GP, "s", [], tmp_path / "pictures", format="png")
    assert not (tmp_path / "pictures").exists()
    assert len(write_report(GP, "s", [], tmp_path / "tables", format="csv")) == 2


FATES = ["keep", "lose", "nan", "failed", "running", "waiting"]


@pytest.mark.parametrize("name", STUDIES)
def test_any_part_of_a_study_will_do(name):
    """Records lost, failed, still running, or without a number, at random."""
    task, records_of = STUDIES[name]
    for seed in range(4):
        draw, records = np.random.default_rng(seed), []
        for record in records_of():
            what = draw.choice(FATES, p=[0.2, 0.5, 0.1, 0.1, 0.05, 0.05])
            if what == "nan":
                record = dataclasses.replace(
                    record,
                    metrics=dict.fromkeys(record.metrics, math.nan),
                    curve=[{**row, "loss": math.nan} for row in record.curve],
                )
            elif what != "keep":
                record = dataclasses.replace(record, state=what, metrics={}, reason="a reason")
            if what != "lose":
                records.append(record)
        page = quick(task, records)
        assert sum(page.counts.values()) == len(records)
        assert "nan" not in page.lead
        for picture in page.figures + page.curves:
            assert "nan" not in picture.alt


def test_failures_are_listed_with_their_reasons():
    records = made_up.auc(2)
    records[0] = dataclasses.replace(records[0], state="failed", metrics={}, reason="the loss is nan at step 7")
    records[1] = dataclasses.replace(records[1], metrics={"auc": math.nan})
    records[2] = dataclasses.replace(records[2], metrics={})
    page = quick(AUC, records)
    assert [[cell.text for cell in row[1:]] for row in page.failures.rows] == [
        ["0", "the loss is nan at step 7"],
        ["1", "complete, but auc is nan"],
        ["0", "complete, but auc is missing"],
    ]
    assert page.counts == {"complete": 35, "failed": 1}


def test_what_differs_from_the_papers_settings_is_said():
    records = [dataclasses.replace(r, settings={**r.settings, "size": 256}) for r in made_up.gp(2)]
    assert any("size 256 (there 1024)" in note for note in quick(GP, records).notes)
    half = [records[0], dataclasses.replace(records[1], state="running")]
    assert any("1 of 2 trials have ended" in note for note in quick(GP, half).notes)


NASTY = "<script>alert('x')</script>\"|`*[a](b)$x_1$ {{ 7 * 7 }} & \\ \n"


def test_hostile_texts_stay_texts(tmp_path):
    records = own(2, optimizer=NASTY)
    records += own(2, optimizer="other")
    records[0] = dataclasses.replace(records[0], state="failed", reason=NASTY, machine={NASTY: NASTY})
    records[1] = dataclasses.replace(records[1], metrics={**records[1].metrics, NASTY: 1.0})
    options = {"command": NASTY, "notes": [NASTY]}
    (path,) = write_report(Own, NASTY, records, tmp_path / "page.html", format="html", **options)
    page = Page(path.read_text(encoding="utf-8"))
    assert "script" not in [tag for tag, _ in page.tags]
    plain = " ".join(NASTY.split())
    seen = " ".join(" ".join(page.texts).split())
    assert seen.count(plain) >= 6
    assert "7 * 7" in seen
    files = write_report(Own, NASTY, records, tmp_path / "page.md", format="md", **options)
    text = next(file for file in files if file.suffix == ".md").read_text(encoding="utf-8")
    assert "<script" not in re.sub(r"`[^`]*`|\\<", "", text)
    for rows in tables_in(text):
        assert len({len(row) for row in rows}) == 1
    assert any(plain in cell for rows in tables_in(text) for row in rows for cell in row)
    trials, _ = write_report(Own, NASTY, records, tmp_path / "out", format="csv")
    assert read_csv(trials)[0]["reason"] == NASTY


def test_a_dollar_is_no_formula():
    page = quick(Own, own(2, optimizer="$\\frac$") + own(2, optimizer="other"))
    for picture in page.figures + page.curves:
        assert picture.png().startswith(b"\x89PNG")


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tables_in(text):
    """The tables of a Markdown file, without its signs."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("| "):
            lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
            cells = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in line] for line in lines]
            found.append([cells[0], *cells[2:]])
    return found


def test_markdown_and_csv_say_the_same(tmp_path):
    records = made_up.cifar10()
    *pictures, text = write_report(CIFAR10, "study", records, tmp_path / "some" / "where.md", format="md")
    assert [path.name for path in pictures] == [f"where-{name}.png" for name in [*PICTURES["cifar10"], *CURVES]]
    content = text.read_text(encoding="utf-8")
    assert re.findall(r"!\[.*?\]\((.*?)\)", content) == [path.name for path in pictures]
    (rows,) = (rows for rows in tables_in(content) if rows[0][:2] == ["batch size", "p"])
    files = write_report(CIFAR10, "study", records, tmp_path / "tables.csv", format="csv")
    assert [path.name for path in files] == ["tables-trials.csv", "tables-configurations.csv"]
    trials, configurations = map(read_csv, files)
    assert len(trials) == len(records)
    assert [float(row["metric loss"]) for row in trials] == [r.metrics["loss"] for r in records]
    assert len(configurations) == len(rows) - 1 == 25
    for row, cells in zip(configurations, rows[1:], strict=True):
        name = (row["batch_size"], row["p"])
        same = [r for r in records if (str(r.settings["batch_size"]), str(r.settings["p"])) == name]
        losses = [r.metrics["loss"] for r in same]
        assert float(row["loss mean"]) == pytest.approx(standard.fmean(losses), rel=1e-12)
        assert float(row["loss sd"]) == pytest.approx(standard.stdev(losses), rel=1e-12)
        assert cells[2].strip("*").startswith(f"{float(row['loss mean']):.4f} ± {float(row['loss sd']):.4f}")
        assert float(row["loss low"]) < float(row["loss mean"]) < float(row["loss high"])
        assert (row["ratio mean"] == "") == (row["p"] == "0.0")


def test_pictures_alone(tmp_path):
    files = write_report(AUC, "study", made_up.auc(), tmp_path / "pictures", format="png")
    assert [path.name for path in files] == ["report-metric.png", *(f"report-{name}.png" for name in CURVES)]
    for path in files:
        with Image.open(path) as picture:
            assert picture.width == pytest.approx(5.4 * 160, abs=1)
            assert picture.convert("L").getextrema() == (pytest.approx(0, abs=60), 255)


def test_same_records_same_bytes(tmp_path):
    """Also in another process, whose strings hash differently."""
    first = make("latent", tmp_path)
    program = (
        "import made_up, sys; from pathlib import Path; from backdrop.experiments.tasks import Latent; "
        "from backdrop.experiments.report.write import write_report; "
        "write_report(Latent, 'latent-study', made_up.latent(), Path(sys.argv[1]), format='html')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "again.html")], check=True, env=environment)
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == first


def test_where_reports_go(tmp_path):
    records = made_up.auc(1)[:2]
    (path,) = write_report(AUC, "s", records, tmp_path / "new" / "folder", format="html")
    assert path == tmp_path / "new" / "folder" / "report.html"
    (path,) = write_report(AUC, "s", records, tmp_path / "a" / "b.html", format="html")
    assert path == tmp_path / "a" / "b.html"
    assert [p.name for p in path.parent.iterdir()] == ["b.html"]
    with pytest.raises(ValueError, match=r"ends in \.html, but got .*page\.txt"):
        write_report(AUC, "s", records, tmp_path / "page.txt", format="html")
    with pytest.raises(NotADirectoryError, match=r"b\.html is a file, not a folder"):
        write_report(AUC, "s", records, path / "below" / "page.html", format="html")
    with pytest.raises(ValueError, match="one of html, md, csv, png, json, but got 'pdf'"):
        write_report(AUC, "s", records, tmp_path, format="pdf")


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    records = made_up.auc(1)[:2]
    (path,) = write_report(AUC, "s", records, tmp_path / "page.html", format="html")
    before = path.read_bytes()

    class Full(io.FileIO):
        def write(self, data):
            super().write(data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "open", lambda path, mode, opener: Full(path, mode, opener=opener), raising=False)
    with pytest.raises(OSError, match=r"the report cannot be written: No space left on device.*page\.html"):
        write_report(AUC, "other", records, path, format="html")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# --- studies in files that others made


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1+1", "'+1+1"),
        ("-1+1", "'-1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\n=1"),
        ("a\r=1\r\n=2", "a\n=1\n=2"),
        (" =1", "' =1"),
        ("\uff1d1", "'\uff1d1"),
        ("-1/2", "'-1/2"),
        ("--1", "'--1"),
        ("-5", "-5"),
        ("-2.5e-3", "-2.5e-3"),
        ("+7", "+7"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_cells_are_no_formulas(tmp_path, text, cell):
    """Wherever text of the user's stands: values and names of settings, metrics, reasons, machines."""
    records = own(2, optimizer=text)
    records[0] = dataclasses.replace(records[0], state="failed", reason=text, machine={"host": text, "device": text})
    records[1] = dataclasses.replace(records[1], metrics={**records[1].metrics, "low": -1.5}, key=text)
    trials, configurations = write_report(Own, "s", records, tmp_path / "out", format="csv")
    with trials.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["optimizer"] for row in rows} == {cell}
    assert [rows[0][name] for name in ("reason", "host", "device")] == [cell] * 3
    assert rows[1]["key"] == cell
    assert rows[1]["metric low"] == "-1.5"
    with configurations.open(newline="", encoding="utf-8") as file:
        assert {row["optimizer"] for row in csv.DictReader(file)} == {cell}


def test_names_of_columns_are_no_formulas(tmp_path):
    records = [dataclasses.replace(r, settings={**r.settings, "=HYPERLINK()": 1}) for r in own(2)]
    for path in write_report(Own, "s", records, tmp_path / "out", format="csv"):
        with path.open(newline="", encoding="utf-8") as file:
            head = next(csv.reader(file))
        assert "'=HYPERLINK()" in head
        assert "=HYPERLINK()" not in head


def test_a_study_in_a_file_is_shown_or_refused(tmp_path):
    """Whatever others have written into it: an error that names the file, or a report."""
    spec, points = plan("gp", "quick", seeds="1")
    measured = {"accuracy": 50.0, "loss": 1.0, "small": 2.0, "large": 3.0}
    row = {"epoch": 1, "step": 5, "loss": 1.0, "lr": 0.1, "seconds": 1.0, "accuracy": 50.0}
    records = [Record(spec.key(s), "complete", s, measured, [row], 3.0, {"host": "x"}) for s in points]
    records[0] = dataclasses.replace(records[0], state="failed", metrics={}, reason="why")
    content = json.loads(pack("gp-quick", spec, records))
    shown = refused = 0
    for seed in range(120):
        path = tmp_path / "study.json"
        path.write_text(json.dumps(changed(content, np.random.default_rng(seed))))
        try:
            study = Archive(path)
        except ValueError as error:
            refused += str(path) in str(error)
            continue
        task, found = study.spec.shown_task(), study.records()
        for kind in ("csv", "json") if seed % 40 else ("csv", "json", "md", "html"):
            command = again(study.name, study.spec, found, task)
            assert write_report(
                task, study.name, found, tmp_path / "out", format=kind, command=command, spec=study.spec
            )
        for part in (live.progress(study, found), live.trials_table(study, found)):
            with (console := Console(file=io.StringIO())).capture() as captured:
                console.print(part)
            assert "\x1b[2J" not in captured.get()
        shown += 1
    assert shown > 30
    assert refused > 30
