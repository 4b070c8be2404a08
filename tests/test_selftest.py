"""`python -m backdrop.selftest`, and what else tells whether an installation is sound."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import backdrop
from backdrop import cli, selftest
from backdrop._core import code


def test_it_runs_in_a_process_of_its_own():
    done = subprocess.run([sys.executable, "-m", "backdrop.selftest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"backdrop {backdrop.__version__}, torch {torch.__version__}")
    assert done.stdout.endswith("all is well\n")
    assert done.stdout.count(" ok\n") == 2 * len(selftest.CHECKS)


def test_it_finds_what_is_broken(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "CHECKS", (selftest.masks, selftest.losses))
    monkeypatch.setattr(selftest, "rank_statistic_loss", lambda *a, **k: torch.zeros(()))
    assert selftest.main() == 2
    assert "losses in float64" in capsys.readouterr().out


def test_the_namesake_is_refused(tmp_path, monkeypatch):
    code.refuse_namesake()
    (tmp_path / "backdrop-0.0.3.dist-info").mkdir()
    (tmp_path / "backdrop-0.0.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: backdrop\nVersion: 0.0.3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("backdrop") == "0.0.3"
    with pytest.raises(ImportError, match=r"unrelated package 'backdrop' 0\.0\.3 is installed.*pip uninstall backdrop"):
        code.refuse_namesake()


def test_the_command_says_its_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"backdrop {backdrop.__version__}, torch {torch.__version__}\n")
