"""Makes the cheat sheet one page of A4: python docs/draw_cheatsheet.py, with chromium and what mkdocs brings."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import markdown

DOCS = Path(__file__).parent
STYLE = """
@page { size: A4; margin: 11mm }
body { font: 8.6pt/1.35 "DejaVu Sans", Helvetica, Arial, sans-serif; color: #222; margin: 0 }
h1 { font-size: 15pt; margin: 0 0 3mm; color: #5e35b1 } p { margin: 2mm 0 }
table { border-collapse: collapse; width: 100% } thead { display: none }
td { border-bottom: .3pt solid #bbb; padding: .9mm 1.5mm; vertical-align: top } td:first-child { width: 30% }
code { font: 7.6pt "DejaVu Sans Mono", monospace; background: #f3f0f7 }
pre { background: #f3f0f7; padding: 2mm; margin: 2mm 0 }
"""


def page() -> str:
    """The sheet, without links and without what is said about the file itself."""
    text = (DOCS / "cheatsheet.md").read_text()
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", re.sub(r"^One page.*\n", "", text, flags=re.MULTILINE))
    text = re.sub(r"^Ten natural mistakes.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("# Cheat sheet", "# torch-backdrop: cheat sheet", 1)
    body = markdown.markdown(text, extensions=["tables", "fenced_code"])
    return f'<!doctype html><meta charset="utf-8"><title>torch-backdrop</title><style>{STYLE}</style>{body}'


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("chromium is needed to write the PDF")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "sheet.html")
        source.write_text(page())
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
        written = Path(folder, "sheet.pdf")
        subprocess.run([browser, *options, f"--print-to-pdf={written}", source.as_uri()], check=True)
        shutil.copy(written, DOCS / "cheatsheet.pdf")


if __name__ == "__main__":
    main()
