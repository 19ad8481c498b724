"""Two precisions: what a read format may change and what not, and stochastic rounding that belongs to the row alone."""

import copy

import pytest
import torch
from backends import both_backends, given
from budgets import assert_e32, assert_same_bits, e32, rms
from draws import DEVICE, draw, same_bits_everywhere, seeds
from format_caches import KINDS, READ, NoValues, assert_copies_follow, checkpoint_planes, new_cache, unreadable
from hypothesis import strategies as st
from passthrough import Passthrough
from programs import BATCH, Program, poison, programs
from torch import Tensor, nn

from replayssm import ReplayStateCache
from replayssm.cache.checkpoint import NAMES

every_kind = pytest.mark.parametrize("kind", KINDS)
checkpoints = st.sampled_from(NAMES)


def of_program(layer: nn.Module, program: Program, checkpoint: str, read_format: str | None) -> ReplayStateCache:
    return new_cache(layer, checkpoint, read_format, window=program.window, step_tokens=program.step_tokens)


def play(layer: Passthrough, program: Program, caches: list[ReplayStateCache], seed: int):
    """Run the program on all caches in step; after each step, outputs by cache and which rows flushed in it."""
    for number, action in enumerate(program.actions):
        x = draw(seed + number, BATCH, action.t, layer.features, dtype=torch.float32)
        outputs, flushing = [], torch.zeros(BATCH, dtype=torch.bool)
        for cache in caches:
            with torch.no_grad():
                outputs.append(layer(x, cache[0]))
            flushing = cache.clock.step.flushing.clone()
            cache.commit(None if action.t > program.step_tokens else torch.tensor(action.kept, device=DEVICE))
            if action.flush:
                cache.flush(list(action.flush))
        yield number, outputs, flushing


def everything_not_read(cache: ReplayStateCache) -> dict[str, Tensor]:
    """All but the copy, and what kernels make of it for later reads."""
    return {name: tensor for name, tensor in cache.tensors().items() if ".copy" not in name and ".ring.u" not in name}


@both_backends
@every_kind
@given(
    program=programs(reject=True, flush=True),
    checkpoint=checkpoints,
    names=st.permutations(READ).map(lambda order: order[:2]),
    seed=seeds,
)
def test_the_read_format_changes_no_bit_of_the_checkpoint(kind, program, checkpoint, names, seed):
    """And a row that flushes answers with the same bits whatever the format."""
    layer = KINDS[kind]()
    caches = [of_program(layer, program, checkpoint, read_format) for read_format in (None, *names)]
    for number, outputs, flushing in play(layer, program, caches, seed):
        for read_format, cache, y in zip((None, *names), caches, outputs, strict=True):
            what = f"{checkpoint} read as {read_format}, step {number}"
            for name, plane in checkpoint_planes(cache).items():
                assert_same_bits(plane, checkpoint_planes(caches[0])[name], f"{name}, {what}")
            assert_same_bits(y[flushing], outputs[0][flushing], f"outputs of rows that flush, {what}")
    for read_format, cache in zip(names, caches[1:], strict=True):
        assert_copies_follow(cache, f"{checkpoint} read as {read_format}")


@both_backends
@every_kind
@given(seed=seeds, data=st.data(), checkpoint=checkpoints, read_format=st.sampled_from(READ))
def test_rows_take_copy_and_stream_along(kind, seed, data, checkpoint, read_format):
    """Reset, reorder, copied rows and deep copies, with a read copy and without: the checkpoints stay the same."""
    layer = KINDS[kind]()
    caches = [new_cache(layer, checkpoint, name, window=3, step_tokens=2) for name in (None, read_format)]
    rows = st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH)
    for number in range(data.draw(st.integers(2, 8))):
        t = data.draw(st.sampled_from([1, 2, 4]))
        action = data.draw(st.sampled_from(["nothing", "reset", "reorder", "copy", "deepcopy", "flush", "poison"]))
        row, index = data.draw(st.integers(0, BATCH - 1)), data.draw(rows)
        x = draw(seed + number, BATCH, t, layer.features, dtype=torch.float32)
        for place, cache in enumerate(caches):
            with torch.no_grad():
                layer(x, cache[0])
            cache.commit()
            if action == "reset":
                cache.reset(row, seed=number)
            elif action == "reorder":
                cache.reorder(torch.tensor(index, device=DEVICE))
            elif action == "copy":
                cache.copy_rows(index[:1], [row])
            elif action == "deepcopy":
                caches[place] = copy.deepcopy(cache)
                for tensor in cache.tensors().values():
                    tensor.fill_(1)
            elif action == "flush":
                cache.flush(row)
            elif action == "poison":
                poison(cache)
        assert_copies_follow(caches[1], action)
        for name, tensor in everything_not_read(caches[0]).items():
            assert_same_bits(tensor, everything_not_read(caches[1])[name], f"{name} after {action}")


