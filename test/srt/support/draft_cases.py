"""Drafts of odd shapes with random weights, built by our class and by the reference.

Our class runs on SGLang's layers.
"""

import json
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from serving import DRAFT
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from support.drafts import as_deepseek, random_weights
from support.engine import Pools, build, read_config, start
from support.reference_dflash import ReferenceDFlash
from torch.nn.functional import pad

from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.speculative.cycle.block import Cycle
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter

BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
    "num_target_layers": 6,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWED = {**SLIDING, "layer_types": ["sliding_attention"] * 2}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
NOT_CAUSAL = {"is_causal": False}


def _nested(**fields) -> dict:
    return {"dflash_config": BASE["dflash_config"] | fields}


VARIANTS = {
    "plain": {},
    "one layer": {"num_hidden_layers": 1},
    "no grouping": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1, "num_attention_heads": 6, "head_dim": 8},
    "wide heads": {"head_dim": 40},
    "attention bias": {"attention_bias": True},
    "yarn": {"rope_scaling": YARN},
    "other theta": {"rope_theta": 1e6},
    "loose eps": {"rms_norm_eps": 1e-2},
    "five target layers": _nested(mask_token_id=0, target_layer_ids=[0, 1, 2, 3, 4]),
    "one target layer": _nested(mask_token_id=60, target_layer_ids=[2]),
    "layer ids left out": {"dflash_config": {"mask_token_id": 7}},
    "sliding, causal": WINDOWED,
    "sliding, not causal": WINDOWED | NOT_CAUSAL,
    "sliding and full": MIXED,
    "sliding and full, not causal": MIXED | NOT_CAUSAL,
    "full, causal": {"is_causal": True},
    "narrow window": MIXED | {"sliding_window": 2, "layer_types": ["full_attention", "sliding_attention"]},
    "block of 16": {"block_size": 16},
    "sample from anchor": _nested(sample_from_anchor=True),
    # Its file has DeepSpec's fields; the reference reads these.
    "DeepSeek's block of 7": {"architectures": ["Qwen3DSparkModel"], "block_size": 7}
    | _nested(sample_from_anchor=True),
    "sliding, counted from the anchor, not causal": WINDOWED | NOT_CAUSAL | _nested(window_from_anchor=True),
    "sliding, counted from the anchor": WINDOWED | _nested(window_from_anchor=True),
}


def lm_head(weight: torch.Tensor) -> ParallelLMHead:
    """Return this rank's share of the target's head as SGLang holds it.

    Rows are padded with zeros to a multiple of 64.
    """
    start()
    head = ParallelLMHead(*weight.shape)
    head.weight_loader(head.weight, weight)
    return head


class FakePlan:
    """SGLang's plan of a step's slots, if every pool uses the same ids."""

    def __init__(self, slots: torch.Tensor):
        self.slots = slots

    def reads_from(self, translator, *, seq_lens, seq_lens_cpu, read_extent) -> "FakePlan":
        return self

    def bind(self, batch, translator, *, cols: slice | None = None) -> None:
        bs = batch.req_pool_indices.numel()
        batch.out_cache_loc = self._part(bs, cols)
        self.bs = bs

    def write_ids(self, translator, *, cols: slice | None = None) -> torch.Tensor:
        return self.slots if cols is None else self._part(self.bs, cols)

    def _part(self, bs: int, cols: slice | None) -> torch.Tensor:
        return self.slots if cols is None else self.slots.view(bs, -1)[:, cols].reshape(-1)


def draft_cycle(
    pools: Pools, requests: Sequence[int], lengths: Sequence[int], tokens: torch.Tensor, width: int
) -> Cycle:
    """Begin a cycle of requests with these committed lengths; cut or pad blocks [bs, B] to `width`."""
    slots = torch.cat([pools.slots(r, n, n + width) for r, n in zip(requests, lengths, strict=True)])
    committed = torch.tensor(lengths)
    return Cycle(
        bs=len(requests),
        verify_len=width,
        req_pool_indices=pools.rows[list(requests)],
        committed=committed,
        committed_host=committed,
        tokens=pad(tokens, (0, width - tokens.shape[1]), value=tokens[0, -1].item()),
        positions=committed[:, None] + torch.arange(width),
        cache_loc=slots,
        kv_loc_plan=FakePlan(slots),
        can_run_cuda_graph=False,
        layout=whole_blocks(len(requests), width),
    )


