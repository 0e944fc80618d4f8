"""Train a draft for a tiny target with the `speculators` package's own model.

DFlash or P-EAGLE, shaped as by that package's command line: Qwen3 layers, all sliding (so a
DFlash block is causal inside), a reduced draft vocabulary. Runs in a separate environment (README.md); the
serving environment never needs the library.

    python train_speculators_draft.py dflash WORK_DIR TARGET_DIR OUTPUT_DIR --warm-start DFLASH_DRAFT_DIR
    python train_speculators_draft.py peagle WORK_DIR TARGET_DIR OUTPUT_DIR
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from corpus import MASK_ID
from kinds import kind_of
from safetensors.torch import load_file
from speculators.model import SpeculatorModel
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle.core import PEagleDraftModel
from speculators.train.checkpointer import convert_float_dtype, patch_config_dtype
from speculators.train.cli import create_transformer_layer_config
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from train_target import MasterWeights, learning_rate_scale
from transformers import AutoModelForCausalLM, PretrainedConfig

DRAFT_TOKENS, DRAFT_VOCAB = 7, 1536
SLIDING_WINDOW = 2048


class DFlashRecipe:
    model_class = DFlashDraftModel
    num_layers = 3
    layer_ids = {12: [2, 5, 8, 11]}  # by the target's depth, in speculators' counting: inputs of these layers
    rows_per_step = 2
    options = {"max_anchors": rows_per_step * 96}
    shape = {"block_size": DRAFT_TOKENS + 1}
    scored_slots = range(1, DRAFT_TOKENS + 1)

    @staticmethod
    def trainable(at: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Return anchors in the rollout whose blocks end inside their row."""
        return (at >= first) & (at < end) & (at < len(at) - DRAFT_TOKENS - 1)

    @staticmethod
    def prepare(row: dict) -> dict:
        return row


