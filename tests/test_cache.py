"""cache.py: slot s holds position s, whatever lay there before and however the buffers move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config, tiny_model, tokens

from nanodecoder import KVCache


def entries(start: int, count: int, rows: int = 1) -> torch.Tensor:
    """(B, Hkv, T, D) marked by head and position, so that a scrambled copy shows."""
    marks = torch.arange(start, start + count).float()[None, None, :, None] + 1000 * torch.arange(2)[None, :, None, None]
    return marks.expand(rows, 2, count, 16).clone()


def append(cache: KVCache, start: int, count: int) -> None:
    at = cache.place(count)
    for number, layer in enumerate(cache.layers(at)):
        new = (entries(start, count) + 1e5 * number).transpose(1, 2).flatten(0, 1)
        layer.write(new, -new)
    cache.advance(at)


def test_growing_keeps_every_entry_in_its_place():
    cache = KVCache(tiny_config(), 1, 4)
    for start in (0, 3, 6):
        cache.resize(max(cache.max_seq_len, start + 3))
        append(cache, start, 3)
    assert cache.lengths.tolist() == [9]
    for number in range(2):
        torch.testing.assert_close(cache.keys[number, :, :, :9], entries(0, 9) + 1e5 * number)
        torch.testing.assert_close(cache.values[number, :, :, :9], -entries(0, 9) - 1e5 * number)


def test_rows_are_kept_repeated_reordered_and_joined_by_empty_ones():
    model = tiny_model()
    cache = KVCache(model.config, 2, 20)
    model(tokens(2, 6), cache, counts=[6, 3])
    before = cache.keys.clone()
    cache.select([1, None, 0, 1])
    assert cache.lengths.tolist() == [3, 0, 6, 3]
    torch.testing.assert_close(cache.keys[:, 0, :, :3], before[:, 1, :, :3])
    torch.testing.assert_close(cache.keys[:, 2, :, :6], before[:, 0, :, :6])
    for rows in ([], [4], [-1]):
        with pytest.raises(ValueError, match="rows must be one or more of 0 to 3"):
            cache.select(rows)


def test_truncated_rows_go_on_as_if_they_had_never_been_longer():
    model, x = tiny_model(), tokens(2, 10)
    cache = KVCache(model.config, 2, 20)
    model(x, cache)
    cache.truncate([7, 4])
    again = model(torch.stack([x[0, 7:10], x[1, 4:7]]), cache)
    whole = model(x)
    torch.testing.assert_close(again[0], whole[0, 7:10], atol=1e-5, rtol=0)
    torch.testing.assert_close(again[1], whole[1, 4:7], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="row 1 holds 7 tokens and cannot be truncated to 8"):
        cache.truncate(8)
    assert cache.lengths.tolist() == [10, 7]
    with pytest.raises(ValueError, match="1 lengths for 2 rows"):
        cache.truncate([1])


def test_a_row_truncated_to_nothing_is_as_new_even_after_nan():
    model, x = tiny_model(), tokens(2, 6)
    cache = KVCache(model.config, 2, 8)
    model(x, cache)
    cache.keys[:, 0, :, :6] = float("nan")
    cache.values[:, 0, :, :6] = float("nan")
    cache.truncate([0, 6])
    logits = model(tokens(2, 1), cache)  # row 0 has one token and reads as far as row 1
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[0], model(tokens(2, 1))[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("junk", [1e30, -torch.finfo(torch.float32).max, float("nan")])
@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_what_the_memory_held_before_changes_not_a_bit(junk, path):
    model, x = tiny_model(windows=(None, 3)), tokens(3, 9)
    model.attention = path

    def run(fill: float | None) -> list[torch.Tensor]:
        cache = KVCache(model.config, 3, 16)
        if fill is not None:
            cache.keys.fill_(fill)
            cache.values.fill_(fill)
        first = model(x, cache, counts=[9, 2, 5])
        return [first[0], first[1, :2], first[2, :5], *(model(x[:, i : i + 1], cache) for i in range(3))]

    for clean, dirty in zip(run(None), run(junk), strict=True):
        assert torch.equal(clean, dirty)


def test_a_long_context_costs_memory_only_where_it_is_used():
    """max_position_embeddings of a million must not mean half a gigabyte for a prompt of five."""
    from pathlib import Path

    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("no /proc here to read the resident memory from")

    def resident() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon"))

    model = tiny_model(max_seq_len=1_048_576)
    model(tokens(1, 5))
    before = resident()
    cache = KVCache(model.config, 1, 1_048_576)
    model(tokens(1, 5), cache)
    assert resident() - before < 50 * 1024  # KiB; the buffers' pages are touched only where they are written
    assert cache.keys.nbytes + cache.values.nbytes == 512 * 2**20


def test_what_does_not_fit_is_refused_with_the_numbers():
    cache = KVCache(tiny_config(), 2, 8)
    with pytest.raises(ValueError, match=r"row 0 holds 0 tokens and 9 more do not fit the cache's 8 slots.*resize\(9\)"):
        cache.place(9)
    with pytest.raises(ValueError, match="counts must be 2 numbers from 0 to 4"):
        cache.place(4, [5, 1])
    with pytest.raises(ValueError, match="at least 1 row and 1 slot"):
        KVCache(tiny_config(), 0, 8)
    model, full = tiny_model(), KVCache(tiny_config(), 1, 8)
    model(tokens(1, 8), full)
    with pytest.raises(ValueError, match="7 slots cannot keep the 8 tokens"):
        full.resize(7)
    with pytest.raises(MemoryError, match=r"a cache of 1 rows of \d+ tokens needs [\d,]+ MiB"):
        KVCache(tiny_config(), 1, 2**50)


def test_a_resize_that_fails_half_way_changes_nothing(monkeypatch):
    model, cache, x = tiny_model(), KVCache(tiny_config(), 1, 8), tokens(1, 6)
    model(x[:, :4], cache)
    real, calls = torch.empty, []

    def second_fails(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", second_fails)
    with pytest.raises(MemoryError, match="a cache of 1 rows of 16 tokens needs"):
        cache.resize(16)
    monkeypatch.undo()
    assert cache.max_seq_len == 8
    torch.testing.assert_close(model(x[:, 4:], cache), model(x)[:, 4:], atol=1e-5, rtol=0)


def test_a_failed_pass_leaves_the_cache_as_it_was():
    model, cache = tiny_model(), KVCache(tiny_config(), 1, 8)
    model(tokens(1, 3), cache)
    with pytest.raises(IndexError):
        model(torch.tensor([[500]]), cache)  # no such id
    assert cache.lengths.tolist() == [3]
    torch.testing.assert_close(model(tokens(1, 4)[:, 3:], cache), model(tokens(1, 4))[:, 3:], atol=1e-5, rtol=0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
def test_positions_continue_each_row_and_padding_repeats_the_last_real_one(steps):
    cache = KVCache(tiny_config(), 2, 64)
    lengths = [0, 0]
    for counts in steps:
        columns = max(1, *counts)
        at = cache.place(columns, counts)
        for row, count in enumerate(counts):
            last = max(0, lengths[row] + count - 1)  # of a row that is fed nothing, what it holds last
            wanted = [min(lengths[row] + i, last) for i in range(columns)]
            assert at.positions[row].tolist() == wanted
        cache.advance(at)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        assert cache.lengths.tolist() == lengths


def marked(cache: KVCache, lengths: list[int]) -> None:
    """Fill rows with numbers that say whose they are: row + slot / 100."""
    columns = max(lengths)
    at = cache.place(columns, lengths)
    for layer in cache.layers(at):
        k = torch.tensor([row + slot / 100 for row, length in enumerate(lengths) for slot in range(length)])
        k = k[:, None, None].expand(-1, cache.keys.shape[2], cache.keys.shape[4])
        layer.write(k, k)
    cache.advance(at)


def test_rows_that_leave_let_the_others_stay_in_their_places_and_the_last_fill_the_gaps():
    cache = KVCache(tiny_config(), 5, 8)
    marked(cache, [3, 8, 5, 4, 6])
    before = cache.keys.data_ptr()
    cache.select([0, 4, 2, 3])
    assert cache.keys.data_ptr() == before  # nobody was copied but the row that moved
    assert cache.lengths.tolist() == [3, 6, 5, 4]
    for place, (row, length) in enumerate([(0, 3), (4, 6), (2, 5), (3, 4)]):
        wanted = torch.tensor([row + slot / 100 for slot in range(length)])
        assert torch.equal(cache.keys[1, place, 0, :length, 0], wanted)
        assert torch.equal(cache.values[0, place, 1, :length, 3], wanted)
    assert cache.keys[:, 1, :, 6:].abs().max() == 0  # what the row before it held beyond is gone
    cache.select([3, 0])  # out of order: copied
    assert cache.keys.data_ptr() != before
    assert torch.equal(cache.keys[0, 1, 0, :3, 0], torch.tensor([0.0, 0.01, 0.02]))


def test_a_batch_that_shrinks_gives_memory_back_in_the_end():
    cache = KVCache(tiny_config(), 8, 16)
    marked(cache, [2] * 8)
    cache.select(range(5))
    assert cache.keys.untyped_storage().nbytes() == 8 * cache.keys[:, 0].nbytes
    cache.select(range(3))
    assert cache.keys.untyped_storage().nbytes() == 3 * cache.keys[:, 0].nbytes
    assert cache.lengths.tolist() == [2, 2, 2]


def test_a_row_of_another_cache_is_adopted_with_all_it_holds():
    one, many = KVCache(tiny_config(), 1, 8), KVCache(tiny_config(), 3, 6)
    marked(one, [4])
    marked(many, [6, 6, 6])
    many.adopt(1, one, 0)
    assert many.lengths.tolist() == [6, 4, 6]
    assert torch.equal(many.keys[:, 1, :, :4], one.keys[:, 0, :, :4])
    assert many.keys[:, 1, :, 4:].abs().max() == 0
    marked(one, [4])
    with pytest.raises(ValueError, match="6 slots cannot keep the 8 tokens that a row holds"):
        many.adopt(0, one, 0)


def test_an_exact_pass_reads_slots_in_blocks():
    cache = KVCache(tiny_config(), 2, 600)
    assert [cache.place(columns, exact=True).extent for columns in (1, 256, 257, 513)] == [256, 256, 512, 600]
    assert cache.keys.abs().max() == 0  # and all that is read was zeroed
