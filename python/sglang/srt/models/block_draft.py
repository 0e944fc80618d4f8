"""Base of the draft models: fused target states and vocabulary."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_dflash.srt.configs.checkpoint import MaskEmbedding
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_kinds import find_mask_token
from sglang_dflash.srt.layers.vocab_argmax import full_logits, greedy_tokens
from sglang_dflash.srt.models.loading import check_tensors, load_tensors


@dataclass
class DraftOutput(LogitsProcessorOutput):
    """Output of a forward over num_blocks blocks of D rows. A CUDA graph pads all fields.

    Attributes:
        hidden_states: [num_blocks * D, hidden], after the final norm.
        draft_tokens: [num_blocks * rows that draft] int64, the argmax of each in target vocabulary. None: the
            forward ends before the head.
        blocks: [num_blocks, B] int64, anchors and draft tokens, if a block's first row is its anchor. Valid
            until the next forward.
    """

    draft_tokens: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


class BlockDraftModel(nn.Module):
    """Base of the draft models: fusion of target states, vocabulary, weights."""

    # Classes of the config, of a layer, and of the first layer if it differs.
    draft_config_class: type[DFlashDraftConfig]
    layer_class: type[Any]
    first_layer_class: type[Any] | None = None
    draft: DFlashDraftConfig
    # [draft_vocab_size] int64, offset from a draft token's id to its target token's; None if ids are equal.
    d2t: torch.Tensor | None

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.draft = draft = self.draft_config_class.parse(config, getattr(config, "_name_or_path", "draft"))
        self.mask_token_id: Any = draft.mask_token_id  # an id, once `prepare_mask` has run
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = ReplicatedLinear(
            draft.aux_width, config.hidden_size, bias=False, prefix=add_prefix("fc", prefix)
        )
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        self.register_buffer("d2t", None, persistent=False)
        # [hidden], the mask token's embedding in place of its row of the table; and as the checkpoint has it.
        self.mask_embedding: torch.Tensor | None = None
        self.saved_mask: MaskEmbedding | None = None
        self.was_loaded = False  # by the checkpoint: what comes then is an update
        self.borrowed: tuple[Any, Any] = (None, None)
        # Whether forwards end before the head. The head then multiplies the rows of verified slots alone,
        # outside the forward and the graphs.
        self.ends_before_head = False
        classes = [self.layer_class] * config.num_hidden_layers
        classes[0] = self.first_layer_class or self.layer_class
        self.layers: Any = nn.ModuleList(
            layer_class(config, draft, layer_id, add_prefix(f"layers.{layer_id}", prefix))
            for layer_id, layer_class in enumerate(classes)
        )

    def borrow_from_target(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Use the target's embedding and head if the checkpoint brought none.

        Without LoRA adapters: those are per request, and a draft runs unadapted.
        """
        # In a tuple, outside the module tree: their weights are the target's.
        self.borrowed = (unwrap_lora_layer(embed_tokens), unwrap_lora_layer(lm_head))
        if self.mask_embedding is not None:
            # The table's row of the mask token would have been scaled too.
            scale: Any = self.draft.input_embedding_scale or getattr(self._embedding(), "embed_scale", 1.0)
            self.mask_embedding = self.mask_embedding * float(scale)

    def prepare_mask(
        self,
        tokenizer=None,
        embedding: MaskEmbedding | None = None,
        target_tokens: int | None = None,
    ) -> None:
        """Set the mask token and its embedding, which a checkpoint may store separately.

        Call this method before `borrow_from_target`.

        Args:
            tokenizer: the target's, used if the checkpoint only names the token.
            embedding: of the mask token, if the checkpoint stores it separately.
            target_tokens: size of the target's vocabulary. None: the draft's.

        Raises:
            ValueError: token and embedding contradict.
        """
        if self.mask_token_id is None:
            self.mask_token_id = find_mask_token(self.draft, tokenizer, target_tokens=target_tokens)
        self.saved_mask = embedding
        if embedding is None:
            return
        if problem := embedding.misfit(self.mask_token_id, len(self.norm.weight)):
            raise ValueError(f"DFLASH draft: {problem}.")
        self.mask_embedding = embedding.vector.to(self.norm.weight)

    @property
    def head(self) -> nn.Module:
        """LM head of the draft, over `draft_vocab_size` tokens."""
        return self.lm_head if self.lm_head is not None else self.borrowed[1]

    def renew_cast_weights(self) -> None:
        """Rebuild tensors derived from the weights, after an update of the draft or the target.

        CUDA graphs read most of these tensors, which keep their addresses.
        """
        for layer in self.layers:
            layer.self_attn.qk_weight = None

    def draft_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the argmax of hidden [n, hidden] in target vocabulary, [n] int64."""
        return self.to_target_ids(greedy_tokens(hidden, self.head))

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft token ids [n] int64 to target token ids."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed [n] int64 -> [n, hidden]. SGLang would cast `input_embeds` to bfloat16."""
        scale = self.draft.input_embedding_scale
        embedded = self._embedding()(input_ids) if scale is None else self._table_rows(input_ids)
        if scale not in (None, 1.0):
            embedded = embedded * scale
        if self.mask_embedding is None:
            return embedded
        # The target uses the same table, and a prompt may hold the mask token: its row stays.
        return torch.where((input_ids == self.mask_token_id)[:, None], self.mask_embedding, embedded)

    def _table_rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up rows of the table, past a module that scales them (Gemma's)."""
        module: Any = self._embedding()
        if isinstance(module, VocabParallelEmbedding):  # on several ranks each holds a part of the table
            return VocabParallelEmbedding.forward(module, input_ids)
        return F.embedding(input_ids, module.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits of hidden [n, hidden], [n, draft_vocab_size], on all ranks."""
        return self.cap_logits(full_logits(hidden, self.head))

    def cap_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap logits of the head as the config says."""
        softcap, multiplier = self.draft.final_logit_softcapping, self.draft.output_multiplier
        if multiplier != 1.0:
            logits = logits.float() * multiplier
        return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)

    def _embedding(self) -> nn.Module:
        return self.embed_tokens if self.embed_tokens is not None else self.borrowed[0]

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the window for SGLang's backends, which plan sliding layers with it."""
        return None if self.draft.sliding_window is None else self.draft.tokens_before_window_start

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint; raise ValueError naming every missing, unknown or misshapen tensor."""
        return load_tensors(self, check_tensors(self, weights))
