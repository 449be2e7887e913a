"""The compiled operations do what their references do, over random shapes."""

import platform
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minivllm.engine.engine import LLMEngine
from minivllm.errors import BackendUnavailable
from minivllm.ops import cpu, registry
from minivllm.ops.cpu import (
    CompiledAttention,
    CompiledLinear,
    CompiledPrefill,
    CompiledRMSNorm,
    compiled_argmax,
    compiled_gelu_and_mul,
    compiled_gelu_tanh_and_mul,
    compiled_reshape_and_cache,
    compiled_rotary_embedding,
    compiled_silu_and_mul,
    why_no_product,
    why_no_tiles,
    why_not_compiled,
)
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.reference import (
    TorchRMSNorm,
    argmax,
    gelu_and_mul,
    gelu_tanh_and_mul,
    reshape_and_cache,
    rotary_embedding,
    silu_and_mul,
)
from minivllm.runners.build import CacheConfig, build_runner
from minivllm.sampling.params import SamplingParams
from tests.op_tools import assert_close
from tests.tiny_folder import (
    CONFIG,
    make_tensors,
    write_byte_tokenizer,
    write_checkpoint,
)

needs_compiler = pytest.mark.skipif(
    why_not_compiled("cpu", "float32") is not None,
    reason=str(why_not_compiled("cpu", "float32")),
)
needs_tiles = pytest.mark.skipif(
    why_no_tiles("cpu", "bfloat16") is not None,
    reason=str(why_no_tiles("cpu", "bfloat16")),
)
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


GATES = [
    (compiled_silu_and_mul, silu_and_mul),
    (compiled_gelu_and_mul, gelu_and_mul),
    (compiled_gelu_tanh_and_mul, gelu_tanh_and_mul),
]


