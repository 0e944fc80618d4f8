"""What ours makes of a record that it serves: flags that it ignores, adjusts, assumes or turns off.

Records are resolved by SGLang's own step, as in the launcher, for a pretended GPU.
"""

import logging

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from serving import DRAFT, HYBRID_DRAFT, HYBRID_TARGET
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.managers.min_free_slots_delayer import resolve_min_free_slots
from support.drafts import REMOVE, make_draft
from support.records import changed_draft, quantize_draft, record_of, resolve
from support.releases import IS_0_5_22

from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.environ import DFlashOptions


@pytest.mark.parametrize("arguments", [{}, {"enable_lora": True}, {"enable_hierarchical_cache": True}])
def test_ours_serves_whatever_it_can(arguments):
    record = resolve(record_of(**arguments))
    assert not Implementation.from_server_args(record).is_builtin
    assert resolving_view(record).speculative_num_draft_tokens == 8


# (field, value, part of the warning)
IGNORED = [
    ("speculative_num_steps", 3, "--speculative-num-steps"),
    ("speculative_eagle_topk", 4, "--speculative-eagle-topk"),
    ("speculative_token_map", "map.pt", "--speculative-token-map"),
    ("speculative_use_block_verification", True, "--speculative-use-block-verification"),
    ("speculative_accept_threshold_acc", 0.5, "--speculative-accept-threshold-acc"),
    ("speculative_accept_threshold_single", 0.5, "--speculative-accept-threshold-single"),
]


@pytest.mark.parametrize("field, value, words", IGNORED)
def test_flags_that_plain_sglang_overrides_get_a_warning(field, value, words, caplog):
    record = resolve(record_of(**{field: value}))
    args = resolving_view(record)
    assert not Implementation.from_server_args(record).is_builtin
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    [warning] = [text.getMessage() for text in caplog.records if "DFLASH ignores" in text.getMessage()]
    assert words in warning


@pytest.mark.parametrize("given, served, waits_for", [({}, 1, None), ({"min_free_slots_delay": 3}, 3, 3)])
def test_a_free_slot_is_given_at_once_unless_a_user_wants_it_otherwise(given, served, waits_for, caplog):
    caplog.set_level(logging.INFO)
    args = resolving_view(resolve(record_of(**given)))
    found = resolve_min_free_slots(
        args.min_free_slots_delay, args.max_running_requests, is_dflash_family=True
    )
    assert found == waits_for
    assert f"At most 48 running requests, admitted from {served} free slots on" in caplog.text


NO_CACHE = {"enable_mixed_chunk": True, "disable_radix_cache": True}
NO_OVERLAP = {"enable_mixed_chunk": True, "page_size": 1, "disable_overlap_schedule": True}


@pytest.mark.parametrize(
    "given, field, served, words",
    [
        ({"enable_mixed_chunk": True, "page_size": 16}, "enable_mixed_chunk", False, "--page-size 16"),
        (
            {"enable_mixed_chunk": True, "page_size": 1},
            "enable_mixed_chunk",
            *((False, "on this SGLang") if IS_0_5_22 else (True, None)),
        ),
        (
            NO_OVERLAP,
            "enable_mixed_chunk",
            False,
            "on this SGLang" if IS_0_5_22 else "off: with --disable-overlap-schedule",
        ),
        (
            NO_OVERLAP | {"mamba_radix_cache_strategy": "extra_buffer"},
            "enable_mixed_chunk",
            not IS_0_5_22,
            None,
        ),
        (NO_CACHE | {"page_size": 16}, "enable_mixed_chunk", False, "--disable-radix-cache"),
        (NO_CACHE | {"page_size": 1}, "enable_mixed_chunk", True, None),
        (
            {"speculative_num_draft_tokens": 33, "mamba_track_interval": 64},
            "mamba_track_interval",
            128,
            "every 128 tokens instead of every 64",
        ),
    ],
)
def test_what_would_spoil_the_prefix_cache_of_recurrent_states_is_adjusted(
    given, field, served, words, caplog
):
    record = resolve(record_of(HYBRID_DRAFT, model_path=str(HYBRID_TARGET), **given))
    assert not Implementation.from_server_args(record).is_builtin
    assert getattr(resolving_view(record), field) == served
    assert words is None or words in caplog.text


def test_widths_of_eagle_get_a_warning(tmp_path, caplog):
    path = tmp_path / "eagle.json"
    path.write_text('{"1": {"candidate_steps": [1, 3]}}')
    record = resolve(record_of(speculative_adaptive=True, speculative_adaptive_config=str(path)))
    assert DFlashOptions.ADAPTIVE.get() == (1, 4, 8)
    assert not resolving_view(record).speculative_adaptive
    assert "does not follow --speculative-adaptive-config" in caplog.text and "EAGLE's form" in caplog.text


