"""Stops inside a run of accepted tokens: the answer and its counts are those of single tokens."""

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from serving import TARGET
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_dflash.srt.speculative.stops import truncate_at_first_stop

VOCAB = 2048
TEXT = "def of(self):\n    return self.text\n\nclass Next:\n    pass\n"
THOUGHTS_END = 17


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = get_tokenizer(str(TARGET))
    tokenizer.additional_stop_token_ids = None
    return tokenizer


@pytest.fixture(autouse=True, scope="module")
def first_stops():
    with pytest.MonkeyPatch.context() as patch:
        check = Req.update_finish_state
        patch.setattr(Req, "update_finish_state", lambda *args: truncate_at_first_stop(check, *args))
        yield


class Grammar:
    """A grammar that has read a whole run, and ended with it."""

    def is_terminated(self) -> bool:
        return True


def answer(tokenizer, tokens, run: int, sampling, grammar=None, aborted_at=None):
    """Return what is sent of these tokens, if `run` of them are accepted at a time.

    aborted_at: the run with this token is the one in which the request is aborted.
    """
    params = SamplingParams(**sampling)
    params.normalize(tokenizer)
    req = Req("0", "", array("q", [1]), params, vocab_size=VOCAB, require_reasoning=True, eos_token_ids={0})
    req.tokenizer, req.grammar = tokenizer, grammar
    for at in range(0, len(tokens), run):
        accepted = tokens[at : at + run]
        if aborted_at is not None and aborted_at < at + run:
            req.to_finish = FINISH_ABORT()
        req.output_ids.extend(accepted)
        req.update_reasoning_tokens(accepted, [THOUGHTS_END])
        req.update_finish_state(len(accepted))
        if req.finished():
            break
    assert req.grammar is grammar
    reason = req.finished_reason and req.finished_reason.to_json()
    return list(req.output_ids_through_stop), reason, req.reasoning_tokens


STOPS = ("self", "return", "\n", "\n\n", ":\n ", "text\n\ncl")


@given(
    st.lists(st.sampled_from(STOPS), max_size=3, unique=True),
    st.lists(st.sampled_from(["s[a-z]+", "\\n$", "[(:]"]), max_size=2),
    st.sets(st.integers(0, 2047), max_size=2),
    st.integers(1, 40),
    st.integers(0, 20),
    st.booleans(),
    st.integers(0, 20),
    st.booleans(),
)
@example([], ["\\n$"], set(), 17, 0, True, 0, False)  # matches inside a run at the end of no run
@example([], [], set(), 1, 0, False, 0, True)  # of broken logits at once
def test_a_run_ends_where_single_tokens_do(
    tokenizer, stop, stop_regex, ends, longest, at, ignores, aborted_at, breaks
):
    """An abort, or broken logits, in the run of a stop leave no token behind it.

    breaks: a token is outside the vocabulary, which is what SGLang calls NaN.
    """
    tokens = tokenizer.encode(TEXT)
    ends |= {tokens[at % len(tokens)]}
    tokens.insert(at, THOUGHTS_END)
    aborted_at %= len(tokens)
    if breaks:
        tokens[aborted_at] = VOCAB
    sampling = {
        "stop": stop,
        "stop_regex": stop_regex,
        "stop_token_ids": ends,
        "max_new_tokens": longest,
        "ignore_eos": ignores,
    }
    expected = answer(tokenizer, tokens, 1, sampling)
    for run in (2, 8, 16, 32):
        assert answer(tokenizer, tokens, run, sampling) == expected
        ids, reason, thoughts = answer(tokenizer, tokens, run, sampling, aborted_at=aborted_at)
        ran = (aborted_at // run + 1) * run
        if len(expected[0]) <= ran - run:
            assert (ids, reason, thoughts) == expected, "it had ended before"
        else:
            assert (ids, thoughts) == (expected[0][:ran], min(expected[2], len(ids))) and reason[
                "type"
            ] == "abort"


def test_a_grammar_that_ends_with_the_run_hides_no_stop(tokenizer):
    """A stop string inside the run wins over the grammar, which SGLang advances by whole runs."""
    tokens = tokenizer.encode(TEXT)
    expected, reason, _ = answer(tokenizer, tokens, 1, {"stop": ["return"]})
    assert reason["matched"] == "return" and 1 < len(expected) < len(tokens)
    assert answer(tokenizer, tokens, len(tokens), {"stop": ["return"]}, Grammar())[:2] == (expected, reason)
