"""The choice between the implementations of an op."""

import pytest

from minivllm.errors import BackendUnavailable, ConfigError
from minivllm.ops import registry
from minivllm.ops.registry import (
    Backend,
    choose,
    define_op,
    explain,
    known_ops,
    only_if_forced,
)


def needs_cuda(device, dtype, head_dim=64):
    if device != "cuda":
        return f"it runs on cuda, not on {device}"
    return None if head_dim <= 128 else f"head_dim is {head_dim}, at most 128"


@pytest.fixture(autouse=True)
def mix(monkeypatch):
    """Define an op with a fast, a middling and a reference backend."""
    monkeypatch.setattr(registry, "OPS", {})
    monkeypatch.setattr(registry, "MODULES", [])
    monkeypatch.delenv("MINIVLLM_OP_MIX", raising=False)
    define_op(
        "mix",
        [
            Backend("cuda", "fast", needs_cuda),
            Backend("compiled", "middling", lambda device, dtype, **sizes: None),
            Backend("torch", "reference"),
        ],
    )


def test_the_first_backend_that_can_run_is_chosen():
    assert choose("mix", "cuda", "float16").backend.implementation == "fast"
    assert choose("mix", "cpu", "float16").backend.implementation == "middling"


def test_the_reasons_of_those_passed_over_are_kept():
    assert choose("mix", "cuda", "float16").passed_over == {}
    assert choose("mix", "cpu", "float16").passed_over == {
        "cuda": "it runs on cuda, not on cpu"
    }


def test_sizes_reach_the_condition():
    choice = choose("mix", "cuda", "float16", head_dim=256)
    assert choice.backend.name == "compiled"
    assert choice.passed_over == {"cuda": "head_dim is 256, at most 128"}


@pytest.mark.parametrize("name", ["MIXX", "mix", ""])
def test_a_variable_of_no_op_is_refused(name, monkeypatch):
    monkeypatch.setenv(f"MINIVLLM_OP_{name}", "torch")
    for ask in (lambda: choose("mix", "cpu", "float32"), known_ops):
        with pytest.raises(
            ConfigError, match=rf"MINIVLLM_OP_{name}' is unknown.*use one of.*_MIX"
        ):
            ask()


def test_a_forced_backend_is_chosen_before_better_ones(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_MIX", "torch")
    assert choose("mix", "cuda", "float16").backend.implementation == "reference"


def test_a_forced_backend_that_cannot_run_is_an_error_with_the_reason(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_MIX", "cuda")
    with pytest.raises(BackendUnavailable, match="it runs on cuda, not on cpu"):
        choose("mix", "cpu", "float16")


def test_an_unknown_backend_is_refused_with_the_nearest_one(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_MIX", "compild")
    with pytest.raises(ConfigError, match=r"'compild' is unknown.*'compiled'"):
        choose("mix", "cpu", "float16")


def test_an_unknown_op_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"op 'mx' is unknown.*'mix'"):
        explain("mx", "cpu", "float16")


def test_an_empty_variable_forces_nothing(monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_MIX", "")
    assert choose("mix", "cpu", "float16").backend.name == "compiled"


def test_a_backend_may_stand_behind_another():
    registry.add_backend("mix", Backend("new", "newest", needs_cuda), behind="cuda")
    names = [backend.name for backend in registry.OPS["mix"]]
    assert names == ["cuda", "new", "compiled", "torch"]
    assert choose("mix", "cuda", "float16").backend.name == "cuda"


def test_every_backend_has_a_verdict():
    assert explain("mix", "cpu", "float16") == {
        "cuda": "it runs on cuda, not on cpu",
        "compiled": "chosen",
        "torch": "can run, but compiled does",
    }


def test_an_op_without_a_reference_cannot_be_defined():
    with pytest.raises(AssertionError, match="must always run"):
        define_op("mix", [Backend("cuda", "fast", needs_cuda)])


def test_a_backend_that_is_added_goes_first():
    registry.add_backend("mix", Backend("new", "newest", needs_cuda))
    assert choose("mix", "cuda", "float16").backend.name == "new"
    assert choose("mix", "cpu", "float16").backend.name == "compiled"


def test_modules_with_backends_are_loaded_at_the_first_choice(monkeypatch, tmp_path):
    (tmp_path / "more_backends.py").write_text(
        "from minivllm.ops.registry import Backend, add_backend\n"
        "add_backend('mix', Backend('late', 'newest', lambda device, dtype: None))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "MODULES", ["more_backends"])
    assert choose("mix", "cpu", "float16").backend.name == "late"
    assert choose("mix", "cpu", "float16").passed_over == {}


def needs_small_heads(device, dtype, head_dim=64):
    return None if head_dim <= 64 else "heads are too large"


@pytest.fixture
def slow():
    """Give the op a backend on top that nobody should get without asking."""
    condition = only_if_forced("mix", needs_small_heads)
    registry.add_backend("mix", Backend("slow", "slowest", condition))


def test_a_backend_only_if_forced_is_passed_over(slow):
    choice = choose("mix", "cpu", "float16")
    assert choice.backend.name == "compiled"
    assert choice.passed_over["slow"] == "runs only if it is forced"
    assert explain("mix", "cpu", "float16")["slow"] == "runs only if it is forced"


def test_a_backend_only_if_forced_runs_if_it_is(slow, monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_MIX", "slow")
    assert choose("mix", "cpu", "float16").backend.name == "slow"
    monkeypatch.setenv("MINIVLLM_OP_MIX", "torch")
    assert choose("mix", "cpu", "float16").backend.name == "torch"


def test_its_own_condition_comes_first(slow, monkeypatch):
    choice = choose("mix", "cpu", "float16", head_dim=80)
    assert choice.passed_over["slow"] == "heads are too large"
    monkeypatch.setenv("MINIVLLM_OP_MIX", "slow")
    with pytest.raises(BackendUnavailable, match="heads are too large"):
        choose("mix", "cpu", "float16", head_dim=80)


def test_all_ops_are_known_with_those_of_modules(monkeypatch, tmp_path):
    (tmp_path / "more_ops.py").write_text(
        "from minivllm.ops.registry import Backend, define_op\n"
        "define_op('add', [Backend('torch', 'reference')])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "MODULES", ["more_ops"])
    assert known_ops() == ["add", "mix"]
