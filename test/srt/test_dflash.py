"""The server as the README starts it: endpoints answer, and numbers are consistent."""

import importlib.metadata
import json
import random
import unittest

import pytest
from serving import DRAFT, TARGET, Server, dflash_arguments, heldout_prompts
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.spec_server_kits import SpecCorrectnessKit, SpecLogprobKit
from support.parity import first_difference
from support.servers import UNCOUNTED, plain_target
from support.streaming import stream
from support.target_answers import requests_from_prompts
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

# Two ways of batching the same bf16 sums may round differently in every layer. The bundled target's logits, 8
# to 16, are 1/16 apart in bf16: a gap of up to four such steps is a near-tie.
BF16_NEAR_TIE = 0.25

BLOCK_SIZE = json.loads((DRAFT / "config.json").read_text())["block_size"]


@pytest.fixture(scope="module")
def server(servers) -> Server:
    """A server with only the README's flags: bf16, defaults for everything else."""
    return servers.get(*dflash_arguments(), environment=UNCOUNTED)


@pytest.fixture(scope="module")
def prompt() -> str:
    return next(p["text"] for p in heldout_prompts() if 40 <= p["num_tokens"] <= 80)


def test_health(server):
    assert server.get("/health") == ""
    assert server.get("/health_generate") == ""


def test_server_info_tells_what_runs(server):
    info = server.get("/server_info")
    found = {
        name: info[name]
        for name in (
            "speculative_algorithm",
            "speculative_draft_model_path",
            "speculative_num_draft_tokens",
            "version",
        )
    }
    assert found == {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(DRAFT),
        "speculative_num_draft_tokens": BLOCK_SIZE,
        "version": importlib.metadata.version("sglang"),
    }
    assert "sglang-dflash DFlashWorker" in server.log(), "another worker than ours serves"


