"""The P-EAGLE drafter against a reference without a cache.

Prefill, propose and commit are called around the draft model. Drafted tokens are argmaxes and are compared
exactly: seeds are fixed, and no two logits of these drafts are within rounding. Unwritten KV slots hold NaN,
so a row that is read too early makes the result NaN.
"""

import contextlib
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, ReqToTokenPool
from support.checkpoint_fields import GOOD_PEAGLE
from support.decisions import accepted_blocks
from support.draft_cases import BASE, SLIDING, FakePlan, draft_cycle, lm_head
from support.drafts import random_peagle_weights
from support.engine import Pools, build
from support.reference_peagle import ReferencePEagle
from support.rehearsal.attention import attend
from support.sampling_parameters import sampling_parameters
from support.verified_rows import INFO, compare, count_head_rows

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.hardware_backend.cpu.attention import TorchNativeSpecAttnBackend
from sglang_dflash.srt.models.peagle import PEagleDraftModel
from sglang_dflash.srt.speculative.cycle.block import Cycle
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.prompts import Prompts
from sglang_dflash.srt.speculative.drafters.peagle import PEagleDrafter

CAPACITY = 64
LAYERS = {
    key: BASE[key]
    for key in BASE
    if key not in ("architectures", "dflash_config", "block_size", "num_target_layers")
}
CONFIG = GOOD_PEAGLE | {
    "eagle_aux_hidden_state_layer_ids": [1, 3],
    "draft_vocab_size": 40,
    "mask_token_id": 7,
    "transformer_layer_config": LAYERS
    | {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "layer_types": ["sliding_attention", "full_attention"],
        **SLIDING,
    },
}


class BlockKeysFromTheForward(TorchNativeSpecAttnBackend):
    """Attention that reads block keys from the forward, as SGLang's Triton backend."""

    needs_cpu_seq_lens = False

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        width = forward_batch.spec_info.num_tokens_per_req
        out = []
        for block, n in enumerate(forward_batch.seq_lens.tolist()):
            rows = slice(block * width, (block + 1) * width)
            prefix = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[block], :n].long()
            keys, values = (
                torch.cat([pool[prefix], new[rows].view(width, *pool.shape[1:])])
                for pool, new in zip(self.token_to_kv_pool.get_kv_buffer(layer.layer_id), (k, v), strict=True)
            )
            window = layer.sliding_window_size
            queries = q[rows].view(width, layer.tp_q_head_num, -1)
            attended, _ = attend(
                queries, keys, values, causal=True, scale=layer.scaling, back=-1 if window is None else window
            )
            out.append(attended.flatten(1))
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return torch.cat(out)


class KeysFromThePool(TorchNativeSpecAttnBackend):
    """Attention that plans without lengths on the host, as FA3."""

    needs_cpu_seq_lens = False


class Translator:
    def plan(self, *, write_virtual, **_) -> FakePlan:
        return FakePlan(write_virtual)


