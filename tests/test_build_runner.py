"""How large the KV cache becomes, and which runner a backend gets."""

import sys

import pytest

from minivllm.errors import ConfigError
from minivllm.models.spec import ModelSpec, RopeSpec
from minivllm.runners.base import CacheLayout
from minivllm.runners.build import (
    DEFAULT_CPU_BYTES,
    CacheConfig,
    build_runner,
    choose_backend,
    count_blocks,
)
from minivllm.runners.fake_runner import FakeRunner
from minivllm.runners.kv_cache import kv_bytes_per_token, num_blocks_for
from tests.tiny_folder import write_parrot

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=12,
    intermediate_size=4,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    max_position_embeddings=1000,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10_000.0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_parrot(tmp_path_factory.mktemp("parrot"))


def test_a_token_takes_a_key_and_a_value_per_head_and_layer():
    # layers x (key and value) x heads x numbers x bytes
    assert kv_bytes_per_token(SPEC, 4) == 5 * 2 * 3 * 2 * 4
    assert kv_bytes_per_token(SPEC, 2) == 120


@pytest.mark.parametrize(
    ("memory_bytes", "num_blocks"), [(959, 0), (960, 1), (1919, 1), (1920, 2)]
)
def test_blocks_that_do_not_fit_wholly_do_not_count(memory_bytes, num_blocks):
    assert num_blocks_for(memory_bytes, SPEC, 4, 4) == num_blocks


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_the_formula_gives_the_size_of_the_real_cache(folder, backend, block_size):
    cache = CacheConfig(block_size=block_size, num_blocks=6)
    runner, _ = build_runner(
        folder, backend=backend, dtype="float32", device="cpu", cache=cache
    )
    per_token = kv_bytes_per_token(runner.decoder.spec, 4)
    assert runner.kv_cache.nbytes == 6 * block_size * per_token


@pytest.mark.parametrize(
    ("options", "free_bytes", "expected"),
    [
        ({"num_blocks": 7}, None, 7),
        ({"num_blocks": 7}, 10**9, 7),
        ({"kv_cache_memory_bytes": 16 * 240 * 3 + 1}, None, 3),
        ({}, 16 * 240 * 5, 5),
        ({"gpu_memory_utilization": 0.5}, 16 * 240 * 5, 5),
        ({}, None, DEFAULT_CPU_BYTES // (16 * 240)),
        ({"block_size": 4}, 4 * 240 * 9, 9),
    ],
)
def test_the_cache_has_as_many_blocks_as_its_memory_holds(
    options, free_bytes, expected
):
    num_blocks, layout = count_blocks(CacheConfig(**options), SPEC, 4, free_bytes)
    assert (num_blocks, layout) == (expected, CacheLayout())


@pytest.mark.parametrize(
    ("options", "free_bytes", "message"),
    [
        (
            {"kv_cache_memory_bytes": 100},
            None,
            "may take 100 bytes, but one block of 16 tokens needs 3,840: raise kv_",
        ),
        ({}, 0, "may take 0 bytes"),
        ({}, -5, "may take 0 bytes"),
        (
            {"gpu_memory_utilization": 0.5},
            None,
            "is 0.5, but the model is not on a GPU",
        ),
    ],
)
def test_a_cache_without_a_block_is_refused_with_the_numbers(
    options, free_bytes, message
):
    with pytest.raises(ConfigError, match=message):
        count_blocks(CacheConfig(**options), SPEC, 4, free_bytes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 992),  # the model's 1,000, in full blocks
        ({"max_model_len": 64}, 64),
        ({"max_model_len": 79}, 64),
        ({"max_model_len": 1000, "block_size": 8}, 1000),
        ({"max_model_len": 7, "block_size": 4}, 4),
    ],
)
def test_a_limit_that_is_no_multiple_of_the_block_size_is_rounded_down(
    options, expected
):
    assert CacheConfig(**options).model_len(SPEC) == expected


def test_the_fake_runner_rounds_down_too():
    runner, tokenizer = build_runner(
        "any", backend="fake", cache=CacheConfig(max_model_len=79)
    )
    assert isinstance(runner, FakeRunner) and tokenizer is None
    assert (runner.max_model_len, runner.block_size) == (64, 16)


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory_bytes": 2**20}, {"gpu_memory_utilization": 0.5}]
)
def test_a_fake_cache_has_no_bytes(options):
    with pytest.raises(ConfigError, match=r"fake backend has no model .* num_blocks"):
        build_runner("any", backend="fake", cache=CacheConfig(**options))


def test_long_models_get_4096_tokens_unless_asked():
    from dataclasses import replace

    long = replace(SPEC, max_position_embeddings=131_072)
    assert CacheConfig().model_len(long) == 4096
    assert CacheConfig(max_model_len=8192).model_len(long) == 8192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1001}, "1,001, but the model was trained for 1,000"),
        ({"max_model_len": 15}, "is 15, less than one block of 16"),
    ],
)
def test_an_impossible_length_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**options).model_len(SPEC)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0, but must be an integer of at least 1"),
        ({"block_size": True}, "block_size is True"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 2.5}, "num_blocks is 2.5"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes is -1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": "8k"}, "max_model_len is '8k'"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1"),
        ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization is 'all'"),
        (
            {"num_blocks": 5, "kv_cache_memory_bytes": 5},
            "num_blocks and kv_cache_memory_bytes each say how large",
        ),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**options)


def test_auto_takes_torch_where_it_is_and_numpy_where_it_is_not(monkeypatch):
    assert choose_backend("auto") == "torch"
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto") == "numpy"
    assert choose_backend("fake") == "fake"


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="'jax', but must be one of auto, torch"):
        choose_backend("jax")


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_runner_knows_its_sizes_and_brings_the_tokenizer(folder, backend):
    cache = CacheConfig(block_size=8, num_blocks=6, max_model_len=45)
    runner, tokenizer = build_runner(
        folder, backend=backend, dtype="float32", device="cpu", cache=cache
    )
    sizes = (runner.num_blocks, runner.block_size, runner.max_model_len)
    assert sizes == (6, 8, 40)
    assert runner.vocab_size == tokenizer.vocab_size == 257
    runner.close()
    runner.close()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_gpu_share_is_refused_on_a_cpu(folder, backend):
    cache = CacheConfig(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="the model is not on a GPU"):
        build_runner(
            folder, backend=backend, device="cpu", dtype="float32", cache=cache
        )


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_cache_larger_than_the_memory_is_an_error_of_ours(backend, tmp_path):
    write_parrot(tmp_path)
    with pytest.raises(ConfigError, match="the KV cache cannot be reserved"):
        build_runner(tmp_path, backend=backend, cache=CacheConfig(num_blocks=10**13))
