"""Make the notebooks from the scripts beside them, and run them: `make notebooks`, or

    python examples/notebooks/make.py [NAME ...]

The scripts are in jupytext's "percent" form. Whoever changes one makes its notebook again; a test compares the cells.
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
NAMES = ("01_where_gradients_go", "08_few_large_images", "10_long_series")


METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}


def small(png: str) -> str:
    """The same picture with 128 colours, in less than half of the bytes."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def make(name: str) -> Path:
    notebook = jupytext.read(HERE.parent / f"{name}.py", fmt="py:percent")
    with tempfile.TemporaryDirectory() as folder:  # for the pictures that the script saves
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=resources, coalesce_streams=True
        ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)  # nothing about the machine that made it
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})  # the same each time
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = small(output.data["image/png"])
    path = HERE / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        path = make(name)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)
