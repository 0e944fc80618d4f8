"""The ends of the context, of the KV pool and of a request's row, with blocks of every size.

In one process: the worker's reservation with SGLang's own tables and allocators, then whole schedulers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT, TARGET, text_prompts
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_schedule, get_serving, get_spec
from support.context_watch import watch_context
from support.drafts import make_draft
from support.engine import start
from support.scheduled import Answer, Job, Oracle, run
from tokenizers import Tokenizer

from sglang_dflash.srt.speculative import kv_pool
from sglang_dflash.srt.speculative.dflash_info import NOT_RESERVED, DFlashDraftInput, reserve_slots

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
        [reserved] = reserve_slots(batch, [committed]).tolist()
    assert reserved == kv.kv_allocated_len
    return table.req_to_token, reserved


@pytest.mark.parametrize("page", [1, 16, 64, 256])
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


@pytest.fixture
def serve_pool_of() -> Iterator[Callable[[object], None]]:
    yield kv_pool.limit_to_kv_pool
    kv_pool.limit_to_kv_pool(None)


@pytest.mark.parametrize(
    ("pool", "page", "prompt", "wanted", "given"),
    [
        (600, 1, 300, 400, 282),
        (600, 1, 300, 5, 5),
        (600, 1, 300, None, 282),
        (600, 1, 581, 400, 1),
        (600, 1, 582, 400, "The prompt has 582 tokens. The KV pool holds 600, and DFLASH needs 18"),
        (640, 64, 400, 400, 96),
        (640, 64, 600, 400, "The prompt has 600 tokens. The KV pool holds 640, and DFLASH needs 144"),
        (16, 1, 3, 4, "The prompt has 3 tokens. The KV pool holds 16"),
    ],
)
def test_requests_end_with_the_pool(pool, page, prompt, wanted, given, serve_pool_of):
    """Two blocks of 8 and two pages stay free beside a request: SGLang runs its steps and admits it."""
    start()
    runner = SimpleNamespace(max_total_num_tokens=pool, page_size=page)
    serve_pool_of(runner)
    params = SimpleNamespace(max_new_tokens=wanted)
    request = SimpleNamespace(origin_input_ids=[7] * prompt, sampling_params=params)
    with get_spec().override(speculative_num_draft_tokens=8):
        refusal = kv_pool.end_with_pool(request)
    if isinstance(given, int):
        assert refusal is None and params.max_new_tokens == given
    else:
        assert refusal.startswith(given) and params.max_new_tokens == wanted


def test_a_prompt_may_be_cut_to_the_pool(serve_pool_of):
    start()
    runner = SimpleNamespace(max_total_num_tokens=600, page_size=1)
    serve_pool_of(runner)
    params = SimpleNamespace(max_new_tokens=400)
    request = SimpleNamespace(origin_input_ids=[*range(700)], sampling_params=params)
    with (
        get_spec().override(speculative_num_draft_tokens=8),
        get_serving().override(allow_auto_truncate=True),
    ):
        assert kv_pool.end_with_pool(request) is None
    assert request.origin_input_ids == [*range(581)] and params.max_new_tokens == 1


def inputs(*requests: int, relayed: bool = False) -> DFlashDraftInput:
    """Make the input of these requests; the numbers stand for each of their fields."""
    numbers = torch.tensor(requests)
    indices = numbers + 200 if relayed else None
    return DFlashDraftInput(numbers, numbers + 100, indices, reserved_lens_cpu=numbers.int())


@pytest.mark.parametrize("relayed", [False, True])
def test_an_input_follows_its_requests(relayed):
    """Requests leave and join a batch; what was reserved for the step before is forgotten."""
    batch = inputs(1, 2, 3, relayed=relayed)
    batch.filter_batch(torch.tensor([0, 2]), [0, 2])
    assert batch.reserved_lens_cpu is NOT_RESERVED
    batch.reserved_lens_cpu = torch.zeros(2)
    batch.merge_batch(inputs(9, relayed=relayed))
    assert batch.reserved_lens_cpu is NOT_RESERVED
    if relayed:
        assert batch.future_indices.tolist() == [201, 203, 209]
    else:
        assert batch.bonus_tokens.tolist() == [1, 3, 9] and batch.new_seq_lens.tolist() == [101, 103, 109]


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
def test_requests_run_past_the_positions_of_the_draft(tmp_path):
    """Answers cross the end of a draft for 256 positions, and prompts lie behind it.

    Output and drafts are those of the same draft with as many positions as its target.
    """
    short = make_draft(tmp_path / "short", max_position_embeddings=256)
    jobs = [Job(text(length), 48, step=step) for step, length in enumerate((215, 250, 256, 300, 1500))]
    [wanted] = run(["--model-path", TARGET, *FLAGS, "--max-total-tokens", "4000"], [jobs])
    long, found = (
        run([*server("DFLASH", draft, 16, WHOLE), *FLAGS, "--max-total-tokens", "4000"], [jobs])[0]
        for draft in (DRAFT, short)
    )
    for answers in (long, found):
        assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in wanted]
    assert [answer.accepted for answer in found] == [answer.accepted for answer in long]
    assert all(sum(answer.accepted) for answer in found), "nothing is drafted"


PAIR = [Job(text(200), 400), Job(text(150), 400)]


@pytest.fixture(scope="module")
def pair_alone() -> list[Answer]:
    """Return the answers of the target alone to PAIR, up to the pool's end."""
    jobs = [replace(job, max_new_tokens=POOL - len(job.input_ids)) for job in PAIR]
    return run(["--model-path", TARGET, *FLAGS, "--max-total-tokens", "4000"], [jobs])[0]