@same_bits_everywhere
@every_kind
@given(program=programs(reject=True, flush=True), checkpoint=checkpoints, row=st.integers(0, BATCH - 1), seed=seeds)
def test_a_row_rounds_the_same_wherever_it_stands(kind, program, checkpoint, row, seed):
    """Alone in a cache, in another row with strangers beside it, or moved there half way; another seed gives others."""
    layer = KINDS[kind]()

    def cache_of(batch: int, seed: Tensor | int) -> ReplayStateCache:
        return ReplayStateCache(
            [layer],
            batch,
            window=program.window,
            step_tokens=program.step_tokens,
            checkpoint=checkpoint,
            read_format="int8",
            backend="torch",
            seed=seed,
        )

    stream = torch.tensor([41], device=DEVICE)
    alone, other = cache_of(1, stream), cache_of(1, stream + 1)
    streams = torch.tensor([7, 8, 9], device=DEVICE)
    streams[row] = 41
    among = cache_of(BATCH, streams)
    for number, action in enumerate(program.actions):
        x = draw(seed + number, BATCH, action.t, layer.features, dtype=torch.float32)
        kept = None if action.t > program.step_tokens else torch.tensor(action.kept, device=DEVICE)
        outputs = []
        for cache, given_x, given_kept in (
            (among, x, kept),
            (alone, x[row : row + 1], None if kept is None else kept[row : row + 1]),
            (other, x[row : row + 1], None if kept is None else kept[row : row + 1]),
        ):
            with torch.no_grad():
                outputs.append(layer(given_x, cache[0]))
            cache.commit(given_kept)
        assert_same_bits(outputs[0][row], outputs[1][0], "outputs")
        for name, plane in checkpoint_planes(among).items():
            assert_same_bits(plane[row : row + 1], checkpoint_planes(alone)[name], name)
        if number == len(program.actions) // 2:
            moved = (row + 1) % BATCH
            among.copy_rows(row, moved)
            row = moved
    for cache in (alone, other):
        cache.flush()
    if checkpoint != "fp32" and rms(alone[0].checkpoint):
        differs = [not torch.equal(plane, checkpoint_planes(other)[n]) for n, plane in checkpoint_planes(alone).items()]
        assert any(differs), "two streams rounded alike"


@every_kind
@given(program=programs(reject=True, flush=True), checkpoint=checkpoints, seed=seeds)
def test_a_flush_that_is_repeated_after_a_rollback_draws_the_same_words(kind, program, checkpoint, seed):
    """A copy of the cache that is given other drafts and keeps none of them ends at the same bits."""
    layer = KINDS[kind]()
    cache = of_program(layer, program, checkpoint, "nvfp4")
    for _ in play(layer, program, [cache], seed):
        pass
    twin = copy.deepcopy(cache)
    with torch.no_grad():
        layer(draw(seed, BATCH, 1, layer.features, dtype=torch.float32), twin[0])
    twin.commit(0)
    for each in (cache, twin):
        each.flush()
    for name, plane in checkpoint_planes(cache).items():
        assert_same_bits(plane, checkpoint_planes(twin)[name], name)


@given(program=programs(reject=True, flush=True), checkpoint=checkpoints, read_format=st.sampled_from(READ), seed=seeds)
def test_nothing_changes_where_values_cannot_be_read(program, checkpoint, read_format, seed):
    """As on a GPU: every row is folded, rounded and copied, and what is not due is not written. Nothing is read."""
    layer = KINDS["kda"]()
    plain = of_program(layer, program, checkpoint, read_format)
    expected = [outputs[0] for _, outputs, _ in play(layer, program, [plain], seed)]
    with unreadable():
        cache = of_program(layer, program, checkpoint, read_format)
        with NoValues():
            found = [outputs[0] for _, outputs, _ in play(layer, program, [cache], seed)]
    for got, exact in zip(found, expected, strict=True):
        assert_same_bits(got, exact, "outputs")
    for name, tensor in everything_not_read(plain).items():
        assert_same_bits(cache.tensors()[name], tensor, name)
    assert_copies_follow(cache, "masked")


@given(seed=seeds, length=st.integers(1, 40), window=st.integers(2, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_many_tokens_read_what_single_ones_do_if_they_keep_their_flushes(kind, seed, length, window):
    """One token, which flushes, then window - 1: rows flush before the same tokens, so the copy is the same."""
    layer = KINDS[kind]()
    x = draw(seed, BATCH, length, layer.features, dtype=torch.float32)
    settings = dict(window=window, checkpoint="fp32", read_format="nvfp4", backend="torch")
    single = ReplayStateCache([layer], BATCH, step_tokens=1, **settings)
    paired = ReplayStateCache([layer], BATCH, step_tokens=window - 1, **settings)
    wide = KINDS[kind](dtype=torch.float64)
    exact = ReplayStateCache([wide], BATCH, step_tokens=1, **settings)

    def feed(layer, cache, sizes):
        outputs, flushed = [], []
        for piece in x.to(cache[0].ring.v.dtype).split(sizes, 1):
            with torch.no_grad():
                outputs.append(layer(piece, cache[0]))
            cache.commit()
            flushed += [cache.flushed[0].item()] * piece.shape[1]
        return torch.cat(outputs, 1), flushed

    sizes = [size for _ in range(length) for size in (1, window - 1)]
    cut = []
    while sum(cut) < length:
        cut.append(min(sizes[len(cut)], length - sum(cut)))
    one, one_flushed = feed(layer, single, [1] * length)
    many, many_flushed = feed(layer, paired, cut)
    assert one_flushed == many_flushed
    assert_e32(many, one, e32(one, feed(wide, exact, [1] * length)[0]))


@every_kind
@pytest.mark.parametrize("read_format", READ)
def test_reading_is_all_that_a_copy_is_for(kind, read_format):
    """A step that reads the copy answers as if the checkpoint were the copy."""
    layer = KINDS[kind]()
    cache = new_cache(layer, "fp32", read_format, window=4, step_tokens=2)
    x = draw(1, BATCH, 9, layer.features, dtype=torch.float32)
    with torch.no_grad():
        layer(x[:, :5], cache[0])
        cache.commit()
        twin = copy.deepcopy(cache)
        twin[0].checkpoint = cache[0].stored.copy.load()
        twin[0].stored.copy = None
        for first in (5, 7):
            piece = x[:, first : first + 2]
            assert_same_bits(layer(piece, cache[0]), layer(piece, twin[0]), f"tokens from {first}")
            cache.commit()
            twin.commit()
