"""A DFlash draft checkpoint's config.json, checked once and frozen.

Format: z-lab/dflash. A flat Qwen3 config plus `block_size`, `num_target_layers` and
`dflash_config: {mask_token_id, target_layer_ids}`. Checkpoints of the speculators library are converted to it
by `configs/speculators_format.py`, with a few more entries in `dflash_config`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as all_fields
from typing import Any, ClassVar, Self

from sglang_dflash.srt.configs.fields import MAX_LAYERS, REQUIRED, Fields, Shapes, names_taken
from sglang_dflash.srt.configs.json_values import short_repr
from sglang_dflash.srt.configs.unsupported import variant_problems

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
# Read from `dflash_config` alone: a config copied from the target has the target's at the top level.
NESTED_ONLY = {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}
NESTED_ONLY |= {"use_swa", "swa_window_size"}
_LAYERS: dict[str, Any] = {"least": 1, "most": MAX_LAYERS}  # limits of a number of layers


class DraftFields(Fields):
    """A cursor over a draft's `dflash_config`, and over the top level for what is not there."""

    def __init__(self, hf_config: Any, problems: list[str]):
        top = Fields({"dflash_config": getattr(hf_config, "dflash_config", None)}, problems)
        super().__init__(top.take_object("dflash_config", None).values, problems)
        self._hf_config = hf_config

    def find(self, name: str) -> Any:
        value = super().find(name)
        return getattr(self._hf_config, name, None) if value is None and name not in NESTED_ONLY else value

    def take(self, name: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Return the value of a field. A value at the top level that it hides must have its type."""
        hidden = None if name in NESTED_ONLY else getattr(self._hf_config, name, None)
        if hidden is not None and self.values.get(name) is not None:
            Fields({}, self.problems).check(name, hidden, kind)
        return super().take(name, kind, default, **limits)

    def fault(self, name: str, text: str) -> None:
        field_name = name.partition(".")[0]
        is_nested = field_name in self.values or field_name in NESTED_ONLY or name.startswith("selector_")
        super().fault(f"dflash_config.{name}" if is_nested else name, text)


@dataclass(frozen=True, kw_only=True)
class DFlashDraftConfig:
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
        layer_types: of each layer, FULL_ATTENTION or SLIDING_ATTENTION.
        sliding_window: tokens a sliding layer sees, the query itself included. None without such layers.
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
        final_logit_softcapping: the softcap of `output_multiplier`. None: no softcap.
        input_embedding_scale: factor on the block's rows of the embedding table. None: as the target's module
            returns them, which for Gemma multiplies them itself.
        has_own_lm_head: whether the checkpoint must bring this tensor. It may in any case.
        has_embed_tokens: as `has_own_lm_head`.
        max_position_embeddings: positions that the draft was made for. It also drafts beyond the last.
        remarks: values that the checkpoint does not give and what stands for them, and fields that are not
            read. A phrase each.
    """

    kind: ClassVar[str] = "DFlash"
    # Whether the draft reads KV slots through the target's request table, shifted by one slot.
    shifts_request_table: ClassVar[bool] = False

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    block_size: int
    draft_vocab_size: int
    mask_token: str | None
    mask_token_id: int | None
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal: bool | None
    sliding_is_causal: bool
    window_from_anchor: bool
    sample_from_anchor: bool
    speculative_tokens: int
    aux_streams: int
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float | None
    has_own_lm_head: bool
    has_embed_tokens: bool
    max_position_embeddings: int | None
    remarks: tuple[str, ...] = field(compare=False)

    @classmethod
    def parse(cls, hf_config: Any, checkpoint: str) -> Self:
        """Read a draft's `PretrainedConfig`: from `dflash_config` first, then from the top level.

        Raises DraftConfigError naming every missing or contradictory field at once.
        """
        fields = DraftFields(hf_config, [])
        values = cls._read(fields)
        found = variant_problems(vars(hf_config), fields.values, cls.nested_fields())
        fields.problems += [finding.what for finding in found]
        fields.raise_problems(checkpoint)
        return cls(**values)

    @classmethod
    def nested_fields(cls) -> set[str]:
        """Return the fields of `dflash_config` that are read."""
        return names_taken(cls._read)

    @classmethod
    def _read(cls, fields: Fields) -> dict[str, Any]:
        """Read the values of the attributes."""
        values = _read_block(fields)
        vocab_size = fields.take("vocab_size", int, least=1)
        drafted = fields.take("draft_vocab_size", int, vocab_size, least=1)
        if vocab_size and drafted and drafted > vocab_size:
            fields.fault("draft_vocab_size", f"is {drafted}, more than the target's {vocab_size} tokens")
        mask_id = fields.take("mask_token_id", int, None)
        if mask_id is not None and not 0 <= mask_id < (vocab_size or mask_id + 1):
            fields.fault("mask_token_id", f"is {mask_id}, outside the vocabulary of {vocab_size} tokens")
        mask = fields.take("mask_token", str, "<|MASK|>") if mask_id is None else None
        if mask == "":
            fields.fault("mask_token", "is empty")
        causal = fields.take("is_causal", bool, None)
        if causal is None:
            causal = fields.take("causal", bool, None)
        values |= {
            "hidden_size": fields.take("hidden_size", int, least=1),
            "num_hidden_layers": fields.take("num_hidden_layers", int, **_LAYERS),
            "vocab_size": vocab_size,
            "draft_vocab_size": drafted,
            "mask_token": mask,
            "mask_token_id": mask_id,
            "causal": causal,
            "aux_streams": fields.take("hc_mult", int, 1, **_LAYERS),
            "output_multiplier": _take_factor(fields, "output_multiplier", 1.0),
            "final_logit_softcapping": _take_factor(fields, "final_logit_softcapping", None),
            "input_embedding_scale": fields.take("input_embedding_scale", float, None, above=0),
            "has_own_lm_head": fields.take("has_own_lm_head", bool, False),
            "has_embed_tokens": fields.take("has_embed_tokens", bool, False),
            "max_position_embeddings": fields.take("max_position_embeddings", int, None, least=1),
        }
        depth = values["num_hidden_layers"]
        values |= _read_target_layers(fields, depth or 1) | _read_windows(fields, depth, causal)
        assumed = (
            ("block_size", "block_size", values["block_size"]),
            ("target_layer_ids", "dflash_config.target_layer_ids", [*values["target_layer_ids"]]),
            ("mask_token", "dflash_config.mask_token_id", mask),
        )
        remarks = tuple(
            f"{place} is missing, {value} is assumed"
            for name, place, value in assumed
            if value is not None and fields.find(name) is None
        )
        return values | {"remarks": remarks}

    def differences(self, other: "DFlashDraftConfig", but: Collection[str] = ()) -> str:
        """Name the fields that differ, each with both values.

        Args:
            other: the config to compare with, perhaps of another kind.
            but: fields that may differ.

        Returns:
            The names and values as text, empty if no field differs.
        """
        configs = self, other
        names = dict.fromkeys(one.name for config in configs for one in all_fields(config) if one.compare)
        values = [(name, *(getattr(config, name, None) for config in configs)) for name in names]
        different = [each for each in values if each[1] != each[2] and each[0] not in but]
        return ", ".join(f"{name} {before} and {after}" for name, before, after in different)

    def with_remarks(self, remarks: Sequence[str]) -> Self:
        return replace(self, remarks=(*remarks, *self.remarks))

    @property
    def aux_width(self) -> int:
        """Width of the states captured for a token, all layers side by side."""
        return len(self.target_layer_ids) * self.aux_streams * self.hidden_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Return True if the draft's ids are not the target's, and have to be mapped."""
        return self.draft_vocab_size != self.vocab_size

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
        hidden, inner = hf_config.hidden_size, hf_config.intermediate_size
        heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
        head_dim = getattr(hf_config, "head_dim", None) or hidden // heads
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": hidden}
        shapes: Shapes = {
            **{
                f"self_attn.{name}_proj.weight": (sizes[name], self.attention_inputs(layer)) for name in "qkv"
            },
            "self_attn.o_proj.weight": (hidden, sizes["q"]),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.has_qk_norm:
            shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
        if getattr(hf_config, "attention_bias", False):
            shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        return shapes

    def attention_inputs(self, layer: int) -> int:
        """Return the channels that the queries, keys and values of a layer are made of."""
        return self.hidden_size

    @property
    def has_qk_norm(self) -> bool:
        """Return True if queries and keys are normed per head."""
        return True


def _take_factor(fields: Fields, name: str, none: float | None) -> Any:
    """Return a positive number; `none` for zero and false, as in SGLang."""
    return none if fields.find(name) == 0 else fields.take(name, float, none, above=0)


def _read_block(fields: Fields) -> dict[str, Any]:
    size = fields.take("block_size", int, 16, least=1)
    drafts_first = fields.take("sample_from_anchor", bool, False)
    num_rows = (size or 0) - (not drafts_first)
    tokens = fields.take("speculative_tokens", int, num_rows, least=1)
    if size and tokens and tokens > num_rows:
        fields.fault("speculative_tokens", f"is {tokens}, but a block_size of {size} drafts {num_rows}")
    return {"block_size": size, "sample_from_anchor": drafts_first, "speculative_tokens": tokens}


def _read_target_layers(fields: Fields, num_layers: int) -> dict[str, Any]:
    depth = fields.take("num_target_layers", int, None, **_LAYERS)
    ids = fields.take_list("target_layer_ids", int, ())
    if ids == ():
        try:
            ids = spread_target_layer_ids(depth, num_layers)
        except ValueError as error:
            fields.fault("target_layer_ids", str(error))
    ids = ids or ()
    if any(i < 0 for i in ids):
        fields.fault("target_layer_ids", f"{format_ids(ids)} hold a negative id")
    if len(set(ids)) < len(ids):
        fields.fault("target_layer_ids", f"must be without repeats, got {short_repr([*ids])}")
    return {"num_target_layers": depth, "target_layer_ids": tuple(ids)}


def _read_windows(fields: Fields, num_layers: int | None, causal: bool | None) -> dict[str, Any]:
    """Read what a draft's layers see of a block and of the tokens before it."""
    full = (FULL_ATTENTION,) * (num_layers or 1)
    types = fields.take_list("layer_types", str, full, one_of=(FULL_ATTENTION, SLIDING_ATTENTION)) or full
    window = fields.take("sliding_window", int, None, least=0)
    whole = fields.take("swa_window_size", int, None)
    is_causal = fields.take("sliding_is_causal", bool, True)
    if fields.take("use_swa", bool, False) and SLIDING_ATTENTION not in types:
        # All layers slide, and are causal only if the checkpoint says so.
        types, window = (SLIDING_ATTENTION,) * (num_layers or 1), window if whole is None else whole
        is_causal = is_causal and causal is not None
    if num_layers not in (None, len(types)):
        problem = f"must list one entry per draft layer ({num_layers}), got {short_repr([*types])}"
        fields.fault("layer_types", problem)
    if SLIDING_ATTENTION not in types:
        window = None
    elif window is None:
        fields.fault("sliding_window", "is missing, and so is dflash_config.swa_window_size")
    elif window < 2:
        fields.fault("sliding_window", f"is {window}, which leaves a layer nothing but the query itself")
    return {
        "layer_types": tuple(types),
        "sliding_window": window,
        "sliding_is_causal": is_causal and causal is not False,
        "window_from_anchor": fields.take("window_from_anchor", bool, False),
    }


def names_sliding_layers(layer_types: Any) -> bool:
    """Return True if a config's `layer_types` name a sliding layer."""
    return isinstance(layer_types, list | tuple) and SLIDING_ATTENTION in layer_types


def spread_target_layer_ids(num_target_layers: int | None, num_draft_layers: int) -> tuple[int, ...]:
    """Return the target layers z-lab's drafts read if a checkpoint names none.

    They are one per draft layer, spread evenly from layer 1 to layer L-3 (0-based layer outputs;
    z-lab/dflash, `build_target_layer_ids`).
    """
    if num_target_layers is None:
        raise ValueError("is missing, and so is num_target_layers, over which to spread layers")
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
