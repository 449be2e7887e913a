"""Who may import whom, and what an import may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minivllm
from tests.tiny_folder import write_parrot

PACKAGE = Path(minivllm.__file__).parent

# Each part of the package, and the parts it may import beside itself. No import runs
# upwards, so there is no circle; a new part takes its place here.
LAYERS = {
    "errors": set(),
    "config": {"errors"},
    "interrupts": set(),
    "json_files": {"errors"},
    "text": {"errors", "json_files"},
    "ops": {"errors", "config", "__init__"},
    "sampling": {"errors", "json_files", "text", "ops"},
    "request": {"errors", "sampling"},
    "outputs": set(),
    "models": {"errors", "json_files", "ops"},
    "reference": {"errors", "models", "sampling", "request"},
    "generation": {"errors", "models"},
    "loading": {"errors", "config", "json_files", "models", "reference"},
    "parity": {"errors", "models", "reference", "loading"},
    "runners": {
        *("errors", "text", "ops", "models", "reference", "loading", "sampling"),
        "request",
    },
    "engine": {
        *("errors", "config", "loading", "text", "sampling", "request", "outputs"),
        "runners",
    },
    "llm": {
        *("errors", "config", "interrupts", "loading", "sampling", "request"),
        *("outputs", "runners", "engine"),
    },
    "viewer": {"errors"},
    "server": {
        *("errors", "text", "sampling", "outputs", "engine", "llm", "__init__"),
        *("request", "viewer"),
    },
    "twin": {
        *("errors", "text", "reference", "loading", "sampling", "request", "outputs"),
        *("runners", "engine"),
    },
    "benchmarks": {
        *("errors", "text", "models", "reference", "generation", "sampling"),
        *("request", "outputs", "runners", "engine"),
    },
    "cli": {
        *("errors", "config", "text", "loading", "sampling", "runners", "engine"),
        *("llm", "generation", "benchmarks", "viewer", "ops", "__init__"),
        *("json_files", "models", "parity", "server", "interrupts", "outputs"),
    },
    "__init__": set(),
    "__main__": {"cli"},
}
# Only these modules may import torch, at the top or lazily.
TORCH_MODULES = {
    "benchmarks/experts.py",
    "benchmarks/machine.py",
    "benchmarks/profile.py",
    "benchmarks/sampler.py",
    "cli/ops.py",
    "loading/loader.py",
    "models/decoder.py",
    "models/gated_delta_net.py",
    "models/layers.py",
    "models/merged.py",
    "models/moe.py",
    "ops/compiler.py",
    "ops/cpu.py",
    "ops/cuda.py",
    "ops/cuda_delta_net.py",
    "ops/cuda_layers.py",
    "ops/cuda_moe.py",
    "ops/cuda_prefill.py",
    "ops/cuda_sampling.py",
    "ops/delta_net.py",
    "ops/draw.py",
    "ops/launch.py",
    "ops/linear.py",
    "ops/moe.py",
    "ops/operators.py",
    "ops/paged_attention.py",
    "ops/reference.py",
    "ops/rungs.py",
    "parity.py",
    "runners/cuda_graphs.py",
    "runners/torch_runner.py",
    "sampling/logprobs.py",
    "sampling/sampler.py",
}
# The bookkeeping: ids, counts and times, with no array library in sight.
PLAIN_MODULES = {
    "engine/__init__.py",
    "engine/async_engine.py",
    "engine/block_manager.py",
    "engine/cache_manager.py",
    "engine/config.py",
    "engine/engine.py",
    "engine/metrics.py",
    "engine/scheduler.py",
    "engine/state_pool.py",
    "engine/trace.py",
    "outputs.py",
    "request.py",
    "runners/base.py",
    "runners/fake_runner.py",
    "sampling/params.py",
}
ARRAY_LIBRARIES = {"numpy", "torch", "scipy", "jax", "cupy", "pandas"}


def imports_of(path: Path) -> set[str]:
    """List the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names.add(node.module)
    return names


def part_of(module: str) -> str:
    """Return the part that a module of ours belongs to."""
    return [*module.split("."), "__init__"][1]


def modules() -> list[str]:
    return sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", modules())
def test_imports_run_downwards_only(module):
    is_door = module.endswith("__main__.py")  # of a folder: it calls the command line
    part = "__main__" if is_door else module.split("/")[0].removesuffix(".py")
    ours = {n for n in imports_of(PACKAGE / module) if n.split(".")[0] == "minivllm"}
    assert {part_of(name) for name in ours} <= LAYERS[part] | {part}


def test_the_layers_have_no_circle():
    above: dict[str, set[str]] = {}
    for part, below in LAYERS.items():  # listed from the bottom up, but for __init__
        assert below - {"__init__"} <= above.keys(), part
        above[part] = below