@pytest.fixture(params=[1, 2])
def threads(request):
    """Both the loops of one thread and those that are cut among two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 31, 576, 1000])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 200])
def test_norms(num_rows, size, dtype, numbers, threads):
    x, added = torch.randn(2, num_rows, size, generator=numbers).to(dtype)
    weight = torch.randn(size, generator=numbers).to(dtype)
    ours, theirs = CompiledRMSNorm(weight, EPS), TorchRMSNorm(weight, EPS)
    before = x.clone()
    if num_rows:
        assert_close(ours(x), theirs(x))
    assert ours(x).shape == x.shape
    assert x.equal(before)
    our_sum, their_sum = x.clone(), x.clone()
    normed = ours(our_sum, added)
    if num_rows:
        assert_close(normed, theirs(their_sum, added))
        assert our_sum.equal(their_sum)


@needs_compiler
def test_the_epsilon_of_a_norm_counts():
    x = torch.full((1, 8), 1e-3)
    norm = CompiledRMSNorm(torch.ones(8), 1e-2)
    assert_close(norm(x), TorchRMSNorm(torch.ones(8), 1e-2)(x))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 1536])
@pytest.mark.parametrize(("compiled", "of_torch"), GATES)
def test_gates(compiled, of_torch, size, dtype, numbers, threads):
    gate_up = (torch.randn(21, 2 * size, generator=numbers) * 8).to(dtype)
    assert_close(compiled(gate_up), of_torch(gate_up))


@needs_compiler
def test_gelu_keeps_its_digits_where_it_is_small():
    x = torch.linspace(-9, 9, 1000, dtype=torch.float64)
    by_tanh = 1.5957691216057308 * (x + 0.044715 * x**3)
    for compiled, exact in (
        (compiled_gelu_and_mul, 0.5 * x * torch.erfc(-x / 2**0.5)),
        (compiled_gelu_tanh_and_mul, x * by_tanh.sigmoid()),
    ):
        y = compiled(torch.cat([x, torch.ones(1000)]).float()[None])[0].double()
        assert (y / exact - 1).abs().max() < 1e-4
        assert (y - exact).abs().max() < 2e-6


@needs_compiler
@pytest.mark.parametrize("compiled", [compiled for compiled, _ in GATES])
def test_gates_far_out_are_zero_or_linear(compiled):
    gates = [-3e38, -1e30, -200.0, -90.0, -87.5, 0.0, 90.0, 200.0, 1e30, float("inf")]
    y = compiled(torch.tensor([[*gates, *[1.0] * len(gates)]]))[0]
    assert torch.allclose(y, torch.tensor(gates).clamp(min=0), atol=1e-30)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_one(dtype):
    for value in (float("nan"), -float("nan")):
        gate_up = torch.ones(1, 64, dtype=dtype)
        gate_up[0, 7] = value
        for compiled, _ in GATES:
            assert compiled(gate_up).isnan().nonzero().tolist() == [[0, 7]]
        x = torch.ones(2, 32, dtype=dtype)
        x[1, 3] = value
        normed = CompiledRMSNorm(torch.ones(32, dtype=dtype), EPS)(x)
        assert normed.isnan().all(dim=1).tolist() == [False, True]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 24, 64])
def test_rotations_leave_the_last_heads_alone(head_dim, dtype, numbers, threads):
    heads = torch.randn(300, 5, head_dim, generator=numbers).to(dtype)
    angles = torch.rand(300, 1, head_dim, generator=numbers) * 100
    cos, sin = angles.cos(), angles.sin()
    ours = heads.clone()
    result = compiled_rotary_embedding(ours, 4, cos, sin)
    assert_close(result, rotary_embedding(heads, 4, cos, sin))
    assert ours[:, 4].equal(heads[:, 4])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_go_to_their_slots(dtype, numbers):
    heads = torch.randn(7, 5, 16, generator=numbers).to(dtype)
    k, v = heads[:, 1:3], heads[:, 3:]
    ours, theirs = torch.zeros(2, 2, 6, 4, 2, 16, dtype=dtype)
    slots = torch.randperm(24, generator=numbers)[:7]
    compiled_reshape_and_cache(k, v, ours, slots)
    reshape_and_cache(k, v, theirs, slots)
    assert ours.equal(theirs)


@needs_compiler
def test_padding_is_written_nowhere():
    kv_cache = torch.zeros(2, 2, 4, 1, 16)
    k = v = torch.ones(2, 1, 16)
    compiled_reshape_and_cache(k, v, kv_cache, torch.tensor([-1, 5]))
    assert kv_cache.flatten(1, 2).sum(dim=(0, 2, 3)).nonzero().tolist() == [[5]]


def attend(make, rows, last, table, kv_cache, group_size, q):
    attention = make(rows, last, table, kv_cache, group_size)
    return attention.attend(q, kv_cache, kv_cache.shape[-1] ** -0.5)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("num_pieces", [1, 3, 9])
def test_attention(num_pieces, group_size, dtype, numbers, threads):
    generator = random.Random(num_pieces * 100 + group_size)
    for block_size in (1, 4, 16, 32):
        head_dim = generator.choice([16, 48, 64, 128])
        num_kv_heads = generator.choice([1, 2, 3])
        num_keys = 80
        width = -(-num_keys // block_size)
        kv_cache = torch.randn(
            2, 100, block_size, num_kv_heads, head_dim, generator=numbers
        ).to(dtype)
        last = torch.randint(0, num_keys, (num_pieces, 1), generator=numbers)
        last[0] = generator.choice([0, block_size - 1, num_keys - 1])
        table = torch.randint(0, 100, (num_pieces, width), generator=numbers)
        num_heads = num_kv_heads * group_size
        # q is the first part of wider rows, as q, k and v are.
        wide = torch.randn(num_pieces + 2, num_heads + 3, head_dim, generator=numbers)
        q = wide.to(dtype)[:, :num_heads]
        rows = torch.randperm(num_pieces + 2, generator=numbers)[:num_pieces, None]
        arguments = (rows, last, table, kv_cache, group_size, q)
        ours = attend(CompiledAttention, *arguments)
        in_double = *arguments[:3], kv_cache.double(), group_size, q.double()
        exact = attend(PaddedAttention, *in_double).to(dtype)
        assert_close(ours, exact, units=8 if dtype == torch.float32 else 1)


@needs_compiler
def test_attention_reads_nothing_behind_the_last_key(numbers):
    kv_cache = torch.randn(2, 4, 4, 1, 16, generator=numbers)
    table, last = torch.tensor([[2, 0]]), torch.tensor([[4]])
    q, rows = torch.randn(1, 2, 16, generator=numbers), torch.tensor([[0]])
    clean = attend(CompiledAttention, rows, last, table, kv_cache, 2, q)
    kv_cache[:, 0, 1:] = torch.nan
    kv_cache[:, [1, 3]] = torch.nan
    assert attend(CompiledAttention, rows, last, table, kv_cache, 2, q).equal(clean)


@needs_compiler
def test_large_scores_do_not_overflow():
    kv_cache = torch.ones(2, 1, 4, 1, 16)
    kv_cache[1, 0, 1] = 3
    kv_cache[0, 0, 1] *= 2
    q = torch.full((1, 1, 16), 1e4)
    place = torch.tensor([[0]])
    last = torch.tensor([[3]])
    mixed = attend(CompiledAttention, place, last, place, kv_cache, 1, q)
    assert mixed.tolist() == [[[3.0] * 16]]


both_types = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=needs_compiler),
        pytest.param(torch.bfloat16, marks=needs_tiles),
    ],
)


@both_types
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_outputs", [1, 16, 33, 64, 100, 960])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 49, 130])
def test_products(num_rows, num_outputs, has_bias, dtype, numbers, threads):
    for num_inputs in (1, 31, 32, 64, 288, 289, 576):
        x = torch.randn(num_rows, num_inputs, generator=numbers).to(dtype)
        weight = torch.randn(num_outputs, num_inputs, generator=numbers).to(dtype)
        bias = torch.randn(num_outputs, generator=numbers).to(dtype)
        bias = bias if has_bias else None
        ours = CompiledLinear(weight, bias)(x)
        assert ours.shape == (num_rows, num_outputs)
        exact = F.linear(x.double(), weight.double())
        if dtype == torch.float32:  # a sum may be much smaller than what is added
            added = F.linear(x.abs(), weight.abs(), bias.abs() if has_bias else None)
            exact += bias if has_bias else 0
            assert ((ours - exact).abs() <= 8 * torch.finfo(dtype).eps * added).all()
        elif num_rows:
            exact = exact.to(dtype)
            assert_close(ours, exact + bias if has_bias else exact, units=1)


@both_types
def test_products_take_any_view_and_number_of_dimensions(dtype, numbers):
    x = torch.randn(6, 5, 64, generator=numbers).to(dtype)
    weight = torch.randn(64, 24, generator=numbers).to(dtype).T
    linear = CompiledLinear(weight)
    assert linear(x).shape == (6, 5, 24)
    assert linear(x[::2]).equal(linear(x[::2].clone()))
    assert linear(x[0, 0]).shape == (24,)
    transposed = torch.randn(64, 7, generator=numbers).to(dtype).T
    assert linear(transposed).equal(linear(transposed.clone()))


@needs_compiler
def test_products_write_nothing_behind_their_result(numbers):
    """The last panel has fewer columns than a vector."""
    x, weight = torch.randn(9, 40, generator=numbers), torch.ones(21, 40)
    linear = CompiledLinear(weight)
    memory = torch.full((10, 21), 7.0)
    function = cpu.compiled("linear", torch.float32)
    sizes = 9, 40, 21, torch.get_num_threads()
    function(x.data_ptr(), linear.panels.data_ptr(), memory.data_ptr(), *sizes)
    assert memory[:9].equal(linear(x)) and memory[9].eq(7).all()


@needs_tiles
def test_a_row_is_the_same_whoever_else_is_in_the_batch(numbers):
    """True within the tiles, and within the vectors for one or two rows."""
    weight = torch.randn(96, 576, generator=numbers).bfloat16()
    x = torch.randn(70, 576, generator=numbers).bfloat16()
    linear = CompiledLinear(weight)
    everybody = linear(x)
    for count in (3, 16, 17, 40):
        assert linear(x[:count]).equal(everybody[:count])
    assert linear(x[:2])[:1].equal(linear(x[:1]))


@needs_compiler
def test_a_row_of_float32_is_the_same_in_every_batch(numbers):
    """Each sum takes its inputs in their order, one by one, however many rows."""
    weight = torch.randn(100, 600, generator=numbers)
    x = torch.randn(300, 600, generator=numbers)
    linear = CompiledLinear(weight)
    everybody = linear(x)
    for count in (1, 2, 5, 8, 9, 16, 17, 128, 129):
        assert linear(x[:count]).equal(everybody[:count])


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "reason"),
    [
        ("cuda", "float32", {}, "not for cuda"),
        ("cpu", "float16", {}, "not for float16"),
        ("cpu", "float32", {"head_dim": 40}, "multiple of 16"),
    ],
)
def test_conditions_say_what_is_missing(device, dtype, sizes, reason):
    assert reason in why_not_compiled(device, dtype, **sizes)


@needs_compiler
def test_products_of_float32_need_no_tiles():
    assert "not float32" in why_no_tiles("cpu", "float32")
    assert why_no_product("cpu", "float32") is None
    assert why_no_product("cpu", "bfloat16") == why_no_tiles("cpu", "bfloat16")
    assert "not for float16" in why_no_product("cpu", "float16")


def test_a_library_that_cannot_be_loaded_is_a_reason(monkeypatch):
    def fail(name):
        raise BackendUnavailable(f"{name} cannot be compiled")

    monkeypatch.setattr(cpu, "load_library", fail)
    assert why_not_compiled("cpu", "float32") == "cpu_ops.cpp cannot be compiled"
    assert "cannot be compiled" in why_no_tiles("cpu", "bfloat16")


@needs_compiler
@pytest.mark.parametrize("op", sorted(cpu.IMPLEMENTATIONS))
def test_the_compiled_backends_are_chosen(op, monkeypatch):
    monkeypatch.delenv(f"MINIVLLM_OP_{op.upper()}", raising=False)
    choice = registry.choose(op, "cpu", "float32")
    assert choice.backend.name == "compiled"
    assert set(choice.passed_over) <= {"cuda", "emulated"}  # those of a GPU


@needs_compiler
def test_wrong_memory_is_refused_before_cpp_sees_it():
    for x in (torch.ones(2, 32), torch.ones(2, 512), torch.ones(2, 64).double()):
        with pytest.raises(AssertionError):
            CompiledLinear(torch.ones(8, 64))(x)
    with pytest.raises(AssertionError):
        CompiledLinear(torch.ones(8, 64).double())
    x = torch.ones(4, 64)[:, ::2]
    with pytest.raises(AssertionError):
        CompiledRMSNorm(torch.ones(32), EPS)(x)
    with pytest.raises(AssertionError):
        CompiledRMSNorm(torch.ones(32), EPS)(torch.ones(2, 32), torch.ones(3, 32))
    several = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(AssertionError):
        CompiledAttention(several, several, several, torch.ones(2, 1, 4, 1, 16), 1)


@needs_tiles
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_attention_of_many_queries(head_dim, group_size, numbers, threads):
    generator = random.Random(head_dim + group_size)
    for block_size in (1, 4, 16, 32):
        num_kv_heads, num_pieces = generator.choice([1, 2]), generator.choice([1, 2, 5])
        lengths = [generator.choice([1, 2, 5, 16, 17, 40]) for _ in range(num_pieces)]
        before = [generator.choice([0, 1, 15, 33]) for _ in range(num_pieces)]
        longest = max(lengths)
        rows, positions, start = [], [], 2  # two rows of others come first
        for length, old in zip(lengths, before, strict=True):
            steps = torch.arange(longest).clamp(max=length - 1)
            rows.append(start + steps)
            positions.append(old + steps)
            start += length
        rows, positions = torch.stack(rows), torch.stack(positions)
        width = int(positions.max()) // block_size + 1
        table = torch.randint(0, 50, (num_pieces, width), generator=numbers)
        kv_cache = torch.randn(
            2, 50, block_size, num_kv_heads, head_dim, generator=numbers
        ).bfloat16()
        num_heads = num_kv_heads * group_size
        wide = torch.randn(start, num_heads + 1, head_dim, generator=numbers)
        q = wide.bfloat16()[:, :num_heads]
        arguments = (rows, positions, table, kv_cache, group_size, q)
        ours = attend(CompiledPrefill, *arguments).view(num_pieces, longest, -1)
        exact = attend(PaddedAttention, *arguments).view(num_pieces, longest, -1)
        for piece, length in enumerate(lengths):
            assert_close(ours[piece, :length], exact[piece, :length], units=8)


@needs_compiler
def test_the_best_score_is_the_first_of_equals_and_a_nan_is_found(numbers, threads):
    logits = torch.randn(5, 40_000, generator=numbers)
    logits[1, 7] = logits[1, 30_001] = 50
    logits[2, 39_999] = torch.nan
    logits[3] = -torch.inf
    logits[4, 0] = torch.inf
    view = logits[:, :39_999]
    for scores in (logits, view):
        largest, token_ids = compiled_argmax(scores)
        expected, expected_ids = argmax(scores)
        assert torch.equal(largest.nan_to_num(-7), expected.nan_to_num(-7))
        assert token_ids[[0, 1, 3, 4]].equal(expected_ids[[0, 1, 3, 4]])
    assert (
        compiled_argmax(logits)[0].isnan().tolist()
        == [False, False, True] + [False] * 2
    )


# Pretend that this processor is an older one: the same file, with fewer instructions.
OLDER = """
import sys
from minivllm.ops import compiler
compiler.FLAGS[compiler.FLAGS.index("-march=native")] = f"-march={sys.argv.pop(1)}"
from minivllm.ops.cpu import why_no_tiles
assert "no AMX" in why_no_tiles("cpu", "bfloat16")
"""
TESTS = f"""{OLDER}
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
LOGITS = f"""{OLDER}
import numpy as np
from tests.test_compiled_ops import logits_of_steps
np.save(sys.argv[1], logits_of_steps(*sys.argv[2:]))
"""
on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="not x86"
)


