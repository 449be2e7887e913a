"""The digital twin: it agrees with itself, and finds every kind of difference."""

import json
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.engine.engine import LLMEngine
from minivllm.engine.trace import TraceWriter, describe_engine
from minivllm.errors import ConfigError, MinivllmError, RequestError
from minivllm.llm import LLM
from minivllm.loading.loader import load_model
from minivllm.reference.decoder import NumpyDecoder
from minivllm.runners.fake_runner import FakeRunner
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.sampling.params import SamplingParams
from minivllm.twin import TokenDifference, TwinReport, recorded_requests, replay
from tests.tiny_folder import make_tensors, write_checkpoint, write_parrot

GREEDY = SamplingParams(temperature=0, max_tokens=8)
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), make_tensors())


@pytest.fixture(scope="module")
def decoder(folder) -> NumpyDecoder:
    return load_model(folder, backend="numpy")


def make_engine(decoder: NumpyDecoder, **options: Any) -> LLMEngine:
    runner = NumpyRunner(decoder, num_blocks=12, block_size=4, max_model_len=64)
    return LLMEngine(runner, max_num_batched_tokens=options.pop("budget", 9), **options)


def record(engine: LLMEngine) -> Records:
    """Run requests of every kind: greedy, sampled, early, late, preempted, aborted."""
    records: Records = []
    engine.listeners.append(records.append)
    system = [3, 1, 4, 1, 5, 9]
    warm = replace(GREEDY, temperature=2.0, max_tokens=13)
    engine.add_request("A", [*system, 2, 6], replace(GREEDY, max_tokens=14))
    engine.step()
    engine.add_request("B", [*system, 2, 7], warm)
    engine.step()
    engine.add_request("C", [*range(12)], warm)
    engine.add_request("D", [*range(2, 15)], GREEDY)
    while sum("D" in step["sampled_token_ids"] for step in records) < 2:
        engine.step()
    engine.abort_request("D")
    engine.add_request("D", [8], replace(warm, seed=5, max_tokens=6))
    while engine.has_unfinished_requests():
        engine.step()
    return records


@pytest.fixture(scope="module")
def trace(decoder) -> tuple[dict[str, Any], Records]:
    engine = make_engine(decoder)
    header = describe_engine(engine)
    records = record(engine)
    assert any(step["preempted"] for step in records)
    assert any(step["aborted"] for step in records)
    return header, records


def scores(decoder: NumpyDecoder, text: Sequence[int]) -> np.ndarray:
    """Score what follows the slow way, without an engine."""
    return decoder.next_token_logits(text)


def place_of(records: Records, request_id: str, index: int) -> dict[str, Any]:
    """Return the record with a token of the first request of that name."""
    for step in records:
        if request_id in step["sampled_token_ids"]:
            if index == 0:
                return step
            index -= 1
    raise AssertionError("no such token")


def test_a_recording_of_the_numpy_runner_agrees_with_its_twin(decoder, trace):
    report = replay(trace, decoder)
    num_tokens = sum(len(step["sampled_token_ids"]) for step in trace[1])
    assert report.num_requests == 5 and report.num_tokens == num_tokens > 40
    assert report.num_different == 0 and report.first_difference is None
    # The batches are the same as those recorded: not even the rounding differs.
    assert report.largest_logit_difference == 0.0


def test_a_twin_with_less_memory_preempts_more_and_says_the_same(decoder, trace):
    report = replay(trace, decoder, kv_cache_memory_bytes=1)
    assert report.num_different == 0 and report.num_tokens > 40
    assert 0 < report.largest_logit_difference < 1e-4  # other batches round otherwise


def test_the_engine_of_the_recording_does_not_matter(decoder, trace):
    header, _ = trace
    for options in (
        {"policy": "decode_first", "enable_prefix_caching": False},
        {"budget": 100, "max_num_seqs": 2},
    ):
        engine = make_engine(decoder, **options)
        records = record(engine)
        for other in (header, describe_engine(engine) | {"policy": "my own"}, {}):
            report = replay((other, records), decoder)
            assert report.num_different == 0
            assert report.largest_logit_difference < 1e-4


