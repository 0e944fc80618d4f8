"""Checkpoints of the `speculators` training library (0.9.0).

Their config.json nests the draft's layers under `transformer_layer_config` and counts target layers
differently. A model per `speculators_model_type` validates one and turns it into the flat config that our
draft models read.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sglang_dflash.srt.configs.checkpoint import tensor_shapes
from sglang_dflash.srt.configs.draft_kinds import (
    DEFAULT_DEPTH,
    PEAGLE_ARCHITECTURE,
    PEAGLE_NORMS,
    default_layer_inputs,
)
from sglang_dflash.srt.configs.fields import (
    MAX_LAYERS,
    Count,
    DraftConfigError,
    LayerFields,
    LayerIds,
    Positive,
    StrictModel,
    as_object,
    first_name,
    short_repr,
    validated,
)
from sglang_dflash.srt.configs.unsupported import dspark_heads, variant_findings

# Types the library can train and we cannot serve. SGLang reads none of the library's files.
_SERVED_ELSEWHERE = ("eagle3", "dspark", "mtp")  # dspark: with heads
# The library's default, for a file whose tensors are not here.
_DEFAULT_VOCABULARY = 32_000
# Layers' fields that vLLM's reader takes from the top level too.
_WINDOW_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_PEAGLE_INPUTS = "eagle_aux_hidden_state_layer_ids"
# Names of P-EAGLE drafts, which may be all that says what they are.
_PEAGLE_ARCHITECTURES = (PEAGLE_ARCHITECTURE, "PEagleSpeculator", "PeagleLlamaForCausalLM")


class _Object(StrictModel):
    """An object of the file, in which null is the same as absent."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class _Verifier(_Object):
    name_or_path: str


class _Proposal(_Object):
    speculative_tokens: Positive


def _choose_default(methods: Any, info: ValidationInfo) -> Any:
    """Leave one method of the checkpoint: the default, or else the first."""
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        return methods
    default = info.data["default_proposal_method"]
    return [method for method in methods if method.get("proposal_type") == default][:1] or methods[:1]


class _Speculators(_Object):
    algorithm: str
    default_proposal_method: Any = None
    proposal_methods: Annotated[list[_Proposal], Field(min_length=1), BeforeValidator(_choose_default)]
    verifier: _Verifier


def _choose_rope(layers: Any) -> Any:
    """Take one of the sets by layer type; layers that rotate differently are refused."""
    rope = as_object(as_object(layers).get("rope_parameters"))
    nested = [value for value in rope.values() if "rope_theta" in as_object(value)]
    if any(value != nested[0] for value in nested):
        raise ValueError("has rope_parameters that differ between layer types, which is not supported")
    return {**layers, "rope_parameters": nested[0]} if nested else layers


class _PEagleLayers(LayerFields):
    model_type: Literal["qwen3", "llama"] | None = None


def _check_layer_inputs(ids: tuple[int, ...]) -> tuple[int, ...]:
    if min(ids) < 1:
        raise ValueError(
            f"{short_repr(list(ids))} names layer 0 or less: id 0 is the embedding, "
            "which SGLang does not capture"
        )
    return ids


def _check_width(value: int | None, info: ValidationInfo) -> int | None:
    layers = info.data.get("transformer_layer_config")
    if layers is not None and value not in (None, layers.hidden_size):
        raise ValueError(
            f"is {value}, but the draft's hidden_size is {layers.hidden_size}: the library's own model "
            "reads aux hidden states of the draft's width only"
        )
    return value


def _check_levels(value: Any, info: ValidationInfo) -> Any:
    """Refuse a value that the layers' object gives otherwise."""
    layers = info.data.get("transformer_layer_config")
    nested = getattr(layers, str(info.field_name), None)
    if None not in (value, nested) and value != nested:
        place = f"transformer_layer_config.{info.field_name}"
        raise ValueError(f"is {short_repr(value)}, but {place} is {short_repr(nested)}")
    return value


def _check_norms(value: bool, info: ValidationInfo) -> bool:
    if value and info.data.get("norm_before_fc"):
        raise ValueError("is not possible: norm_before_fc and fc_norm are both true")
    return value


LayerInputs = Annotated[LayerIds, AfterValidator(_check_layer_inputs)]


