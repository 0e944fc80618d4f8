"""Deliberate faults, each of which a rehearsal has to notice: tests of the tests.

A captured graph keeps what it was captured with, so a fault in it is there from the start (`AT_START`). The
others come and go while the server runs, as the file named by REHEARSAL_FAULT says (`PLANTED`).
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.srt.patching import resolve

VARIABLE = "REHEARSAL_FAULT"
_SPECULATIVE = "sglang_dflash.srt.speculative"
_first: dict[Any, torch.Tensor] = {}  # what faults keep of the step that they were planted in


def _wrong_host_length(wait, self):
    """Make the host believe that every request is one token shorter."""
    return wait(self) - 1


def _wrong_relayed_length(resolve, self, batch, *args, **kwargs):
    """Make the host believe the same, where SGLang's relay waits before the draft."""
    resolve(self, batch, *args, **kwargs)
    if batch.forward_mode.is_decode():
        batch.seq_lens_cpu = batch.seq_lens_cpu - 1


def _no_wait(wait, self):
    """Plan with what is on the host. A CPU's copies are over at once, and a GPU's may not be."""
    return self._on_host


def _second_wait(begin, batch, *args):
    """Wait for the lengths before the draft, too."""
    if batch.spec_info.arriving_lens is not None:
        batch.spec_info.arriving_lens.wait()
    return begin(batch, *args)


def _stale_states(to_commit, self, target_out):
    """Build the draft's context from the aux hidden states of an earlier step."""
    states = target_out.logits_output.hidden_states
    return _first.setdefault(states.shape, states.clone())  # over what the graph has written


def _uncopied_candidates(complete, self, cycle, output, *args):
    """Verify a drawn block with candidates that lie in the draft graph's memory."""
    block = complete(self, cycle, output, *args)
    if block.probs is None:
        return block
    probs = dataclasses.replace(block.probs, ids=output.candidate_ids[: cycle.bs])
    return dataclasses.replace(block, probs=probs)


def _host_read(accept, self, batch, cycle, *args, **kwargs):
    """Let a decode step wait for the device."""
    cycle.committed.tolist()
    return accept(self, batch, cycle, *args, **kwargs)


def _late_read(accept, self, batch, *args, **kwargs):
    """Let a decode step read the request table behind the verify forward."""
    batch.req_to_token_pool.req_to_token[0].clone()
    return accept(self, batch, *args, **kwargs)


def _new_kernel(run, self, batch, *args, **kwargs):
    """Launch a kernel in a decode step that start-up has not launched."""
    from sglang_dflash.kernels.ops.speculative.block import block_offsets

    block_offsets(batch.seq_lens, 8, counts=batch.seq_lens.int())
    return run(self, batch, *args, **kwargs)


# name -> what is called -> what is called with it instead
PLANTED: dict[str, dict[str, Callable[..., Any]]] = {
    "wrong host length": {f"{_SPECULATIVE}.cycle.lengths.ArrivingLengths.wait": _wrong_host_length},
    "wrong relayed length": {
        "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu": _wrong_relayed_length
    },
    "no wait": {f"{_SPECULATIVE}.cycle.lengths.ArrivingLengths.wait": _no_wait},
    "second wait": {f"{_SPECULATIVE}.cycle.block.Cycle.begin": _second_wait},
    "stale states": {f"{_SPECULATIVE}.drafters.base.VerifyTail.states_to_commit": _stale_states},
    "host read": {f"{_SPECULATIVE}.acceptance.acceptor.Acceptor.accept": _host_read},
    "candidates that are not copied": {
        f"{_SPECULATIVE}.drafters.dflash.DFlash2Drafter._complete_output": _uncopied_candidates
    },
    "late read": {f"{_SPECULATIVE}.acceptance.acceptor.Acceptor.accept": _late_read},
    "new kernel": {f"{_SPECULATIVE}.dflash_worker.DFlashWorker.run_cycle": _new_kernel},
}


def plant_all() -> None:
    """Prepare the faults that come and go."""
    for name, changes in PLANTED.items():
        for path, faulty in changes.items():
            _plant(name, path, faulty)


def _plant(name: str, path: str, faulty: Callable[..., Any]) -> None:
    owner, original = resolve(path)

    @functools.wraps(original)
    def call(*args, **kwargs):
        if Path(os.environ[VARIABLE]).read_text() == name:
            return faulty(original, *args, **kwargs)
        return original(*args, **kwargs)

    # A class method comes bound from its class.
    is_bound = hasattr(original, "__self__")
    setattr(owner, path.rpartition(".")[2], staticmethod(call) if is_bound else call)


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


def _failing_start_up() -> None:
    """Let start-up's second cycle fail after its verify forward."""
    from sglang_dflash.srt.speculative.acceptance.acceptor import Acceptor

    accept, calls = Acceptor.accept, itertools.count()

    def accept_or_fail(self, *args, **kwargs):
        if next(calls) == 1:
            raise RuntimeError("a kernel does not compile")
        return accept(self, *args, **kwargs)

    Acceptor.accept = accept_or_fail


AT_START = {
    "causal draft": _causal_draft,
    "forgotten buffer": _forgotten_buffer,
    "failing start-up": _failing_start_up,
}
