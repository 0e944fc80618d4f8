"""Accept lengths of drafts with and without selector, without a server.

At temperature 0 the text is greedy, and a walk over its blocks counts steps, as `evaluate.py` does. Above,
the text x is drawn from the target's distribution p, and every position is an anchor. Rejection keeps the
first k tokens of x with probability prod min(1, q(x_i) / p(x_i)). The mean over x of 1 + the sum over k of
that product is the expected accept length, with less noise than drafting would have.

    python dflash2_gain.py TARGET_DIR PLAIN_DRAFT_DIR DFLASH2_DRAFT_DIR ../../benchmark/prompts/heldout.jsonl
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from dflash2_model import load_dflash2
from draft_model import block_token_ids, load_draft
from evaluate import walk
from rollouts import ends_after_stop, rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

PLAIN_CANDIDATES = 128  # what the server considers of a plain draft's distribution


@torch.no_grad()
def block_scores(draft, embedding, tokens, aux, anchors, use_selector: bool, top_k: int | None):
    """Return candidate ids and scores, each [R, N, B - 1, K].

    A selector sees the text's own tokens before each slot.
    """
    block_size = draft.config["block_size"]
    embeds = F.embedding(block_token_ids(tokens.gather(1, anchors), block_size), embedding)
    hidden = draft(embeds, aux, anchors)[:, :, 1:]
    logits = F.linear(hidden, embedding).float()
    if not use_selector:
        scores, ids = logits.topk(PLAIN_CANDIDATES, dim=-1)
        return ids, scores
    unary, ids = logits.topk(top_k or draft.config["dflash_config"]["selector_top_k"], dim=-1)
    before = (anchors[..., None] + torch.arange(block_size - 1)).clamp(max=tokens.shape[1] - 1)
    previous = tokens[torch.arange(len(tokens))[:, None, None], before]
    return ids, draft.candidate_selector(hidden, previous, ids, unary)


@torch.no_grad()
def accept_length(
    draft, embedding, texts, temperature: float, use_selector: bool, top_k: int | None = None
) -> float:
    """Return the mean tokens per step over texts.

    Each text is (tokens [R, S], aux, last hidden states, first position, ends).
    """
    block_size = draft.config["block_size"]
    total, count = 0.0, 0
    for tokens, aux, last, first, ends in texts:
        found = [
            block_scores(draft, embedding, tokens, aux, anchors.expand(len(tokens), -1), use_selector, top_k)
            for anchors in torch.arange(first, tokens.shape[1] - block_size + 1).split(32)
        ]
        ids, scores = (torch.cat(part, dim=1) for part in zip(*found))
        positions = (
            first + torch.arange(ids.shape[1])[:, None] + torch.arange(1, block_size)
        )  # of the drafted tokens
        truth = tokens[:, positions]
        if temperature == 0:
            # A slot's best given the true prefix is the walk's, as far as the walk is right.
            best = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1).tolist()
            for text, blocks, end in zip(tokens.tolist(), best, ends):
                steps = walk(text, blocks, first, min(end, first + len(blocks) + block_size - 1))
                total, count = total + sum(steps), count + len(steps)
            continue
        said = ((scores / temperature).softmax(-1) * (ids == truth[..., None])).sum(-1)
        wanted = torch.stack(
            [
                (F.linear(last[:, column - 1], embedding).float() / temperature)
                .softmax(-1)
                .gather(-1, tokens[:, column, None])
                .squeeze(-1)
                for column in positions.T
            ],
            dim=-1,
        )
        expected = 1 + (said / wanted).clamp(max=1).cumprod(-1).sum(-1)
        inside = (first + torch.arange(ids.shape[1])) + block_size <= torch.tensor(ends)[:, None]
        total, count = total + float(expected[inside].sum()), count + int(inside.sum())
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("plain_dir", type=Path)
    parser.add_argument("dflash2_dir", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--stride", type=int, default=6, help="use every n-th prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument(
        "--top-k", type=int, nargs="*", default=[], help="other numbers of candidates, for information"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target_dir)
    groups = defaultdict(list)
    for line in args.prompts.read_text().splitlines()[:: args.stride]:
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
        groups[len(ids)].append(ids)
    model = AutoModelForCausalLM.from_pretrained(args.target_dir, dtype=torch.bfloat16).eval()
    embedding = model.get_input_embeddings().weight
    plain, dflash2 = (
        load_draft(args.plain_dir, torch.bfloat16),
        load_dflash2(args.dflash2_dir, torch.bfloat16),
    )
    cases = {
        "plain draft": (plain, False, None),
        "DFlash2 without its selector": (dflash2, False, None),
        "DFlash2": (dflash2, True, None),
    }
    cases |= {f"DFlash2, {k} candidates": (dflash2, True, k) for k in args.top_k}
    report = defaultdict(dict)
    for temperature in args.temperatures:
        generator, texts = torch.Generator().manual_seed(0), []
        for length, members in sorted(groups.items()):
            made = rollout(
                model, torch.tensor(members), length + args.max_new, temperature, generator, keep_last=True
            )
            tokens, states, _ = made
            aux, last = states[..., : -embedding.shape[1]], states[..., -embedding.shape[1] :]
            texts.append((tokens, aux, last, length, ends_after_stop(tokens, length).tolist()))
        for name, (draft, *options) in cases.items():
            found = accept_length(draft, embedding, texts, temperature, *options)
            base = report["plain draft"].get(str(temperature), found)
            report[name][str(temperature)] = round(found, 3)
            print(f"T = {temperature}: {name} {found:.3f} ({100 * (found / base - 1):+.1f} %)", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