# name -> (changes to the draft's config, text of the warning)
ASSUMED = {
    "no block size": ({"block_size": REMOVE}, "block_size is missing, 16 is assumed"),
    "no mask token": ({"dflash_config": {"mask_token_id": REMOVE}}, "<|MASK|> is assumed"),
    "another depth": ({"num_target_layers": 36}, "num_target_layers is 36"),
    "another order": ({"dflash_config": {"target_layer_ids": [10, 7, 4, 1]}}, ""),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_checkpoints_that_plain_sglang_takes_are_served(name, tmp_path, caplog, monkeypatch):
    changes, words = ASSUMED[name]
    if name == "no mask token":  # the bundled target's embedding has no row to spare for it
        monkeypatch.setattr("sglang_dflash.srt.arg_groups.resolve.find_mask_token", lambda *_: 3)
    record = resolve(record_of(make_draft(tmp_path / "draft", base=DRAFT, **changes)))
    assert not Implementation.from_server_args(record).is_builtin
    assert words in caplog.text
    if name == "no block size":
        assert resolving_view(record).speculative_num_draft_tokens == 16


def test_what_is_told_at_the_start_is_told_once(tmp_path, caplog):
    changes = {"loss_gamma": 4.0, "dflash_config": {"num_anchors": 512, "projector_type": "dflash"}}
    resolve(record_of(changed_draft(changes, tmp_path), speculative_num_draft_tokens=16))
    [unread] = [text for text in caplog.messages if "not read" in text]
    assert unread.endswith("fields that are not read: loss_gamma, dflash_config.num_anchors.")
    [longer] = [text for text in caplog.messages if "trained with 8" in text]
    assert "blocks of 16" in longer and "--num-draft-tokens 16" in longer
    caplog.clear()
    resolve(record_of(speculative_num_draft_tokens=8))
    assert not [text for text in caplog.messages if "not read" in text or "trained with" in text]


def test_quantization_of_the_target_is_not_the_drafts(caplog):
    caplog.set_level(logging.INFO)
    inherited = quantize_draft("fp8", is_given=False)
    args = resolving_view(resolve(record_of(quantization="fp8", **inherited)))
    assert args.speculative_draft_model_quantization is None and args.quantization == "fp8"
    assert "--quantization fp8 is the target's" in caplog.text


def test_nothing_experimental_is_on_by_default_on_a_gpu():
    args = resolving_view(resolve(record_of(HYBRID_DRAFT, model_path=str(HYBRID_TARGET))))
    assert not DFlashOptions.ADAPTIVE.get() and not args.enable_linear_replayssm_spec
    assert not DFlashOptions.COPY_AHEAD.get() and not DFlashOptions.WAIT_UNDER_DRAFT.get()


EXTRA = {
    DFlashOptions.COPY_AHEAD: ("1", "copies"),
    DFlashOptions.WAIT_UNDER_DRAFT: ("1", "wait under"),
}


def test_basic_mode_leaves_out_what_is_extra(monkeypatch, caplog):
    """One option for all of it. One line lists what was asked for."""
    monkeypatch.setenv(DFlashOptions.BASIC_MODE.variable, "1")
    resolve(record_of())
    [said] = [message for message in caplog.messages if "SGLANG_DFLASH_BASIC=1" in message]
    assert not [part for part in ("copies", "wait under", "ReplaySSM") if part in said]
    caplog.clear()
    for option, (value, _) in EXTRA.items():
        monkeypatch.setenv(option.variable, value)
    hybrid = dict(model_path=str(HYBRID_TARGET), enable_linear_replayssm_spec=True, speculative_adaptive=True)
    args = resolving_view(resolve(record_of(HYBRID_DRAFT, **hybrid)))
    assert not DFlashOptions.ADAPTIVE.get() and not args.enable_linear_replayssm_spec
    assert not any(option.get() == value or option.get() is True for option, (value, _) in EXTRA.items())
    [said] = [message for message in caplog.messages if "SGLANG_DFLASH_BASIC=1" in message]
    for part in ("adaptive", "ReplaySSM", *(part for _, part in EXTRA.values())):
        assert part in said


@pytest.mark.parametrize("field", ["enable_return_routed_experts", "enable_return_indexer_topk"])
@pytest.mark.parametrize(
    "given, kept, rows",
    [
        ({"chunked_prefill_size": 2048, "max_running_requests": 256}, None, 256 * 8),
        ({"chunked_prefill_size": 2048, "max_running_requests": 257}, 2048, 257 * 8),
        ({"chunked_prefill_size": 2048, "max_running_requests": 256, "attn_dp_size": 2}, None, 128 * 8),
        ({"chunked_prefill_size": 512, "max_running_requests": 256, "attn_dp_size": 2}, 512, 128 * 8),
        ({"chunked_prefill_size": 256}, 256, 48 * 8),
        ({"chunked_prefill_size": 256, "speculative_num_draft_tokens": 4}, None, 48 * 4),
        ({"chunked_prefill_size": -1, "max_running_requests": 2}, 2, 16),
        (
            {"max_running_requests": 300, "chunked_prefill_size": 100, "speculative_num_draft_tokens": 1},
            None,
            0,
        ),
    ],
)
def test_rows_that_sglang_keeps_are_those_of_a_verify(field, given, kept, rows):
    """SGLang's buffer of `max(chunk, requests)` rows ends the scheduler at a larger verify."""
    if "attn_dp_size" in given:
        given = given | {"tp_size": 2, "enable_dp_lm_head": True}
    if kept is None:
        assert not Implementation.from_server_args(resolve(record_of(**given, **{field: True}))).is_builtin
        return
    resolve(record_of(**given))  # what keeps no rows starts
    with pytest.raises(ValueError, match=f"keeps {kept} rows .* has {rows}. Give"):
        resolve(record_of(**given, **{field: True}))


# Found after ours was chosen: name -> (changes to the draft's config, arguments, words of the refusal)
REFUSED_LATER = {
    "no draft": ({}, {"speculative_draft_model_path": None}, "needs a draft"),
    "two block sizes": (
        {},
        {"speculative_num_draft_tokens": 4, "speculative_dflash_block_size": 8},
        "was given twice",
    ),
    "no block": ({}, {"speculative_dflash_block_size": 0}, "must be positive, got 0"),
    "half of a convolution": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {"conv_kernel_size": 2}},
        {},
        "convolutions need both",
    ),
}


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_later_refusals(name, tmp_path):
    changes, arguments, words = REFUSED_LATER[name]
    with pytest.raises(ValueError, match=words):
        resolve(record_of(changed_draft(changes, tmp_path), **arguments))
