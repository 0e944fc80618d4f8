"""What SGLang keeps of a stream between two chunks, at 1 to 16 tokens a chunk."""

import random
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from serving import CHAT_TARGET, TARGET
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from support.scripts import SCRIPTS
from transformers import AutoTokenizer

from sglang_dflash.srt.plugins import streams


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
