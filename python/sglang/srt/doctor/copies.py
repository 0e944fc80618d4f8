"""Blocks that `--speculative-copy-ahead` would have proposed for the same texts."""

import torch

from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE, append_tokens, choose_copies, find_match
from sglang_dflash.srt.doctor.readings import Block, Drafts, Text, count_accepted


def blocks_with_copies(text: Text, drafts: Drafts) -> list[Block]:
    """Return `readings.blocks` of a request that also copies from its own text."""
    tokens, drafted = text.tokens.tolist(), drafts.tokens.tolist()
    width = drafts.tokens.shape[1] + 1
    history = torch.nn.functional.pad(text.tokens.cpu().int(), (0, width))[None]
    records, row = torch.tensor([[RULE.copies_start, RULE.drafts_start]]), torch.tensor([0])
    found, anchor = [], drafts.first
    while anchor < len(tokens) - 1:
        anchors = torch.tensor([anchor])
        keys = find_match(history, row, anchors, anchor + 1, RULE)
        copied, lengths = choose_copies(history, records, row, anchors, keys, width, RULE)
        is_copied = int(lengths) > 0
        block = copied[0, 1:].tolist() if is_copied else drafted[anchor - drafts.first]
        accepted = count_accepted(tokens, anchor, block)
        found.append(Block(anchor, block, accepted, is_copied))
        # The history already holds the whole text, so the same tokens are written again.
        emitted = history[:, anchor + 1 : anchor + 1 + width].long()
        accept_lens = torch.tensor([accepted], dtype=torch.int32)
        append_tokens(history, records, row, anchors, emitted, accept_lens, lengths, True, RULE)
        anchor += accepted + 1
    return found
