"""Train a DFlash2 draft on stored rollouts, from a plain DFlash draft's weights.

The labels are the target's whole distributions, so the rollouts must come from `rollouts.py --sampled`. Three
losses, each weighted by slot as in `train_draft.py`: cross entropy of the base logits, whose largest are the
candidates; cross entropy of the selector's scores, given the true previous token; and the part of the
target's distribution that the selector's does not cover, which probabilistic drafting rejects.

    python train_dflash2.py WORK_DIR TARGET_DIR PLAIN_DRAFT_DIR OUTPUT_DIR --steps 1500
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from dflash2_model import DFlash2Draft, dflash2_config
from draft_model import BLOCK_SIZE, block_token_ids
from safetensors.torch import load_file
from train_draft import DECAY, LONG_EVERY, ROWS_PER_STEP, AnchorSampler
from train_target import MasterWeights, learning_rate_scale, write_checkpoint

BASE_WEIGHT, UNCOVERED_WEIGHT = 0.5, 1.0


def block_losses(draft: DFlash2Draft, embedding: torch.Tensor, tokens, aux, last, anchors):
    """Return three losses [R, N, B - 1] in training order, hits, and the share covered.

    A hit is a slot whose best score is the target's best token. tokens [R, S]; aux [R, S, A * H];
    last [R, S, H], the input of the target's head; anchors [R, N].
    """
    embeds = F.embedding(block_token_ids(tokens.gather(1, anchors), BLOCK_SIZE), embedding)
    hidden = draft(embeds, aux, anchors)[:, :, 1:]
    # Slot k's token is at anchor + k: the target's word about it, and its predecessor, are one position
    # before.
    before = (anchors[..., None] + torch.arange(BLOCK_SIZE - 1)).clamp(max=tokens.shape[1] - 1)
    rows = torch.arange(len(tokens))[:, None, None]
    with torch.no_grad():
        target = (
            F.linear(last[rows, before].flatten(0, 2), embedding).float().softmax(-1).view(*before.shape, -1)
        )
    logits, candidates = draft.candidates(hidden, embedding)
    base = -(target * logits.log_softmax(-1)).sum(-1)
    scores = draft.candidate_selector(hidden, tokens[rows, before], candidates, logits.gather(-1, candidates))
    wanted, said = target.gather(-1, candidates), scores.log_softmax(-1)
    covered = torch.minimum(wanted, said.exp()).sum(-1)
    best = candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    return base, -(wanted * said).sum(-1), 1 - covered, best == target.argmax(-1), covered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("plain_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end earlier, by this clock")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument(
        "--seed", type=int, default=2, help="of the rows and anchors; another one to go on with"
    )
    parser.add_argument("--init", type=Path, help="go on from this DFlash2 draft")
    args = parser.parse_args()

    torch.manual_seed(0)
    pools = torch.load(args.work_dir / "rollouts.pt", mmap=True)
    short, long = (
        AnchorSampler(pools["short"], ROWS_PER_STEP, args.seed),
        AnchorSampler(pools["long"], 1, args.seed + 1),
    )
    embedding = load_file(str(args.target_dir / "model.safetensors"))["model.embed_tokens.weight"]
    config = dflash2_config(json.loads((args.plain_dir / "config.json").read_text()))
    draft = DFlash2Draft(config)
    for module in draft.modules():  # the convolutions begin as the identity, the selector's gate small
        if hasattr(module, "kernel_projection"):
            torch.nn.init.zeros_(module.kernel_projection.weight)
    torch.nn.init.normal_(draft.candidate_selector.hidden_projection.weight, std=0.02)
    start = load_file(str((args.init or args.plain_dir) / "model.safetensors"))
    missing, unknown = draft.load_state_dict(start, strict=args.init is not None)
    assert not unknown and all(
        "conv." in name or name.startswith("candidate_selector.") for name in missing
    ), unknown
    weights = MasterWeights(draft, args.muon_lr, args.adam_lr)
    slot_weights = torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)
    split = [len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"], config["hidden_size"]]

    began, log, running, step, done = time.time(), [], None, 0, 0.0
    while done < 1:
        tokens, _, states, anchors, valid = (long if step % LONG_EVERY == LONG_EVERY - 1 else short).draw()
        *losses, is_best, covered = block_losses(
            draft, embedding, tokens, *states.split(split, dim=-1), anchors
        )
        slot_weight = slot_weights * valid
        base, chosen, uncovered = ((loss * slot_weight).sum() / slot_weight.sum() for loss in losses)
        (BASE_WEIGHT * base + chosen + UNCOVERED_WEIGHT * uncovered).backward()
        weights.step(learning_rate_scale(step, done, warmup=30))

        per_slot = [
            (x * valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1) for x in (is_best, covered.detach())
        ]
        now = torch.cat((torch.stack((base, chosen)).detach(), *per_slot))
        running = now if running is None else 0.98 * running + 0.02 * now
        seconds, step = time.time() - began, step + 1
        done = max(step / args.steps, seconds / (60 * args.minutes))
        if step % 50 == 1 or done >= 1:
            numbers = [round(number, 3) for number in running.tolist()]
            log.append(
                {
                    "step": step,
                    "base_loss": numbers[0],
                    "selector_loss": numbers[1],
                    "slot_accuracy": numbers[2:9],
                    "slot_coverage": numbers[9:],
                    "seconds": round(seconds),
                }
            )
            print(json.dumps(log[-1]), flush=True)
        if step % 100 == 0 or done >= 1:
            write_checkpoint(args.output_dir, config, draft.state_dict())
    (args.work_dir / "train_dflash2.json").write_text(
        json.dumps(
            {"steps": step, "rows": len(pools["short"]["tokens"]), "continued": bool(args.init), "log": log},
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