def test_a_wrong_last_token_is_the_only_difference(decoder, trace):
    header, records = trace[0], deepcopy(trace[1])
    request = recorded_requests(records)[0]
    step = place_of(records, "A", len(request.token_ids) - 1)
    right = request.token_ids[-1]
    wrong = (right + 1) % 20
    step["sampled_token_ids"]["A"] = [wrong]
    logits = scores(decoder, [*request.prompt_token_ids, *request.token_ids[:-1]])
    step["token_logits"]["A"] = [float(logits[wrong])]
    report = replay((header, records), decoder)
    assert report.num_different == 1
    first = report.first_difference
    assert first == TokenDifference(
        request_id="A", index=13, recorded=wrong, recomputed=right, gap=first.gap
    )
    assert first.gap == pytest.approx(float(logits[right] - logits[wrong]), abs=1e-4)
    assert first.gap > 0 and report.largest_logit_difference < 1e-4


def test_the_twin_goes_on_with_the_recorded_tokens(decoder, trace):
    """One wrong token in the middle: all that follows is judged on the wrong text."""
    header, records = trace[0], deepcopy(trace[1])
    step = place_of(records, "A", 3)
    step["sampled_token_ids"]["A"] = [(step["sampled_token_ids"]["A"][0] + 1) % 20]
    request = recorded_requests(records)[0]
    text = [*request.prompt_token_ids, *request.token_ids]
    expected = [
        index
        for index in range(14)
        if scores(decoder, text[: 8 + index]).argmax() != request.token_ids[index]
    ]
    assert expected[0] == 3 and 1 < len(expected) < 14
    report = replay((header, records), decoder)
    assert report.num_different == len(expected)
    assert report.first_difference.index == 3
    assert report.num_tokens == replay(trace, decoder).num_tokens


def test_a_sampled_token_is_compared_too(decoder, trace):
    header, records = trace[0], deepcopy(trace[1])
    for step in records:
        for request in step["added"]:
            if request["request_id"] == "B":
                request["sampling_params"]["seed"] += (
                    1  # as if the recording had drawn other numbers
                )
    report = replay((header, records), decoder)
    assert report.num_different > 3
    assert report.first_difference.request_id == "B"
    assert report.largest_logit_difference == 0.0


def test_the_largest_logit_difference_is_found(decoder, trace):
    header, records = trace[0], deepcopy(trace[1])
    place_of(records, "C", 2)["token_logits"]["C"][0] += 0.25
    place_of(records, "B", 1)["token_logits"]["B"][0] -= 0.5
    report = replay((header, records), decoder)
    assert report.where == ("B", 1) and report.num_different == 0
    assert report.largest_logit_difference == pytest.approx(0.5, abs=1e-4)


def test_other_weights_are_noticed(decoder, trace):
    weights = dict(decoder.weights)
    name = "layers.1.self_attn.v_proj.weight"
    weights[name] = weights[name] * np.float32(1.5)
    report = replay(trace, NumpyDecoder(decoder.spec, weights))
    assert report.num_different > 0 and report.largest_logit_difference > 0.01


def test_torch_agrees_with_its_twin(folder, decoder):
    pytest.importorskip("torch")
    from minivllm.runners.torch_runner import TorchRunner

    torch_decoder = load_model(folder, backend="torch", device="cpu")
    runner = TorchRunner(torch_decoder, num_blocks=12, block_size=4, max_model_len=64)
    engine = LLMEngine(runner, max_num_batched_tokens=9)
    records = record(engine)
    header = describe_engine(engine)
    assert (header["backend"], header["dtype"]) == ("torch", "float32")
    report = replay((header, records), decoder)
    assert report.num_different == 0 and report.num_requests == 5
    assert 0 < report.largest_logit_difference < 1e-4


def test_outputs_are_compared_by_their_tokens(decoder, tmp_path):
    folder = write_parrot(tmp_path)
    params = [GREEDY, replace(GREEDY, temperature=50.0, seed=3)]
    with LLM(folder, backend="numpy", trace=tmp_path / "t.jsonl") as llm:
        outputs = llm.generate([[*b"x"], [*b"hello:"]], params)
    report = replay(outputs, folder, sampling_params=params)
    assert report == TwinReport(
        num_requests=2,
        num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        num_different=0,
        first_difference=None,
        largest_logit_difference=None,
        where=None,
    )
    greedy = replay(outputs, folder, sampling_params=GREEDY)
    assert greedy.num_different > 0 and greedy.first_difference.request_id == "1"
    # The trace of the same run names its model.
    assert replay(tmp_path / "t.jsonl").num_tokens == report.num_tokens
    assert replay(str(tmp_path / "t.jsonl")).largest_logit_difference == 0.0


