"""The subcommand `ops`: a verdict for every backend of every op."""

import re
import subprocess
import sys

import pytest
import torch

from minivllm.cli.main import main
from minivllm.ops import registry
from minivllm.ops.registry import Backend

REFERENCE = Backend("torch", "reference")


def only_cuda(device, dtype, **sizes):
    return None if device == "cuda" else f"it runs on cuda, not on {device}"


@pytest.fixture
def ops(monkeypatch):
    """Three ops, which note how they are asked."""
    asked = []

    def condition(device, dtype, **sizes):
        asked.append((device, dtype, sizes))
        return only_cuda(device, dtype)

    known = {
        name: [Backend("cuda", name, condition), REFERENCE]
        for name in ("rms_norm", "paged_attention", "argmax")
    }
    monkeypatch.setattr(registry, "OPS", known)
    monkeypatch.setattr(registry, "MODULES", [])
    for name in known:
        monkeypatch.delenv(f"MINIVLLM_OP_{name.upper()}", raising=False)
    return asked


def test_every_backend_of_every_op_has_its_line(ops, capsys):
    assert main(["ops", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == (
        "cpu, bfloat16, heads of 64 numbers\n"
        "\nargmax\n"
        "  cuda      it runs on cuda, not on cpu\n"
        "  torch     chosen\n"
        "\npaged_attention\n"
        "  cuda      it runs on cuda, not on cpu\n"
        "  torch     chosen\n"
        "\nrms_norm\n"
        "  cuda      it runs on cuda, not on cpu\n"
        "  torch     chosen\n"
    )


def test_it_asks_as_the_engine_does(ops, capsys):
    options = ("--device", "cuda", "--dtype", "float16", "--head-dim", "80")
    assert main(["ops", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cuda, float16, heads of 80 numbers")
    assert "torch     can run, but cuda does" in out
    assert ("cuda", "float32", {}) in ops  # argmax, on scores
    assert ("cuda", "float16", {"head_dim": 80}) in ops
    assert ("cuda", "float16", {}) in ops
    assert len(set(map(str, ops))) == 3


def test_a_forced_backend_is_named_as_forced(ops, capsys, monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_RMS_NORM", "torch")
    assert main(["ops", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "torch     chosen, because MINIVLLM_OP_RMS_NORM says so" in out
    assert out.count("says so") == 1


@pytest.mark.parametrize("forced", ["cuda", "cudda"])
def test_a_forced_backend_that_cannot_run_fails_after_the_others(
    forced, ops, capsys, monkeypatch
):
    monkeypatch.setenv("MINIVLLM_OP_ARGMAX", forced)
    assert main(["ops", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"argmax\n  MINIVLLM_OP_ARGMAX.*'{forced}'", out)
    assert out.count("chosen") == 2


def test_a_variable_of_no_op_is_refused_at_once(ops, capsys, monkeypatch):
    monkeypatch.setenv("MINIVLLM_OP_RMS_NORN", "torch")
    assert main(["ops", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "did you mean 'MINIVLLM_OP_RMS_NORM'?" in captured.err
    assert "chosen" not in captured.out


def test_the_device_is_that_of_torch_by_default(ops, capsys, monkeypatch):
    for is_there, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=is_there: there)
        assert main(["ops"]) == 0
        assert capsys.readouterr().out.startswith(f"{device}, ")


@pytest.mark.parametrize("options", [("--device", "tpu"), ("--head-dim", "0")])
def test_impossible_values_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ops", *options])
    assert options[1] in capsys.readouterr().err


def test_the_real_ops_are_all_listed():
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", "ops", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("chosen") == done.stdout.count("\n\n")
    for op in ("linear", "rms_norm", "paged_attention", "prefill_attention", "draw"):
        assert f"\n{op}\n" in done.stdout


def test_without_torch_the_way_out_is_told(tmp_path):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from minivllm.cli.main import main; sys.exit(main(['ops']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "needs PyTorch" in done.stderr
    assert "Traceback" not in done.stderr
