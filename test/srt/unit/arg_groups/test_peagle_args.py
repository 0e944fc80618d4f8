"""Server arguments of P-EAGLE: number of drafted tokens, and attention."""

from types import SimpleNamespace

import pytest
from support.checkpoint_fields import GOOD_PEAGLE, changed

from sglang_dflash.srt.arg_groups.resolve import choose_block_size
from sglang_dflash.srt.configs.draft_kinds import (
    PEagleDraftConfig,
    check_draft_fits_target,
    read_draft_config,
)
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.speculators_format import normalize

TARGET = SimpleNamespace(hidden_size=256, vocab_size=2048, num_hidden_layers=12)


def parse(config: dict = GOOD_PEAGLE) -> PEagleDraftConfig:
    return read_draft_config(SimpleNamespace(**normalize(config, "ck")), "ck")


def args(**flags) -> SimpleNamespace:
    names = (
        "speculative_num_draft_tokens",
        "speculative_dflash_block_size",
        "speculative_draft_window_size",
        "page_size",
    )
    return SimpleNamespace(**dict.fromkeys(names) | flags)


def test_the_trained_number_is_the_default_and_a_ceiling(caplog):
    draft = parse()
    assert isinstance(draft, PEagleDraftConfig) and draft.speculative_tokens == 7
    assert choose_block_size(args(), draft) == 8
    for block_size in (4, 8):
        draft.check_arguments(block_size, window=None)
    assert not caplog.records
    draft.check_arguments(12, window=None)
    [record] = caplog.records
    assert "11 tokens" in record.getMessage() and "trained for 7" in record.getMessage()


def test_a_draft_window_is_refused():
    with pytest.raises(ValueError, match="--speculative-draft-window-size"):
        parse().check_arguments(8, window=64)


@pytest.mark.parametrize(
    "ids, message",
    [([2, 12], "the last layer"), ([2, 13], "leave the target's 12 layers"), ([6, 2], "ascending")],
)
def test_layer_ids_unfit_for_the_target(ids, message):
    with pytest.raises(DraftConfigError, match=message):
        check_draft_fits_target(
            parse(changed("eagle_aux_hidden_state_layer_ids", ids, base=GOOD_PEAGLE)), TARGET, "ck"
        )


def test_a_mask_token_outside_the_vocabulary():
    with pytest.raises(DraftConfigError, match="mask_token_id is 2048"):
        parse(changed("mask_token_id", 2048, base=GOOD_PEAGLE))
