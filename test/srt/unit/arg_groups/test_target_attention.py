"""Messages about the target's attention backend, chosen by the user or by SGLang."""

from types import SimpleNamespace

import pytest

from sglang_dflash.srt.arg_groups.support import chose_attention, target_attention_findings


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_target_that_cannot_verify(is_chosen):
    """The finding states if SGLang chose the backend."""
    [finding] = target_attention_findings("cuda", "flashmla", is_chosen)
    assert "'flashmla'" in finding.what and "--attention-backend" in finding.what and finding.builtin_supports
    assert ("SGLang's choice" in finding.what) == (not is_chosen)
    assert not target_attention_findings("cuda", "triton", is_chosen)


@pytest.mark.parametrize(
    "field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]
)
def test_an_attention_flag_is_the_users_choice(field):
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    nothing = dict.fromkeys(fields)
    assert not chose_attention(SimpleNamespace(**nothing))
    assert chose_attention(SimpleNamespace(**{**nothing, field: "fa3"}))
