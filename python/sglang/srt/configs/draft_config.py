"""A DFlash draft checkpoint's config.json, validated once and frozen.

Format: z-lab/dflash. A flat Qwen3 config plus `block_size`, `num_target_layers` and
`dflash_config: {mask_token_id, target_layer_ids}`. Checkpoints of the speculators library are converted to it
by `configs/speculators_format.py`, with a few more entries in `dflash_config`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, WrapValidator

from sglang_dflash.srt.configs.fields import (
    MAX_LAYERS,
    DraftConfigError,
    LayerIds,
    NumLayers,
    Positive,
    Shapes,
    StrictModel,
    layer_shapes,
    problems_of,
    short_repr,
)
from sglang_dflash.srt.configs.unsupported import variant_findings

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
# Read from `dflash_config` alone: a config copied from the target has the target's at the top level.
NESTED_ONLY = {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}
NESTED_ONLY |= {"use_swa", "swa_window_size"}

# Validators of one field. A validator sees the valid fields above its own.
_DERIVED: Any = None  # the default of a field that its validator derives from others
_UNKNOWN = 2**63  # in place of a size that is not valid


def _check_vocabulary(value: Any, validate: Any, info: ValidationInfo) -> int:
    vocab_size = info.data.get("vocab_size", _UNKNOWN)
    drafted = vocab_size if value is None else validate(value)
    if drafted > vocab_size:
        raise ValueError(f"is {drafted}, more than the target's {vocab_size} tokens")
    return drafted


def _check_mask_token(value: int | None, info: ValidationInfo) -> int | None:
    vocab_size = info.data.get("vocab_size", _UNKNOWN)
    if value is not None and not 0 <= value < vocab_size:
        raise ValueError(f"is {value}, outside the vocabulary of {vocab_size} tokens")
    return value


def _check_target_layers(value: Any, validate: Any, info: ValidationInfo) -> tuple[int, ...]:
    depth = info.data.get("num_target_layers")
    if value is None:
        if depth is None:
            raise ValueError("is missing, and so is num_target_layers, over which to spread layers")
        value = spread_target_layer_ids(depth, info.data.get("num_hidden_layers", 1))
    ids = validate(value)
    if min(ids) < 0:
        raise ValueError(f"{format_ids(ids)} hold a negative id")
    if len(set(ids)) < len(ids):
        raise ValueError(f"must be without repeats, got {short_repr(list(ids))}")
    return ids


def _check_layer_types(value: Any, validate: Any, info: ValidationInfo) -> tuple[str, ...]:
    num_layers = info.data.get("num_hidden_layers")
    types = (FULL_ATTENTION,) * (num_layers or 1) if value is None else validate(value)
    if num_layers not in (None, len(types)):
        raise ValueError(f"must list one entry per draft layer ({num_layers}), got {short_repr(value)}")
    return types


def _check_sliding_window(value: int | None, info: ValidationInfo) -> int | None:
    if value is None and SLIDING_ATTENTION in info.data.get("layer_types", ()):
        raise ValueError("is missing, and so is dflash_config.swa_window_size")
    if value == 1:
        raise ValueError("is 1, which leaves a layer nothing but the query itself")
    return value


def _causal_unless_denied(value: bool, info: ValidationInfo) -> bool:
    return value and info.data.get("causal") is not False


def _check_speculative_tokens(value: Any, validate: Any, info: ValidationInfo) -> int:
    block_size = info.data.get("block_size", _UNKNOWN)
    num_rows = block_size if info.data.get("sample_from_anchor") else block_size - 1
    tokens = num_rows if value is None else validate(value)
    if tokens > num_rows:
        raise ValueError(f"is {tokens}, but a block_size of {block_size} drafts {num_rows}")
    return tokens


LayerTypes = Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], Field(strict=False)]
# Zero and false are "none", as in SGLang.
Cap = Annotated[float | None, Field(gt=0), BeforeValidator(lambda value: None if value == 0 else value)]
Multiplier = Annotated[float, Field(gt=0), BeforeValidator(lambda value: 1.0 if value == 0 else value)]


class DFlashDraftConfig(StrictModel):
    """One draft, in this project's terms.

    Attributes:
        block_size: slots of a block: the anchor (the bonus token) and the mask tokens after it. As in SGLang
            16 if not given.
        draft_vocab_size: rows of the draft's head; fewer than `vocab_size` if the checkpoint maps them to the
            target's.
        mask_token: the mask token by name, looked up in the target's tokenizer if mask_token_id is None. As
            in SGLang `<|MASK|>` if neither is given.
        num_target_layers: the target's depth. None: the checkpoint does not say.
        target_layer_ids: 0-based, naming layer OUTPUTS: entry i is Hugging Face's `hidden_states[i + 1]`. In
            the order in which `fc` reads them.
        sliding_window: tokens a sliding layer sees, the query itself included.
        causal: whether all layers are causal inside the block. None: the checkpoint does not say, and full
            layers see their whole block.
        sliding_is_causal: whether a sliding layer is causal inside the block.
        window_from_anchor: whether every row counts the window from the anchor, rather than from itself.
        sample_from_anchor: whether the anchor's row drafts a token too. Row k then drafts position k + 1.
            Otherwise row k drafts position k, and row 0 nothing.
        speculative_tokens: drafted tokens a step.
        aux_streams: width of a layer's output in hidden states: 1, unless the target's residual has several
            streams (`hc_mult`).
        output_multiplier: the draft's logits l become softcap * tanh(multiplier * l / softcap). The argmax is
            the same without, a sample is not.
        final_logit_softcapping: the softcap of `output_multiplier`.
        input_embedding_scale: factor on the block's rows of the embedding table. None: as the target's module
            returns them, which for Gemma multiplies them itself.
        has_own_lm_head: whether the checkpoint must bring this tensor. It may in any case.
        has_embed_tokens: as `has_own_lm_head`.
        max_position_embeddings: positions that the draft was made for. It also drafts beyond the last.
        use_swa: whether all layers slide, unless `layer_types` name some that do.
        swa_window_size: their `sliding_window`, if given.
    """

    kind: ClassVar[str] = "DFlash"
    # Whether the draft reads KV slots through the target's request table, shifted by one slot.
    shifts_request_table: ClassVar[bool] = False

    hidden_size: Positive
    num_hidden_layers: NumLayers
    vocab_size: Positive
    block_size: Positive = 16
    draft_vocab_size: Annotated[Positive, WrapValidator(_check_vocabulary)] = _DERIVED
    mask_token: Annotated[str, Field(min_length=1)] | None = "<|MASK|>"
    mask_token_id: Annotated[int | None, AfterValidator(_check_mask_token)] = None
    num_target_layers: NumLayers | None = None
    target_layer_ids: Annotated[LayerIds, WrapValidator(_check_target_layers)] = _DERIVED
    layer_types: Annotated[LayerTypes, WrapValidator(_check_layer_types)] = _DERIVED
    sliding_window: Annotated[Positive | None, AfterValidator(_check_sliding_window)] = None
    causal: bool | None = Field(None, alias="is_causal")
    sliding_is_causal: Annotated[bool, AfterValidator(_causal_unless_denied)] = True
    window_from_anchor: bool = False
    sample_from_anchor: bool = False
    speculative_tokens: Annotated[Positive, WrapValidator(_check_speculative_tokens)] = _DERIVED
    aux_streams: NumLayers = Field(1, alias="hc_mult")
    output_multiplier: Multiplier = 1.0
    final_logit_softcapping: Cap = None
    input_embedding_scale: Annotated[float | None, Field(gt=0)] = None
    has_own_lm_head: bool = False
    has_embed_tokens: bool = False
    max_position_embeddings: Positive | None = None
    use_swa: bool = False
    swa_window_size: int | None = None

    @classmethod
    def parse(cls, hf_config: Any, checkpoint: str) -> Self:
        """Read a draft's `PretrainedConfig`: from `dflash_config` first, then from the top level.

        Raises DraftConfigError naming every missing or contradictory field at once.
        """
        problems, draft = [], None
        nested = getattr(hf_config, "dflash_config", None)
        if not isinstance(nested, dict):
            if nested is not None:
                problems.append(f"dflash_config must be an object, got {type(nested).__name__}")
            nested = {}
        values = cls._values(hf_config, nested)
        try:
            draft = cls.model_validate(values)
        except ValidationError as error:
            # A field is named where the file has it.
            own = [key for key in cls._keys() if key.startswith("selector_")]
            names = {key: f"dflash_config.{key}" for key in (*nested, *NESTED_ONLY, *own)}
            if "is_causal" not in names and not hasattr(hf_config, "is_causal"):
                names["is_causal"] = names.get("causal", "causal")
            problems += problems_of(error, names=names)
        problems += cls._hidden_problems(hf_config, nested, values)
        problems += [found.what for found in variant_findings(vars(hf_config), nested, cls.nested_fields())]
        if draft is None or problems:
            raise DraftConfigError(checkpoint, problems)
        return draft

    @classmethod
    def _hidden_problems(
        cls, hf_config: Any, nested: Mapping[str, Any], values: Mapping[str, Any]
    ) -> list[str]:
        """List top-level values of another type than their field's that `dflash_config` replaces."""
        names = [key for key in cls._keys() if key not in NESTED_ONLY and nested.get(key) is not None]
        hidden = {key: top for key in names if (top := getattr(hf_config, key, None)) is not None}
        try:
            cls.model_validate({**values, **hidden})
        except ValidationError as error:
            kinds = [(fault["loc"][0], fault["type"]) for fault in error.errors(include_url=False)]
            return [
                problem
                for (name, kind), problem in zip(kinds, problems_of(error), strict=True)
                if name in hidden and kind.endswith("_type")
            ]
        return []

    @classmethod
    def nested_fields(cls) -> set[str]:
        """Return the fields of `dflash_config` that are read."""
        return {"causal", *cls._keys()}

    @classmethod
    def _keys(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def _values(cls, hf_config: Any, nested: Mapping[str, Any]) -> dict[str, Any]:
        """Collect the fields that are given; null is not."""

        def get(key: str) -> Any:
            value = nested.get(key)
            return getattr(hf_config, key, None) if value is None and key not in NESTED_ONLY else value

        values = {key: get(key) for key in cls._keys()}
        if values["is_causal"] is None:
            values["is_causal"] = get("causal")
        depth = values["num_hidden_layers"]
        if not names_sliding_layers(values["layer_types"]):
            if values["use_swa"] and isinstance(depth, int) and 0 < depth <= MAX_LAYERS:
                # All layers slide, and are causal only if the checkpoint says so.
                values["layer_types"] = (SLIDING_ATTENTION,) * depth
                if values["swa_window_size"] is not None:
                    values["sliding_window"] = values["swa_window_size"]
                if values["is_causal"] is None:
                    values["sliding_is_causal"] = False
            else:
                values["sliding_window"] = None
        given = {key: value for key, value in values.items() if value is not None}
        return given if "mask_token_id" not in given else {**given, "mask_token": None}

    def assumed(self) -> list[str]:
        """Say which values the checkpoint does not give and SGLang's defaults replace."""
        given = self.model_fields_set
        defaults = (
            ("block_size" in given, "block_size", self.block_size),
            ("target_layer_ids" in given, "dflash_config.target_layer_ids", list(self.target_layer_ids)),
            (bool({"mask_token_id", "mask_token"} & given), "dflash_config.mask_token_id", self.mask_token),
        )
        return [
            f"{name} is missing, {value} is assumed" for is_given, name, value in defaults if not is_given
        ]

    @property
    def aux_width(self) -> int:
        """Width of the states captured for a token, all layers side by side."""
        return len(self.target_layer_ids) * self.aux_streams * self.hidden_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Return True if the draft's ids are not the target's, and have to be mapped."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def has_sliding_layers(self) -> bool:
        return SLIDING_ATTENTION in self.layer_types

    @property
    def tokens_before_window_start(self) -> int:
        """Tokens a sliding layer sees before the query, or before the anchor.

        A window that is counted from the query includes the query's own token.
        """
        assert self.sliding_window is not None, "this draft has no sliding layers"
        return self.sliding_window if self.window_from_anchor else self.sliding_window - 1

    def is_causal(self, layer_id: int) -> bool:
        """Return True if a row of this layer sees only the rows of its block before it."""
        is_sliding = self.layer_types[layer_id] == SLIDING_ATTENTION
        return self.causal is True or is_sliding and self.sliding_is_causal

    @property
    def num_idle_rows(self) -> int:
        """Rows at the front of a block that draft nothing: the anchor's, unless it drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafting_rows(self) -> int:
        """Rows of a full block that draft a token."""
        return self.block_size - self.num_idle_rows

    def required_tensors(self, hf_config: Any) -> Shapes:
        """Return the tensors a checkpoint must hold and their shapes, the vocabulary's aside.

        Shapes are those in the files, before any fusing or tensor-parallel split.
        """
        hidden = self.hidden_size
        shapes: Shapes = {
            "fc.weight": (hidden, self.aux_width),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for i in range(self.num_hidden_layers):
            layer = self.layer_tensors(hf_config, i)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def layer_tensors(self, hf_config: Any, layer: int) -> Shapes:
        """Return the tensors of one layer and their shapes."""
        return layer_shapes(hf_config, self.attention_inputs(layer), self.has_qk_norm)

    def attention_inputs(self, layer: int) -> int:
        """Return the channels that the queries, keys and values of a layer are made of."""
        return self.hidden_size

    @property
    def has_qk_norm(self) -> bool:
        """Return True if queries and keys are normed per head."""
        return True


def names_sliding_layers(layer_types: Any) -> bool:
    """Return True if a config's `layer_types` name a sliding layer."""
    return isinstance(layer_types, list | tuple) and SLIDING_ATTENTION in layer_types


def spread_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Return the target layers z-lab's drafts read if a checkpoint names none.

    They are one per draft layer, spread evenly from layer 1 to layer L-3 (0-based layer outputs;
    z-lab/dflash, `build_target_layer_ids`).
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise ValueError(
            f"is missing, and num_target_layers {num_target_layers} is too shallow to spread "
            f"{num_draft_layers} ids over"
        )
    # Multiplied before it is divided, as z-lab's is: ties then round the same way.
    return tuple(round(first + i * (last - first) / (num_draft_layers - 1)) for i in range(num_draft_layers))


def format_ids(ids: Sequence[int]) -> str:
    """Return target layer ids for a message."""
    return f"{short_repr(list(ids))} (0-based layer outputs; speculators counts one more)"