BUSY = SamplingParams(
    n=3, temperature=20.0, top_k=15, top_p=0.95, min_p=1e-4, repetition_penalty=1.3,
    frequency_penalty=0.4, presence_penalty=-0.2, logit_bias={3: 2.0, 4: -100},
    allowed_token_ids=range(18), min_tokens=3, stop_token_ids=[7], max_tokens=9,
)  # fmt: skip


def test_every_parameter_and_every_answer_is_computed_again(decoder):
    engine = make_engine(decoder)
    records = []
    engine.listeners.append(records.append)
    engine.add_request("unseeded", [1, 2, 3, 4, 5], BUSY)
    engine.add_request("seeded", [1, 2, 3, 4, 6], replace(BUSY, seed=5))
    while engine.has_unfinished_requests():
        engine.step()
    header = describe_engine(engine)
    report = replay((header, json.loads(json.dumps(records))), decoder)
    assert report.num_requests == 6 and report.num_tokens > 20
    assert report.num_different == report.num_guided == 0
    assert report.largest_logit_difference < 1e-4
    for name, value in (("top_k", 2), ("logit_bias", {"5": 50}), ("min_tokens", 9)):
        other = deepcopy(records)
        for request in other[0]["added"]:
            request["sampling_params"][name] = value
        assert replay((header, other), decoder).num_different > 0, name


def test_answers_of_one_prompt_are_compared_one_by_one(decoder, tmp_path):
    folder = write_parrot(tmp_path)
    params = SamplingParams(n=3, temperature=50.0, seed=3, max_tokens=6, top_p=0.99)
    with LLM(folder, backend="numpy") as llm:
        outputs = llm.generate([[*b"x"], [*b"hello:"]], params)
    report = replay(outputs, folder, sampling_params=params)
    assert report.num_requests == 6 and report.num_different == 0
    other = replay(outputs, folder, sampling_params=replace(params, seed=4))
    assert other.num_different > 0


def test_recommendations_of_the_model_are_filled_in_again(decoder, tmp_path):
    folder = write_parrot(tmp_path)
    config = {"temperature": 40.0, "top_k": 3}
    (folder / "generation_config.json").write_text(json.dumps(config))
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    with LLM(folder, backend="numpy") as llm:
        outputs = llm.generate([[*b"hello:"]], params)
    assert replay(outputs, folder, sampling_params=params).num_different == 0
    plain = replace(params, top_k=0)
    assert replay(outputs, folder, sampling_params=plain).num_different > 0


def test_end_tokens_that_were_banned_for_a_while_are_banned_again(tmp_path):
    folder = write_parrot(tmp_path)  # " blué!" and the end come after ":"
    params = replace(GREEDY, min_tokens=12, max_tokens=16)
    stopped = replace(GREEDY, stop_token_ids=[ord("z")], min_tokens=5)
    ignored = replace(GREEDY, ignore_eos=True, min_tokens=9, max_tokens=12)
    asked = [params, stopped, ignored]
    with LLM(folder, backend="numpy") as llm:
        outputs = llm.generate([[*b"hello:"], [*b"x"], [*b"hello:"]], asked)
    end = llm.tokenizer.eos_token_ids
    first, second, third = (output.outputs[0].token_ids for output in outputs)
    assert not end & {*first[:12]} and end & {*third[:9]}, "the ban was needed"
    assert ord("z") not in second[:5]
    report = replay(outputs, folder, sampling_params=asked)
    assert report.num_tokens == len(first) + len(second) + len(third)
    assert report.num_different == 0


