"""What only a GPU can show of decoding: memory that was used before, bits that repeat, graphs, sizes beyond 2**31."""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from budgets import assert_e32, assert_e64, assert_same_bits, e32
from draws import DEVICE, draw
from geometries import CASES as LAYERS
from geometries import Geometry
from gpu_cases import ODD, Sequences, exact_and_plain, poison_free_memory
from oracles import token_loop
from racecheck import races
from records import make_records, to, tokens_of
from running import no_waiting

from replayssm import ReplayStateCache
from replayssm.bench.cases import CASES
from replayssm.ops import chunked
from replayssm.ops.records import Records
from replayssm.ops.tiling import choose_tiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: run with REPLAYSSM_TEST_DEVICE=cuda"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.layer)
every_layer = pytest.mark.parametrize(
    "geometry", [*LAYERS, Geometry("mamba2", 64, 4, 64, 128, {"ngroups": 2})], ids=lambda g: f"{g.kind}-{g.headdim}"
)
LIMIT = 2**31  # elements that a 32-bit offset reaches
MANY = 48  # rows: more work than programs that fold
BATCHES = (1, 2, 7, 100, 1024)


@pytest.fixture
def much_memory() -> Iterator[None]:
    """Gives gigabytes back to the other workers of a run."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("window", [0, 5, 16])
@pytest.mark.parametrize("case", [*CASES, *ODD], ids=lambda case: f"{case.layer}-{case.headdim}x{case.d_state}")
def test_what_lay_in_memory_before_changes_nothing(case, window):
    """Every ring starts as NaN, and so does what the allocator hands out."""
    for step_tokens in (1, 3):
        rows = Sequences(case, 3, window=window, step_tokens=step_tokens, dtype=torch.bfloat16)
        q, records = rows.draw(2 * window + 3)
        (exact, exact_state), (plain, plain_state) = exact_and_plain(rows, q, records)
        poison_free_memory(2 * q.shape[0] * rows.step_tokens * case.nheads * case.headdim * 4)
        y = rows.decode(q, records)
        rows.flush(rows.seqlen > rows.flushed)
        assert_e32(y, exact, e32(plain, exact), f"output, {step_tokens} at a time")
        assert_e32(rows.checkpoint, exact_state, e32(plain_state, exact_state), f"state, {step_tokens} at a time")


@pytest.mark.parametrize("spread", [False, True], ids=["aligned", "spread"])
@every_case
def test_a_step_that_flushes_has_the_same_bits_twenty_times(case, spread):
    """Programs that raced would differ once: every output, checkpoint and ring, gaps between them included."""
    window = 4
    for step_tokens in (1, 2):
        start = Sequences(case, MANY, window=window, step_tokens=step_tokens, dtype=torch.bfloat16)
        start.decode(*start.draw(window + step_tokens if spread else window), spread=spread)
        q, records = start.draw(step_tokens, seed=2)
        due = start.seqlen - start.flushed + step_tokens > window
        assert due.any()
        assert due.all() == (not spread)
        first = start.copy()
        expected = first.step(q, records)
        for number in range(20):
            again = start.copy()
            assert_same_bits(again.step(q, records), expected, f"output {number}")
            assert_same_bits(again.pool, first.pool, f"cache {number}")


@every_case
@pytest.mark.usefixtures("much_memory")
def test_a_rows_bits_depend_on_no_other_row(case):
    """Identical records, at another place of another batch, while others flush at other steps; the tiling is the same.

    Another tiling sums over the records in another order: then it holds up to rounding.
    """
    window = 4
    tiling = choose_tiling(BATCHES[-1], case.nheads, case.headdim, case.d_state, case.recurrence)
    for step_tokens in (1, 2):
        rows = Sequences(case, BATCHES[-1], window=window, step_tokens=step_tokens, dtype=torch.bfloat16)
        rows.tiling = tiling
        q, records = rows.draw(2 * window)
        chosen = []
        for batch in BATCHES[:-1]:  # rows from everywhere, the last one included, in descending order
            index = torch.arange(BATCHES[-1] - 1, -1, -BATCHES[-1] // batch, device=DEVICE)[:batch]
            chosen.append((index, rows.take(index)))
        y = rows.decode(q, records)
        for index, some in chosen:
            got = some.decode(q[index], Records(*(field[index] for field in records)))
            assert_same_bits(got, y[index], f"output of {len(index)} rows, {step_tokens} at a time")
            assert_same_bits(some.pool, rows.pool[index], f"cache of {len(index)} rows, {step_tokens} at a time")


@every_case
@pytest.mark.usefixtures("much_memory")
def test_rc27_states_and_rings_beyond_32_bits(case):
    """Offsets of 64 bits: in the checkpoints, and in rings whose rows are as far apart."""
    batch = LIMIT // (case.nheads * case.headdim * case.d_state) + 4
    for step_tokens, window in ((1, 3), (2, 4)):
        rows = Sequences(case, batch, window=window, step_tokens=step_tokens, dtype=torch.bfloat16)
        for tensor in (rows.checkpoint, *rows.ring):
            assert (batch - 1) * tensor.stride(0) > LIMIT - 1
        index = torch.tensor([*range(0, batch, 512), batch - 1], device=DEVICE)
        alone = [rows.take(row) for row in index.split(1)]
        q, records = rows.draw(2 * window)
        y = rows.decode(q, records)
        for row, one in zip(index.split(1), alone, strict=True):
            got = one.decode(q[row], Records(*(field[row] for field in records)))
            assert_same_bits(got, y[row], f"output of row {row.item()}")
            assert_same_bits(one.pool, rows.pool[row], f"cache of row {row.item()}")
        before = rows.pool.clone()
        q, records = rows.draw(step_tokens, seed=2)
        few = Records(*(field[:4] for field in records))
        rows.step(q[:4], few, rows=torch.tensor([-1, batch - 1, -1, 0], device=DEVICE))
        assert torch.equal(rows.pool[1:-1].view(torch.int64), before[1:-1].view(torch.int64))
        assert not torch.equal(rows.pool[-1], before[-1])
        del rows, alone, before, y  # before the next ones are made


@pytest.mark.usefixtures("much_memory")
def test_rc27_a_prefill_beyond_32_bits():
    """Row by row it is what each row gives alone, up to rounding: products of another batch sum in another order."""
    case, batch = CASES[1], 16
    t = LIMIT // (batch - 1) // (case.nheads * case.headdim) + 1
    assert ((batch - 1) * t * case.nheads + case.nheads - 1) * case.headdim > LIMIT - 1
    each = [case.draw(1, t, dtype=torch.bfloat16, device=DEVICE, seed=row) for row in range(batch)]
    q = torch.cat([q for q, _ in each])
    records = Records(*(torch.cat(fields) for fields in zip(*(records for _, records in each), strict=True)))
    y, final = chunked.scan(q, records, None, case.recurrence)
    for row in (0, batch // 2, batch - 1):
        alone, wide = each[row], (each[row][0].double(), to(each[row][1], torch.float64))
        plain, exact = (chunked.scan(*inputs, None, case.recurrence) for inputs in (alone, wide))
        assert_e32(y[row : row + 1], exact[0], e32(plain[0], exact[0]), f"output of row {row}")
        assert_e32(final[row : row + 1], exact[1], e32(plain[1], exact[1]), f"state of row {row}")


@every_case
def test_rc23_decoding_in_fp32_is_not_rounded_to_tf32(case):
    """8 times the error of plain fp32 is about 1e-6 of the state; products in TF32 would miss by 1e-3."""
    rows = Sequences(case, 2, window=16, dtype=torch.float32)
    q, records = rows.draw(64)
    (exact, exact_state), (plain, plain_state) = exact_and_plain(rows, q, records)
    y = rows.decode(q, records)
    rows.flush(rows.seqlen > rows.flushed)
    assert_e32(y, exact, e32(plain, exact))
    assert_e32(rows.checkpoint, exact_state, e32(plain_state, exact_state), "state")


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@every_case
def test_rc23_gradients_are_right_at_every_chunk_size(case, chunk, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    rule = case.recurrence
    q, records = make_records(
        decay=rule.decay, delta=rule.delta, batch=2, t=130, heads=(4, 2), headdim=64, d_state=64, seed=chunk
    )
    weight = draw(9, 2, 130, 4, 64)

    def gradients(run, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, *records)]
        y = run(inputs[0], Records(*inputs[1:]))
        return torch.autograd.grad((y * weight.to(y.dtype)).sum(), inputs)

    def loop(q, records):
        return token_loop(tokens_of(q, records), delta=rule.delta)[0]

    got = gradients(lambda q, records: chunked.scan(q, records, None, rule)[0], torch.float32)
    exact, plain = gradients(loop, torch.float64), gradients(loop, torch.float32)
    for name, *three in zip(("q", *Records._fields), got, exact, plain, strict=True):
        assert_e32(three[0], three[1], e32(three[2], three[1]), f"gradient of {name}")


def started(geometry: Geometry, dtype: torch.dtype, step_tokens: int = 1) -> tuple[torch.nn.Module, ReplayStateCache]:
    """A layer and a cache of three ragged rows, window 5, past what is compiled or allocated once."""
    layer = geometry.build(dtype)
    cache = ReplayStateCache([layer], 3, window=5, step_tokens=step_tokens)
    mask = torch.tensor([[1] * 7, [1] * 6 + [0], [1] * 5 + [0] * 2], device=DEVICE)
    with torch.no_grad():
        layer(geometry.input(3, 7, dtype=dtype), cache[0], attention_mask=mask)
        cache.commit()
        for number in range(cache.window + 2):
            layer(geometry.input(3, 1, number, dtype), cache[0])
            cache.commit()
    return layer, cache


@every_layer
def test_a_captured_step_decodes_whole_windows_as_eager_steps_do(geometry):
    layer, cache = started(geometry, torch.float32)
    twin, before = copy.deepcopy(cache), cache.flushed.clone()
    x = geometry.input(3, 2 * cache.window + 1, 50, torch.float32)
    entry = torch.empty_like(x[:, :1])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), no_waiting():
        with torch.cuda.graph(graph):
            out = layer(entry, cache[0])
            cache.commit()
        outputs = []
        for token in x.split(1, 1):
            entry.copy_(token)
            graph.replay()
            outputs.append(out.clone())
        expected = []
        for token in x.split(1, 1):
            expected.append(layer(token, twin[0]))
            twin.commit()
    assert_same_bits(torch.cat(outputs, 1), torch.cat(expected, 1), "output")
    for (name, got), same in zip(cache.tensors().items(), twin.tensors().values(), strict=True):
        assert_same_bits(got, same, name)
    assert (cache.flushed - before == 2 * cache.window).all()
    cache.check()


@every_layer
def test_a_captured_step_of_a_tree_keeps_whatever_path_it_is_given(geometry):
    layer, cache = started(geometry, torch.float32, step_tokens=4)
    twin, warm = copy.deepcopy(cache), copy.deepcopy(cache)
    trees = [[[-1, 0, 0, 1], [-1, -1, 0, 1], [-1, 0, 1, 2]], [[-1, 0, 0, 2], [-1, 0, 1, 1], [-1, -1, -1, -1]]]
    paths = [[[0, 1, 3], [1, 3, 9], [0, 1, 2]], [[0, 2, 3], [0, 9, 9], [3, 9, 9]]]
    counts = [[3, 2, 0], [2, 1, 1]]
    steps = [[torch.tensor(values[i % 2], device=DEVICE) for values in (trees, counts, paths)] for i in range(6)]
    x = geometry.input(3, 24, 50, torch.float32).split(4, 1)
    entry = [x[0].clone(), *(values.clone() for values in steps[0])]

    def decode(cache: ReplayStateCache, x: torch.Tensor, parents: torch.Tensor, n: torch.Tensor, path: torch.Tensor):
        y = layer(x, cache[0], parents=parents)
        cache.commit(n, path=path)
        return y

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        decode(warm, *entry)
        with no_waiting(), torch.cuda.graph(graph):
            out = decode(cache, *entry)
        for piece, values in zip(x, steps, strict=True):
            for static, value in zip(entry, (piece, *values), strict=True):
                static.copy_(value)
            with no_waiting():
                graph.replay()
                expected = decode(twin, piece, *values)
            assert_same_bits(out, expected, "output")
    for (name, got), same in zip(cache.tensors().items(), twin.tensors().values(), strict=True):
        assert_same_bits(got, same, name)
    cache.check()


@every_layer
def test_a_decode_step_neither_waits_nor_allocates(geometry):
    layer, cache = started(geometry, torch.float32)
    x = geometry.input(3, 4 * cache.window, 50, torch.float32)
    held = []
    with torch.no_grad(), no_waiting():
        for token in x.split(1, 1):
            layer(token, cache[0])
            cache.commit()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(held)) == 1


@every_layer
def test_a_compiled_step_decodes_as_eager_steps_do(geometry):
    """In fp64, where inductor's own sums round as little as others."""
    torch._dynamo.reset()
    layer, cache = started(geometry, torch.float64)
    twin = copy.deepcopy(cache)
    compiled = torch.compile(lambda x, state: layer(x, state), fullgraph=True)
    with torch.no_grad():
        for number, token in enumerate(geometry.input(3, 2 * cache.window + 1, 50).split(1, 1)):
            assert_e64(compiled(token, cache[0]), layer(token, twin[0]), f"output {number}")
            cache.commit()
            twin.commit()
    assert torch.equal(cache.flushed, twin.flushed)
    assert_e64(cache[0].state(), twin[0].state(), "state")


def checked(*options: str) -> str:
    """What compute-sanitizer prints of every kernel, unless the program failed."""
    checker = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [checker, *options, sys.executable, str(Path(__file__).parent / "gpu_small_case.py")]
    # blocks as they are, not carved out of larger ones: an access beyond one is then an access beyond memory
    run = subprocess.run(
        command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, timeout=300
    )
    if "Device not supported" in run.stdout:
        pytest.skip("compute-sanitizer does not reach this device")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    return run.stdout


def test_no_kernel_leaves_its_memory():
    checked("--tool", "memcheck", "--error-exitcode", "9")


def test_no_kernel_races_in_shared_memory():
    printed = checked(
        "--tool", "racecheck", "--racecheck-report", "hazard", "--show-backtrace", "no", "--print-limit", "0"
    )
    found = races(printed)
    assert not found, "\n".join(found)[:5000]
