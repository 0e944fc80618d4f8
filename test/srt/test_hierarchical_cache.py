"""A hierarchical cache: KV of target and draft that comes back from the host.

The pool holds four of the eight prompts. So a prompt that is sent again is on the host, and the draft's KV
returns with the target's.
"""

import pytest
from serving import DRAFT, TARGET, dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.servers import FLOAT32, patched

pytestmark = pytest.mark.server

LENGTH, SLOTS = 200, 900
CACHE = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "4", "--max-total-tokens", str(SLOTS), "--no-speculative-adaptive"),
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


def test_the_drafts_kv_comes_back_from_the_host(servers, requests, reference):
    server = servers.get(*FLOAT32, *dflash_arguments(DRAFT), *CACHE, environment=patched("no_memory_reserve"))
    first = [server.generate(**request) for request in requests]
    again = [server.generate(**request) for request in requests]
    wanted = reference.answers(requests)
    assert_same(requests, first, wanted)
    assert_same(requests, again, wanted)
    assert LENGTH * len(requests) > SLOTS  # the first of them are no longer on the device
    assert all(answer["meta_info"]["cached_tokens"] >= LENGTH - 1 for answer in again)
    assert sum(map(sum, map(cycles, first))) and list(map(cycles, again)) == list(map(cycles, first))