class _Draft(_Object):
    """Fields that all kinds have in common."""

    kind: ClassVar[str]
    architecture: ClassVar[str]

    mask_token_id: int
    draft_vocab_size: Positive
    speculators_config: _Speculators | None = None
    transformer_layer_config: Annotated[LayerFields, BeforeValidator(_choose_rope)]
    layer_types: Annotated[list[str] | None, AfterValidator(_check_levels)] = None
    sliding_window: Annotated[Count | None, AfterValidator(_check_levels)] = None
    use_sliding_window: Annotated[bool | None, AfterValidator(_check_levels)] = None
    max_window_layers: Annotated[Count | None, AfterValidator(_check_levels)] = None
    target_hidden_size: Annotated[int | None, AfterValidator(_check_width)] = None
    layer_inputs: LayerInputs  # each kind has another name for it

    @field_validator("speculators_config")
    @classmethod
    def _check_algorithm(cls, value: _Speculators | None) -> _Speculators | None:
        if value is not None and value.algorithm != cls.kind:
            raise ValueError(f"has algorithm {value.algorithm!r}, but speculators_model_type is {cls.kind!r}")
        return value

    def entries(self) -> dict[str, Any]:
        """Return the entries of `dflash_config` that only this kind has."""
        return {}

    def flatten(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Return a flat Qwen3 config with a `dflash_config`, from the layers as the file has them."""
        methods = self.speculators_config.proposal_methods if self.speculators_config else ()
        tokens = next((method.speculative_tokens for method in methods), None)
        window = {name: value for name in _WINDOW_FIELDS if (value := getattr(self, name)) is not None}
        return flat_draft(
            _choose_rope({**layers, **window}),
            architecture=self.architecture,
            # P-EAGLE's block is the newest token and the number of drafted tokens of the training.
            block_size=getattr(self, "block_size", (tokens or DEFAULT_DEPTH) + 1),
            mask_token_id=self.mask_token_id,
            draft_vocab_size=self.draft_vocab_size,
            speculative_tokens=tokens,
            target_layer_ids=speculators_ids_to_layer_outputs(self.layer_inputs),
            **self.entries(),
        )


class _DFlash(_Draft):
    kind: ClassVar[str] = "dflash"
    architecture: ClassVar[str] = "DFlashDraftModel"

    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    block_size: Positive
    layer_inputs: LayerInputs = Field(alias="aux_hidden_state_layer_ids")

    def entries(self) -> dict[str, Any]:
        return {
            "sample_from_anchor": self.sample_from_anchor,
            "sliding_is_causal": not self.sliding_window_non_causal,
            "window_from_anchor": True,
        }


def _check_rows(value: int, info: ValidationInfo) -> int:
    """Refuse a proposal of more or fewer tokens than a block of this size drafts."""
    given = info.data.get("speculators_config")
    tokens = given.proposal_methods[0].speculative_tokens if given else None
    drafted = value if info.data.get("sample_from_anchor", True) else value - 1
    if tokens not in (None, drafted):
        raise ValueError(f"is {value}, which drafts {drafted}, but speculative_tokens is {tokens}")
    return value


class _DSpark(_DFlash):
    """A DSpark draft without heads, whose anchor drafts unless the file denies it."""

    kind: ClassVar[str] = "dspark"

    sample_from_anchor: bool = True
    block_size: Annotated[Positive, AfterValidator(_check_rows)]
    markov_rank: Literal[0]
    enable_confidence_head: Literal[False]


def _check_taps(value: int, info: ValidationInfo) -> int:
    block_size = info.data.get("block_size", value)
    if value > block_size:
        raise ValueError(f"is {value}, longer than a block of {block_size}")
    return value


class _DFlash2(_DFlash):
    """A DFlash2 draft, whose sliding layers see their whole block unless the file denies it."""

    kind: ClassVar[str] = "dflash2"
    architecture: ClassVar[str] = "DFlash2DraftModel"

    sliding_window_non_causal: bool = True
    conv_kernel_size: Annotated[Positive, AfterValidator(_check_taps)]
    conv_group_size: Positive
    selector_rank: Positive
    selector_top_k: Positive

    def entries(self) -> dict[str, Any]:
        options = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
        return super().entries() | self.model_dump(include=options)


class _PEagle(_Draft):
    """A P-EAGLE draft, with the library's own defaults.

    `norm_output` concerns what EAGLE-3 feeds to its next step, of which P-EAGLE has none.
    """

    kind: ClassVar[str] = "peagle"
    architecture: ClassVar[str] = PEAGLE_ARCHITECTURE

    transformer_layer_config: Annotated[_PEagleLayers, BeforeValidator(_choose_rope)]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: Annotated[bool, AfterValidator(_check_norms)] = False
    layer_inputs: LayerInputs = Field(alias="eagle_aux_hidden_state_layer_ids")

    def entries(self) -> dict[str, Any]:
        has_qk_norm = self.transformer_layer_config.model_type != "llama"
        return {"qk_norm": has_qk_norm, **self.model_dump(include=set(PEAGLE_NORMS))}


_DRAFTS: dict[str, type[_Draft]] = {draft.kind: draft for draft in (_DFlash, _DFlash2, _DSpark, _PEagle)}


def speculators_type(config: Mapping[str, Any]) -> Any:
    """Return a checkpoint's `speculators_model_type`; None if it is not the library's."""
    kind = config.get("speculators_model_type")
    is_flat = "hidden_size" in config and "transformer_layer_config" not in config
    if kind is None and not is_flat and first_name(config.get("architectures")) in _PEAGLE_ARCHITECTURES:
        return "peagle"
    return kind


def is_served(config: Mapping[str, Any]) -> bool:
    """Return True for a config.json that `normalize` converts."""
    kind = speculators_type(config)
    is_known = isinstance(kind, str) and kind in _DRAFTS
    return is_known and not (kind == _DSpark.kind and dspark_heads(config))


def is_speculators_config(config: Mapping[str, Any]) -> bool:
    """Return True for a config.json of the library."""
    return speculators_type(config) is not None or "transformer_layer_config" in config


def speculators_ids_to_layer_outputs(speculators_layer_ids: Sequence[int]) -> list[int]:
    """Convert `aux_hidden_state_layer_ids` to `target_layer_ids`; nothing else converts.

    speculators counts the layers that have run: id i is the INPUT of layer i, Hugging Face's
    `hidden_states[i]`, with 0 the embedding. Ours names the layer whose OUTPUT is taken: id i is
    `hidden_states[i + 1]`. SGLang's capture hook counts inputs again and adds the one back by itself.
    """
    return [layer_id - 1 for layer_id in speculators_layer_ids]


def flat_draft(
    layers: Mapping[str, Any], architecture: str, block_size: int, **entries: Any
) -> dict[str, Any]:
    """Return a flat Qwen3 config of these layers, whose `dflash_config` has these entries.

    These writers copy the target's table into a plain embedding, which scales nothing.
    """
    return {
        **layers,
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "architectures": [architecture],
        "block_size": block_size,
        "dflash_config": {"input_embedding_scale": 1.0, **entries},
    }


def normalize(config: Mapping[str, Any], checkpoint: str, target_layers: int | None = None) -> dict[str, Any]:
    """Convert a speculators config.json to a flat Qwen3 config with a `dflash_config`.

    `target_layers` is the target's depth, for a P-EAGLE draft that does not name the layers it reads.

    Raises:
        DraftConfigError: fields are missing, ill-typed or contradictory. The message names every one.
    """
    return _read(config, checkpoint, target_layers).flatten(config["transformer_layer_config"])


def verifier_of(config: Mapping[str, Any], checkpoint: str) -> str:
    """Return a checkpoint's target. Raises DraftConfigError if it names none."""
    read = _read(config, checkpoint, target_layers=MAX_LAYERS)  # the depth is that of the target
    if read.speculators_config is None:
        give = "give it: --model-path TARGET --speculative-draft-model-path CHECKPOINT"
        raise DraftConfigError(checkpoint, [f"speculators_config is missing, which names the target; {give}"])
    verifier = read.speculators_config.verifier.name_or_path
    if not verifier:
        raise DraftConfigError(checkpoint, ["speculators_config.verifier.name_or_path is empty"])
    return verifier


def _read(config: Mapping[str, Any], checkpoint: str, target_layers: int | None) -> _Draft:
    kind = speculators_type(config)
    if not is_served(config):
        hint = "; vLLM may serve it" if kind in _SERVED_ELSEWHERE else ""
        heads = ", ".join(dspark_heads(config)) if kind == _DSpark.kind else ""
        served = ", ".join(_DRAFTS)
        problem = f"speculators_model_type {kind!r} is not served here (only {served}){hint}"
        if heads:
            problem = f"speculators_model_type 'dspark' is not served here with heads: {heads}{hint}"
        raise DraftConfigError(checkpoint, [problem])
    draft = _DRAFTS[str(kind)]
    if found := variant_findings(config, {}, speculators_fields(config)):
        raise DraftConfigError(checkpoint, [finding.what for finding in found])
    defaults: dict[str, Any] = {}
    if config.get("draft_vocab_size") is None:
        defaults["draft_vocab_size"] = _rows_of_head(config, checkpoint)
    if draft is _PEagle and target_layers is not None and config.get(_PEAGLE_INPUTS) is None:
        defaults[_PEAGLE_INPUTS] = default_layer_inputs(target_layers)
    return validated(draft, {**config, **defaults}, checkpoint)


def speculators_fields(config: Mapping[str, Any]) -> set[str]:
    """Return the fields that are read at the top level of a config.json of the library."""
    draft = _DRAFTS.get(str(speculators_type(config)), _Draft)
    return {field.alias or name for name, field in draft.model_fields.items()}


def _rows_of_head(config: Mapping[str, Any], checkpoint: str) -> Any:
    """Return the size of the draft's vocabulary by its tensors, or the library's default."""
    shapes = tensor_shapes(checkpoint)
    if shapes is None:
        return _DEFAULT_VOCABULARY
    whole = as_object(config.get("transformer_layer_config")).get("vocab_size")
    return next((shapes[name][0] for name in ("d2t", "lm_head.weight") if shapes.get(name)), whole)
