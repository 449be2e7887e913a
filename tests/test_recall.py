"""The small models of the chapter on hybrid attention do what it says of them."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from minivllm import LLM, SamplingParams
from minivllm.loading.loader import load_model
from minivllm.text.tokenizer import Tokenizer

BOOK = Path(__file__).parents[1] / "book"
FOLDERS = {kind: BOOK / "models" / f"recall-{kind}" for kind in ("hybrid", "recurrent")}

_module = importlib.util.spec_from_file_location(
    "train_recall", BOOK / "tools" / "train_recall.py"
)
train_recall = importlib.util.module_from_spec(_module)
_module.loader.exec_module(train_recall)


def load(kind: str) -> torch.nn.Module:
    """Read a model from its folder; called with token ids, it returns logits."""
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[kind]).eval()


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {kind: load(kind) for kind in FOLDERS}


@pytest.mark.parametrize(
    ("kind", "num_pairs", "at_least", "at_most"),
    [
        ("hybrid", 4, 0.98, 1),
        ("hybrid", 32, 0.95, 1),
        ("hybrid", 64, 0.95, 1),
        ("recurrent", 8, 0.95, 1),
        ("recurrent", 32, 0.4, 0.8),
        ("recurrent", 64, 0.15, 0.5),
    ],
)
def test_only_the_hybrid_recalls_more_pairs_than_its_states_hold(
    models, kind, num_pairs, at_least, at_most
):
    accuracy = train_recall.measure(models[kind], num_pairs, num_queries=512)
    assert at_least <= accuracy <= at_most


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_engine_loads_them_and_answers(kind, backend):
    token_ids, values = train_recall.make_batch(np.random.default_rng(2), 6, 5)
    tokenizer = Tokenizer.from_dir(FOLDERS[kind])
    with LLM(FOLDERS[kind], backend=backend, device="cpu", num_blocks=200) as llm:
        for row, answers in zip(token_ids.tolist(), values.tolist(), strict=True):
            # Five texts in one batch: each asks one key more than the one before.
            prompts = [row[: 11 + asked] for asked in range(1, 6)]
            params = SamplingParams(temperature=0, max_tokens=1)
            outputs = llm.generate(prompts, params)
            said = [output.outputs[0].token_ids[0] for output in outputs]
            assert said == answers
            assert (
                outputs[0].outputs[0].text.strip()
                == tokenizer.decode(answers[:1]).strip()
            )


@pytest.mark.parametrize("kind", FOLDERS)
def test_our_logits_are_those_of_transformers(models, kind):
    token_ids, _ = train_recall.make_batch(np.random.default_rng(3), 1, 20)
    with torch.inference_mode():
        expected = models[kind](torch.from_numpy(token_ids), use_cache=False).logits
    decoder = load_model(FOLDERS[kind], backend="numpy")
    positions = np.arange(token_ids.shape[1])
    hidden = decoder.forward(token_ids[0], positions, decoder.dense_context())
    difference = np.abs(decoder.compute_logits(hidden) - expected[0].numpy()).max()
    assert difference < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_log_tells_of_these_weights(models, kind):
    log = (FOLDERS[kind] / "train.log").read_text()
    assert f"{models[kind].num_parameters():,} parameters" in log
    assert f"layers: {', '.join(models[kind].config.layer_types)}\n" in log
    [seconds] = re.findall(r"^trained in .* \((\d+) s of CPU time\)$", log, re.M)
    assert int(seconds) < 600
    table = re.findall(r"^ *(\d+)  (\d\.\d+)$", log, re.M)
    assert [int(num_pairs) for num_pairs, _ in table] == list(train_recall.COUNTS)
    for num_pairs, accuracy in table[:5]:
        found = train_recall.measure(models[kind], int(num_pairs), num_queries=512)
        assert abs(found - float(accuracy)) < 0.05


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_shapes_are_those_that_the_script_trains(models, kind):
    fresh = train_recall.make_model(kind).state_dict()
    found = models[kind].state_dict()
    assert {name: x.shape for name, x in found.items()} == {
        name: x.shape for name, x in fresh.items()
    }


def test_a_text_has_every_key_twice_and_the_answers_in_order():
    token_ids, values = train_recall.make_batch(np.random.default_rng(0), 5, 3)
    assert token_ids.shape == (5, 10) and values.shape == (5, 3)
    for row, answers in zip(token_ids.tolist(), values.tolist(), strict=True):
        pairs = dict(zip(row[:6:2], row[1:6:2], strict=True))
        assert row[6] == train_recall.BAR
        assert sorted(row[7:]) == sorted(pairs)
        assert [pairs[key] for key in row[7:]] == answers


@pytest.mark.parametrize("kind", FOLDERS)
def test_prompts_are_words(models, kind):
    tokenizer = Tokenizer.from_dir(FOLDERS[kind])
    text = "k3 v17 k9 v2 k60 v63 | k9"
    token_ids = tokenizer.encode(text)
    assert token_ids == [3, 64 + 17, 9, 64 + 2, 60, 64 + 63, train_recall.BAR, 9]
    assert tokenizer.decode(token_ids) == text
    tokenizer.check_embedding_rows(models[kind].config.vocab_size)
    assert tokenizer.vocab_size == models[kind].config.vocab_size
    # transformers cannot cache for a model without any full attention.
    logits = models[kind](torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == "v2"


def test_the_files_are_small():
    sizes = [file.stat().st_size for file in BOOK.glob("models/**/*") if file.is_file()]
    assert sum(sizes) < 2_000_000
