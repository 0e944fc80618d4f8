"""`--speculative-draft-window-size`: drafts equal a reference that sees only the window.

Slots before the window hold NaN, so they are not read.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from support.draft_cases import Case, FakePlan, draft_cycle

from sglang_dflash.srt.hardware_backend.cpu.attention import TorchNativeSpecAttnBackend
from sglang_dflash.srt.speculative.drafters.dflash import DraftWindow

LENGTHS = [23, 4, 12]
CAPACITY = 48


def pools_with_a_table_of_its_own(pools):
    """Return the same KV slots under another request table, as the draft's runner has."""
    own = copy.copy(pools)
    rows, columns = pools.req_to_token_pool.req_to_token.shape
    own.req_to_token_pool = ReqToTokenPool(rows - 1, columns, "cpu", enable_memory_saver=False)
    own.req_to_token_pool.req_to_token.fill_(-1)
    own.backend = TorchNativeSpecAttnBackend(own)
    return own


@pytest.mark.parametrize("window", [1, 5, 12, 200])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["plain", "sliding, not causal", "sample from anchor"])
def test_drafted_tokens_see_the_window_alone(name, page_size, window, tmp_path):
    case = Case.variant(name, tmp_path)
    width = case.model.draft.num_drafting_rows + 1
    pools = case.pools(len(LENGTHS), CAPACITY, page_size=page_size)
    own = pools_with_a_table_of_its_own(pools)
    drafter = case.drafter(own, width)
    drafter.has_own_table = True
    drafter.window = DraftWindow(
        window,
        SimpleNamespace(page_size=page_size, req_to_token_pool=pools.req_to_token_pool),
        drafter._runner,
        "torch_native",
        drafter.num_draft_rows,
    )
    contexts = [case.aux_hidden(n, seed) for seed, n in enumerate(LENGTHS)]
    for request, aux_hidden in enumerate(contexts):
        seen = torch.arange(max(0, len(aux_hidden) - window), len(aux_hidden))
        where = pools.slots(request, int(seen[0]), len(aux_hidden))
        case.model.write_context_kv(aux_hidden[seen], seen, where, pools.token_to_kv_pool)

    idle = case.model.draft.num_idle_rows
    blocks = case.block_tokens([3, 50, 9])[:, : width - 1 + idle]
    cycle = draft_cycle(pools, range(len(LENGTHS)), LENGTHS, blocks, width)
    drafted = drafter.propose(cycle).tokens[:, 1:]

    sees = case.reference.sees
    case.reference.sees = lambda layer, query, key, anchor: (
        (key >= anchor - window) & sees(layer, query, key, anchor)
    )
    for request, aux_hidden in enumerate(contexts):
        embeddings = case.embedding.weight.data[blocks[request]]
        hidden = case.reference.block_hidden(embeddings, case.reference.context_kv(aux_hidden))
        expected = case.logits(hidden)[idle:].argmax(dim=-1)
        assert drafted[request].tolist() == expected.tolist()


@pytest.mark.parametrize("backend, page", [("flashinfer", 1), ("triton", 1), ("fa3", 16)])
def test_lengths_in_sight(backend, page):
    """Exactly the window, unless the backend reads whole pages: then it begins on one.

    Host lengths, which FlashInfer plans with, are the device's plus the block, and never below them.
    """
    window, width = 20, 8
    table = torch.arange(4 * 96, dtype=torch.int32).view(4, 96)
    own = torch.full_like(table, -1)
    pool = SimpleNamespace(req_to_token=table)
    view = DraftWindow(
        window,
        SimpleNamespace(page_size=16, req_to_token_pool=pool),
        SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=own), kv_index_translator=None),
        backend,
        width,
    )
    seq_lens = torch.tensor([1, 20, 21, 70])
    rows = torch.tensor([2, 0, 3, 1])
    cycle = SimpleNamespace(
        committed=seq_lens,
        committed_host=seq_lens,
        req_pool_indices=rows,
        kv_loc_plan=FakePlan(torch.empty(0)),
    )
    seen, seen_host, _ = view.read(cycle)
    for i, (row, n) in enumerate(zip(rows.tolist(), seq_lens.tolist())):
        start = max(0, n - window) // page * page
        assert seen[i] == n - start
        assert own[row, : n - start + width].tolist() == table[row, start : n + width].tolist()
        assert seen_host[i] >= seen[i]
        if page == 1:
            assert seen_host[i] == seen[i]
