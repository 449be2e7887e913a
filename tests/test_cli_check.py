"""`minivllm check`: knobs, every tensor, and the difference from transformers."""

import json
import re

import numpy as np
import pytest
import torch
import transformers

from minivllm import parity
from minivllm.cli import check
from minivllm.cli.main import FAILED, main
from minivllm.loading.tensors import read_safetensors, write_safetensors
from minivllm.models.knobs import knobs_of
from tests.gguf_families import ARCHES, write_family
from tests.parity.make_tiny import FAMILIES, make_tiny
from tests.test_families import GEMMA3, LLAMA, MOE, QWEN2, QWEN3, spec_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, made once."""
    home = tmp_path_factory.mktemp("tiny")
    return {name: make_tiny(home / name, name) for name in FAMILIES}


def edit(folder, target, **changes):
    """Copy a checkpoint with another config; None takes a key away."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config = {k: v for k, v in (config | changes).items() if v is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


# What a user sees.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_checkpoint_of_each_family_is_as_it_should_be(capsys, folders, family):
    assert main(["check", str(folders[family])]) == 0
    out = capsys.readouterr().out
    for part in ("knobs\n", "tensors\n", "logits\n", "GB for float32"):
        assert part in out
    for name in ("numpy", "torch"):
        line = next(line for line in out.splitlines() if f"  {name} against" in line)
        found = re.search(r"difference (\S+) of", line)
        # A delta net divides what it reads by its size: where a head reads next to
        # nothing, that makes rounding large, here 1e-5 (appendix A28 shows it against
        # float64).
        limit = 1e-4 if "qwen3_5" in family else 1e-5
        assert float(found[1]) < limit and line.endswith("as they should be")
    left_out = re.search(r"left out on purpose: \S*(multi_modal_proj|visual)", out)
    assert bool(left_out) == family.endswith("with_images")
    assert ("a convolution over 4 tokens" in out) == ("qwen3_5" in family)
    has_shared = family.startswith("qwen3_5_moe")
    assert ("one for every token, 20 wide" in out) == has_shared
    assert ("8 of the 32 numbers of a head" in out) == ("qwen3_5" in family)
    gate = "none" if "qwen3_5" not in family else "one for each number of a head"
    assert re.search(rf"^  gate +{gate}$", out, re.MULTILINE)


@pytest.mark.parametrize("family", ARCHES)
def test_a_gguf_file_of_each_family_is_as_transformers_reads_it(
    capsys, tmp_path, family
):
    path = tmp_path / "tiny.gguf"
    write_family(path, family)
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "tiny.gguf, a GGUF file" in out
    assert out.count("as they should be") == 2, out


def test_a_scaling_that_transformers_cannot_read_is_not_compared(capsys, tmp_path):
    factors = {"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)}
    write_family(tmp_path / "tiny.gguf", "llama", tensors=factors)
    assert main(["check", str(tmp_path / "tiny.gguf")]) == 0
    out = capsys.readouterr().out
    assert "a divisor for each frequency" in out and "not compared: transf" in out


FLIPS = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen2": {"max_window_layers": 4, "layer_types": None},
    "qwen3": {"sliding_window": 9},
    "qwen3_moe": {"norm_topk_prob": False},
    "gemma3": {"query_pre_attn_scalar": 16},
}


@pytest.mark.parametrize("family", FLIPS)
def test_a_wrong_knob_is_not_as_it_should_be(
    capsys, monkeypatch, tmp_path, folders, family
):
    wrong = edit(folders[family], tmp_path / "wrong", **FLIPS[family])
    theirs = parity.their_logits
    right = folders[family]
    monkeypatch.setattr(check, "their_logits", lambda _, ids, __: theirs(right, ids))
    assert main(["check", str(wrong)]) == FAILED
    assert capsys.readouterr().out.count("NOT the same model") == 2


def test_knobs_are_printed_before_the_tensors_are_refused(capsys, tmp_path, folders):
    wrong = edit(folders["qwen3"], tmp_path / "x", attention_bias=True)
    assert main(["check", str(wrong)]) == FAILED
    out, err = capsys.readouterr()
    assert "biases         q, k, v, o" in out and "q and k norms" in out
    assert "asks for 16 biases, but the files hold 0: see attention_bias" in err