class PEagleRecipe:
    model_class = PEagleDraftModel
    num_layers = 3  # with one, a token cannot build on a guess of the one before it
    layer_ids = {12: [2, 6, 9], 8: [2, 4, 5]}  # what the library picks; its counting is EAGLE's
    rows_per_step = 1  # attention grows with the square of the packed row
    options = {"num_depths": DRAFT_TOKENS}
    # norm_before_residual as in the library's class and P-EAGLE tutorial; its command line defaults to True.
    shape = {"num_depths": DRAFT_TOKENS, "norm_before_residual": False}
    scored_slots = range(DRAFT_TOKENS)

    @staticmethod
    def trainable(at: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Return positions with a label. Chains start one before, inside the row."""
        return (at >= max(first, 2)) & (at < end - 1)

    @staticmethod
    def prepare(row: dict) -> dict:
        """Pair token x[t + 1] with hidden state g[t], by the library's function."""
        return shift_batch(row)


RECIPES = {"dflash": DFlashRecipe, "peagle": PEagleRecipe}


@torch.no_grad()
def target_states(target, tokens: torch.Tensor, layer_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's states for tokens [R, S].

    Returns:
        aux [R, S, A * H], inputs of the layers; last [R, S, H], input of the final norm.
    """
    caught: dict = {}
    layers = [(i, target.model.layers[i]) for i in layer_ids] + [("last", target.model.norm)]
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, key=key: caught.__setitem__(key, inputs[0]))
        for key, module in layers
    ]
    target.model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([caught[i] for i in layer_ids], dim=-1), caught["last"]


def training_batch(recipe, target, pool: dict, picked: torch.Tensor) -> dict:
    """Pack rows of the pool into one: every tensor [1, S, ...]."""
    tokens = pool["tokens"][picked].long()
    aux, last = target_states(target, tokens, recipe.layer_ids[target.config.num_hidden_layers])
    at, rows = torch.arange(tokens.shape[1]), []
    for i, (first, end) in enumerate(zip(pool["first"][picked].tolist(), pool["end"][picked].tolist())):
        row = recipe.prepare(
            {
                "input_ids": tokens[i],
                "hidden_states": aux[i],
                "verifier_last_hidden_states": last[i],
                "loss_mask": recipe.trainable(at, first, end).float(),
                "position_ids": at,
                "lengths": torch.tensor([len(at)]),
            }
        )
        length = int(row.pop("lengths"))
        rows.append(row | {"document_ids": torch.full((length,), i)})
    return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def new_draft(recipe, target_dir: Path, frequencies: Counter, config: PretrainedConfig) -> SpeculatorModel:
    layers = create_transformer_layer_config(
        str(target_dir), recipe.num_layers, "qwen3", None, SLIDING_WINDOW, full_attention_indices=[]
    )
    d2t, t2d = build_vocab_mappings_from_distribution(dict(frequencies), DRAFT_VOCAB, config.vocab_size)
    return recipe.model_class.from_training_args(
        layers,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=str(target_dir),
        draft_vocab_size=DRAFT_VOCAB,
        target_layer_ids=recipe.layer_ids[config.num_hidden_layers],
        mask_token_id=MASK_ID,
        draft_attn_impl="eager",
        **recipe.shape,
    )


def save(draft: SpeculatorModel, output_dir: Path, verifier: str | None) -> None:
    """Save like the library's trainer, with the target named by its folder."""
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
    parser.add_argument("type", choices=RECIPES)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--warm-start", type=Path, help="a draft of the same shape; z-lab's layout will do")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.001)
    args = parser.parse_args()

    torch.manual_seed(0)
    recipe = RECIPES[args.type]
    pool = torch.load(args.work_dir / "rollouts.pt", mmap=True)["short"]
    generated = torch.arange(pool["argmax"].shape[1])[None] >= pool["first"][:, None]
    frequencies = Counter(pool["argmax"][generated].tolist())
    target = AutoModelForCausalLM.from_pretrained(args.target_dir, dtype=torch.bfloat16).eval()
    draft = new_draft(recipe, args.target_dir, frequencies, target.config)
    if args.warm_start:
        before = load_file(args.warm_start / "model.safetensors")
        missing, unexpected = draft.load_state_dict(before, strict=False)
        assert not unexpected, unexpected
        print("kept from the library's initialisation:", missing)
        draft.load_verifier_weights()  # the labels' head, by the draft vocabulary that was loaded
    if kind_of(target.config.to_dict()).zero_centered_norm:
        # The labels come from the target's final norm, which the library reads as an ordinary one.
        draft.verifier_norm.weight.data += 1
    weights = MasterWeights(draft, args.muon_lr, args.adam_lr)
    options, _ = draft.get_trainer_kwargs(loss_fn="ce", loss_implementation="eager", **recipe.options)

    usable = ((pool["end"] - pool["first"]) > DRAFT_TOKENS).nonzero().flatten()
    began, log, order, running = time.time(), [], torch.empty(0, dtype=torch.int64), None
    for step in range(args.steps):
        if len(order) < recipe.rows_per_step:
            order = usable[torch.randperm(len(usable))]
        picked, order = order[: recipe.rows_per_step], order[recipe.rows_per_step :]
        _, loss, metrics = draft(**training_batch(recipe, target, pool, picked), **options)
        loss.backward()
        weights.step(learning_rate_scale(step, step / args.steps, warmup=20))

        sums = torch.tensor([metrics[f"position_{k}_acc_sum"] for k in recipe.scored_slots])
        totals = torch.tensor([metrics[f"position_{k}_acc_total"] for k in recipe.scored_slots])
        now = torch.cat((loss.detach()[None], sums / totals.clamp(min=1)))
        running = now if running is None else 0.98 * running + 0.02 * now
        if step % 50 == 0 or step + 1 == args.steps:
            log.append(
                {
                    "step": step + 1,
                    "loss": round(running[0].item(), 3),
                    "slot_accuracy": [round(h, 3) for h in running[1:].tolist()],
                    "seconds": round(time.time() - began),
                }
            )
            print(json.dumps(log[-1]), flush=True)
    save(draft, args.output_dir, args.target_dir.name)
    report = {
        "steps": args.steps,
        "date": time.strftime("%Y-%m-%d"),
        "warm_start": bool(args.warm_start),
        "log": log,
    }
    (args.work_dir / f"train_speculators_{args.type}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
