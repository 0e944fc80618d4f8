"""The draft's KV in the prefix cache: slots that it exchanges, and a hierarchical cache's host.

With a hierarchical cache the pool holds four of the eight prompts. So a prompt that is sent again is on the
host, and the draft's KV returns with the target's.
"""

import json

import pytest
from serving import DRAFT, PEAGLE_DRAFT, TARGET, dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.scheduled import Job, run
from support.servers import FLOAT32, patched

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = pytest.mark.server

LENGTH, SLOTS = 200, 900
CACHE = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "4", "--max-total-tokens", str(SLOTS), "--no-speculative-adaptive"),
    "--disable-overlap-schedule",  # a request that has ended would sometimes be in one more cycle
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": 32})),
)


@pytest.fixture(scope="module")
def requests() -> list[dict]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = [prompt["text"] for prompt in heldout_prompts()]
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    return [{"input_ids": ids[i * LENGTH : (i + 1) * LENGTH], "sampling_params": sampling} for i in range(8)]


def cycles(answer: dict) -> list[int]:
    return answer["meta_info"]["spec_correct_drafts_histogram"]


def hit_on_the_device(server, request: dict) -> dict:
    """Answer a request whose tokens but the last are on the device, and the last one nowhere.

    A request after one that is on the device finds the last token there as well, and takes over its KV.
    """
    ids = request["input_ids"]
    # A separate key keeps these requests' KV apart from the others'.
    server.generate(
        input_ids=ids[:-1], sampling_params={"temperature": 0, "max_new_tokens": 1}, extra_key="alone"
    )
    return server.generate(**request, extra_key="alone")


@pytest.mark.skipif(not runtime.needs_stand_in(), reason="equal cycles are for float32 on a CPU")
def test_equal_prompts_of_one_batch(requests):
    """The second one gets the first one's slots after its prefill, and others write to its own.

    P-EAGLE's drafter reads through a separate table, which must follow.
    """
    prompts = [tuple(request["input_ids"]) for request in requests]
    others = [Job(other, 8, step=2 * number) for number, other in enumerate(prompts[4:], 1)]
    groups = [[Job(prompt, 48), Job(prompt, 48), *others] for prompt in prompts[:2]]
    small = *FLOAT32, "--no-speculative-adaptive", "--max-total-tokens", "1000"
    answers = run(["--model-path", TARGET, *small, *dflash_arguments(PEAGLE_DRAFT)], groups)
    for one, other, *_ in answers:
        assert other.cached_tokens < LENGTH - 1, "it was not in the same batch"
        assert (one.output_ids, one.accepted) == (other.output_ids, other.accepted)


# A server on a CPU refuses this cache (server/test_startup_errors.py).
@pytest.mark.long
@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_the_drafts_kv_comes_back(draft, servers, requests, reference, tmp_path):
    """From the host, and from files once device and host are emptied.

    Cycles are equal to those after a hit on the device that ends at the same token. The prefill runs the last
    token again. P-EAGLE's row of it lacks the target's state before it, and the first request's row had it.
    After a hit on the device the cache gives a request the first one's row, if it has the last token there.
    After a hit on the host it keeps the new row, as the first one is not on the device.
    """
    patches = patched("no_memory_reserve", "kv_transfer")
    environment = patches | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    server = servers.get(*FLOAT32, *dflash_arguments(draft), *CACHE, environment=environment)
    first, warm = zip(*([server.generate(**request) for _ in range(2)] for request in requests), strict=True)
    again = [server.generate(**request) for request in requests]
    server.flush_cache()
    stored = [server.generate(**request) for request in requests]
    on_device = [hit_on_the_device(server, request) for request in requests]
    wanted = reference.answers(requests)
    assert LENGTH * len(requests) > SLOTS  # the first of them are no longer on the device
    assert sum(map(sum, map(cycles, first)))
    for answers in (first, warm, again, stored, on_device):
        assert_same(requests, answers, wanted)
    for answers in (warm, again, stored, on_device):
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        assert min(cached) >= LENGTH - 1, cached
    assert list(map(cycles, again)) == list(map(cycles, stored)) == list(map(cycles, on_device))
    if draft == DRAFT:  # no row of it depends on the token before
        assert list(map(cycles, again)) == list(map(cycles, warm))
