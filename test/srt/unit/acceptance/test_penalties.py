"""Penalties count emitted and drafted tokens. engine/test_penalized_answers.py compares whole answers."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.penalized import EOS, STOP, penalized, request

from sglang_dflash.srt.speculative.acceptance.constraints import Penalties
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests

VOCAB = 12
POOL = 6


def batch_of(reqs, slots, lengths) -> SimpleNamespace:
    """Build a batch; lengths count tokens with KV after prefill or before a block."""
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices=torch.tensor(slots),
        seq_lens=torch.tensor(lengths),
        sampling_info=SimpleNamespace(acc_additive_penalties=torch.zeros(1), acc_scaling_penalties=None),
    )


@st.composite
def requests(draw):
    penalties = {
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5, -1.5])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.7, -0.3])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.8])),
        "min_new_tokens": draw(st.sampled_from([0, 1, 4, 9])),
    }
    return request(
        draw(st.integers(1, 5)), draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)), **penalties
    )


def begin_prefill(penalties: Penalties, batch, num_new: int) -> None:
    """Prepare the batch as the worker does before `num_new` requests are prefilled."""
    new = batch.reqs[:num_new]
    penalties.begin_prefill(SimpleNamespace(new_reqs=new, req_pool_indices=batch.req_pool_indices))
    penalties.penalize_prefill(batch)


@given(st.data())
def test_any_schedule_counts_emitted_tokens(data):
    """Each verified slot is penalized by the emitted and drafted tokens before it."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    penalties, running, width = Penalties(POOL, VOCAB, torch.device("cpu")), {}, data.draw(st.integers(1, 5))

    def assert_logits(outputs: list[list[int]], reqs, penalize) -> None:
        logits = torch.randn(len(outputs), VOCAB)
        expected = torch.stack([penalized(*row) for row in zip(logits, reqs, outputs, strict=True)])
        torch.testing.assert_close(penalize(logits.clone()), expected)

    for _ in range(data.draw(st.integers(1, 6))):
        for slot in data.draw(st.lists(st.sampled_from(sorted(running) or [0]), unique=True, max_size=3)):
            running.pop(slot, None)
        free = sorted(set(range(POOL)) - set(running))
        slots = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=3)) if free else []
        new = {slot: (req := data.draw(requests()), list(req.output_ids)) for slot in slots}
        if new:
            # A mixed batch: running requests join with their last token.
            joining = data.draw(st.lists(st.sampled_from(sorted(running) or [-1]), unique=True, max_size=2))
            both = {**new, **{slot: running[slot] for slot in joining if slot in running}}
            reqs, outputs = zip(*both.values(), strict=True)
            lengths = [len(req.origin_input_ids) + len(tokens) for req, tokens in both.values()]
            batch = batch_of(reqs, list(both), lengths)
            begin_prefill(penalties, batch, num_new=len(new))

            def as_sglang(logits, info=batch.sampling_info):
                logits += info.acc_additive_penalties
                return torch.where(
                    logits < 0, logits * info.acc_scaling_penalties, logits / info.acc_scaling_penalties
                )

            assert_logits(outputs, reqs, as_sglang)
            next_tokens = torch.randint(VOCAB, (len(both),))
            penalties.count(batch, next_tokens[:, None], torch.zeros_like(next_tokens).int())
            for tokens, token in zip(outputs, next_tokens.tolist(), strict=True):
                tokens.append(token)
            running.update(new)
        if not running:
            continue
        chosen = data.draw(st.permutations(sorted(running)))[: data.draw(st.integers(1, POOL))]
        reqs, outputs = zip(*(running[slot] for slot in chosen), strict=True)
        lengths = [
            len(req.origin_input_ids) + len(tokens) - 1 for req, tokens in zip(reqs, outputs, strict=True)
        ]
        batch = batch_of(reqs, chosen, lengths)
        block = torch.randint(VOCAB, (len(chosen), width))
        lengths = (
            torch.randint(width, (len(chosen),)) if data.draw(st.booleans()) else [width - 1] * len(chosen)
        )
        layout = VerifyLayout(len(chosen), width, np.array(lengths))
        slots = [(i, k) for i, length in enumerate(lengths) for k in range(length + 1)]

        def in_block(logits, batch=batch, block=block, layout=layout):
            penalties.penalize_block(batch, block, logits, layout)
            return logits

        before = [outputs[i] + block[i, 1 : k + 1].tolist() for i, k in slots]
        assert_logits(before, [reqs[i] for i, _ in slots], in_block)
        kept = torch.randint(width, (len(chosen),), dtype=torch.int32)
        out = torch.randint(VOCAB, (len(chosen), width))
        penalties.count(batch, out, kept)
        for tokens, row, accept_len in zip(outputs, out.tolist(), kept.tolist(), strict=True):
            tokens.extend(row[: accept_len + 1])


def test_a_tokenizers_own_end_counts_too():
    req = request(2, min_new_tokens=3)
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=7)
    batch = batch_of([req], [0], [2])
    begin_prefill(Penalties(POOL, VOCAB, torch.device("cpu")), batch, num_new=1)
    assert batch.sampling_info.acc_additive_penalties[0].isinf().nonzero().flatten().tolist() == [
        EOS,
        STOP,
        7,
    ]


def test_requests_that_another_server_prefilled():
    """A decode server gets requests without prefill, with their earlier output."""
    penalties, device = Penalties(POOL, VOCAB, torch.device("cpu")), torch.device("cpu")
    old = request(2, [3, 3, 4], frequency_penalty=0.5)
    begin_prefill(penalties, batch_of([old], [2], [5]), num_new=1)  # the row's previous request
    reqs = [request(2, frequency_penalty=0.5), request(3, min_new_tokens=2)]
    outputs = [[5, 6, 5], [7]]
    slots = torch.tensor([2, 1], device=device)
    penalties.admit_prefilled(
        PrefilledRequests(reqs, slots, slots.numpy(), [4, 3], torch.tensor([5, 7]), outputs)
    )
    batch = batch_of(reqs, [2, 1], [4, 3])
    logits = torch.randn(2, VOCAB)
    expected = torch.stack([penalized(*row) for row in zip(logits, reqs, outputs, strict=True)])
    penalties.penalize_block(batch, torch.tensor([[5], [7]]), logits, whole_blocks(2, 1))
    torch.testing.assert_close(logits, expected)