class Case:
    """One draft, built twice, with a random target embedding and head."""

    model_class, reference_class, checkpoint = DFlashDraftModel, ReferenceDFlash, DRAFT
    drafter_class = DFlashDrafter

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], num_aux: int, tmp_path):
        self.config = config
        self.num_aux, self.weights = num_aux, weights
        self.reference = self.reference_class(config, weights)
        stored = as_deepseek(config) if config["architectures"] == ["Qwen3DSparkModel"] else config
        self.model = build(self.model_class, read_config(stored, tmp_path), iter(weights.items()))
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.embedding.weight.data = torch.randn(
            config["vocab_size"], config["hidden_size"], generator=generator
        )
        self.head = torch.randn(config["vocab_size"], config["hidden_size"], generator=generator)
        self.head *= config["hidden_size"] ** -0.5
        self.model.borrow_from_target(self.embedding, lm_head(self.head))

    @classmethod
    def variant(cls, name: str, tmp_path, **nested) -> "Case":
        """nested: further entries of `dflash_config`."""
        config = BASE | VARIANTS[name]
        config["dflash_config"] = config["dflash_config"] | nested
        ids = config["dflash_config"].get("target_layer_ids")
        num_aux = (config["num_hidden_layers"] if ids is None else len(ids)) * nested.get("hc_mult", 1)
        return cls(config, random_weights(config, num_aux), num_aux, tmp_path)

    @classmethod
    def bundled(cls, tmp_path) -> "Case":
        config = json.loads((cls.checkpoint / "config.json").read_text())
        weights = {
            name: tensor.float() for name, tensor in load_file(cls.checkpoint / "model.safetensors").items()
        }
        return cls(config, weights, len(config["dflash_config"]["target_layer_ids"]), tmp_path)

    def pools(self, requests: int, capacity: int, **options) -> Pools:
        return Pools.of_draft(self.model, requests, capacity, **options)

    def drafter(self, pools: Pools, width: int) -> DFlashDrafter:
        """Return a drafter whose model runner is only the model and these pools."""
        target = SimpleNamespace(lm_head=lm_head(self.head), get_input_embeddings=lambda: self.embedding)
        runner = SimpleNamespace(
            model=self.model,
            token_to_kv_pool=pools.token_to_kv_pool,
            req_to_token_pool=pools.req_to_token_pool,
            kv_index_translator=None,
            decode_cuda_graph_runner=None,
            forward=lambda batch: SimpleNamespace(logits_output=pools.forward(self.model, batch)),
        )
        return self.drafter_class(runner, target, width)

    def aux_hidden(self, length: int, seed: int) -> torch.Tensor:
        """Return captured states of a context, at the uneven scale of real ones."""
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(length, self.num_aux, self.config["hidden_size"], generator=generator)
        return (states * torch.linspace(0.5, 3, self.num_aux)[:, None]).flatten(1)

    def block_tokens(self, anchors: list[int]) -> torch.Tensor:
        """Return [bs, B]: each anchor followed by mask tokens."""
        tokens = torch.full(
            (len(anchors), self.config["block_size"]), self.config["dflash_config"]["mask_token_id"]
        )
        tokens[:, 0] = torch.tensor(anchors)
        return tokens

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.double() @ self.head.double().T

    def run_blocks(self, lengths: list[int], **pool_options):
        """Run a block behind a context of each length.

        Returns tokens [bs, B], the states of each context, and our output.
        """
        tokens = self.block_tokens([(5 * i + 2) % self.config["vocab_size"] for i in range(len(lengths))])
        pools = self.pools(len(lengths), max(lengths) + tokens.shape[1], **pool_options)
        contexts = [self.aux_hidden(length, seed) for seed, length in enumerate(lengths)]
        for request, (length, aux_hidden) in enumerate(zip(lengths, contexts, strict=True)):
            where = pools.slots(request, 0, length)
            self.model.write_context_kv(aux_hidden, torch.arange(length), where, pools.token_to_kv_pool)
        return tokens, contexts, pools.forward(self.model, pools.blocks(tokens, lengths))

    def block_hidden(self, tokens: torch.Tensor, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Return the reference's hidden states [B, hidden] of a block behind a context, float64."""
        embeddings = self.embedding.weight.data[tokens]
        return self.reference.block_hidden(embeddings, self.reference.context_kv(aux_hidden))

    def compare_blocks(self, lengths: list[int], **pool_options) -> float:
        """Return the largest difference of block logits over requests with these context lengths."""
        tokens, contexts, output = self.run_blocks(lengths, **pool_options)
        ours = output.hidden_states.view(*tokens.shape, -1)
        worst = 0.0
        for request, aux_hidden in enumerate(contexts):
            expected = self.block_hidden(tokens[request], aux_hidden)
            difference = (self.logits(ours[request]) - self.logits(expected)).abs().max()
            assert not difference.isnan(), "the draft read an unwritten slot"
            worst = max(worst, difference.item())
        return worst
