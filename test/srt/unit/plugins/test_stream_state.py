"""What SGLang keeps of a stream between two chunks, at 1 to 16 tokens a chunk."""

import random
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from serving import CHAT_TARGET, TARGET
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from support.scripts import SCRIPTS
from transformers import AutoTokenizer

from sglang_dflash.srt.plugins import streams
from sglang_dflash.srt.speculative.dflash_utils import withhold_partial_stops


@pytest.fixture(params=[TARGET, CHAT_TARGET], ids=lambda path: path.name)
def tokenizer(request):
    if not request.param.is_dir():
        pytest.skip("make model")
    return AutoTokenizer.from_pretrained(request.param)


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(detokenizer_manager, "DecodeStatus", streams.DecodeStatus)


def streamed(tokenizer, ids: list[int], lengths: list[int]) -> list[str]:
    """What the detokenizer sends for chunks of these lengths."""
    manager = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size, manager.decode_status = tokenizer, len(tokenizer), {}
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    begin, sent = 0, []
    for length in lengths:
        end = begin + length
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
        if begin >= len(ids):
            break
    return sent


def wrong_streams(tokenizer) -> list[tuple]:
    """Streams that are not the whole text: of the same chunks, and of chunks by lot."""
    wrong = []
    for script, text in SCRIPTS.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        for seed, most in enumerate([*range(1, 17)] * 3):
            draw = random.Random(seed)
            first = draw.randrange(3)
            least = most if seed < 16 else 1
            lengths = [draw.randint(least, most) for _ in ids]
            if "".join(streamed(tokenizer, ids[first:], lengths)) != tokenizer.decode(ids[first:]):
                wrong.append((script, least, most))
    return wrong


def test_joined_chunks_are_the_whole_text(tokenizer, ours):
    assert not wrong_streams(tokenizer)


def test_without_our_patch_they_are_not(tokenizer):
    """Control: SGLang alone sends some text twice, if chunks have several tokens."""
    assert {most > 1 for _, _, most in wrong_streams(tokenizer)} == {True}


def request_of(tokenizer, stop: list[str], ids: list[int], is_stream: bool = True) -> Req:
    params = SamplingParams(stop=stop, max_new_tokens=64)
    params.normalize(tokenizer)
    req = Req("0", "", [1], params, vocab_size=len(tokenizer), stream=is_stream)
    req.tokenizer, req.output_ids = tokenizer, ids
    return req


def is_sent(req: Req, interval: int = 1) -> bool:
    sent = []
    outputs = SimpleNamespace(default_force_stream_interval=interval)
    withhold_partial_stops(lambda outputs, req: sent.append(req), outputs, req=req)
    return bool(sent)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_no_text_goes_out_that_a_stop_takes_back(is_stream, tokenizer):
    """Stop at three characters of each script, and look at every place before their end."""
    sglang_sent = 0
    for text in SCRIPTS.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        stop = text[len(text) // 2 :][:3]
        begin = text.index(stop)
        for end in range(1, len(ids)):
            said = tokenizer.decode(ids[:end])
            if stop in said:
                break
            req = request_of(tokenizer, [stop], ids[:end], is_stream)
            is_inside = len(said.rstrip("\ufffd")) > begin
            sglang_sent += is_inside and not req.check_match_stop_str_prefix()
            assert not (is_inside and is_sent(req)), f"{said!r} before {stop!r}"
    assert sglang_sent, "SGLang alone holds these back, so the test proves nothing"


def test_other_text_goes_out(tokenizer):
    for text in ("界", "世 x", "x \ufffd"):
        assert is_sent(request_of(tokenizer, ["世界"], tokenizer.encode(text, add_special_tokens=False)))
    begun = tokenizer.encode("世", add_special_tokens=False)
    assert is_sent(request_of(tokenizer, [], begun)) and not is_sent(request_of(tokenizer, ["世界"], begun))
    whole = request_of(tokenizer, ["世界"], begun, is_stream=False)
    assert is_sent(whole, interval=len(begun) + 1), "SGLang was not asked whether the answer is due"
    whole.finished_reason = FINISH_LENGTH(length=len(begun))
    assert is_sent(whole)
