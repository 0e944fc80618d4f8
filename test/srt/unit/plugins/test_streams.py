"""What SGLang keeps of a stream between two chunks, at 1 to 16 tokens a chunk."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from serving import CHAT_TARGET, TARGET
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from support.scripts import SCRIPTS
from transformers import AutoTokenizer

from sglang_dflash.srt.plugins import streams
from sglang_dflash.srt.speculative.dflash_utils import withhold_begun_stops


@pytest.fixture(params=[TARGET, CHAT_TARGET], ids=lambda path: path.name)
def tokenizer(request):
    if not request.param.is_dir():
        pytest.skip("make model")
    return AutoTokenizer.from_pretrained(request.param)


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(detokenizer_manager, "DecodeStatus", streams.DecodeStatus)


def streamed(tokenizer, ids: list[int], lengths) -> list[str]:
    """What the detokenizer sends for chunks of these lengths."""
    manager = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size, manager.decode_status = tokenizer, len(tokenizer), {}
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    begin, sent = 0, []
    while begin < len(ids):
        end = begin + next(lengths)
        batch = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[ids[begin:end]],
            read_offsets=[0],
            finished_reasons=[{"type": "length", "length": len(ids)} if end >= len(ids) else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        sent += manager._decode_batch_token_id_output(batch)
        begin = end
    return sent


def wrong_streams(tokenizer) -> list[tuple]:
    """Streams that are not the whole text: of the same chunks, and of chunks by lot."""
    wrong = []
    for script, text in SCRIPTS.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        for seed, most in enumerate([*range(1, 17)] * 3):
            draw = random.Random(seed)
            is_even = seed < 16
            lengths = iter(lambda: most if is_even else draw.randint(1, most), None)
            first = draw.randrange(3)
            if "".join(streamed(tokenizer, ids[first:], lengths)) != tokenizer.decode(ids[first:]):
                wrong.append((script, most, is_even))
    return wrong


def test_joined_chunks_are_the_whole_text(tokenizer, ours):
    assert not wrong_streams(tokenizer)


def test_without_our_patch_they_are_not(tokenizer):
    """Control: SGLang alone sends some text twice, if chunks have several tokens."""
    assert {most > 1 for _, most, _ in wrong_streams(tokenizer)} == {True}


def request_of(tokenizer, stop: list[str], ids: list[int]) -> Req:
    params = SamplingParams(stop=stop, max_new_tokens=64)
    params.normalize(tokenizer)
    req = Req("0", "", [1], params, vocab_size=len(tokenizer))
    req.tokenizer, req.output_ids = tokenizer, ids
    return req


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_begun_stop_is_held_back(script, tokenizer):
    """Stop at each word: no stream goes on while its text ends inside a beginning of the stop."""
    text = SCRIPTS[script]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop = text[len(text) // 2 :][:3]
    begins = text.index(stop)
    sent_too_early = {"SGLang's": 0, "ours": 0}
    for end in range(1, len(ids)):
        said = tokenizer.decode(ids[:end])
        if stop in said:
            break
        req = request_of(tokenizer, [stop], ids[:end])
        is_inside = len(said.rstrip("\ufffd")) > begins
        sent_too_early["SGLang's"] += is_inside and not req.check_match_stop_str_prefix()
        sent_too_early["ours"] += is_inside and not withhold_begun_stops(Req.check_match_stop_str_prefix, req)
    assert sent_too_early["ours"] == 0


def test_sglang_alone_sends_a_begun_stop(tokenizer):
    """Control."""
    ids = tokenizer.encode("x 世界", add_special_tokens=False)
    req = request_of(tokenizer, ["世界"], ids[:-1])
    assert tokenizer.decode(ids[:-1]).endswith("世\ufffd")
    assert not req.check_match_stop_str_prefix()
    assert withhold_begun_stops(Req.check_match_stop_str_prefix, req)


def test_other_text_is_not_held_back(tokenizer):
    for text in ("界", "世 x", "x \ufffd"):
        req = request_of(tokenizer, ["世界"], tokenizer.encode(text, add_special_tokens=False))
        assert not withhold_begun_stops(Req.check_match_stop_str_prefix, req)
    assert not withhold_begun_stops(Req.check_match_stop_str_prefix, request_of(tokenizer, [], [5]))