@pytest.mark.server
@pytest.mark.parametrize("block", [pytest.param(8, marks=pytest.mark.long), 32])
def test_an_answer_ends_where_the_pool_does(block, pair_alone):
    """One user's pool is smaller than the context. Two requests together are retracted, and end there too."""
    groups = [[PAIR[0]], [PAIR[1]], PAIR]
    found = run([*server("DFLASH", DRAFT, block), *AT_POOL], groups)
    answers = [answer for group in found for answer in group]
    for job, want, answer in zip([*PAIR, *PAIR], [*pair_alone, *pair_alone], answers, strict=True):
        length = POOL - 2 * (block + 1) - len(job.input_ids)
        assert len(answer.output_ids) == length and answer.finish_reason == "FINISH_LENGTH"
        assert answer.output_ids == want.output_ids[:length]


@pytest.mark.server
def test_a_prompt_longer_than_the_pool_is_refused():
    [[answer]] = run([*server("DFLASH", DRAFT, 8), *AT_POOL], [[Job(text(290), 8)]])
    assert answer.finish_reason == "FINISH_ABORT"


@pytest.mark.server
@pytest.mark.parametrize(
    ("algorithm", "draft", "block", "page", "flags"),
    [
        ("DFLASH", DRAFT, 16, 1, ["--chunked-prefill-size", "12"]),
        pytest.param(
            *("PEAGLE", PEAGLE_DRAFT, 8, 16, ["--disable-radix-cache", WHOLE]), marks=pytest.mark.long
        ),
    ],
    ids=["chunks", "pages"],
)
def test_answers_run_up_to_the_pool(algorithm, draft, block, page, flags):
    """A request alone ends with `length`. Requests that exceed the pool together end as they would alone."""
    end = POOL // page * page - 2 * (block + page)
    jobs = near(end, 150, 60, 20, 2)
    [wanted] = run(["--model-path", TARGET, *FLAGS, "--max-total-tokens", "2000"], [jobs])
    together = [Job(job.input_ids, 400, step=index) for index, job in enumerate(jobs)]
    alone = [[Job(job.input_ids, 400)] for job in jobs[1:3]]
    too_long = [Job(text(end), 400)]
    arguments = [*server(algorithm, draft, block, *flags), *AT_POOL, "--page-size", page]
    # Told that answers are short, the scheduler admits more than the pool holds.
    environment = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
    *single, found, refused = run(arguments, [*alone, together, too_long], environment=environment)
    for answer, want, job in zip(
        [answer for [answer] in single] + found, [*wanted[1:3], *wanted], [*jobs[1:3], *jobs], strict=True
    ):
        assert answer.finish_reason == "FINISH_LENGTH" and len(answer.output_ids) == end - len(job.input_ids)
        assert answer.output_ids == want.output_ids[: len(answer.output_ids)]
    assert refused[0].finish_reason == "FINISH_ABORT"
    if "--disable-radix-cache" not in flags:  # or SGLang admits only what fits to its end
        assert sum(answer.retractions for answer in found) > 0
