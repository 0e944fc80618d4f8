"""Configs of DFlash2 and P-EAGLE drafts, config classes by architecture, fitting targets.

DFlash2 is z-lab's `DFlash2DraftModel`: a DFlash draft with convolutions and a candidate selector, by four
more entries in `dflash_config`, `conv_kernel_size`, `conv_group_size`, `selector_rank` and `selector_top_k`.
P-EAGLE is speculators' `peagle`, converted to a flat config by `configs/speculators_format.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, format_ids
from sglang_dflash.srt.configs.fields import DraftConfigError, Fields, Shapes
from sglang_dflash.srt.configs.json_values import first_name, short_repr

# One format under three names, as SGLang has them.
DFLASH2_ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")


@dataclass(frozen=True, kw_only=True)
class DFlash2DraftConfig(DFlashDraftConfig):
    """One DFlash2 draft.

    Attributes:
        conv_kernel_size: rows of a block that a row's convolution sees, the row included; 0 without
            convolutions.
        conv_group_size: channels that share what is added to their kernel; 0 without convolutions.
        selector_rank: width of the codebooks that score a token after another.
        selector_top_k: candidates of a slot.
        selector_vocab_size: tokens that may be candidates, the first of the vocabulary. None: all.
    """

    kind: ClassVar[str] = "DFlash2"

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    selector_vocab_size: int | None

    @classmethod
    def _read(cls, fields: Fields) -> dict[str, Any]:
        values = super()._read(fields)
        hidden, vocab_size = values["hidden_size"] or 0, values["vocab_size"] or 0
        taps, group = _take_count(fields, "conv_kernel_size"), _take_count(fields, "conv_group_size")
        if None not in (taps, group) and bool(taps) != bool(group):
            problem = f"is {group} and conv_kernel_size {taps}: convolutions need both"
            fields.fault("conv_group_size", problem)
        elif group and hidden % group:
            fields.fault("conv_group_size", f"is {group}, which does not divide {hidden} channels")
        rank, top_k = _take_count(fields, "selector_rank"), _take_count(fields, "selector_top_k")
        for name, value in (("selector_rank", rank), ("selector_top_k", top_k)):
            if value == 0:
                fields.fault(name, "is missing: a DFlash2 draft has a candidate selector")
        size = fields.take("selector_vocab_size", int, None, least=1)
        for name, value in (("selector_top_k", top_k), ("selector_vocab_size", size)):
            if value and vocab_size and value > vocab_size:
                fields.fault(name, f"is {value}, of a vocabulary of {vocab_size} tokens")
        if size and top_k and size < top_k:
            problem = f"is {size}, fewer than the {top_k} candidates of a slot"
            fields.fault("selector_vocab_size", problem)
        # Not defined: no published draft, and no other server, has a selector over one.
        if values["draft_vocab_size"] != values["vocab_size"]:
            fields.fault("selector_rank", "with a draft_vocab_size is not supported")
        return values | {
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "selector_rank": rank,
            "selector_top_k": top_k,
            "selector_vocab_size": size,
        }

    def required_tensors(self, hf_config: Any) -> Shapes:
        codebook = (self.vocab_size, self.selector_rank)
        return super().required_tensors(hf_config) | {
            "candidate_selector.hidden_projection.weight": (self.selector_rank, self.hidden_size),
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
        }

    def layer_tensors(self, hf_config: Any, layer: int) -> Shapes:
        shapes = super().layer_tensors(hf_config, layer)
        if taps := self.conv_kernel_size:
            groups = self.hidden_size // self.conv_group_size
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{name}.base_kernel"] = (2, taps, self.hidden_size)
                shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, self.hidden_size)
        return shapes


def _take_count(fields: Fields, name: str) -> Any:
    """Return a number, which is zero for false too: the draft has none."""
    return 0 if fields.find(name) is False else fields.take(name, int, 0, least=0)


PEAGLE_ARCHITECTURE = "PEagleDraftModel"
DEFAULT_DEPTH = 7  # drafted tokens a step, if the config does not say
PEAGLE_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")  # options of the format


def default_layer_inputs(depth: int) -> list[int]:
    """Return the layers whose inputs a draft reads that names none, for a target's depth."""
    return [2, depth // 2, depth - 3]


@dataclass(frozen=True, kw_only=True)
class PEagleDraftConfig(DFlashDraftConfig):
    """One P-EAGLE draft (arXiv 2602.01469).

    Attributes:
        block_size: slots of the verified block, anchor included: K + 1.
        norm_before_residual: whether layer 0's residual is the fused hidden state after its norm, rather than
            before.
        norm_before_fc: one norm over all captured states at once, before they are fused.
        fc_norm: a norm for each captured state, before they are fused.
        qk_norm: whether queries and keys are normed per head, as Qwen3's are and Llama's are not.
    """

    kind: ClassVar[str] = "P-EAGLE"
    shifts_request_table: ClassVar[bool] = True

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    qk_norm: bool

    @classmethod
    def _read(cls, fields: Fields) -> dict[str, Any]:
        values = super()._read(fields)
        ids = list(values["target_layer_ids"])
        # SGLang concatenates captured states in ascending order, and norms are fitted to each place.
        if ids != sorted(ids):
            fields.fault("target_layer_ids", f"must be ascending without repeats, got {short_repr(ids)}")
        return values | {name: fields.take(name, bool) for name in (*PEAGLE_NORMS, "qk_norm")}

    def is_causal(self, layer_id: int) -> bool:
        """Return True: every row sees only the rows before it."""
        return True

    def required_tensors(self, hf_config: Any) -> Shapes:
        hidden, num_aux = self.hidden_size, len(self.target_layer_ids)
        shapes = super().required_tensors(hf_config) | {"mask_hidden": (1, 1, num_aux * hidden)}
        del shapes["hidden_norm.weight"]
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (num_aux * hidden,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
        return shapes

    def layer_tensors(self, hf_config: Any, layer: int) -> Shapes:
        shapes = super().layer_tensors(hf_config, layer)
        return shapes if layer else shapes | {"hidden_norm.weight": (self.hidden_size,)}

    def attention_inputs(self, layer: int) -> int:
        """Return the width; the first layer reads embedding and fused state side by side."""
        return self.hidden_size if layer else 2 * self.hidden_size

    @property
    def has_qk_norm(self) -> bool:
        return self.qk_norm


# Names by NeMo AutoModel and AngelSlim of formats that are z-lab's otherwise.
ALIASES = {
    "Qwen3DFlashDraftModel": "DFlashDraftModel",
    "Qwen3DFlash2DraftModel": "DFlash2DraftModel",
    "QwenDFlashDraftModel": "DFlashDraftModel",
}
# DSpark drafts, by DeepSpec and by SpecForge. SGLang has an algorithm for them.
DSPARK_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
_CONFIG_CLASSES: dict[str, type[DFlashDraftConfig]] = {
    "DFlashDraftModel": DFlashDraftConfig,
    PEAGLE_ARCHITECTURE: PEagleDraftConfig,
    **dict.fromkeys(DFLASH2_ARCHITECTURES, DFlash2DraftConfig),
}
_CONFIG_CLASSES |= {alias: _CONFIG_CLASSES[name] for alias, name in ALIASES.items()}


def config_class(architectures: Any) -> type[DFlashDraftConfig] | None:
    """Return the class of a config with these `architectures`; None if it is no draft."""
    return _CONFIG_CLASSES.get(first_name(architectures) or "")


def check_architectures(
    architectures: Any, checkpoint: str, heads: Sequence[str] = ()
) -> type[DFlashDraftConfig]:
    """Return the class of a config. Raises ValueError if the names are not a draft's.

    `heads` are those of a DSpark draft, for the message.
    """
    names = architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"architectures must be a list of names, got {short_repr(architectures)}"
        raise DraftConfigError(checkpoint, [problem])
    found = config_class(names)
    if found is None:
        hint = f"expected one of {sorted(_CONFIG_CLASSES)}"
        if first_name(names) in DSPARK_ARCHITECTURES and heads:
            hint = f"a DSpark draft ({', '.join(heads)}): start it with `--speculative-algorithm DSPARK`"
        raise ValueError(
            f"{checkpoint!r} is neither a DFlash nor a P-EAGLE draft: its architectures are "
            f"{short_repr(architectures)}, {hint}."
        )
    return found


def read_draft_config(hf_config: Any, checkpoint: str) -> DFlashDraftConfig:
    """Read a draft's config. Raises ValueError for the architecture of another model."""
    kind = check_architectures(getattr(hf_config, "architectures", None), checkpoint)
    return kind.parse(hf_config, checkpoint)


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
        problems.append(f"target_layer_ids {format_ids(ids)} leave the target's {depth} layers")
    elif max(ids) == depth - 1 and next(iter(architectures), None) not in _CAPTURES_LAST_LAYER:
        problems.append(
            f"target_layer_ids {format_ids(ids)} name the last layer: "
            "SGLang captures a layer's output at the input of the next one, and the last layer has none"
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
        problem = f"{name}: there is no tokenizer to look it up in, give mask_token_id"
        raise DraftConfigError(checkpoint, [problem])
    found = tokenizer.get_vocab().get(draft.mask_token, len(tokenizer))
    if found >= rows:
        full = f"its embedding of {rows} rows has none to spare"
        problem = f"{name} is not in the target's tokenizer, and {full}"
        raise DraftConfigError(checkpoint, [problem])
    return found


def differences(draft: DFlashDraftConfig, target_text_config: Any, context_len: int = 0) -> dict[str, str]:
    """Say by field where the draft was made for another target, which it serves.

    `context_len` is the number of tokens that a request may have.
    """
    found, target = {}, target_text_config
    trained, depth, length = draft.num_target_layers, target.num_hidden_layers, draft.max_position_embeddings
    if trained not in (None, depth):
        found["num_target_layers"] = f"is {trained}, but the target's num_hidden_layers is {depth}"
    if draft.vocab_size != target.vocab_size:
        found["vocab_size"] = f"is {draft.vocab_size}, but the target's vocab_size is {target.vocab_size}"
    if length is not None and length < context_len:
        found["max_position_embeddings"] = (
            f"is {length}, and requests may have {context_len} tokens: fewer drafted tokens may be accepted "
            f"beyond {length}"
        )
    return {name: f"{name} {text}" for name, text in found.items()}
