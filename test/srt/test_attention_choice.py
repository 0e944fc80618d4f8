"""Which attention backends target and draft run on, and what is said where that is not the user's doing."""

from types import SimpleNamespace

import pytest

from sglang_dflash.srt.arg_groups.dflash_args import _check_target_attention, _choose_draft_attention, _chose_attention


def args(device="cuda", draft=None) -> SimpleNamespace:
    return SimpleNamespace(device=device, speculative_draft_attention_backend=draft)


@pytest.mark.parametrize(
    "target, draft, chosen",
    [
        ("fa3", None, "fa3"),
        ("fa3", "flashinfer", "flashinfer"),
        ("trtllm_mha", None, "triton"),  # SGLang's default for gpt-oss and Gemma 4 on Blackwell
        ("trtllm_mla", None, "triton"),  # and for DeepSeek
        ("trtllm_mha", "fa4", "fa4"),
    ],
)
def test_the_drafts_backend(target, draft, chosen):
    assert _choose_draft_attention(args(draft=draft), target) == chosen


def test_the_drafts_backend_on_a_cpu():
    assert _choose_draft_attention(args("cpu"), "torch_native") == "torch_native"


def test_a_backend_the_user_gave_the_draft_is_refused():
    with pytest.raises(ValueError, match="'trtllm_mha'.*--speculative-draft-attention-backend"):
        _choose_draft_attention(args(draft="trtllm_mha"), "fa3")


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_target_that_cannot_verify(is_chosen):
    """The message says whose choice it was."""
    with pytest.raises(ValueError, match="'flashmla'.*--attention-backend") as caught:
        _check_target_attention(args(), "flashmla", is_chosen)
    assert ("SGLang's choice" in str(caught.value)) == (not is_chosen)
    _check_target_attention(args(), "triton", is_chosen)


@pytest.mark.parametrize("field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_whose_choice_it_was(field):
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    nothing = dict.fromkeys(fields)
    assert not _chose_attention(SimpleNamespace(**nothing))
    assert _chose_attention(SimpleNamespace(**{**nothing, field: "fa3"}))