def test_bf16_differs_from_the_target_only_at_near_ties(server, capsys):
    """Every token is the bf16 target's best at its position, or rounding tipped a near-tie.

    The target alone scores prompt and answer, and so gives the lead of its best token there. Every such
    position is printed.
    """
    requests = requests_from_prompts()
    requests = random.Random(0).sample(requests, len(requests) // 18)  # bf16 is slow on many a CPU
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [request.get("input_ids") or tokenizer.encode(request["text"]).ids for request in requests]
    answers = [answer["output_ids"] for answer in server.generate_many(requests, 16)]
    scoring = [
        {
            "input_ids": prompt + answer,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 1,
            "logprob_start_len": len(prompt) - 1,
        }
        for prompt, answer in zip(prompts, answers)
    ]
    with plain_target("--sleep-on-idle") as bf16_target:
        scores = [answer["meta_info"] for answer in bf16_target.server.generate_many(scoring, 16)]
    behind = []
    for number, (answer, score) in enumerate(zip(answers, scores, strict=True)):
        said, best = (score[f"input_{kind}_logprobs"][-len(answer) :] for kind in ("token", "top"))
        for place, ((logprob, *_), [(most, token, _)]) in enumerate(zip(said, best, strict=True)):
            if token != answer[place]:
                behind.append((most - logprob, f"answer {number}, output position {place}"))
    with capsys.disabled():
        print(f"\nbf16: {len(behind)} of {sum(map(len, answers))} tokens are not the bf16 target's best")
        for gap, place in behind:
            print(f"  {place}: {gap:.4f} behind it")
    wide = [place for gap, place in behind if gap > BF16_NEAR_TIE]
    assert not wide, f"{len(wide)} tokens are far from the bf16 target's best:\n{wide[:3]}"
    for request, answer in zip(requests, answers):
        sampling = request["sampling_params"]
        assert len(answer) == sampling["max_new_tokens"] or not sampling["ignore_eos"]


def test_numbers_of_an_answer_fit_together(server):
    """`spec_verify_ct`, the histogram of kept drafts per cycle, and the emitted tokens agree."""
    for prompt in [p["text"] for p in heldout_prompts() if p["num_tokens"] >= 8][::40]:
        answer = server.generate(
            text=prompt, sampling_params={"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
        )
        meta = answer["meta_info"]
        histogram = meta["spec_correct_drafts_histogram"]
        cycles = meta["spec_verify_ct"]
        kept = sum(count * tokens for tokens, count in enumerate(histogram))
        assert sum(histogram) == cycles, meta
        assert len(histogram) <= BLOCK_SIZE, f"more drafts kept in a cycle than a block holds: {meta}"
        # One token from the prompt's forward, then every cycle gives its drafts and a bonus; the last may
        # overshoot.
        produced = 1 + kept + cycles
        assert 50 <= produced < 50 + BLOCK_SIZE, f"the histogram makes {produced} tokens of 50: {meta}"
        assert len(answer["output_ids"]) == meta["completion_tokens"] == 50, meta
        assert meta["spec_num_proposed_drafts"] == cycles * (BLOCK_SIZE - 1), meta
        assert meta["spec_accept_length"] == pytest.approx(50 / cycles), "SGLang: all tokens over cycles"


def test_completions(server, prompt):
    request = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 40}
    answer = server.post("/v1/completions", request)
    chunks = list(stream(server, request, "/v1/completions"))
    text = answer["choices"][0]["text"]
    assert text and "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    native = server.generate(text=prompt, sampling_params={"temperature": 0, "max_new_tokens": 40})
    assert text == native["text"]
    assert answer["usage"]["completion_tokens"] == native["meta_info"]["completion_tokens"]


def test_chat_completions(server):
    """Streamed or not, the answer is the same up to a near-tie, as verify lengths may differ."""
    messages = next(p["messages"] for p in heldout_prompts() if p.get("chat"))
    request = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 40}
    request |= {"logprobs": True, "top_logprobs": 2}
    server.flush_cache()
    choice = server.post("/v1/chat/completions", request)["choices"][0]
    whole = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "".join(entry["token"] for entry in whole)
    server.flush_cache()
    chunks = [
        chunk["choices"][0] for chunk in stream(server, request, "/v1/chat/completions") if chunk["choices"]
    ]
    deltas = [chunk["delta"].get("content") or "" for chunk in chunks]
    streamed = [
        entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ]
    assert "".join(deltas) == "".join(streamed)
    assert len([delta for delta in deltas if delta]) > 1, "the answer came in one piece"
    place = first_difference(streamed, [entry["token"] for entry in whole])
    if place is not None:
        best, second = whole[place]["top_logprobs"]
        two = {best["token"], second["token"]}
        assert {streamed[place], whole[place]["token"]} == two, f"token {place} is none of the two best"
        assert best["logprob"] - second["logprob"] <= BF16_NEAR_TIE, f"token {place} is no near-tie"


class TestSGLangKits(
    BasicAPIContractMixin, AbortAllMixin, SpecCorrectnessKit, SpecLogprobKit, unittest.TestCase
):
    """SGLang's own checks of a speculative server.

    Left out: kits that ask for the capital of France, for tokens a vocabulary of 2,048 lacks, or for a pool
    of most of the machine's memory (SpecParityKit; engine/test_lossless.py is the stricter form).
    """

    abort_all_max_new_tokens = 3000
    # The prompts are English chat, which the bundled pair has never seen: only that drafting does no harm.
    acc_length_thres = 1.0
    batch_accept_len_thres = 1.0

    # A minute of prefill for a question test_requests.py asks in float32.
    test_logprob_mixed = None
    # Long answers. Tests in float32 ask the same of short ones.
    test_eos_token = pytest.mark.long(SpecCorrectnessKit.test_eos_token)
    test_acc_length = pytest.mark.long(SpecCorrectnessKit.test_acc_length)
    test_logprob_match = pytest.mark.long(SpecLogprobKit.test_logprob_match)

    @pytest.fixture(autouse=True, scope="class")
    def _attach(self, request, server):
        request.cls.base_url = server.url
        request.cls.process = server.process
        request.cls.tokenizer = _KitTokenizer(server)


class _KitTokenizer:
    """The part of a tokenizer that SpecCorrectnessKit needs."""

    def __init__(self, server: Server):
        path = server.get("/get_model_info")["model_path"]
        self._tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
        self.eos_token_id = self._tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text: str, truncation: bool = False) -> list[int]:
        return self._tokenizer.encode(text).ids
