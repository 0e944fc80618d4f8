"""A draft, its target and its attention backend: what has to fit, and what may differ."""

from collections.abc import Sequence
from typing import Any

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, listed_ids
from sglang_dflash.srt.configs.fields import DraftConfigError

# Backends that run draft blocks, in order of preference if the target's own does not suit the draft.
DRAFT_ATTENTION_BACKENDS = ("flashinfer", "triton", "fa3", "fa4")
# Backends that read whole pages of the KV cache.
PAGED_BACKENDS = ("fa3", "fa4")
# In a verify forward, FlashInfer cuts a sliding layer's keys once per block, the others once per query.
COUNT_WINDOW_FROM_ANCHOR = ("flashinfer",)
COUNT_WINDOW_FROM_QUERY = ("triton", "fa3", "fa4")

# Targets whose last layer SGLang captures. Others have no next layer, at whose input it would.
_CAPTURES_LAST_LAYER = (
    "BeamForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "LagunaForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "NemotronHForCausalLM",
)


def check_draft_fits_target(
    draft: DFlashDraftConfig, target_text_config: Any, checkpoint: str, architectures: Sequence[str] = ()
) -> None:
    """Raise DraftConfigError unless the draft can read this target's states.

    `architectures` are the target's.
    """
    problems = []
    size, tokens = target_text_config.hidden_size, target_text_config.vocab_size
    if draft.hidden_size != size:
        problems.append(f"hidden_size is {draft.hidden_size}, but the target's hidden_size is {size}")
    # The other ids of a vocabulary of another size do not matter, unless the draft has tensors for them.
    if draft.mask_token_id is not None and draft.mask_token_id >= tokens:
        problems.append(f"mask_token_id is {draft.mask_token_id}, but the target's vocab_size is {tokens}")
    streams = getattr(target_text_config, "hc_mult", None) or 1
    if draft.aux_streams != streams:
        problems.append(f"hc_mult is {draft.aux_streams}, but the target's residual has {streams} streams")
    # A looped target has each layer several times, and counts them all.
    depth = target_text_config.num_hidden_layers * (getattr(target_text_config, "num_loops", None) or 1)
    ids = draft.target_layer_ids
    if max(ids) >= depth:
        problems.append(f"target_layer_ids {listed_ids(ids)} leave the target's {depth} layers")
    elif max(ids) == depth - 1 and next(iter(architectures), None) not in _CAPTURES_LAST_LAYER:
        problems.append(
            f"target_layer_ids {listed_ids(ids)} name the last layer: SGLang captures a layer's output at "
            "the input of the next one, and the last layer has none"
        )
    if problems:
        raise DraftConfigError(checkpoint, problems)


def find_mask_token(
    draft: DFlashDraftConfig, tokenizer: Any, checkpoint: str = "draft", target_tokens: int | None = None
) -> int:
    """Return the id of `draft.mask_token` in the target's tokenizer.

    A token that the tokenizer lacks gets the id after its last, as z-lab's code adds it. `target_tokens` is
    the size of the target's vocabulary, or None if it is the draft's.

    Raises:
        DraftConfigError: the embedding has no such row, or there is no tokenizer.
    """
    rows = target_tokens or draft.vocab_size
    name = f"dflash_config.mask_token {draft.mask_token!r}"
    if tokenizer is None:
        raise DraftConfigError(
            checkpoint, [f"{name}: there is no tokenizer to look it up in, give mask_token_id"]
        )
    found = tokenizer.get_vocab().get(draft.mask_token, len(tokenizer))
    if found >= rows:
        full = f"its embedding of {rows} rows has none to spare"
        raise DraftConfigError(checkpoint, [f"{name} is not in the target's tokenizer, and {full}"])
    return found


def differences(draft: DFlashDraftConfig, target_text_config: Any, context_len: int) -> list[str]:
    """Say in what the draft was made for another target, which it serves all the same.

    `context_len` is the number of tokens that a request may have.
    """
    found = [depth_problem(draft, target_text_config), vocabulary_difference(draft, target_text_config)]
    length = draft.max_position_embeddings
    if length is not None and length < context_len:
        found.append(
            f"max_position_embeddings is {length}, and requests may have {context_len} tokens: fewer drafted "
            f"tokens may be accepted beyond {length}"
        )
    return [text for text in found if text is not None]


def vocabulary_difference(draft: DFlashDraftConfig, target_text_config: Any) -> str | None:
    """Say that the draft was made for a vocabulary of another size, if so."""
    if draft.vocab_size == target_text_config.vocab_size:
        return None
    return f"vocab_size is {draft.vocab_size}, but the target's vocab_size is {target_text_config.vocab_size}"


def depth_problem(draft: DFlashDraftConfig, target_text_config: Any) -> str | None:
    """Say that the draft was trained for a target of another depth, if so."""
    trained, depth = draft.num_target_layers, target_text_config.num_hidden_layers
    if trained in (None, depth):
        return None
    return f"num_target_layers is {trained}, but the target's num_hidden_layers is {depth}"
