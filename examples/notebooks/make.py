"""Make the notebooks from the scripts beside them, and run them: `make notebooks`, or

    python examples/notebooks/make.py [--front] [NAME ...]

The scripts are in jupytext's "percent" form. Whoever changes one makes its notebook again; a test compares the cells.
In front of them stands a cell that installs the library where it is missing. Where REPOSITORY_URL names a public
repository, the cell installs from there, and a badge above it opens the notebook in Colab. `--front` writes these two
anew, and runs nothing.
"""

import base64
import io
import os
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


def front(name: str, url: str = "") -> list[nbformat.NotebookNode]:
    """The cells before those of the script."""
    where = f"torch-backdrop @ git+{url}" if url else "../.."
    install = (
        "# What it needs, where that is missing.\n"
        "import importlib.util\n\n"
        'if importlib.util.find_spec("backdrop") is None:\n'
        f'    %pip install -q "{where}" matplotlib scikit-learn'
    )
    made = nbformat.v4.new_code_cell(install, execution_count=1, metadata={"tags": ["front"]})
    if not url:
        return [made]
    link = f"{url.replace('https://github.com', 'https://colab.research.google.com/github')}/blob/main"
    badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link}/examples/notebooks/{name}.ipynb)"
    return [nbformat.v4.new_markdown_cell(badge, metadata={"tags": ["front"]}), made]


def put_in_front(name: str, url: str = "") -> Path:
    """Write these cells anew; all others, and what they showed, stay."""
    path = HERE / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    own = [cell for cell in notebook.cells if "front" not in cell.metadata.get("tags", [])]
    notebook.cells = front(name, url) + own
    number = 0
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        if cell.cell_type == "code":
            number += 1
            cell.execution_count = number
    nbformat.write(notebook, path)
    return path


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
    return put_in_front(name, os.environ.get("REPOSITORY_URL", ""))


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--front"]
    for name in names or NAMES:
        url = os.environ.get("REPOSITORY_URL", "")
        path = put_in_front(name, url) if "--front" in sys.argv else make(name)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)
