"""The ends of the context, of the KV pool and of a request's row, with blocks of every size.

In one process: the worker's reservation with SGLang's own tables and allocators, then whole schedulers.
"""

from types import SimpleNamespace

import pytest
import torch
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT, TARGET, text_prompts
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_schedule, get_spec
from support.context_watch import watch_context
from support.engine import start
from support.scheduled import Answer, Job, Oracle, run
from tokenizers import Tokenizer

from sglang_dflash.srt.speculative.dflash_info import _reserve_slots

CONTEXT = 128
POOL = 300
MARK = -7  # entries of other requests
ROW = 2  # of the request table


def reserve(block: int, page: int, committed: int, pool_size: int = 4096) -> tuple[torch.Tensor, list[int]]:
    """Reserve for one request of `committed` tokens, in a table that SGLang sizes.

    Returns the table, in which every other row has marks, and the reserved length.
    """
    start()
    spec = {"speculative_num_draft_tokens": block, "speculative_algorithm": "DFLASH"}
    with get_spec().override(**spec), get_schedule().override(page_size=page):
        extra = get_req_to_token_extra_context_len()
        table = ReqToTokenPool(3, CONTEXT + extra, "cpu", enable_memory_saver=False)
        make = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
        sizes = (pool_size,) if page == 1 else (pool_size, page)
        allocator = make(*sizes, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)
        slots = allocator.alloc(-(-committed // page) * page)[:committed]
        table.req_to_token.fill_(MARK)
        table.req_to_token[ROW, :committed] = slots.int()
        kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=committed)
        batch = SimpleNamespace(
            reqs=[SimpleNamespace(kv=kv)],
            req_pool_indices=torch.tensor([ROW]),
            req_to_token_pool=table,
            token_to_kv_pool_allocator=allocator,
            tree_cache=SimpleNamespace(
                token_to_kv_pool_allocator=allocator,
                supports_prefix_sharing=lambda: False,
                pretty_print=lambda: None,
            ),
            device="cpu",
            hisparse_coordinator=None,
        )
        [reserved] = _reserve_slots(batch, [committed]).tolist()
    assert reserved == kv.kv_allocated_len
    return table.req_to_token, reserved


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("block", [8, 16, 32])
def test_a_reservation_ends_with_the_row(block, page):
    """A running request has at most CONTEXT - 4 tokens with KV; one more block may be in flight."""
    for committed in range(CONTEXT - 3 * block, CONTEXT - 3):
        table, reserved = reserve(block, page, committed)
        assert min(committed + 2 * block, CONTEXT + block) <= reserved <= table.shape[1]
        assert reserved % page == 0, "the rest of a page would have no owner"
        own = table[ROW]
        assert (own[:reserved] > 0).all() and own[:reserved].unique().numel() == reserved
        table[ROW, :reserved] = MARK
        assert (table == MARK).all(), "entries of another request"


def test_a_full_pool_gives_two_blocks():
    """The pool has two blocks for this request, and none to spare."""
    for page in (1, 16):
        _, reserved = reserve(8, page, 48, pool_size=64)
        assert reserved == 64


def text(length: int) -> tuple[int, ...]:
    """Return the first tokens of some held-out code."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return tuple(tokenizer.encode("\n".join(prompt["text"] for prompt in text_prompts()[:20])).ids[:length])


def near(end: int, *rooms: int) -> list[Job]:
    """Make requests for more tokens than there are up to `end`, with prompts that leave these rooms."""
    return [Job(text(end - room)[-(end - room) :], end) for room in rooms]


FLAGS = ["--dtype", "float32", "--max-running-requests", "6"]
AT_CONTEXT = [*FLAGS, "--context-length", str(CONTEXT), "--max-total-tokens", "2000"]
AT_POOL = [*FLAGS, "--context-length", "2048", "--max-total-tokens", str(POOL)]
WHOLE = "--no-speculative-adaptive"


def server(algorithm: str, draft: object, block: int, *flags: object) -> list[object]:
    draft = ["--speculative-draft-model-path", draft, "--speculative-num-draft-tokens", block]
    return ["--model-path", TARGET, "--speculative-algorithm", algorithm, *draft, *flags]


@pytest.fixture(scope="module")
def at_the_context() -> tuple[list[Job], list[Answer]]:
    """Requests near the context's end, and the answers of the target alone."""
    jobs = near(CONTEXT, 100, 60, 20, 10, 7)
    [answers] = run(["--model-path", TARGET, *AT_CONTEXT], [jobs])
    lengths = [len(job.input_ids) + len(answer.output_ids) for job, answer in zip(jobs, answers, strict=True)]
    assert lengths == [CONTEXT - 2] * len(jobs)
    return jobs, answers


@pytest.mark.server
@pytest.mark.parametrize(
    ("algorithm", "draft", "block", "flags"),
    [
        ("DFLASH", DRAFT, 16, [WHOLE, "--speculative-draft-window-size", "64"]),
        ("DFLASH", DFLASH2_DRAFT, 32, []),
        ("PEAGLE", PEAGLE_DRAFT, 16, [WHOLE]),
    ],
    ids=["window", "adaptive", "peagle"],
)
def test_answers_run_up_to_the_context(algorithm, draft, block, flags, at_the_context):
    """An oracle drafts, so that the last cycle of a request keeps all, and one more begins far behind it."""
    jobs, wanted = at_the_context
    oracle = Oracle([[*answer.output_ids, *[5] * 2 * block] for answer in wanted], 0.05)
    [found] = run(
        [*server(algorithm, draft, block, *flags), *AT_CONTEXT], [jobs], oracle, prepare=watch_context
    )
    assert [answer.output_ids for answer in found] == [answer.output_ids for answer in wanted]
    assert {answer.finish_reason for answer in found} == {"FINISH_LENGTH"}


@pytest.mark.server
@pytest.mark.parametrize("block", [8, 32])
def test_an_answer_ends_where_the_pool_does(block):
    """One user's pool is smaller than the context. Two requests together are retracted, and end there too."""
    jobs = [Job(text(200), 400), Job(text(150), 400)]
    groups = [[jobs[0]], [jobs[1]], jobs]
    plain = run(["--model-path", TARGET, *FLAGS, "--max-total-tokens", "4000"], groups)
    found = run([*server("DFLASH", DRAFT, block), *AT_POOL], groups)
    for group, wanted, answers in zip(groups, plain, found, strict=True):
        for job, want, answer in zip(group, wanted, answers, strict=True):
            length = POOL - 2 * (block + 1) - len(job.input_ids)
            assert len(answer.output_ids) == length and answer.finish_reason == "FINISH_LENGTH"
            assert answer.output_ids == want.output_ids[:length]


@pytest.mark.server
def test_a_prompt_longer_than_the_pool_is_refused():
    [[answer]] = run([*server("DFLASH", DRAFT, 8), *AT_POOL], [[Job(text(290), 8)]])
    assert answer.finish_reason == "FINISH_ABORT"
