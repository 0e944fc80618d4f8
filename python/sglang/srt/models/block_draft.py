"""What the draft models of this family share: how they take in the target's states, and whose vocabulary they
speak."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.layers.vocab_argmax import full_logits
from sglang_dflash.srt.models.dflash_weights import load_checkpoint
from sglang_dflash.srt.models.mask_token import MASK_EMBEDDING_FILE, MaskEmbedding, find_mask_token


@dataclass
class DraftOutput(LogitsProcessorOutput):
    """Of a forward over num_blocks blocks of D rows.

    hidden_states: [num_blocks * D, hidden], after the final norm.
    draft_tokens: [num_blocks * rows that draft] int64, the argmax of each in target vocabulary. blocks:
        [num_blocks, B] int64, the anchors and these, where the anchors are the blocks' first rows. Valid
        until the next forward. A CUDA graph pads all of them.
    """

    draft_tokens: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


class BlockDraftModel(nn.Module):
    """What the draft models of this family share: fused target states, and a vocabulary of their own or the
    target's."""

    def __init__(self, config, draft: DFlashDraftConfig, quant_config, prefix: str):
        super().__init__()
        self.config = config
        self.draft = draft
        self.mask_token_id = draft.mask_token_id
        self.num_ranks = get_parallel().tp_size  # with DP attention fewer than where a weight update comes in
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = ReplicatedLinear(
            draft.aux_width,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("fc", prefix),
        )
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        # [draft_vocab_size] int64, offset from a draft token's id to its target token's; None: the ids are
        # the same.
        self.d2t: torch.Tensor | None = None
        # [hidden], what stands for the mask token instead of its row of the embedding.
        self.mask_embedding: torch.Tensor | None = None
        self._borrowed = None

    def borrow_from_target(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Use the target's embedding and head where the checkpoint brought none of its own."""
        # In a tuple, outside the module tree: their weights are the target's.
        self._borrowed = (embed_tokens, lm_head)
        if self.mask_embedding is not None:
            # An embedding that scales what it looks up would have scaled this row too.
            self.mask_embedding = self.mask_embedding * float(getattr(self._embedding(), "embed_scale", 1.0))

    def prepare_mask(self, tokenizer=None, embedding: MaskEmbedding | None = None) -> None:
        """Settle the mask token and its embedding, which a checkpoint may keep apart from its weights. Before
        anything is borrowed.

        tokenizer: the target's, asked where the checkpoint only names the token. Raises ValueError where they
        contradict."""
        if self.mask_token_id is None:
            self.mask_token_id = find_mask_token(self.draft, tokenizer)
        if embedding is None:
            return
        if embedding.token_id != self.mask_token_id:
            raise ValueError(
                f"DFLASH draft: {MASK_EMBEDDING_FILE} is of token {embedding.token_id}, but the mask token is {self.mask_token_id}."
            )
        if embedding.vector.shape != self.norm.weight.shape:
            raise ValueError(
                f"DFLASH draft: {MASK_EMBEDDING_FILE} holds {tuple(embedding.vector.shape)}, expected {tuple(self.norm.weight.shape)}."
            )
        self.mask_embedding = embedding.vector.to(self.norm.weight)

    @property
    def head(self) -> nn.Module:
        """The LM head of the draft, over `draft_vocab_size` tokens."""
        return self.lm_head if self.lm_head is not None else self._borrowed[1]

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft token ids [n] int64 -> target token ids."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, hidden]. Looked up in the model and not handed in, because SGLang casts
        `input_embeds` to bfloat16."""
        embedded = self._embedding()(input_ids)
        if self.mask_embedding is None:
            return embedded
        # Not written into the table, which is the target's as well: a prompt may hold the mask token.
        return torch.where((input_ids == self.mask_token_id)[:, None], self.mask_embedding, embedded)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, draft_vocab_size], those the draft's distribution is made from, on all
        ranks."""
        return self.capped(full_logits(hidden, self.head))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the head, some or all, as the config has them scaled and capped."""
        softcap, multiplier = self.draft.final_logit_softcapping, self.draft.output_multiplier
        if multiplier != 1.0:
            logits = logits.float() * multiplier
        return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)

    def _embedding(self) -> nn.Module:
        return self.embed_tokens if self.embed_tokens is not None else self._borrowed[0]

    def get_attention_sliding_window_size(self) -> int | None:
        """Asked by SGLang's backends when they plan sliding layers."""
        return None if self.draft.sliding_window is None else self.draft.tokens_before_window_start

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint. Raises ValueError naming every tensor that is missing, unknown or of another
        shape."""
        loaded = load_checkpoint(self, weights)
        for layer in self.layers:
            layer.self_attn._qk_weight = None
        return loaded
