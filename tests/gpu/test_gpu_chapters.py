"""The notebooks that use a GPU where there is one, from top to bottom."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

CHAPTERS = Path(__file__).parents[2] / "chapters"


def run(name: str) -> str:
    """Run a notebook in a process of its own, and return what its cells print."""
    notebook = nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(CHAPTERS)}}
    options = {"kernel_name": "python3", "timeout": 900, "resources": resources}
    nbclient.NotebookClient(notebook, **options).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "\n".join(out.get("text", "") for out in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["06_cuda_kernels", "a16_launcher"])
def test_a_chapter_runs_on_the_gpu(name):
    assert "not yet measured on a GPU" not in run(name)