def run_older(script: str, march: str, *arguments: str) -> str:
    """Run a script in a process that compiles for another processor."""
    done = subprocess.run(
        [sys.executable, "-c", script, march, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs_compiler
@on_x86
@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64-v3"])
def test_the_operations_are_right_on_an_older_processor_too(march):
    """Without AVX, and with AVX2 but no AVX-512, through the tests above."""
    draws = str(Path(__file__).with_name("test_sampler.py"))
    these = "not older and not products and not many and not wrong and not backends"
    assert "passed" in run_older(TESTS, march, __file__, "-k", these)
    assert "passed" in run_older(TESTS, march, draws, "-k", "compiled")


def logits_of_steps(folder: str, dtype: str) -> np.ndarray:
    """Return the scores of a step of three prompts and of three steps after it."""
    cache = CacheConfig(num_blocks=64, block_size=16)
    runner, _ = build_runner(
        folder, backend="torch", dtype=dtype, device="cpu", cache=cache
    )
    engine, found, sample = LLMEngine(runner), [], runner._sample

    def watched(logits, *arguments):
        found.append(logits.clone().numpy())
        return sample(logits, *arguments)

    runner._sample = watched
    # Everybody takes token 7, so that texts stay the same where scores nearly tie.
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, allowed_token_ids=[7]
    )
    for length in (5, 40, 130):
        ids = [(length * 31 + 17 * i) % 250 for i in range(length)]
        engine.add_request(str(length), ids, params)
    while engine.has_unfinished_requests():
        engine.step()
    return np.stack(found)


@needs_compiler
@on_x86
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_whole_step_is_the_same_on_an_older_processor(dtype, limit, tmp_path):
    """Here AVX-512 and the tiles of AMX, where they are; there neither."""
    config = CONFIG | {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    tensors = {name: 0.2 * x for name, x in make_tensors(config).items()}
    folder = str(write_checkpoint(tmp_path / "model", tensors, config))
    write_byte_tokenizer(tmp_path / "model", None)
    file = str(tmp_path / "older.npy")
    run_older(LOGITS, "x86-64-v3", file, folder, dtype)
    older, newer = np.load(file), logits_of_steps(folder, dtype)
    assert older.shape == newer.shape == (4, 3, 257)
    assert len({row.tobytes() for row in newer.reshape(12, -1)}) == 12
    assert np.abs(older - newer).max() < limit * np.abs(newer).max()
