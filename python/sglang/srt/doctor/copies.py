"""`doctor --copy-ahead`: the blocks that `--speculative-copy-ahead` would have proposed for the same
texts."""

import torch

from sglang_dflash.kernels.ops.speculative.copy_ahead import (
    RULE,
    CopyRule,
    append_tokens,
    choose_copies,
    find_match,
)
from sglang_dflash.srt.doctor.readings import Drafts, Text, kept_of

# (anchor, proposed tokens, how many of them were kept, whether they were copied)
Cycle = tuple[int, list[int], int, bool]


def cycles(text: Text, drafts: Drafts, rule: CopyRule = RULE) -> list[Cycle]:
    """`readings.blocks` of a request that also copies from its own text."""
    tokens, drafted = text.tokens.tolist(), drafts.tokens.tolist()
    width = drafts.tokens.shape[1] + 1
    history = torch.nn.functional.pad(text.tokens.cpu().int(), (0, width))[None]
    records, row = torch.tensor([[rule.copies_start, rule.drafts_start]]), torch.tensor([0])
    found, anchor = [], drafts.first
    while anchor < len(tokens) - 1:
        at = torch.tensor([anchor])
        keys = find_match(history, row, at, anchor + 1, rule)
        copied, lengths = choose_copies(history, records, row, at, keys, width, rule)
        is_copied = int(lengths) > 0
        block = copied[0, 1:].tolist() if is_copied else drafted[anchor - drafts.first]
        kept = kept_of(tokens, anchor, block)
        found.append((anchor, block, kept, is_copied))
        said = history[:, anchor + 1 : anchor + 1 + width].long()  # the text is what it was
        append_tokens(
            history, records, row, at, said, torch.tensor([kept], dtype=torch.int32), lengths, True, rule
        )
        anchor += kept + 1
    return found


def accept_length(of_texts: list[list[Cycle]], texts: list[Text]) -> tuple[float, float]:
    """Tokens a block, bonus included, and the share of blocks that were copied. A block that reaches beyond
    its text does not count."""
    whole = [
        cycle
        for found, text in zip(of_texts, texts, strict=True)
        for cycle in found
        if cycle[0] + len(cycle[1]) < len(text.tokens)
    ]
    if not whole:
        return 1.0, 0.0
    return 1 + sum(kept for _, _, kept, _ in whole) / len(whole), sum(
        is_copied for *_, is_copied in whole
    ) / len(whole)
