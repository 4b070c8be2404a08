"""The workflows for a public forge: sound files of their kind, whose commands and versions are those of the project."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import backdrop

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML, which comes with the documentation, is not installed")
    return yaml.safe_load(path.read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_both_are_there():
    assert [path.name for path in FILES] == ["release.yml", "tests.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_fit_the_schema(path):
    command = shutil.which("check-jsonschema")
    if command is None:
        pytest.skip("check-jsonschema is not installed")
    done = subprocess.run(
        [command, "--builtin-schema", "vendor.github-workflows", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_they_run_is_there(path):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = steps(load(path))
    for step in found:
        assert ("run" in step) != ("uses" in step)
        for line in step.get("run", "").splitlines():
            word, *rest = line.split()
            assert (ROOT / word).exists() or (word == "make" and rest[0] in targets) or word == "grep", line
        assert "${{" not in step.get("run", "")  # what comes from outside goes through the environment
    assert any("run" in step for step in found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_may_do_as_little_as_possible(path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_both_ends_of_the_range_are_tried():
    project = (ROOT / "pyproject.toml").read_text()
    low, high = re.search(r'"torch>=(\d+\.\d+),<(\d+\.\d+)"', project).groups()
    above = f"{high.split('.')[0]}.{int(high.split('.')[1]) - 1}"
    versions = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert [each["torch"] for each in versions] == [f"{low}.0", f"{above}.0"]
    assert versions[0]["python"] == re.search(r'requires-python = ">=([\d.]+)"', project)[1]


def test_the_tag_is_compared_with_the_version():
    workflow = load(ROOT / ".github" / "workflows" / "release.yml")
    (line,) = (step["run"] for step in steps(workflow) if step.get("name") == "The tag is the version")
    for tag, fits in ((f"v{backdrop.__version__}", True), ("v9.9.9", False), ("v0.1", False)):
        done = subprocess.run(["sh", "-c", line], cwd=ROOT, env={"TAG": tag, "PATH": "/usr/bin:/bin"})
        assert (done.returncode == 0) == fits
