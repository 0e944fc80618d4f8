"""Which copies to prefer to the draft: accept lengths of rules for `--speculative-copy-ahead` over the same texts, without a server.

    python benchmark/copy_rules.py        # some 4 minutes on a core

The bundled target answers in plain PyTorch, the bundled draft drafts at every position of the answers, and each rule walks over both
as a greedy or sampled request would (doctor/copies.py). Sets are those of copy_ahead.py. Writes benchmark/results/copy-rules.md.
"""

import platform
from dataclasses import replace
from datetime import date

import torch
from copy_ahead import LOOPS, loop_share, requests_of
from serving import DRAFT, ROOT, TARGET
from tokenizers import Tokenizer

from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE
from sglang_dflash.srt.doctor.checkpoint import Checkpoint
from sglang_dflash.srt.doctor.copies import accept_length, cycles
from sglang_dflash.srt.doctor.measure import _continue, _load_target, capture, load_draft
from sglang_dflash.srt.doctor.readings import AS_CONFIGURED, draft_everywhere
from sglang_dflash.srt.doctor.static_checks import Pair

PROMPTS, NEW_TOKENS = 24, 96
_ALWAYS = replace(RULE, copies_follow=0.0, drafts_follow=0.0, drafts_start=0.0)
RULES = {
    "the draft alone": replace(RULE, shortest=10**6),
    **{f"every match of {m} tokens or more": replace(_ALWAYS, shortest=m) for m in (2, 3, 4, 5, 8, 12)},
    "the request's record, copies followed at 1/4": replace(RULE, copies_follow=0.25),
    "the request's record, from 2 tokens on": replace(RULE, shortest=2),
    "the request's record (as shipped)": RULE,
}


def texts() -> dict[str, list[tuple[list[int], int]]]:
    """Of each set: (token ids, prompt's length)."""
    torch.manual_seed(0)
    found = {}
    edits = [(encode(r.text), list(r.says[:NEW_TOKENS])) for r in requests_of("edit", PROMPTS, words)]
    found["edit"] = [(prompt + answer, len(prompt)) for prompt, answer in edits]
    prompts = [encode(request.text) for request in requests_of("plain", PROMPTS, words)]
    for temperature in (0.0, 0.8):
        ids = list(_continue(target, prompts, NEW_TOKENS, temperature))
        made = [(text, len(prompt)) for text, prompt in zip(ids, prompts, strict=True) if len(text) - len(prompt) > 16]
        found[f"plain, T = {temperature:g}"] = made
        if not temperature:
            found["plain, greedy, does not loop"] = [(t, n) for t, n in made if loop_share(t[n:]) <= LOOPS]
    return found


def encode(text: str) -> list[int]:
    return tokenizer(text).input_ids


def table(sets: dict[str, list[tuple[list[int], int]]]) -> str:
    walked = {}
    for name, of_set in sets.items():
        captured = [capture(target, ids, length) for ids, length in of_set]
        walked[name] = captured, [draft_everywhere(draft, text, AS_CONFIGURED) for text in captured]
        print(f"{name}: {len(captured)} texts", flush=True)
    rows = ["| rule | " + " | ".join(f"{name} ({len(of_set)})" for name, of_set in sets.items()) + " |"]
    rows.append("|---|" + "---:|" * len(sets))
    for rule_name, rule in RULES.items():
        cells = []
        for captured, drafts in walked.values():
            length, share = accept_length([cycles(t, d, rule) for t, d in zip(captured, drafts, strict=True)], captured)
            cells.append(f"{length:.2f}, {share:.0%}")
        rows.append(f"| {rule_name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    pair = Pair(Checkpoint.open(str(TARGET), with_tensors=False), Checkpoint.open(str(DRAFT), with_tensors=True))
    target, tokenizer = _load_target(pair.target, "cpu", torch.float32)
    draft, words = load_draft(pair, target), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    page = f"""# Rules for copies

{date.today()}, {platform.machine()}, float32. `python benchmark/copy_rules.py`. Tokens a block, bonus token included, and the share of
blocks that are copied, on the bundled pair; in brackets the number of texts. A copy goes on in itself where it reaches the text's end, so it
always fills its block.

{table(texts())}
"""
    (ROOT / "benchmark" / "results" / "copy-rules.md").write_text(page)
    print(page)