def test_tokens_chosen_with_a_function_of_the_users_are_compared_by_scores(decoder):
    def boost(output_token_ids, logits):
        logits[5] += 100

    engine = make_engine(decoder)
    records = []
    engine.listeners.append(records.append)
    engine.add_request("a", [1, 2], replace(GREEDY, logits_processors=[boost]))
    engine.add_request("b", [1, 2], GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    report = replay((describe_engine(engine), records), decoder)
    assert report.num_guided == 8 and report.num_tokens == 16
    assert report.num_different == 0 and report.largest_logit_difference < 1e-4
    assert "8 were chosen with a logits processor: not compared" in str(report)


def test_a_file_and_the_records_of_a_listener_are_traces(decoder, trace, tmp_path):
    engine = make_engine(decoder)
    engine.listeners.append(TraceWriter(tmp_path / "t", describe_engine(engine)))
    records = record(engine)
    reports = [replay(x, decoder) for x in (trace, tmp_path / "t", records)]
    assert {(report.num_tokens, report.num_different) for report in reports} == {
        (reports[0].num_tokens, 0)
    }


def test_a_report_can_be_read():
    first = TokenDifference(
        request_id="A", index=7, recorded=31, recomputed=318, gap=0.01234
    )
    report = TwinReport(
        num_requests=2,
        num_tokens=1234,
        num_different=3,
        first_difference=first,
        largest_logit_difference=0.0625,
        where=("B", 4),
    )
    assert str(report).splitlines() == [
        "2 requests, 1,234 tokens compared",
        "3 tokens differ; the first: request 'A', token 7: 31 recorded, 318 "
        "recomputed, logit gap 0.0123",
        "largest logit difference: 0.0625, request 'B', token 4",
    ]
    same = replace(
        report, num_different=0, first_difference=None, where=None,
        largest_logit_difference=None,
    )  # fmt: skip
    assert str(same).splitlines()[1:] == [
        "every token is the same",
        "no logits were recorded",
    ]


def test_what_cannot_be_compared_is_refused(decoder, trace, tmp_path):
    header, records = trace
    fake = LLMEngine(FakeRunner())
    with pytest.raises(ConfigError, match="backend 'fake', whose tokens are random"):
        replay((describe_engine(fake), []), decoder)
    with pytest.raises(ConfigError, match="does not name one"):
        replay(trace)
    with pytest.raises(ConfigError, match="model is a int"):
        replay(trace, 7)
    with pytest.raises(ConfigError, match=r"chose among 21 tokens.*scores 20"):
        replay((header | {"vocab_size": 21}, records), decoder)
    with pytest.raises(RequestError, match=r"token of request 'A', but .* its start"):
        replay((header, records[3:]), decoder)
    for nothing in ((header, records[:0]), []):
        with pytest.raises(RequestError, match="no answer of at least 1 token"):
            replay(nothing, decoder)
    strange = deepcopy(records)
    strange[0]["added"][0]["prompt_token_ids"][0] = 99
    with pytest.raises(RequestError, match="token id 99"):
        replay((header, strange), decoder)


def test_outputs_without_their_parameters_are_refused(decoder):
    with LLM(backend="fake") as llm:
        outputs = llm.generate([[1], [2]])
    for params, message in (
        (None, "do not say how their tokens were chosen"),
        ([GREEDY], "1 entries for 2 outputs"),
        (SamplingParams(), "a seed that only the engine knows"),
    ):
        with pytest.raises(RequestError, match=message):
            replay(outputs, decoder, sampling_params=params)


def test_a_twin_that_fails_says_so(decoder, trace):
    weights = decoder.weights | {
        "norm.weight": np.full_like(decoder.weights["norm.weight"], np.nan)
    }
    with pytest.raises(MinivllmError, match=r"'A' fails on the NumPy runner: .*nan"):
        replay(trace, NumpyDecoder(decoder.spec, weights))


def test_the_public_name_stays_a_function():
    code = (
        "import minivllm; minivllm.replay; import minivllm.twin; "
        "print(callable(minivllm.replay))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert run.stdout == "True\n", run.stderr


def test_logprobs_of_the_recording_are_no_hindrance(decoder):
    def boost(output_token_ids, logits):
        logits[5] += 100

    engine = make_engine(decoder)
    records = []
    engine.listeners.append(records.append)
    params = replace(GREEDY, logits_processors=[boost], logprobs=2, prompt_logprobs=1)
    engine.add_request("a", [1, 2], params)
    while engine.has_unfinished_requests():
        engine.step()
    assert replay((describe_engine(engine), records), decoder).num_guided == 8
