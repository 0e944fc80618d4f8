"""Deliberate faults, each of which a rehearsal has to notice: tests of the tests.

A captured graph keeps what it was captured with, so a fault in it is there from the start (`AT_START`). The
others come and go while the server runs, as the file named by REHEARSAL_FAULT says (`PLANTED`).
"""

import dataclasses
import os
from pathlib import Path

import torch

VARIABLE = "REHEARSAL_FAULT"


def _is_planted(name: str) -> bool:
    return Path(os.environ[VARIABLE]).read_text() == name


def _wrong_host_length() -> None:
    """Make the host believe that every request is one token shorter."""
    from sglang_dflash.srt.speculative.cycle.block import Cycle

    begin = Cycle.begin.__func__

    def shorter(cls, *args):
        cycle = begin(cls, *args)
        if _is_planted("wrong host length"):
            return dataclasses.replace(cycle, committed_host=cycle.committed_host - 1)
        return cycle

    Cycle.begin = classmethod(shorter)


def _stale_states() -> None:
    """Build the draft's context from the aux hidden states of an earlier step."""
    from sglang_dflash.srt.speculative.drafters.base import VerifyTail

    to_commit, first = VerifyTail.states_to_commit, {}

    def stale(self, target_out):
        states = target_out.logits_output.hidden_states
        if _is_planted("stale states"):
            return first.setdefault(states.shape, states.clone())  # over what the graph has written
        return to_commit(self, target_out)

    VerifyTail.states_to_commit = stale


def _plain_upper_bounds() -> None:
    """Plan with the longest lengths alone, as if a plan for more keys held for fewer."""
    from sglang_dflash.srt.layers.attention import flashinfer_plans as plans
    from sglang_dflash.srt.layers.attention.kv_chunks import ChunkChoice, searched_chunk

    choose, holds = plans.choose_chunk, plans.holds

    def longest(least, most, tiles, capacity):
        if not _is_planted("plain upper bounds"):
            return choose(least, most, tiles, capacity)
        return ChunkChoice(most, None, searched_chunk(most, tiles, capacity))

    plans.choose_chunk = longest
    plans.holds = lambda *args: _is_planted("plain upper bounds") or holds(*args)


def _one_staging_buffer() -> None:
    """Write every plan of a backend to the same pinned buffer."""
    from sglang_dflash.srt.layers.attention.flashinfer_plans import Staging

    take, first = Staging.next, {}

    def same(self):
        buffer = take(self)
        return first.setdefault(id(self), buffer) if _is_planted("one staging buffer") else buffer

    Staging.next = same


def _host_read() -> None:
    """Let a decode step wait for the device."""
    from sglang_dflash.srt.speculative.acceptance.acceptor import Acceptor

    accept = Acceptor.accept

    def reading(self, batch, cycle, *args, **kwargs):
        if _is_planted("host read"):
            cycle.committed.tolist()
        return accept(self, batch, cycle, *args, **kwargs)

    Acceptor.accept = reading


def _late_read() -> None:
    """Let a decode step read the request table behind the verify forward."""
    from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter

    commit = DFlashDrafter.commit

    def reading(self, *args):
        if _is_planted("late read"):
            self._runner.req_to_token_pool.req_to_token[0].clone()
        return commit(self, *args)

    DFlashDrafter.commit = reading


def _new_kernel() -> None:
    """Launch a kernel in a decode step that start-up has not launched."""
    from sglang_dflash.kernels.ops.speculative.block import pack_blocks_triton
    from sglang_dflash.srt.speculative.cycle.block import Cycle

    begin = Cycle.begin.__func__

    def launching(cls, batch, *args):
        if _is_planted("new kernel"):
            lengths, offsets = batch.seq_lens, torch.empty(batch.seq_lens.numel() + 1, dtype=torch.int32)
            pack_blocks_triton(lengths, 8, lengths.clone(), offsets, offsets.clone(), lengths.int())
        return begin(cls, batch, *args)

    Cycle.begin = classmethod(launching)


def _causal_draft() -> None:
    """Let a block's rows see only earlier rows: output is right, drafts are a little worse."""
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_dflash.srt.models import dflash

    def causal(*args, **kwargs):
        return attention(*args, **kwargs | {"attn_type": AttentionType.DECODER})

    attention, dflash.RadixAttention = dflash.RadixAttention, causal


def _forgotten_buffer() -> None:
    """Let the draft's graph read a tensor that every step makes anew."""
    from sglang_dflash.srt.models.dflash import DFlashDraftModel
    from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter

    propose, embed = DFlashDrafter.propose, DFlashDraftModel.embed
    DFlashDraftModel.of_this_step = torch.ones(1)

    def propose_anew(self, *args, **kwargs):
        DFlashDraftModel.of_this_step = torch.ones(1)
        return propose(self, *args, **kwargs)

    DFlashDrafter.propose = propose_anew
    DFlashDraftModel.embed = lambda self, input_ids: embed(self, input_ids) * self.of_this_step


PLANTED = {
    "wrong host length": _wrong_host_length,
    "plain upper bounds": _plain_upper_bounds,
    "one staging buffer": _one_staging_buffer,
    "stale states": _stale_states,
    "host read": _host_read,
    "late read": _late_read,
    "new kernel": _new_kernel,
}
AT_START = {"causal draft": _causal_draft, "forgotten buffer": _forgotten_buffer}
