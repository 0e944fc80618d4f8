"""A launch of every kernel as serving launches it, at published sizes.

bs: requests. width: slots that each verifies.
"""

import torch

from sglang_dflash.kernels.ops.speculative import (
    accept,
    block,
    block_conv,
    context_kv,
    copy_ahead,
    peagle_rows,
    penalties,
    rejection,
    selector_walk,
    window,
)


def launch_prepare_block(bs=4, width=16):
    ints, table = torch.zeros(bs, dtype=torch.int64), torch.zeros(48, 40_960, dtype=torch.int32)
    block.prepare_block.__wrapped__(ints, ints, ints, table, 151_669, width)


def launch_block_offsets(is_ragged: bool = False, bs=48, width=16):
    lengths = torch.zeros(bs, dtype=torch.int64)
    block.block_offsets.__wrapped__(lengths, width, lengths.int() if is_ragged else None)


def launch_prepare_window(bs=4, width=16):
    ints, table = torch.zeros(bs, dtype=torch.int64), torch.zeros(48, 40_960, dtype=torch.int32)
    window.prepare_window.__wrapped__(ints, ints, table, table, 4096, 16, 4127)


def launch_penalize_block(dtype: torch.dtype, has_stops: bool, is_ragged: bool = False, bs=4, width=16):
    vocabulary = 151_936
    logits = torch.empty(bs * width, vocabulary, dtype=dtype)  # large, and never read
    counts = torch.empty(48, vocabulary, dtype=torch.int32)
    tokens, floats = torch.zeros(bs, width, dtype=torch.int64), torch.zeros(bs)
    ints, stops = torch.zeros(bs, dtype=torch.int64), torch.empty(bs, vocabulary) if has_stops else None
    terms = penalties.PenaltyTerms(floats, floats, floats, ints, ints, stops)
    rows = (ints, ints.int()) if is_ragged else ()
    penalties.penalize_block.__wrapped__(logits, tokens, counts, ints, ints, terms, *rows)


def launch_count_tokens(bs=4, width=16):
    tokens, counts = torch.zeros(bs, width, dtype=torch.int64), torch.zeros(48, 151_936, dtype=torch.int32)
    penalties.count_tokens.__wrapped__(
        counts, tokens[:, 0].contiguous(), tokens, torch.zeros(bs, dtype=torch.int32)
    )


def launch_prepare_rows(last_start: int | None, bs=4, width=8):
    block_size, hidden = 8, 4096
    ints, table = torch.zeros(bs, dtype=torch.int64), torch.zeros(48, 40_960, dtype=torch.int32)
    states = torch.zeros(48, block_size, hidden, dtype=torch.bfloat16)
    tokens = torch.zeros(48, block_size, dtype=torch.int64)
    pending = peagle_rows.PendingRows(tokens, states, tokens[:, 0].contiguous(), tokens[:, 0].int())
    fused = torch.zeros(bs * 2 * (block_size - 1), hidden, dtype=torch.bfloat16)
    tables = peagle_rows.RequestTables(table, table, 151_669, last_start)
    peagle_rows.prepare_rows.__wrapped__(ints, ints, pending, tables, states[0, 0], fused, ints)


def launch_append_rows(has_slots: bool, bs=4, width=8):
    tokens, rows = torch.zeros(bs, width, dtype=torch.int64), torch.zeros(48, 8, dtype=torch.int64)
    states, count = torch.zeros(48, 8, 4096, dtype=BF16), rows[:, 0].contiguous()
    pending = peagle_rows.PendingRows(rows, states, count, count.int())
    fused = torch.zeros(bs * width, 4096, dtype=BF16)
    accept_len = torch.zeros(bs, dtype=torch.int32)
    requests, slots = pending.count[:bs], tokens if has_slots else None
    peagle_rows.append_rows.__wrapped__(requests, accept_len, tokens, fused, slots, pending)


def launch_find_match(bs=4, width=16):
    texts, ints = torch.zeros(48, 40_977, dtype=torch.int32), torch.zeros(bs, dtype=torch.int64)
    copy_ahead.find_match.__wrapped__(texts, ints, ints, 2048 * width)


def launch_copy_matches(bs=4, width=16):
    texts, ints = torch.zeros(48, 40_977, dtype=torch.int32), torch.zeros(bs, dtype=torch.int64)
    keys = torch.zeros(bs, width, dtype=torch.int64)
    copy_ahead.copy_matches.__wrapped__(texts, ints, ints, keys, width)


def launch_append_tokens(bs=4, width=16):
    texts, ints = torch.zeros(48, 40_977, dtype=torch.int32), torch.zeros(bs, dtype=torch.int64)
    copy_ahead.append_tokens.__wrapped__(texts, ints, ints, torch.zeros(bs, width, dtype=torch.int64))


