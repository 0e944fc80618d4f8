"""Accept lengths of drafts on greedy rows of `chat_rollouts.py`.

The target does not run: the text is its own, so a walk over the blocks of all its positions counts the steps
of greedy speculative decoding. Accept lengths include the bonus token.

    python evaluate_shards.py SHARD_DIR TARGET_DIR DRAFT_DIR [DRAFT_DIR ...]
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from dflash2_model import DFlash2Draft
from draft_model import DFlashDraft
from evaluate import summarise, walk
from safetensors.torch import load_file
from train_chat_draft import block_embeddings

GROUPS = {
    "complete": "code",
    "task": "code",
    "write": "code",
    "topic": "chat",
    "turns": "chat",
    "edit": "edit",
    "chat": "requests",  # of prompts/chats.toml
    "asked": "asked",  # by the target, of ask_prompts.py
}


def load(directory: Path):
    """Return the draft in a folder, of either format, in bfloat16."""
    config = json.loads((directory / "config.json").read_text())
    draft = (DFlash2Draft if "DFlash2DraftModel" in config["architectures"] else DFlashDraft)(config)
    draft.load_state_dict(load_file(str(directory / "model.safetensors")))
    return draft.to(torch.bfloat16).eval()


def drafted_blocks(draft, embedding, tokens, aux, anchors) -> torch.Tensor:
    """Return drafted tokens [N, B - 1] for anchors [N] of one row: tokens [S], aux [S, A * H]."""
    embeds = block_embeddings(tokens[anchors][None], embedding, draft.config)
    hidden = draft(embeds, aux[None], anchors[None])[0, :, 1:]
    logits = F.linear(hidden.flatten(0, 1), embedding).unflatten(0, hidden.shape[:2]).float()
    if not isinstance(draft, DFlash2Draft):
        return logits.argmax(-1)
    options = draft.config["dflash_config"]
    unary, ids = logits[..., : options.get("selector_vocab_size")].topk(options["selector_top_k"], dim=-1)
    drafted, previous = [], tokens[anchors]
    for slot in range(ids.shape[1]):
        scores = draft.candidate_selector(hidden[:, slot], previous, ids[:, slot], unary[:, slot])
        previous = ids[:, slot].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        drafted.append(previous)
    return torch.stack(drafted, dim=1)


def spans(written: list[bool]) -> list[tuple[int, int]]:
    """Return [begin, end) of each answer."""
    edges = [i for i in range(1, len(written)) if written[i] != written[i - 1]] + [len(written)]
    return [(a, b) for a, b in zip(edges, edges[1:]) if written[a]]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shard_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("draft_dirs", type=Path, nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    embedding = load_file(str(args.target_dir / "model.safetensors"))["model.embed_tokens.weight"]
    for directory in args.draft_dirs:
        draft, steps = load(directory), defaultdict(list)
        for path in sorted(args.shard_dir.glob("*.json")):
            shard, names = (
                torch.load(path.with_suffix(".pt"), mmap=True),
                json.loads(path.read_text())["names"],
            )
            ends = shard["lengths"].cumsum(0).tolist()
            for name, begin, end in zip(names, [0, *ends], ends):
                tokens, aux = (
                    shard["tokens"][begin:end].long(),
                    shard["states"][begin:end, : draft.fc.in_features],
                )
                for first, last in spans(shard["written"][begin:end].tolist()):
                    anchors = torch.arange(first, last).split(48)
                    blocks = torch.cat(
                        [drafted_blocks(draft, embedding, tokens, aux, part) for part in anchors]
                    )
                    found = walk(tokens.tolist(), blocks.tolist(), first, last)
                    steps[GROUPS.get(re.split("[-_]", name)[0], "other")] += found
        report = {kind: summarise(found, draft.config["block_size"]) for kind, found in sorted(steps.items())}
        print(directory.name, json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
