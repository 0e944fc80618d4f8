"""What a DFlash draft checkpoint's config.json says, checked once and frozen.

Format: z-lab/dflash. A flat Qwen3 config plus `block_size`, `num_target_layers` and
`dflash_config: {mask_token_id, target_layer_ids}`. Checkpoints of the speculators library are brought to it
by `configs/speculators_format.py`, with a few more entries in `dflash_config`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.srt.configs.draft_variants import variant_problems
from sglang_dflash.srt.configs.layer_fields import is_int, is_number

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
MAX_LAYERS = 10_000  # far beyond any model; keeps a garbled config from being allocated for
MAX_PROBLEMS = 20  # shown


class DraftConfigError(ValueError):
    """A draft checkpoint that cannot be served; the message names the fields at fault, the first of them
    where there are many."""

    def __init__(self, checkpoint: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        shown = [*problems[:MAX_PROBLEMS]]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        super().__init__(f"DFLASH draft {checkpoint!r} cannot be served:\n  - " + "\n  - ".join(shown))


@dataclass(frozen=True, slots=True)
class DFlashDraftConfig:
    """One draft, in this project's terms.

    block_size: the anchor (the bonus token) and the mask tokens after it.
    target_layer_ids: 0-based, naming layer OUTPUTS: entry i is Hugging Face's `hidden_states[i + 1]`.
        draft_vocab_size: rows of the draft's head; fewer than `vocab_size` when the checkpoint maps them to
        the target's. sample_from_anchor: whether the anchor's row drafts a token too: row k then drafts
        position k + 1, otherwise row k drafts position k and row 0 nothing.
    speculative_tokens: drafted tokens a step.
    num_target_layers: None where the checkpoint does not say.
    mask_token: the mask token by name, to be looked up in the target's tokenizer, where mask_token_id is
        None. aux_streams: hidden states wide each layer output is: 1, but for targets whose residual has
        several streams (`hc_mult`). output_multiplier, final_logit_softcapping: of the draft's logits l,
        softcap * tanh(multiplier * l / softcap); the argmax is the same without, a draw is not.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    block_size: int
    mask_token_id: int | None
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None  # tokens a sliding layer sees, the query itself included
    sliding_is_causal: bool  # whether a sliding layer is causal inside the block
    window_from_anchor: bool  # whether every row counts the window from the anchor, rather than from itself
    draft_vocab_size: int
    sample_from_anchor: bool
    speculative_tokens: int
    mask_token: str | None
    aux_streams: int
    output_multiplier: float
    final_logit_softcapping: float | None

    @property
    def aux_width(self) -> int:
        """Width of what is captured of a token: all layers, side by side."""
        return len(self.target_layer_ids) * self.aux_streams * self.hidden_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the draft's ids are not the target's, and have to be mapped."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def has_sliding_layers(self) -> bool:
        return SLIDING_ATTENTION in self.layer_types

    @property
    def tokens_before_window_start(self) -> int:
        """How far back a sliding layer sees: from the query, whose token the window counts, or from the
        anchor, before which the speculators library counts the whole window."""
        return self.sliding_window if self.window_from_anchor else self.sliding_window - 1

    def is_causal(self, layer_id: int) -> bool:
        """Whether a row of this layer sees only the rows of its block before it."""
        return self.layer_types[layer_id] == SLIDING_ATTENTION and self.sliding_is_causal

    @property
    def num_idle_rows(self) -> int:
        """Rows at the front of a block that draft nothing: the anchor's, unless the draft samples from it."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafting_rows(self) -> int:
        """Rows of a full block that draft a token."""
        return self.block_size - self.num_idle_rows


def spread_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers z-lab's drafts read when a checkpoint names none: one per draft layer, spread evenly
    from layer 1 to layer L-3 (0-based layer outputs; z-lab/dflash, `build_target_layer_ids`)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise ValueError(
            f"a target of {num_target_layers} layers is too shallow to spread {num_draft_layers} ids over"
        )
    # Multiplied before it is divided, as z-lab's is: ties then round the same way.
    return tuple(round(first + i * (last - first) / (num_draft_layers - 1)) for i in range(num_draft_layers))


def parse_draft_config(hf_config: Any, checkpoint: str, served: Sequence[str] = ()) -> DFlashDraftConfig:
    """Read a draft's `PretrainedConfig`. served: fields of `dflash_config` that the caller reads itself.

    Raises DraftConfigError naming every missing or contradictory field at once.
    """
    fields = _FieldReader(hf_config)
    hidden_size = fields.positive_int("hidden_size")
    num_layers = fields.positive_int("num_hidden_layers", at_most=MAX_LAYERS)
    vocab_size = fields.positive_int("vocab_size")
    block_size = fields.positive_int("block_size")
    mask_token = fields.mask_token()
    mask_token_id = None if mask_token is not None else fields.token_id("mask_token_id", vocab_size)
    # Only needed to spread ids over, when a checkpoint names none.
    num_target_layers = fields.positive_int(
        "num_target_layers", at_most=MAX_LAYERS, required=fields.get("target_layer_ids") is None
    )
    draft_vocab_size = fields.positive_int("draft_vocab_size", required=False) or vocab_size
    if draft_vocab_size > vocab_size:
        fields.problems.append(
            f"draft_vocab_size is {draft_vocab_size}, more than the target's {vocab_size} tokens"
        )
    sample_from_anchor = fields.optional_bool("sample_from_anchor") is True
    layer_types = fields.layer_types(num_layers)
    sliding_window = None
    if SLIDING_ATTENTION in layer_types:
        sliding_window = fields.positive_int("sliding_window")
        if sliding_window == 1:
            fields.problems.append("sliding_window is 1, which leaves a layer nothing but the query itself")
    layer_ids = fields.target_layer_ids(num_target_layers, num_layers)
    is_causal = fields.optional_bool("is_causal" if fields.get("is_causal") is not None else "causal")
    if is_causal and FULL_ATTENTION in layer_types:
        fields.problems.append("is_causal is true, but full-attention DFlash layers see their whole block")
    sliding_is_causal = fields.optional_bool("sliding_is_causal")
    window_from_anchor = fields.optional_bool("window_from_anchor") is True
    num_rows = block_size if sample_from_anchor else block_size - 1
    speculative_tokens = fields.positive_int("speculative_tokens", required=False) or num_rows
    if speculative_tokens > num_rows:
        fields.problems.append(
            f"speculative_tokens is {speculative_tokens}, but a block of {block_size} drafts {num_rows}"
        )
    aux_streams = fields.positive_int("hc_mult", at_most=MAX_LAYERS, required=False) or 1
    output_multiplier = fields.positive_number("output_multiplier")
    softcap = fields.positive_number("final_logit_softcapping")
    fields.problems += variant_problems(hf_config, fields.nested, served)
    if fields.problems:
        raise DraftConfigError(checkpoint, fields.problems)
    return DFlashDraftConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        num_target_layers=num_target_layers,
        target_layer_ids=layer_ids,
        layer_types=layer_types,
        sliding_window=sliding_window,
        sliding_is_causal=False not in (is_causal, sliding_is_causal),
        window_from_anchor=window_from_anchor,
        draft_vocab_size=draft_vocab_size,
        sample_from_anchor=sample_from_anchor,
        speculative_tokens=speculative_tokens,
        mask_token=mask_token,
        aux_streams=aux_streams,
        output_multiplier=output_multiplier or 1.0,
        final_logit_softcapping=softcap,
    )


def check_draft_fits_target(draft: DFlashDraftConfig, target_text_config: Any, checkpoint: str) -> None:
    """Raise DraftConfigError unless the draft was made for a target of these dimensions."""
    problems = []
    for name, drafted in (
        ("hidden_size", draft.hidden_size),
        ("vocab_size", draft.vocab_size),
        ("num_hidden_layers", draft.num_target_layers),
    ):
        wanted = getattr(target_text_config, name)
        if drafted is not None and drafted != wanted:
            what = "num_target_layers" if name == "num_hidden_layers" else name
            problems.append(f"{what} is {drafted}, but the target's {name} is {wanted}")
    streams = getattr(target_text_config, "hc_mult", None) or 1
    if draft.aux_streams != streams:
        problems.append(f"hc_mult is {draft.aux_streams}, but the target's residual has {streams} streams")
    # A draft that names its target's depth was checked against it when it was parsed.
    if draft.num_target_layers is None:
        problems += _target_layer_problems(draft.target_layer_ids, target_text_config.num_hidden_layers)
    if problems:
        raise DraftConfigError(checkpoint, problems)


def _target_layer_problems(ids: Sequence[int], num_target_layers: int | None) -> list[str]:
    """Why these layer outputs cannot be captured: SGLang captures a layer's output as the next layer's
    input."""
    listed = (
        f"dflash_config.target_layer_ids {list(ids)} (0-based layer outputs; speculators counts one more)"
    )
    if min(ids) < 0:
        return [f"{listed} hold a negative id"]
    if num_target_layers is None:
        return []
    if max(ids) >= num_target_layers:
        return [f"{listed} leave the target's {num_target_layers} layers"]
    if max(ids) == num_target_layers - 1:
        return [
            f"{listed} name the last layer: SGLang captures a layer's output at the input of the next one, and the last "
            "layer has none"
        ]
    return []


class _FieldReader:
    """Reads fields from `dflash_config` first, then from the top level, and collects what is wrong."""

    def __init__(self, hf_config: Any):
        self.problems: list[str] = []
        self._config = hf_config
        nested = getattr(hf_config, "dflash_config", None)
        if nested is not None and not isinstance(nested, dict):
            self.problems.append(f"dflash_config must be an object, got {type(nested).__name__}")
            nested = None
        self.nested = nested or {}

    def get(self, name: str) -> Any:
        value = self.nested.get(name)
        return getattr(self._config, name, None) if value is None else value

    def positive_int(self, name: str, at_most: int | None = None, required: bool = True) -> int | None:
        value = self.get(name)
        if value is None and not required:
            return None
        if value is None:
            self.problems.append(f"{name} is missing")
        elif not is_int(value) or value < 1 or (at_most is not None and value > at_most):
            bound = "" if at_most is None else f" of at most {at_most}"
            self.problems.append(f"{name} must be a positive integer{bound}, got {value!r}")
        else:
            return value
        return 1

    def token_id(self, name: str, vocab_size: int) -> int:
        value = self.get(name)
        if value is None:
            self.problems.append(f"dflash_config.{name} is missing")
        elif not is_int(value) or not 0 <= value < vocab_size:
            self.problems.append(
                f"dflash_config.{name} is {value!r}, outside the vocabulary of {vocab_size} tokens"
            )
        else:
            return value
        return 0

    def mask_token(self) -> str | None:
        """The mask token's name, where no id is given."""
        value = self.get("mask_token")
        if value is None or self.get("mask_token_id") is not None:
            return None
        if not isinstance(value, str) or not value:
            self.problems.append(f"dflash_config.mask_token must be a token's text, got {value!r}")
            return None
        return value

    def positive_number(self, name: str) -> float | None:
        """Of `dflash_config` alone: at the top level a config copied from the target has the target's."""
        value = self.nested.get(name)
        if value is None or value is False:
            return None
        if not is_number(value) or value < 0:
            self.problems.append(f"dflash_config.{name} must be a positive number, got {value!r}")
            return None
        return float(value) or None  # SGLang, too, takes zero for none

    def optional_bool(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{name} must be true or false, got {value!r}")
            return None
        return value

    def layer_types(self, num_layers: int) -> tuple[str, ...]:
        value = self.get("layer_types")
        if value is None:
            return (FULL_ATTENTION,) * num_layers
        if not isinstance(value, (list, tuple)) or len(value) != num_layers:
            self.problems.append(
                f"layer_types must list one entry per draft layer ({num_layers}), got {value!r}"
            )
            return (FULL_ATTENTION,) * num_layers
        unknown = sorted({str(kind) for kind in value} - {FULL_ATTENTION, SLIDING_ATTENTION})
        if unknown:
            self.problems.append(f"layer_types has unknown entries {unknown}")
        return tuple(value)

    def target_layer_ids(self, num_target_layers: int | None, num_draft_layers: int) -> tuple[int, ...]:
        ids = self.get("target_layer_ids")
        if ids is None:
            try:
                ids = spread_target_layer_ids(num_target_layers, num_draft_layers)
            except ValueError as error:
                self.problems.append(str(error))
                return ()
        if not isinstance(ids, (list, tuple)) or not ids or not all(is_int(i) for i in ids):
            self.problems.append(
                f"dflash_config.target_layer_ids must be a non-empty list of integers, got {ids!r}"
            )
            return ()
        self.problems += _target_layer_problems(ids, num_target_layers)
        # SGLang concatenates captured states in ascending order, once each.
        if list(ids) != sorted(set(ids)):
            self.problems.append(
                f"dflash_config.target_layer_ids must be ascending without repeats, got {list(ids)}"
            )
        return tuple(ids)
