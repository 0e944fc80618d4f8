"""Messages about the target's attention backend, chosen by the user or by SGLang."""

from types import SimpleNamespace

import pytest

from sglang_dflash.srt.arg_groups.dflash_args import check_target_attention, chose_attention


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_target_that_cannot_verify(is_chosen):
    """The message states if SGLang chose the backend."""
    with pytest.raises(ValueError, match="'flashmla'.*--attention-backend") as caught:
        check_target_attention(SimpleNamespace(device="cuda"), "flashmla", is_chosen)
    assert ("SGLang's choice" in str(caught.value)) == (not is_chosen)
    check_target_attention(SimpleNamespace(device="cuda"), "triton", is_chosen)


@pytest.mark.parametrize(
    "field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]
)
def test_an_attention_flag_is_the_users_choice(field):
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    nothing = dict.fromkeys(fields)
    assert not chose_attention(SimpleNamespace(**nothing))
    assert chose_attention(SimpleNamespace(**{**nothing, field: "fa3"}))