def test_a_tied_model_that_stores_its_head_is_told_so(capsys, tmp_path, folders):
    folder = edit(folders["gemma3"], tmp_path / "x")
    tensors = read_safetensors(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    assert main(["check", str(folder), "--compare", "never"]) == 0
    out = capsys.readouterr().out
    assert "1 repeats the embedding, left out: lm_head.weight" in out


def test_without_a_tokenizer_random_tokens_are_compared(capsys, tmp_path, folders):
    folder = edit(folders["qwen3"], tmp_path / "x")
    (folder / "tokenizer.json").unlink()
    assert main(["check", str(folder), "--backend", "torch", "--tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert "torch against transformers, 20 tokens" in out and "numpy" not in out


def test_sizes_that_fast_kernels_refuse_are_compared(capsys, tmp_path):
    folder = make_tiny(tmp_path / "x", "qwen3_moe", moe_intermediate_size=7)
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.count("as they should be") == 2


def test_weights_that_are_no_numbers_are_called_damaged(capsys, tmp_path, folders):
    folder = edit(folders["llama"], tmp_path / "x")
    tensors = read_safetensors(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0] = np.inf
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    assert main(["check", str(folder)]) == FAILED
    out, err = capsys.readouterr()
    assert "the weights are damaged" in out and "NOT" not in out
    assert err == ""


@pytest.mark.parametrize("row", [0, slice(None)])
def test_an_embedding_that_is_no_number_is_called_damaged(
    capsys, tmp_path, folders, row
):
    folder = edit(folders["gemma3"], tmp_path / "x")
    tensors = read_safetensors(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][row] = np.nan
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    assert main(["check", str(folder)]) == FAILED
    out = capsys.readouterr().out
    assert "the weights are damaged" in out and "against" not in out


@pytest.mark.parametrize("who", ["transformers", "numpy", "torch"])
def test_what_only_one_of_them_finds_no_number_is_no_difference(
    capsys, monkeypatch, folders, who
):
    def broken(logits):
        logits[3, 5] = np.inf
        return logits

    theirs, ours = parity.their_logits, parity.our_logits
    if who == "transformers":
        monkeypatch.setattr(check, "their_logits", lambda *args: broken(theirs(*args)))
    else:
        monkeypatch.setattr(
            check,
            "our_logits",
            lambda folder, name, ids: (broken if name == who else np.asarray)(
                ours(folder, name, ids)
            ),
        )
    assert main(["check", str(folders["llama"])]) == FAILED
    out = capsys.readouterr().out
    assert f"NaN or infinity with {who}, not with the others" in out
    assert "NOT" not in out
    assert out.count("as they should be") == (0 if who == "transformers" else 1)


def test_a_model_of_zeros_is_as_it_should_be(capsys, tmp_path, folders):
    folder = edit(folders["llama"], tmp_path / "x")
    tensors = read_safetensors(folder / "model.safetensors")
    zeros = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", zeros, "F32")
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.count("difference 0.0e+00") == 2


def test_a_damaged_tokenizer_is_seen_without_a_comparison(capsys, tmp_path, folders):
    folder = edit(folders["qwen3"], tmp_path / "x")
    assert main(["check", str(folder), "--compare", "never"]) == 0
    assert "  259 tokens, a chat template" in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("{")
    assert main(["check", str(folder), "--compare", "never"]) == FAILED
    assert "tokenizer.json is no valid tokenizer" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main(["check", str(folder), "--compare", "never"]) == 0
    assert "there is no tokenizer.json" in capsys.readouterr().out


def test_a_file_that_is_no_model_is_told_what_would_be(capsys, folders):
    assert main(["check", str(folders["qwen3"] / "model.safetensors")]) == FAILED
    assert "give the folder that it is in" in capsys.readouterr().err


def test_no_more_tokens_are_advised_than_are_allowed(capsys, tmp_path, folders):
    folder = edit(folders["gemma3"], tmp_path / "x", sliding_window=1000)
    assert main(["check", str(folder), "--backend", "numpy"]) == 0
    assert "reach beyond the window of 1000\n" in capsys.readouterr().out


def test_a_text_within_the_window_says_how_to_go_beyond(capsys, folders):
    assert main(["check", str(folders["gemma3"]), "--tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "8 tokens do not reach beyond the window of 8: try --tokens 16" in out
    assert main(["check", str(folders["gemma3"])]) == 0
    assert "do not reach" not in capsys.readouterr().out


def test_more_tokens_than_the_model_was_made_for_are_refused(capsys, folders):
    assert main(["check", str(folders["llama"]), "--tokens", "513"]) == FAILED
    assert "--tokens is 513, but the model was made for 512" in capsys.readouterr().err


# When nothing is compared.


def test_a_model_of_ours_alone_is_not_compared(capsys, tmp_path, folders):
    folder = edit(folders["qwen3_moe"], tmp_path / "x", qk_norm=False)
    tensors = read_safetensors(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not re.search("[qk]_norm", n)}
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    assert main(["check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"not compared: transformers \S+ finds no .*k_norm\.weight", out)


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": None},
        {"rms_norm_eps": None},
        {"norm_topk_prob": None},
        {"num_experts_per_tok": "3"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_transformers_refuses_is_no_traceback(
    capsys, monkeypatch, tmp_path, folders, change
):
    folder = edit(folders["qwen3_moe"], tmp_path / "x")
    wrong = edit(folders["qwen3_moe"], tmp_path / "y")
    config = json.loads((wrong / "config.json").read_text()) | change
    (wrong / "config.json").write_text(json.dumps(config))
    theirs = parity.their_logits
    monkeypatch.setattr(check, "their_logits", lambda _, ids, __: theirs(wrong, ids))
    assert main(["check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"not compared: transformers \S+ cannot read it \(.*Field", out)
    # Who asks for a comparison in any case gets one, or an error.
    assert main(["check", str(folder), "--compare", "always"]) == FAILED
    assert "cannot read it" in capsys.readouterr().err


def test_what_transformers_cannot_compute_is_no_traceback(capsys, monkeypatch, folders):
    def fail(*_, **__):
        raise RuntimeError("strides should be multiples\nof 16 bytes")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fail)
    assert main(["check", str(folders["llama"])]) == 0
    assert "cannot compute it (strides should be multiples of 16" in (
        capsys.readouterr().out
    )
    assert main(["check", str(folders["llama"]), "--compare", "always"]) == FAILED


def test_help_says_what_the_exit_code_means(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert re.search(r"exit code:\n  0 .*\n  1 ", capsys.readouterr().out, re.DOTALL)


def test_without_transformers_there_is_no_reference(capsys, monkeypatch, folders):
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    assert main(["check", str(folders["llama"])]) == 0
    assert "not compared: torch is not installed" in capsys.readouterr().out
    assert main(["check", str(folders["llama"]), "--compare", "always"]) == FAILED
    assert "torch is not installed: install it" in capsys.readouterr().err


def test_memory_is_told_first_and_too_little_is_not_used(capsys, monkeypatch, folders):
    monkeypatch.setattr(check, "free_memory", lambda: 1000)
    assert main(["check", str(folders["llama"])]) == 0
    out = capsys.readouterr().out
    assert "not compared: too little memory" in out and "0.00 GB are free" in out
    assert main(["check", str(folders["llama"]), "--compare", "always"]) == 0
    assert "as they should be" in capsys.readouterr().out
    monkeypatch.setattr(check, "free_memory", lambda: None)
    assert main(["check", str(folders["llama"])]) == 0


def test_what_is_no_model_is_an_error(capsys, tmp_path):
    assert main(["check", str(tmp_path / "nothing")]) == FAILED
    assert "there is no model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert main(["check", str(tmp_path)]) == FAILED
    assert "MambaForCausalLM, but supported are" in capsys.readouterr().err


# The parts.


def test_a_difference_by_hand():
    theirs = np.array([[1.0, 4.0], [2.0, -5.0]])
    ours = np.array([[1.0, 4.0], [2.0, 5.0]])
    found = parity.difference(ours, theirs)
    assert (found.largest, found.same_choices, found.num_positions) == (2.0, 1, 2)
    assert not found.fits
    assert parity.difference(theirs, theirs).fits
    assert not parity.difference(theirs * np.nan, theirs).fits


def test_pieces_of_a_text_are_scored_like_the_whole(folders):
    for backend in ("numpy", "torch"):
        decoder = parity.load_model(folders["gemma3"], backend=backend)
        tokens = list(range(30))
        whole = parity.all_logits(decoder, tokens, 30)
        for first in (1, 7, 29):
            found = parity.difference(parity.all_logits(decoder, tokens, first), whole)
            assert found.fits and found.same_choices == 30


def test_enough_tokens_reach_beyond_a_small_window():
    assert parity.enough_tokens(spec_of(LLAMA)) == 16
    assert parity.enough_tokens(spec_of(GEMMA3)) == 16
    assert parity.enough_tokens(spec_of(GEMMA3, sliding_window=20)) == 28
    assert parity.enough_tokens(spec_of(GEMMA3, sliding_window=4096)) == 64
    assert parity.enough_tokens(spec_of(LLAMA, max_position_embeddings=10)) == 10


def test_every_knob_has_its_words():
    gemma = knobs_of(spec_of(GEMMA3, attention_bias=True))
    assert gemma["rope"] == "theta 1,000,000; with a window theta 10,000"
    assert gemma["windows"] == "8 tokens in 5 of 6 layers"
    assert gemma["norms"] == "4 in a layer, times 1 + w, epsilon 1e-06"
    assert gemma["embedding"] == "used for the output, too; its rows times 5.6569"
    assert gemma["scale"] == "1 / sqrt(24)" and gemma["biases"] == "q, k, v, o"
    assert gemma["MLP"] == "gelu, the form with tanh, 48 wide"
    moe = knobs_of(spec_of(MOE, norm_topk_prob=True, decoder_sparse_step=2))
    assert moe["experts"] == (
        "3 of 12, 24 wide, in 3 of 6 layers; shares made to sum to one"
    )
    assert "shares as they are" in knobs_of(spec_of(MOE))["experts"]
    yarn = {"type": "yarn", "factor": 4.0}
    qwen2 = knobs_of(spec_of(QWEN2, rope_scaling=yarn))
    assert qwen2["rope"] == "theta 10,000, yarn scaling by 4"
    assert qwen2["biases"] == "q, k, v" and qwen2["q and k norms"] == "none"
    assert knobs_of(spec_of(QWEN3))["q and k norms"] == "one for each head"
    factors = {"rope_type": "factors", "factors": [1.0] * 4}
    llama = knobs_of(spec_of(LLAMA, rope_scaling=factors))
    assert llama["rope"] == "theta 10,000, a divisor for each frequency"


def test_transformers_is_silent(capfd, folders):
    ids = list(range(8))
    assert parity.their_logits(folders["llama"], ids).shape == (8, 263)
    out, err = capfd.readouterr()
    assert out == err == ""
    assert torch.is_grad_enabled()
