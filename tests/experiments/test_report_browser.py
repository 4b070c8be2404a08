"""Reports in a browser: everything is drawn, nothing sticks out, nothing is fetched."""

import dataclasses

import pytest

import chromium
import made_up
from backdrop.experiments.report.write import write_report
from backdrop.experiments.tasks import GP, TASKS

pytestmark = pytest.mark.skipif(chromium.find() is None, reason=f"none of {', '.join(chromium.NAMES)} is installed")

BROKEN = """<html><head></head><body><script>missing()</script><div style="width: 2000px">wide</div>
<img alt="no picture" src="data:image/png;base64,AAAA"><img alt="elsewhere" src="http://127.0.0.1:9/x.png">
<img alt="far" style="position: absolute; left: 1900px; width: 90px; height: 90px" src="data:image/svg+xml,PICTURE">
</body></html>""".replace("PICTURE", "%3Csvg xmlns='http://www.w3.org/2000/svg' width='90' height='90'/%3E")


def long_names():
    """Settings, reasons and machines that do not fit anywhere."""
    records = [dataclasses.replace(r, settings={**r.settings, "norm": "w" * 300}) for r in made_up.gp(2)]
    records[0] = dataclasses.replace(records[0], state="failed", reason="r" * 400, machine={"host": "h" * 200})
    return records + made_up.gp(2)


STUDIES = {name: (task, getattr(made_up, name)) for name, task in TASKS.items()}
STUDIES |= {"search": (GP, made_up.search), "long names": (GP, long_names), "empty": (GP, list)}


def test_the_browser_test_sees_what_is_wrong(tmp_path):
    complaints = "\n".join(chromium.look(BROKEN, 390, tmp_path).complaints())
    for expected in ("missing is not defined", "127.0.0.1", "wide, in a window of 390", "not loaded: no picture"):
        assert expected in complaints
    assert "not loaded: elsewhere" in complaints
    assert "not in view: far" in complaints


@pytest.mark.parametrize("name", STUDIES)
def test_page_on_a_desk_and_on_a_phone(name, tmp_path):
    task, records = STUDIES[name]
    study, command = ("s" * 200, "c" * 400) if name == "long names" else (name, "backdrop run it")
    (path,) = write_report(task, study, records(), tmp_path / "page.html", format="html", command=command)
    content = path.read_text(encoding="utf-8")
    desk, phone = (chromium.look(content, width, tmp_path / str(width), dark=width == 390) for width in (1280, 390))
    assert desk.complaints() == phone.complaints() == []
    assert (desk.width, phone.width) == (1280, 390)
    assert len(desk.pictures) == len(phone.pictures) == content.count("<img ")
    for light, dark in zip(desk.pictures, phone.pictures, strict=True):
        assert light["source"] != dark["source"]  # the phone prefers dark
