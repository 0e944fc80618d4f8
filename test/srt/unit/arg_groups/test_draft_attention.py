"""The attention backend chosen for a draft on a GPU, and messages about the target's."""

import logging
from types import SimpleNamespace

import pytest

from sglang_dflash.srt.arg_groups.support import (
    choose_draft_attention,
    chose_attention,
    target_attention_problems,
)
from sglang_dflash.srt.configs.draft_kinds import PEagleDraftConfig

FULL = {"sliding_window": None, "shifts_request_table": False}
SLIDING = FULL | {"sliding_window": 2048}
PEAGLE = FULL | {name: getattr(PEagleDraftConfig, name) for name in ("kind", "shifts_request_table")}
FROM_ANCHOR, FROM_QUERY = SLIDING | {"window_from_anchor": True}, SLIDING | {"window_from_anchor": False}


def choose(
    target: str, draft, asked: str | None = None, context: int = 40_960, page_size: int | None = None
) -> str:
    args = SimpleNamespace(
        speculative_draft_attention_backend=asked, context_length=None, page_size=page_size, device="cuda"
    )
    draft = SimpleNamespace(**draft) if isinstance(draft, dict) else draft
    return choose_draft_attention(args, target, draft, SimpleNamespace(max_position_embeddings=context))


@pytest.mark.parametrize("target", ["flashinfer", "triton", "fa3", "fa4"])
def test_the_targets(target):
    assert choose(target, FULL) == target


@pytest.mark.parametrize("target", ["trtllm_mha", "trtllm_mla", "flashmla"])
def test_a_target_whose_backend_runs_no_drafts(target, caplog):
    """SGLang's default on Blackwell is trtllm_mha; plain flags have to start there."""
    with caplog.at_level(logging.INFO):
        assert choose(target, FULL) == "flashinfer"
    [record] = caplog.records
    assert target in record.getMessage() and "flashinfer" in record.getMessage()


@pytest.mark.parametrize(
    ("draft", "target", "wanted"),
    [
        (FROM_ANCHOR, "flashinfer", "flashinfer"),
        (FROM_ANCHOR, "fa3", "flashinfer"),
        (FROM_ANCHOR, "triton", "flashinfer"),
        (FROM_QUERY, "flashinfer", "triton"),
        (FROM_QUERY, "trtllm_mha", "triton"),
        (FROM_QUERY, "fa3", "fa3"),
    ],
)
def test_sliding_windows_are_counted_as_in_training(draft, target, wanted):
    assert choose(target, draft) == wanted


@pytest.mark.parametrize("draft", [FROM_ANCHOR, FROM_QUERY])
def test_a_window_as_long_as_the_context_is_none(draft):
    for target in ("flashinfer", "fa3", "triton"):
        assert choose(target, draft, context=2048) == target


@pytest.mark.parametrize(
    ("draft", "asked", "chosen"),
    [
        (FROM_QUERY, "flashinfer", "triton"),
        (FROM_ANCHOR, "fa3", "flashinfer"),
        (FULL, "trtllm_mha", "flashinfer"),
    ],
)
def test_an_unsuited_request_gets_a_suited_one_and_a_warning(draft, asked, chosen, caplog):
    assert choose("flashinfer", draft, asked=asked) == chosen
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"attention backend {chosen}, not on the requested {asked}" in record.getMessage()


def test_peagle_with_pages():
    assert choose("fa3", PEAGLE, page_size=1) == "fa3"
    assert choose("fa3", PEAGLE, page_size=16) == "flashinfer"
    assert choose("fa3", PEAGLE, asked="fa3", page_size=16) == "flashinfer"


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_target_that_cannot_verify(is_chosen):
    [finding] = target_attention_problems("cuda", "flashmla", is_chosen)
    assert "'flashmla'" in finding.what and "--attention-backend" in finding.what and finding.builtin_supports
    assert ("SGLang's choice" in finding.what) == (not is_chosen)
    assert not target_attention_problems("cuda", "triton", is_chosen)


def test_an_attention_flag_is_the_users_choice():
    nothing = dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
    assert not chose_attention(SimpleNamespace(**nothing))
    for field in nothing:
        assert chose_attention(SimpleNamespace(**nothing | {field: "fa3"}))
