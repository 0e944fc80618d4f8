"""SGLang's own DFlash2 draft on the blocks of some DFlash2Cases: `stock_dflash2.py IN OUT`.

It runs in a separate process. Only its model class is SGLang's: the pools, and the attention over them,
are the unit tests'. Its compiled functions run uncompiled (the caller sets TORCHDYNAMO_DISABLE). Context
keys and values come from its own methods for them.
"""

import sys

import torch
from sglang.srt.models import dflash as stock
from sglang.srt.utils.hf_transformers_utils import get_config
from support.draft_cases import lm_head
from support.engine import Pools, build

stock._flashinfer_top_k = None  # which has no CPU version; `torch.topk` is what SGLang then takes


def main(given: dict) -> dict:
    config = get_config(given["folder"], trust_remote_code=False)
    model = build(stock.DFlash2DraftModel, config, iter(given["weights"].items()))
    model.lm_head = lm_head(given["head"])
    tokens, contexts = given["tokens"], given["contexts"]
    lengths = [len(context) for context in contexts]
    pools = Pools(
        len(lengths),
        max(lengths) + tokens.shape[1],
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    for request, context in enumerate(contexts):
        where, positions = pools.slots(request, 0, len(context)), torch.arange(len(context))
        fused = model.project_target_hidden(context)
        for number, layer in enumerate(model.layers):
            keys, values = layer.self_attn.kv_proj_only(fused)
            keys = layer.self_attn.apply_k_rope(positions, layer.self_attn.apply_k_norm(keys))
            for buffer, rows in zip(
                (pools.token_to_kv_pool.k_buffer, pools.token_to_kv_pool.v_buffer), (keys, values)
            ):
                buffer[number][where] = rows.view(len(context), *buffer[number].shape[1:])
    embeds = given["embedding"][tokens.flatten()]
    output = pools.forward(
        lambda ids, positions, batch: model(ids, positions, batch, input_embeds=embeds),
        pools.blocks(tokens, lengths),
    )
    rows = output.hidden_states.view(*tokens.shape, -1)[:, 1:]
    ids, unary = (part.view(*rows.shape[:2], -1) for part in model.compute_candidates(rows.flatten(0, 1)))
    scores = model.candidate_selector.build_lattice(
        candidate_ids=ids, unary_logits=unary, hidden_states=rows, anchor_token_ids=tokens[:, 0]
    )
    walks = [
        model.candidate_selector.sample_path(
            candidate_ids=ids,
            scores=scores,
            uniforms=given["uniforms"],
            temperatures=given["temperatures"],
            greedy_mask=torch.full((len(lengths),), greedy),
        )
        for greedy in (True, False)
    ]
    return {
        "hidden": rows,
        "ids": ids,
        "unary": unary,
        "best": walks[0][0],
        "drawn": walks[1][0],
        "probs": walks[1][1],
    }


if __name__ == "__main__":
    with torch.no_grad():
        torch.save([main(given) for given in torch.load(sys.argv[1])], sys.argv[2])