def launch_accept(is_decided: bool, is_relayed: bool, bs=4, width=16):
    tokens, best = torch.zeros(bs, width, dtype=torch.int64), torch.zeros(bs, width)
    seq_lens = tokens[:, 0].contiguous()
    relay = accept.RelayTables(*torch.zeros(3, 64, dtype=torch.int64)) if is_relayed else None
    accept_len, block = (seq_lens.int(), None) if is_decided else (None, tokens)
    accept.accept_blocks.__wrapped__(accept_len, tokens, best, seq_lens, 151_936, relay, block=block)


def launch_write_context_kv(head_dim: int, pool_dtype: torch.dtype, prefill: bool, bs=4, width=16):
    """Launch for Qwen3-8B's draft: 5 layers, 8 KV heads, block 16, bfloat16."""
    layers, heads, rows = 5, 8, bs * width
    kv = torch.zeros(rows, layers, 2, heads, head_dim, dtype=torch.bfloat16)
    weight = torch.ones(layers, head_dim, dtype=torch.bfloat16)
    ints = torch.zeros(rows, dtype=torch.int64)
    buffers = [torch.zeros(rows, heads, head_dim).to(pool_dtype) for _ in range(2 * layers)]
    pool = context_kv.KVPoolPointers.from_pools(buffers[:layers], buffers[layers:])
    accept_len = None if prefill else torch.zeros(bs, dtype=torch.int32)
    context_kv.write_context_kv.__wrapped__(
        kv, weight, 1e-6, torch.zeros(64, head_dim), ints, ints, pool, accept_len, width
    )


def launch_block_conv(bs=4, width=8):
    """Launch for the draft of Qwen3.8-27B; its width is the draft's."""
    x, deltas = torch.zeros(bs * 8, 5120, dtype=BF16), torch.zeros(bs * 8, 2, 2, 320, dtype=BF16)
    block_conv.block_conv.__wrapped__(x, torch.zeros(2, 5120, dtype=BF16), deltas[:, 1], 8)


def launch_selector_walk(draws: bool, bs=4, width=16):
    shape = bs, 15, 16
    found = selector_walk.Candidates(
        torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(bs, 15, 256, dtype=BF16)
    )
    books, floats = torch.zeros(1000, 256, dtype=BF16), torch.zeros(bs)
    draw = selector_walk.DrawInputs(*(floats, floats.int(), floats, floats), torch.zeros(bs, 15))
    anchors = torch.zeros(bs, dtype=torch.int64)
    selector_walk.walk_triton(found, anchors, books, books, draw if draws else None)


def launch_rejection(rule: str, is_ragged: bool, bs=4, width=16):
    ids, tokens = (
        torch.zeros(bs, width - 1, 128, dtype=torch.int64),
        torch.zeros(bs, width, dtype=torch.int64),
    )
    starts = tokens[:, 0].contiguous()
    rejection.accept_drafts_triton(
        *(tokens, torch.zeros(bs, width, 1000), ids, ids.float(), torch.zeros(bs, width - 1)),
        rule,
        *((starts, starts.int()) if is_ragged else ()),
    )


F32, BF16, E4M3, E5M2 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# (module, kernel, launch, arguments of each case)
_KERNELS = (
    (block, "prepare_block", launch_prepare_block, {"": ()}),
    (block, "block_offsets", launch_block_offsets, {"": (), "own lengths": (True,)}),
    (window, "prepare_window", launch_prepare_window, {"": ()}),
    (
        *(penalties, "penalize_block", launch_penalize_block),
        {"": (F32, False), "bfloat16, stops": (BF16, True), "own lengths": (F32, False, True)},
    ),
    (penalties, "count_tokens", launch_count_tokens, {"": ()}),
    (peagle_rows, "prepare_rows", launch_prepare_rows, {"": (None,), "from the first pending": (40_000,)}),
    (peagle_rows, "append_rows", launch_append_rows, {"": (False,), "ragged": (True,)}),
    (copy_ahead, "find_match", launch_find_match, {"": ()}),
    (copy_ahead, "copy_matches", launch_copy_matches, {"": ()}),
    (copy_ahead, "append_tokens", launch_append_tokens, {"": ()}),
    (
        *(accept, "accept", launch_accept),
        {f"decided {one}, relayed {two}": (one, two) for one in (False, True) for two in (False, True)},
    ),
    (block_conv, "block_conv", launch_block_conv, {"": ()}),
    (selector_walk, "walk", launch_selector_walk, {"best": (False,), "drawn": (True,)}),
    (
        *(rejection, "accept_drafts", launch_rejection),
        {f"by {rule}, ragged {own}": (rule, own) for rule in ("standard", "block") for own in (False, True)},
    ),
    (
        *(context_kv, "write_context_kv", launch_write_context_kv),
        {
            "dim 128": (128, BF16, False),
            "dim 128, prefill": (128, BF16, True),
            "dim 80": (80, BF16, False),
            "dim 128, e4m3 pool": (128, E4M3, False),
            "dim 80, e5m2 pool": (80, E5M2, False),
        },
    ),
)
CASES = {
    f"{kernel}, {case}".removesuffix(", "): (module, f"{kernel}_kernel", launch, arguments)
    for module, kernel, launch, cases in _KERNELS
    for case, arguments in cases.items()
}
