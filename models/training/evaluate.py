"""Greedy acceptance of a draft on held-out prompts, and how repetitive the text is.

Greedy speculative decoding emits the target's greedy text, whatever the draft proposes. So the target writes
each continuation once, and the draft fills a block at every position of it in one pass. The speculative loop
is a walk over these blocks: from anchor a, accept drafts while they equal the text, then go to a + accepted +
1. `--check N` runs the real loop on N prompts, in float32 without a cache, and compares the steps.

Accept lengths include the bonus token: tokens per target step, at most B.

    python evaluate.py TARGET_DIR DRAFT_DIR PROMPTS.jsonl [--json OUT] [--check 4]
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_model import aux_from_hidden_states, block_token_ids, load_draft
from rollouts import ends_after_stop, rollout
from train_draft import slot_logits
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def draft_everywhere(draft, embedding, tokens, aux, first: int, block_size: int) -> torch.Tensor:
    """Return drafts [R, N, B - 1] for all anchors first .. S - 1 of tokens [R, S]."""
    pieces = []
    for anchors in torch.arange(first, tokens.shape[1]).split(64):
        anchors = anchors.expand(len(tokens), -1)
        pieces.append(slot_logits(draft, embedding, tokens, aux, anchors, block_size).argmax(-1))
    return torch.cat(pieces, dim=1)


def walk(text: list[int], drafts: list[list[int]], first: int, end: int) -> list[int]:
    """Return accept lengths (bonus included) of every full step over text[first:end].

    drafts[i] belongs to anchor first + i. A block that reaches beyond `end` is not counted, because its
    fate was not observed.
    """
    steps, anchor = [], first
    while anchor + len(drafts[0]) < end:
        accepted = 0
        for draft in drafts[anchor - first]:
            if draft != text[anchor + 1 + accepted]:
                break
            accepted += 1
        steps.append(accepted + 1)
        anchor += accepted + 1
    return steps


def summarise(steps: list[int], block_size: int) -> dict:
    """Return the mean accept length, and per slot the share of steps that accepted it."""
    reached = [sum(s > k for s in steps) / len(steps) for k in range(1, block_size)]
    return {
        "accept_length": round(sum(steps) / len(steps), 3),
        "steps": len(steps),
        "accepted_per_position": [round(r, 3) for r in reached],
    }


def distinct_ngrams(texts: list[list[int]]) -> list[float]:
    """Return the mean share of distinct n-grams inside one text, n = 1..4."""
    ratios = []
    for n in range(1, 5):
        grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in texts if len(t) >= 32]
        ratios.append(round(sum(len(set(g)) / len(g) for g in grams) / max(1, len(grams)), 3))
    return ratios


def repeated_ngrams(texts: list[list[int]], n: int = 5) -> float:
    """Return the share of tokens that complete an n-gram of the same text again."""
    repeated = total = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return round(repeated / max(1, total), 3)


@torch.no_grad()
def cache_free_steps(model, draft, prompt: list[int], max_new: int) -> tuple[list[int], list[int]]:
    """Run the paper's loop without a cache; return the text and its accept lengths."""
    config = draft.config["dflash_config"]
    embedding, block_size = model.get_input_embeddings().weight, draft.config["block_size"]

    def greedy(ids: list[int]):
        return model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)

    ids, steps, len_block = list(prompt), [], block_size - 1
    ids.append(int(greedy(ids).logits[0, -1].argmax()))
    while len(ids) - 1 + len_block < len(prompt) + max_new:
        aux = aux_from_hidden_states(greedy(ids).hidden_states, config["target_layer_ids"])
        anchor = torch.tensor([[len(ids) - 1]])
        embeds = F.embedding(block_token_ids(torch.tensor([[ids[-1]]]), block_size), embedding)
        block = F.linear(draft(embeds, aux, anchor)[0, 0, 1:], embedding).argmax(-1).tolist()
        verdict = greedy(ids + block).logits[0, len(ids) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(block) and block[accepted] == verdict[accepted]:
            accepted += 1
        ids += block[:accepted] + [verdict[accepted]]
        steps.append(accepted + 1)
    return ids, steps


def check(target_dir: Path, draft_dir: Path, rows: list[list[int]], max_new: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    draft = load_draft(draft_dir, torch.float32)
    for prompt in rows:
        real_ids, real_steps = cache_free_steps(model, draft, prompt, max_new)
        tokens, aux, _ = rollout(model, torch.tensor([prompt]), len(prompt) + max_new)
        first = len(prompt)
        drafts = draft_everywhere(
            draft, model.get_input_embeddings().weight, tokens, aux, first, draft.config["block_size"]
        )[0].tolist()
        text = tokens[0].tolist()
        steps = walk(text, drafts, first, len(text))
        assert real_ids[: len(text)] == text[: len(real_ids)], "speculative text differs from greedy text"
        assert real_steps == steps, f"steps differ: {real_steps} and {steps}"
    print(f"check: {len(rows)} prompts, text and every accept length equal (float32, no cache)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("draft_dir", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--stride", type=int, default=1, help="use every n-th prompt")
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[], help="others, for information")
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print this many continuations")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target_dir)
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()][:: args.stride]
    groups = defaultdict(list)
    for line in lines:
        ids = tokenizer(line["text"], add_special_tokens=False).input_ids
        if line.get("chat"):
            rendered = tokenizer.apply_chat_template(
                line["messages"], tokenize=False, add_generation_prompt=True
            )
            assert rendered == line["text"], "chat template and training text differ"
        groups[len(ids)].append((line, ids))

    model = AutoModelForCausalLM.from_pretrained(args.target_dir, dtype=torch.bfloat16).eval()
    draft = load_draft(args.draft_dir, torch.bfloat16)
    trained_size = draft.config["block_size"]
    embedding = model.get_input_embeddings().weight
    steps = {size: defaultdict(list) for size in [trained_size, *args.block_sizes]}
    texts, stopped, shown = [], 0, 0
    for length, members in sorted(groups.items()):
        prompts = torch.tensor([ids for _, ids in members])
        tokens, aux, _ = rollout(model, prompts, length + args.max_new)
        ends = ends_after_stop(tokens, length).tolist()
        for size in steps:
            drafts = draft_everywhere(draft, embedding, tokens, aux, length, size).tolist()
            for (line, _), text, block, end in zip(members, tokens.tolist(), drafts, ends):
                kind = "chat" if line.get("chat") else "code"
                steps[size][kind] += walk(text, block, length, end)
        for (line, _), text, end in zip(members, tokens.tolist(), ends):
            texts.append(text[length:end])
            stopped += end < len(text)
            if shown < args.show and length > 30:
                shown += 1
                print(f"=== {line['id']}\n{line['text'][-200:]}<<<{tokenizer.decode(text[length:end])}>>>")

    report = {
        "prompts": len(lines),
        "max_new_tokens": args.max_new,
        "dtype": "bfloat16",
        "stopped_by_themselves": stopped,
        "distinct_1_to_4_grams": distinct_ngrams(texts),
        "repeated_5_grams": repeated_ngrams(texts),
        # The same measure on held-out code: pieces of long prompts, as many tokens each.
        "repeated_5_grams_heldout": repeated_ngrams(
            [
                ids[i : i + args.max_new]
                for members in groups.values()
                for _, ids in members
                for i in range(0, len(ids) - args.max_new + 1, args.max_new)
            ]
        ),
    }
    for size, kinds in steps.items():
        name = f"block_{size}" if size == trained_size else f"block_{size}_untrained"
        report[name] = {kind: summarise(found, size) for kind, found in kinds.items()}
        report[name]["all"] = summarise(sum(kinds.values(), []), size)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.check:
        rows = [ids for members in groups.values() for _, ids in members if 20 <= len(ids) <= 130]
        check(args.target_dir, args.draft_dir, rows[:: max(1, len(rows) // args.check)][: args.check], 64)


if __name__ == "__main__":
    main()