class Simulation:
    """A drafter driven through requests with fixed texts and hidden states."""

    def __init__(
        self,
        block_size: int,
        requests: int,
        folder,
        page_size: int = 1,
        backend: type = TorchNativeSpecAttnBackend,
    ):
        (folder / "config.json").write_text(json.dumps(CONFIG))
        layers = CONFIG["transformer_layer_config"]
        hidden = layers["hidden_size"]
        weights = random_peagle_weights(layers, 2, 40)
        generator = torch.Generator().manual_seed(3)
        weights["d2t"] = self.d2t = torch.arange(40) // 3
        self.reference = ReferencePEagle(CONFIG, weights)
        config = DraftConfigParser().parse(str(folder), trust_remote_code=False)
        self.model = build(PEagleDraftModel, config, iter(weights.items()))
        self.pools = Pools.of_draft(self.model, requests, CAPACITY, page_size=page_size, backend=backend)
        # The target's table; the draft's own starts empty.
        own = self.pools.req_to_token_pool
        self.target_pool = ReqToTokenPool(own.size, own.max_context_len, "cpu", enable_memory_saver=False)
        self.table = self.target_pool.req_to_token.copy_(own.req_to_token)
        own.req_to_token.zero_()
        runner = SimpleNamespace(
            model=self.model,
            req_to_token_pool=own,
            kv_index_translator=Translator(),
            attn_backend=self.pools.backend,
            model_config=SimpleNamespace(context_len=CAPACITY),
            decode_cuda_graph_runner=None,
            forward=self.forward,
        )
        borrowed = SimpleNamespace(
            lm_head=lm_head(torch.zeros(64, hidden)),
            get_input_embeddings=lambda: torch.nn.Embedding(64, hidden),
        )
        self.num_forwards = 0
        self.drafter = PEagleDrafter(runner, borrowed, block_size)
        self.target_runner = SimpleNamespace(req_to_token_pool=self.target_pool)
        self.drafter.attach_pools(self.target_runner)
        self.width = block_size
        self.texts = torch.randint(layers["vocab_size"], (requests, CAPACITY), generator=generator)
        self.states = torch.randn(requests, CAPACITY, 2 * hidden, generator=generator)
        self.lengths = [0] * requests
        self.unknown: list[set[int]] = [set() for _ in range(requests)]

    def forward(self, batch) -> SimpleNamespace:
        self.num_forwards += 1
        return SimpleNamespace(logits_output=self.pools.forward(self.model, batch))

    @contextlib.contextmanager
    def behind_the_targets_forward(self):
        """Check that SGLang keeps the tables until a forward of the draft has read them.

        After the target's forward it may give the rows of an ended request to another one.
        """
        self.target_runner.shared_read_done_event = "recorded by the target's forward"
        self.num_forwards = 0
        yield
        assert (self.target_runner.shared_read_done_event is None) == (self.num_forwards > 0)

    def prefill(
        self, ends: dict[int, int], continued: tuple[int, ...] = (), running: tuple[int, ...] = ()
    ) -> None:
        """Prefill requests up to these lengths, with their committed tokens as prefix."""
        chosen = list(ends) + list(running)
        prefix = [self.lengths[r] for r in chosen]
        ends = ends | {r: self.lengths[r] + 1 for r in running}
        where = [(r, start, ends[r]) for r, start in zip(chosen, prefix)]
        prompts = Prompts(
            req_pool_indices=self.pools.rows[chosen],
            tokens=torch.cat([self.texts[r, a:b] for r, a, b in where]),
            positions=torch.cat([torch.arange(a, b) for _, a, b in where]),
            prefix_lens=prefix,
            extend_lens=[b - a for _, a, b in where],
            num_running=len(running),
            is_continued=[r in continued or r in running for r in chosen],
            table_rows=self.pools.rows[chosen].numpy(),
        )
        self.drafter.begin_prefill(prompts)
        aux_hidden = torch.cat([self.states[r, a:b] for r, a, b in where])
        slots = torch.cat([self.slots(*place) for place in where])
        next_tokens = torch.stack([self.texts[r, b] for r, _, b in where])
        with self.behind_the_targets_forward():
            self.drafter.prefill(prompts, aux_hidden, slots, next_tokens)
        for r, a, b in where:
            if a and r not in continued and r not in running:
                self.unknown[r].add(a - 1)
            self.lengths[r] = b

    def exchange_slots(self, request: int, first: int, stop: int) -> None:
        """Replace a request's slots by others with the same KV and free its own, as the prefix cache does.

        A freed slot holds NaN, as another request may write there.
        """
        row = int(self.pools.rows[request])
        own = self.table[row, first:stop].long()
        kv_pool = self.pools.token_to_kv_pool
        is_free = torch.ones(kv_pool.size, dtype=torch.bool)
        is_free[self.table.flatten().long()] = False
        others = is_free.nonzero().flatten()[: stop - first]
        for buffer in (*kv_pool.k_buffer, *kv_pool.v_buffer):
            buffer[others] = buffer[own]
            buffer[own] = torch.nan
        self.target_pool.write((row, slice(first, stop)), others.int())

    def begin_cycle(self, chosen: list[int]) -> Cycle:
        lengths = [self.lengths[r] for r in chosen]
        tokens = torch.full((len(chosen), self.width), CONFIG["mask_token_id"])
        tokens[:, 0] = self.texts[chosen, lengths]
        targets = SimpleNamespace(rows=self.pools.rows, slots=self.slots)
        return draft_cycle(targets, chosen, lengths, tokens, self.width)

    def slots(self, request: int, first: int, stop: int) -> torch.Tensor:
        """Return the slots of a request's positions, which the target's table names."""
        return self.table[self.pools.rows[request], first:stop].long()

    def reference_logits(self, request: int) -> torch.Tensor:
        text, states = self.texts[request, : self.lengths[request] + 1].tolist(), self.states[request]
        return self.reference.step(text, states, self.width - 1, self.unknown[request])

    def cycle(self, kept: dict[int, int], width: int | None = None, is_planned: bool = False) -> None:
        """Run one decode step and check the drafted tokens against the reference.

        Args:
            kept: Accepted drafted tokens per request.
            width: Slots that the step verifies, by default all.
            is_planned: Whether the drafter says for which requests it runs, as with adaptive lengths.
        """
        chosen, width = list(kept), self.width if width is None else width
        drafted = np.full(len(chosen), self.width > 1)
        if is_planned and self.width > 1:
            verified = np.full(len(chosen), width - 1)
            drafted = self.drafter.rows_to_draft(self.pools.rows[chosen].numpy(), verified, verified > 0)
        if drafted.any():
            to_draft = [r for r, is_drafted in zip(chosen, drafted) if is_drafted]
            block = self.drafter.propose(self.begin_cycle(to_draft)).tokens
            for row, r in enumerate(to_draft):
                found = self.reference_logits(r).argmax(dim=-1)
                expected = [int(self.texts[r, self.lengths[r]]), *(found + self.d2t[found]).tolist()]
                assert block[row].tolist() == expected, f"request {r} after {self.lengths[r]} tokens"
        cycle = self.begin_cycle(chosen).with_layout(whole_blocks(len(chosen), width))
        # Rejected slots get arbitrary states and tokens.
        verified = torch.randn(
            len(chosen), width, self.states.shape[-1], generator=torch.Generator().manual_seed(9)
        )
        out = torch.full((len(chosen), width), 1)
        for row, r in enumerate(chosen):
            n, k = self.lengths[r], kept[r]
            verified[row, : k + 1] = self.states[r, n : n + k + 1]
            out[row, : k + 1] = self.texts[r, n + 1 : n + k + 2]
            self.lengths[r] += k + 1
        accept_len = torch.tensor(list(kept.values()), dtype=torch.int32)
        with self.behind_the_targets_forward():
            self.drafter.commit(cycle, verified.flatten(0, 1), accepted_blocks(accept_len, out))


