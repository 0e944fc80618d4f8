"""Train a DFlash draft for the tiny target with the `speculators` package's own model, as its command line would.

All layers sliding, so causal inside the block, and a reduced draft vocabulary: what the library's defaults give. Runs in
an environment of its own (README.md); the serving environment never needs the library.

    python train_speculators_draft.py WORK_DIR TARGET_DIR OUTPUT_DIR --warm-start DFLASH_DRAFT_DIR
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from corpus import MASK_ID
from safetensors.torch import load_file
from speculators.models.dflash.core import DFlashDraftModel
from speculators.train.checkpointer import convert_float_dtype, patch_config_dtype
from speculators.train.cli import create_transformer_layer_config
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from train_target import MasterWeights, learning_rate_scale
from transformers import AutoModelForCausalLM

BLOCK_SIZE, DRAFT_LAYERS, DRAFT_VOCAB = 8, 3, 1536
LAYER_IDS = [2, 5, 8, 11]  # speculators' counting: inputs of these layers
SLIDING_WINDOW = 2048
ROWS_PER_STEP, ANCHORS_PER_ROW = 2, 96


@torch.no_grad()
def target_states(target, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [R, S] -> aux [R, S, A * H], inputs of LAYER_IDS; last [R, S, H], what enters the final norm."""
    caught: dict = {}
    layers = [(i, target.model.layers[i]) for i in LAYER_IDS] + [("last", target.model.norm)]
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, key=key: caught.__setitem__(key, inputs[0]))
        for key, module in layers
    ]
    target.model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([caught[i] for i in LAYER_IDS], dim=-1), caught["last"]


def trainable_positions(first: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    """[R] -> loss mask [R, S]: the rollout, less what a block starting there would read beyond its row."""
    at = torch.arange(length)
    return ((at >= first[:, None]) & (at < end[:, None]) & (at < length - BLOCK_SIZE)).float()


def new_draft(target_dir: Path, frequencies: Counter, vocab_size: int) -> DFlashDraftModel:
    layers = create_transformer_layer_config(str(target_dir), DRAFT_LAYERS, "qwen3", None, SLIDING_WINDOW, [])
    d2t, t2d = build_vocab_mappings_from_distribution(dict(frequencies), DRAFT_VOCAB, vocab_size)
    return DFlashDraftModel.from_training_args(
        layers,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=str(target_dir),
        draft_vocab_size=DRAFT_VOCAB,
        target_layer_ids=LAYER_IDS,
        mask_token_id=MASK_ID,
        block_size=BLOCK_SIZE,
        draft_attn_impl="eager",
    )


def save(draft: DFlashDraftModel, output_dir: Path, verifier: str) -> None:
    """As the library's trainer saves, with the target named by what it is called next to the checkpoint."""
    state = convert_float_dtype(draft.state_dict(), torch.bfloat16)
    draft.save_pretrained(output_dir, state_dict=state)
    patch_config_dtype(output_dir / "config.json", torch.bfloat16)
    (output_dir / "config.py").unlink(missing_ok=True)  # transformers adds the library's source
    config = json.loads((output_dir / "config.json").read_text())
    config.pop("auto_map", None)
    config["speculators_config"]["verifier"]["name_or_path"] = verifier
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--warm-start", type=Path, help="a DFlash draft of the same shape")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.001)
    args = parser.parse_args()

    torch.manual_seed(0)
    pool = torch.load(args.work_dir / "rollouts.pt", mmap=True)["short"]
    generated = torch.arange(pool["argmax"].shape[1])[None] >= pool["first"][:, None]
    frequencies = Counter(pool["argmax"][generated].tolist())
    target = AutoModelForCausalLM.from_pretrained(args.target_dir, dtype=torch.bfloat16).eval()
    draft = new_draft(args.target_dir, frequencies, target.config.vocab_size)
    if args.warm_start:
        missing, unexpected = draft.load_state_dict(load_file(args.warm_start / "model.safetensors"), strict=False)
        assert not unexpected, unexpected
        print("kept from the library's initialisation:", missing)
    weights = MasterWeights(draft, args.muon_lr, args.adam_lr)
    options, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce", loss_implementation="eager", max_anchors=ROWS_PER_STEP * ANCHORS_PER_ROW
    )

    usable = ((pool["end"] - pool["first"]) >= BLOCK_SIZE).nonzero().flatten()
    began, log, order = time.time(), [], torch.empty(0, dtype=torch.int64)
    for step in range(args.steps):
        if len(order) < ROWS_PER_STEP:
            order = usable[torch.randperm(len(usable))]
        rows, order = order[:ROWS_PER_STEP], order[ROWS_PER_STEP:]
        tokens = pool["tokens"][rows].long()
        aux, last = target_states(target, tokens)
        mask = trainable_positions(pool["first"][rows], pool["end"][rows], tokens.shape[1])
        positions = torch.arange(tokens.shape[1]).repeat(len(rows))
        documents = torch.arange(len(rows)).repeat_interleave(tokens.shape[1])
        packed = lambda x: x.flatten(0, 1)[None]
        _, loss, metrics = draft(
            hidden_states=packed(aux),
            input_ids=tokens.flatten()[None],
            loss_mask=mask.flatten()[None],
            verifier_last_hidden_states=packed(last),
            document_ids=documents[None],
            position_ids=positions[None],
            **options,
        )
        loss.backward()
        weights.step(learning_rate_scale(step, args.steps, warmup=20))
        if step % 50 == 0 or step + 1 == args.steps:
            slots = [float(metrics[f"position_{k}_acc_sum"] / metrics[f"position_{k}_acc_total"]) for k in range(1, BLOCK_SIZE)]
            log.append({"step": step + 1, "loss": round(loss.item(), 3), "slot_accuracy": [round(s, 3) for s in slots],
                        "accept_length": round(float(metrics["eal_sum"] / metrics["eal_total"]), 3),
                        "seconds": round(time.time() - began)})
            print(json.dumps(log[-1]), flush=True)
    save(draft, args.output_dir, args.target_dir.name)
    (args.work_dir / "train_speculators_draft.json").write_text(json.dumps({"steps": args.steps, "log": log}, indent=2) + "\n")


if __name__ == "__main__":
    main()