def test_only_the_torch_half_names_torch():
    torch_users = {
        module
        for module in modules()
        if any(n.split(".")[0] == "torch" for n in imports_of(PACKAGE / module))
    }
    assert torch_users == TORCH_MODULES


@pytest.mark.parametrize("module", sorted(PLAIN_MODULES))
def test_the_bookkeeping_names_no_array_library(module):
    names = {name.split(".")[0] for name in imports_of(PACKAGE / module)}
    assert not names & ARRAY_LIBRARIES


def test_every_module_of_the_engine_is_bookkeeping():
    engine = {module for module in modules() if module.startswith("engine/")}
    assert engine == {name for name in PLAIN_MODULES if name.startswith("engine/")}


def test_a_whole_engine_runs_without_any_array_library():
    script = """
import sys
from minivllm.engine.engine import LLMEngine
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams

engine = LLMEngine(FakeRunner(script={"a": [7, 8]}))
engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
while engine.has_unfinished_requests():
    outputs = engine.step()
print(outputs[0].outputs[0].token_ids, *sys.modules)
"""
    answer, _, loaded = python(script).stdout.partition("]")
    assert answer == "[7, 8"
    assert not {name.split(".")[0] for name in loaded.split()} & ARRAY_LIBRARIES


@pytest.mark.parametrize(
    # A benchmark compares with it, where it happens to be installed.
    ("foreign", "allowed"),
    [("transformers", ["benchmarks/sampler.py", "parity.py"]), ("bookkit", [])],
)
def test_what_only_tests_and_book_use_is_never_imported(foreign, allowed):
    users = [
        module
        for module in modules()
        if any(n.split(".")[0] == foreign for n in imports_of(PACKAGE / module))
    ]
    assert users == allowed


def python(script: str) -> subprocess.CompletedProcess:
    """Run a script in a fresh interpreter; fail with what it wrote."""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result


def test_importing_the_package_loads_nothing_heavy():
    script = "import sys, minivllm, minivllm.cli.main; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in python(script).stdout.split()}
    assert "minivllm" in loaded
    heavy = {"numpy", "torch", "transformers", "tokenizers", "jinja2", "gguf"}
    assert not loaded & (heavy | {"huggingface_hub", "safetensors", "fastapi"})


def test_the_numpy_path_works_where_torch_cannot_be_imported(tmp_path):
    folder = str(write_parrot(tmp_path))
    script = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
from minivllm import Tokenizer, generate_naive, load_model

model = load_model({folder!r}, backend="numpy")
tokenizer = Tokenizer.from_dir({folder!r})
prompt = tokenizer.encode_chat([{{"role": "user", "content": "Why?"}}])
print(tokenizer.decode(generate_naive(model, prompt, 7)))

from minivllm.llm import LLM
from minivllm.sampling.params import SamplingParams

with LLM({folder!r}, backend="numpy", num_blocks=8) as llm:
    (output,) = llm.generate("sky:", SamplingParams(temperature=0))
    print(output.outputs[0].text, type(llm.engine.runner).__name__)
assert "torch" not in sys.modules
"""
    assert python(script).stdout == " blué!\n blué! NumpyRunner\n"


def test_bodies_are_answered_where_torch_and_fastapi_cannot_be_imported(tmp_path):
    folder = str(write_parrot(tmp_path))
    script = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "fastapi", "starlette", "uvicorn"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
from minivllm.llm import LLM
from minivllm.server.local import LocalHandlers

with LLM({folder!r}, backend="numpy", num_blocks=8) as llm:
    body = {{"messages": [{{"role": "user", "content": "Why?"}}], "temperature": 0}}
    answer = LocalHandlers(llm).handle_chat(body)
    print(answer["choices"][0]["message"]["content"])
"""
    assert python(script).stdout == " blué!\n"


def test_every_public_name_is_there_and_listed():
    for name in minivllm._MODULES:
        assert getattr(minivllm, name).__doc__ or name.isupper()
        assert name in dir(minivllm)
    with pytest.raises(AttributeError, match="no attribute 'generate_fast'"):
        _ = minivllm.generate_fast


def test_loading_a_model_leaves_the_compiler_of_torch_out(tmp_path):
    """It is half of torch; a single `nn.Embedding` on "meta" would load it."""
    folder = str(write_parrot(tmp_path))
    script = f"""
import sys
from minivllm import LLM, SamplingParams

with LLM({folder!r}, backend="torch", device="cpu") as llm:
    llm.generate("x", SamplingParams(max_tokens=2))
print(*sys.modules)
"""
    loaded = set(python(script).stdout.split())
    assert "torch" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy"}