@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
@pytest.mark.parametrize(("page_size", "is_planned"), [(1, False), (16, False), (1, True)])
def test_cycles_after_a_prefill(block_size, page_size, is_planned, tmp_path):
    simulation = Simulation(block_size, 4, tmp_path, page_size)
    simulation.prefill({0: 17, 1: 1, 2: 2, 3: 6})
    most = block_size - 1
    for kept in (
        (0, 0, 0, 0),
        (most, most // 2, 0, most),
        (0, most, 1 % block_size, most),
        (most, 0, most, 0),
        (0, 0, 0, 0),
    ):
        simulation.cycle(dict(enumerate(kept)), is_planned=is_planned)


@pytest.mark.parametrize("block_size", [2, 5])
def test_widths_change_from_cycle_to_cycle(block_size, tmp_path):
    """A pause without drafting leaves later drafts unchanged."""
    simulation = Simulation(block_size, 3, tmp_path)
    simulation.prefill({0: 12, 1: 3})
    cycle = functools.partial(simulation.cycle, is_planned=True)
    cycle({0: 1, 1: 0}, width=2)
    cycle({0: block_size - 1, 1: 1})
    for _ in range(block_size + 2):
        cycle({0: 0, 1: 0}, width=1)
    simulation.prefill({2: 9})
    for _ in range(2):
        cycle({0: 0, 1: 0, 2: 0}, width=1)
    for width in (block_size, 2, block_size):
        cycle({0: 1, 1: 0, 2: 1}, width)
    cycle({0: 0, 1: 0, 2: 0}, width=1)
    cycle({0: 0, 1: 0, 2: 0})


def test_whole_blocks_that_nobody_planned_are_pending(tmp_path):
    simulation = Simulation(5, 2, tmp_path)
    simulation.prefill({0: 12, 1: 3})
    for _ in range(2):
        simulation.cycle({0: 4, 1: 4})
        simulation.cycle({0: 0, 1: 0}, width=1, is_planned=True)
        simulation.cycle({0: 1, 1: 2}, is_planned=True)


@pytest.mark.parametrize("backend", [BlockKeysFromTheForward, KeysFromThePool])
def test_backends_that_do_not_know_the_hosts_lengths(backend, tmp_path):
    simulation = Simulation(6, 4, tmp_path, backend=backend)
    simulation.prefill({0: 17, 1: 1, 2: 2, 3: 6})
    for kept in ((0, 0, 0, 0), (5, 2, 0, 5), (0, 5, 1, 3), (5, 0, 5, 0), (4, 1, 2, 2)):
        simulation.cycle(dict(enumerate(kept)))


@pytest.mark.parametrize("block_size", [6, 16])
def test_the_end_of_the_context(block_size, tmp_path):
    """No row lies beyond the tables, and the last tokens are drafted as usual.

    SGLang's tables have B + 4 columns behind the context. Under overlap a text that has ended runs once more,
    with as many tokens as the context has.
    """
    simulation = Simulation(block_size, 2, tmp_path, backend=KeysFromThePool)
    context = CAPACITY - block_size - 4
    simulation.drafter._runner.model_config.context_len = context
    simulation.prefill({0: context - 17, 1: 3})
    for kept in ((0, 5), (5, 0), (3, 1), (1, 2), (3, 0), (0, 1)):
        simulation.cycle(dict(enumerate(kept)))
    assert simulation.lengths[0] == context + 1


@pytest.mark.parametrize("backend", [TorchNativeSpecAttnBackend, BlockKeysFromTheForward])
def test_batches_change(backend, tmp_path):
    simulation = Simulation(5, 3, tmp_path, backend=backend)
    simulation.prefill({2: 9, 0: 12})
    simulation.cycle({0: 3, 2: 4})
    simulation.prefill({1: 5})
    simulation.cycle({1: 2})
    simulation.cycle({2: 1, 1: 4, 0: 0})
    simulation.cycle({0: 0, 1: 0})


def test_a_chunked_prefill_is_exact(tmp_path):
    simulation = Simulation(5, 2, tmp_path)
    simulation.prefill({0: 6, 1: 3})
    simulation.prefill({0: 7}, continued=(0,))
    simulation.prefill({0: 20, 1: 11}, continued=(0, 1))
    simulation.cycle({0: 2, 1: 4})
    simulation.cycle({0: 0, 1: 0})


def test_a_cached_prefix(tmp_path):
    """One row uses the learned state: the state at the prefix's end is unknown."""
    simulation = Simulation(5, 2, tmp_path)
    simulation.prefill({0: 10, 1: 1})
    simulation.prefill({0: 15, 1: 3})  # as a new request that finds its first tokens in the cache
    assert simulation.unknown == [{9}, {0}]
    simulation.cycle({0: 4, 1: 4})
    simulation.cycle({0: 0, 1: 0})


@pytest.mark.parametrize("backend", [TorchNativeSpecAttnBackend, KeysFromThePool])
def test_the_prefix_cache_exchanges_slots(backend, tmp_path):
    """Before the first cycle, or after it as under overlap scheduling."""
    simulation = Simulation(5, 3, tmp_path, backend=backend)
    simulation.prefill({0: 17, 1: 30})
    simulation.exchange_slots(0, 0, 17)
    simulation.cycle({0: 2, 1: 4})
    simulation.exchange_slots(1, 12, 30)
    simulation.prefill({2: 1})
    simulation.exchange_slots(2, 0, 1)
    simulation.cycle({0: 4, 1: 0, 2: 3})
    simulation.cycle({0: 0, 1: 0, 2: 0})


def test_a_mixed_batch(tmp_path):
    simulation = Simulation(5, 3, tmp_path)
    simulation.prefill({0: 12, 1: 3})
    simulation.cycle({0: 4, 1: 2})
    simulation.prefill({2: 8}, running=(0, 1))
    simulation.prefill({2: 14}, continued=(2,), running=(1, 0))
    simulation.cycle({2: 1, 0: 0, 1: 3})
    simulation.cycle({2: 0, 0: 0, 1: 0})


def test_draft_probabilities_belong_to_their_request(tmp_path):
    """Probabilities are over target ids, under each request's temperature."""
    simulation = Simulation(5, 3, tmp_path)
    simulation.prefill({0: 12, 1: 3, 2: 30})
    simulation.cycle({0: 4, 1: 0, 2: 2})
    chosen, temperatures = [2, 0, 1], [0.7, 1.0, 1.5]
    info = sampling_parameters(temperature=temperatures, top_k=[1 << 30] * 3, top_p=[1.0] * 3)
    block = simulation.drafter.propose(simulation.begin_cycle(chosen), info)
    for row, r in enumerate(chosen):
        expected = torch.softmax(simulation.reference_logits(r) / temperatures[row], dim=-1)
        target_ids = torch.arange(40) + simulation.d2t
        for slot in range(4):
            got = torch.zeros(61, dtype=torch.float64)
            got[block.probs.ids[row, slot]] = block.probs.probs[row, slot].double()
            torch.testing.assert_close(got[target_ids], expected[slot], rtol=0, atol=1e-5)
            assert got[block.tokens[row, slot + 1]] > 0


@INFO
def test_verified_slots_are_those_of_whole_blocks(info, monkeypatch, tmp_path):
    """The head multiplies no other rows. The last forward's drafts are ignored: it runs pending rows."""
    head_rows, whole = count_head_rows(monkeypatch), None
    for lengths in (None, [7, 1, 2], [0, 0, 2], [1, 1, 1], [7, 7, 7], [0, 0, 0]):
        simulation = Simulation(8, 3, tmp_path)
        simulation.prefill({0: 17, 1: 3, 2: 11})
        simulation.cycle({0: 4, 1: 0, 2: 2})
        simulation.model.ends_before_head = lengths is not None
        head_rows.clear()
        verified = None if lengths is None else np.array(lengths)
        found = simulation.drafter.propose(simulation.begin_cycle([0, 1, 2]), info, verified)
        if whole is None:
            whole = found
            assert set(head_rows) == {3 * 7}, "the control"
        else:
            compare(whole, found, lengths)
            # A request that verifies nothing has a row beside others.
            assert sum(head_rows) == sum(max(n, 1) for n in lengths if any(lengths))


def test_a_graph_can_be_captured_if_nothing_is_drafted(tmp_path):
    """With one draft token SGLang runs a row per request and ignores its output."""
    simulation = Simulation(1, 2, tmp_path)
    batch = simulation.pools.blocks(torch.zeros(2, 1, dtype=torch.int64), [3, 5])
    out = simulation.pools.forward(simulation.model, batch)
    assert out.draft_tokens.shape == (0,)


@pytest.mark.parametrize(
    ("pending", "lengths", "chosen", "left"),
    [
        ([7, 4, 1], [0, 0, 0], [False, False, False], [8, 5, 2]),
        ([8, 4, 1], [0, 0, 0], [True, True, False], [1, 1, 2]),
        ([1, 4, 6], [7, 0, 0], [True, True, True], [8, 1, 1]),
        ([1, 5, 2], [3, 0, 0], [True, False, False], [4, 6, 3]),
    ],
)
def test_requests_with_half_a_block_go_along_with_an_overdue_one(pending, lengths, chosen, left):
    drafter = SimpleNamespace(most_pending=np.array([5, *pending]), _block_size=8)
    lengths = np.array(lengths)
    found = PEagleDrafter.rows_to_draft(drafter, np.array([1, 2, 3]), lengths, lengths > 0)
    assert found.tolist() == chosen
    assert drafter.most_pending.tolist() == [5, *left]
