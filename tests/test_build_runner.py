"""How large the KV cache becomes, and which runner a backend gets."""

import sys
from dataclasses import replace

import pytest

from minivllm.errors import ConfigError
from minivllm.models.spec import DeltaNetSpec, ModelSpec, RopeSpec
from minivllm.runners.base import CacheLayout
from minivllm.runners.build import (
    DEFAULT_CPU_BYTES,
    CacheConfig,
    build_runner,
    choose_backend,
    count_blocks,
)
from minivllm.runners.fake_runner import FakeRunner
from minivllm.runners.kv_cache import (
    kv_bytes_per_token,
    num_blocks_for,
    state_bytes,
)
from tests.tiny_folder import (
    BYTE_VOCAB_SIZE,
    CONFIG,
    make_tensors,
    write_byte_tokenizer,
    write_checkpoint,
    write_parrot,
)

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

RECURRENT = CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": BYTE_VOCAB_SIZE,
    "layer_types": ["linear_attention"] * 2,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


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
        ({"num_blocks": 2**31}, "num_blocks is 2,147,483,648, but 2,147,483,647 is"),
        ({"max_num_batched_tokens": 10**18}, "2,147,483,647 is the limit: lower it"),
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
    cache = CacheConfig(num_blocks=2**31 - 1, block_size=4096)
    with pytest.raises(ConfigError, match="the KV cache cannot be reserved"):
        build_runner(tmp_path, backend=backend, cache=cache)


def test_a_budget_of_more_blocks_than_can_be_numbered_is_refused():
    cache = CacheConfig(kv_cache_memory_bytes=2**70)
    with pytest.raises(ConfigError, match=r"blocks, but 2,147,483,647 is the limit"):
        count_blocks(cache, SPEC, 4, None)


# The published sizes of Qwen3.5-9B; nothing of it is loaded.
QWEN = replace(
    SPEC,
    num_layers=32,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    max_position_embeddings=262_144,
    delta_net=DeltaNetSpec(
        layers=tuple(layer for layer in range(32) if (layer + 1) % 4),
        num_key_heads=16,
        num_value_heads=32,
        key_head_dim=128,
        value_head_dim=128,
        conv_kernel_size=4,
    ),
)
STATE = 24 * ((2 * 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * 4)
BLOCK = 16 * 8 * 2 * 4 * 256 * 2


def test_the_states_of_a_real_model_and_its_blocks_fit_into_the_budget():
    assert (STATE, BLOCK) == (51_511_296, 524_288)
    assert state_bytes(QWEN, 2) == STATE
    assert 16 * kv_bytes_per_token(QWEN, 2) == BLOCK
    cache = CacheConfig(kv_cache_memory_bytes=2**30)
    num_blocks, layout = count_blocks(cache, QWEN, 2, None)
    assert layout == CacheLayout(num_states=10, num_kept_states=2)
    assert num_blocks == (2**30 - 12 * STATE) // BLOCK == 869


@pytest.mark.parametrize(
    ("memory_bytes", "way_out"),
    [
        (STATE - 1, "or gpu_memory_utilization$"),
        (STATE + BLOCK - 1, "or gpu_memory_utilization, or lower block_size$"),
    ],
)
def test_smaller_blocks_are_the_way_out_only_where_a_state_fits(memory_bytes, way_out):
    cache = CacheConfig(kv_cache_memory_bytes=memory_bytes)
    needs = "one block of 16 tokens needs 524,288, and a request's states 51,511,296"
    with pytest.raises(ConfigError, match=f"{needs}: raise .* {way_out}"):
        count_blocks(cache, QWEN, 2, None)


@pytest.mark.parametrize(
    ("memory_bytes", "num_texts"), [(STATE, 1), (7 * STATE, 3), (2**40, 64 + 256)]
)
def test_without_attention_there_are_blocks_for_as_many_texts_as_states(
    memory_bytes, num_texts
):
    net = replace(QWEN.delta_net, layers=tuple(range(24)))
    spec = replace(QWEN, num_layers=24, delta_net=net)
    cache = CacheConfig(kv_cache_memory_bytes=memory_bytes, max_model_len=8192)
    num_blocks, layout = count_blocks(cache, spec, 2, None)
    assert layout.num_states + layout.num_kept_states == num_texts
    assert num_blocks == num_texts * 8192 // 16


def test_without_attention_a_state_must_fit_too():
    net = replace(QWEN.delta_net, layers=tuple(range(24)))
    spec = replace(QWEN, num_layers=24, delta_net=net)
    for memory_bytes in (1, STATE - 1):
        cache = CacheConfig(kv_cache_memory_bytes=memory_bytes)
        with pytest.raises(ConfigError, match="a request's states 51,511,296: raise"):
            count_blocks(cache, spec, 2, None)
    with pytest.raises(ConfigError, match="may take 0 bytes"):
        count_blocks(CacheConfig(), spec, 2, -(10**9))


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_states_that_do_not_fit_into_memory_name_the_option_for_them(backend, tmp_path):
    write_checkpoint(tmp_path, make_tensors(RECURRENT), RECURRENT)
    write_byte_tokenizer(tmp_path, None)
    many = 2**31 - 1
    cache = CacheConfig(num_blocks=1, max_num_seqs=many, max_num_batched_tokens=many)
    with pytest.raises(ConfigError, match=r"be reserved .* or max_num_seqs$"):
        build_runner(tmp_path, backend=backend, cache=cache)
