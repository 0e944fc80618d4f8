"""Train the DFlash draft on stored rollouts of the target.

Each row has many random anchors. Each anchor starts a block of one token and seven masks, and all blocks are
denoised in one pass. The loss is cross entropy towards the target's argmax, which decides greedy acceptance.
Early slots weigh more, because a later slot counts only after all before it were right.

    python train_draft.py WORK_DIR TARGET_DIR OUTPUT_DIR --steps 2000
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_model import BLOCK_SIZE, DFlashDraft, block_token_ids, draft_config, initialize
from kinds import kind_of
from safetensors.torch import load_file
from train_target import MasterWeights, join_processes, learning_rate_scale, seconds_since, write_checkpoint

ROWS_PER_STEP, ANCHORS_PER_ROW = 8, 32
LONG_EVERY = 16  # every sixteenth step is one row of 1024 tokens
DECAY = 4.0  # slot k weighs exp(-(k - 1) / DECAY), the paper's choice for short blocks


class AnchorSampler:
    """Rows without replacement per epoch, and random anchors inside each row."""

    def __init__(self, pool: dict, rows: int, seed: int):
        self.pool, self.rows = pool, rows
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.int64)
        # A row that stopped at once has no block worth training.
        self.usable = ((pool["end"] - pool["first"]) >= 4).nonzero().flatten()

    def draw(self):
        """Return tokens, argmax [R, S]; aux [R, S, A * H]; anchors [R, N]; valid [R, N, B - 1]."""
        if len(self.order) < self.rows:
            self.order = self.usable[torch.randperm(len(self.usable), generator=self.generator)]
        picked, self.order = self.order[: self.rows], self.order[self.rows :]
        first, end = self.pool["first"][picked, None], self.pool["end"][picked, None]
        # Up to end - 2, so that every block has at least one slot with a label.
        fraction = torch.rand(self.rows, ANCHORS_PER_ROW, generator=self.generator)
        anchors = first + (fraction * (end - 1 - first)).long()
        valid = anchors[..., None] + torch.arange(1, BLOCK_SIZE) < end[..., None]
        return (
            self.pool["tokens"][picked].long(),
            self.pool["argmax"][picked].long(),
            self.pool["aux"][picked],
            anchors,
            valid,
        )


def block_labels(argmax: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return labels [R, N, B - 1] of argmax [R, S] for anchors [R, N].

    The token AT anchor + k is the argmax at anchor + k - 1.
    """
    positions = anchors[..., None] + torch.arange(BLOCK_SIZE - 1)
    flat = positions.clamp(max=argmax.shape[1] - 1).flatten(1)
    return argmax.gather(1, flat).view_as(positions)


def slot_logits(
    draft, embedding: torch.Tensor, tokens, aux, anchors, block_size: int = BLOCK_SIZE
) -> torch.Tensor:
    """Return logits [R, N, B - 1, vocab] of slots 1..B-1.

    embedding: [vocab, H], the target's, tied.
    """
    block_embeds = F.embedding(block_token_ids(tokens.gather(1, anchors), block_size), embedding)
    hidden = draft(block_embeds, aux, anchors)[:, :, 1:]
    # Flat rows: of a slice, PyTorch makes a batched product with a copy of the embedding per batch.
    return F.linear(hidden.flatten(0, 2), embedding).unflatten(0, hidden.shape[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end earlier, by this clock")
    parser.add_argument("--rows", type=int, default=ROWS_PER_STEP, help="per step, over all processes")
    parser.add_argument("--layers", type=int, help="default: as the target's kind says")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--init", type=Path, help="start from this draft's weights")
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    args = parser.parse_args()

    torch.manual_seed(0)
    pools = torch.load(args.work_dir / "rollouts.pt", mmap=True)
    rank, processes = join_processes()
    short = AnchorSampler(pools["short"], args.rows // processes, seed=2 + 10 * rank)
    long = AnchorSampler(pools["long"], 1, seed=3 + 10 * rank)
    target_config = json.loads((args.target_dir / "config.json").read_text())
    target = load_file(str(args.target_dir / "model.safetensors"))
    embedding = target["model.embed_tokens.weight"]
    kind = kind_of(target_config)
    config = draft_config(target_config, args.layers or kind.draft_layers)
    draft = DFlashDraft(config)
    initialize(draft)
    # The borrowed head expects the scale of the target's final norm.
    draft.norm.weight.data.copy_(target["model.norm.weight"] + kind.zero_centered_norm)
    if args.init:
        draft.load_state_dict(load_file(str(args.init / "model.safetensors")))
    weights = MasterWeights(draft, args.muon_lr, args.adam_lr)
    if args.compile:  # layer by layer: they share their code
        for layer in draft.layers:
            layer.compile(dynamic=False)
    slot_weights = torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)

    began, log, running, step, done = time.time(), [], None, 0, 0.0
    while done < 1:
        is_long = step % LONG_EVERY == LONG_EVERY - 1
        tokens, argmax, aux, anchors, valid = (long if is_long else short).draw()
        with torch.compiler.set_stance("force_eager" if is_long else "default"):
            logits = slot_logits(draft, embedding, tokens, aux, anchors)
        labels = block_labels(argmax, anchors)
        losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
        slot_weight = slot_weights * valid
        loss = (losses.view_as(labels) * slot_weight).sum() / slot_weight.sum()
        loss.backward()
        weights.step(learning_rate_scale(step, done, warmup=30))

        hits = ((logits.argmax(-1) == labels) & valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
        now = torch.cat((loss.detach()[None], hits))
        running = now if running is None else 0.98 * running + 0.02 * now
        seconds, step = seconds_since(began), step + 1
        done = max(step / args.steps, seconds / (60 * args.minutes))
        if rank > 0:
            continue
        if step % 50 == 1 or done >= 1:
            log.append(
                {
                    "step": step,
                    "loss": round(running[0].item(), 3),
                    "slot_accuracy": [round(h, 3) for h in running[1:].tolist()],
                    "seconds": round(seconds),
                }
            )
            print(json.dumps(log[-1]), flush=True)
        if step % 500 == 0 or done >= 1:
            write_checkpoint(args.output_dir, config, draft.state_dict())
    if rank == 0:
        (args.work_dir / "train_draft.json").write_text(
            json.dumps(
                {
                    "steps": step,
                    "layers": config["num_hidden_layers"],
                    "rows": len(pools["short"]["tokens"]),
                    "warm_start": bool(args.init),
                    "log": log,
                },
                indent=2,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
