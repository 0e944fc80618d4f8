"""The draft model split over two tensor-parallel ranks, without a server.

The ranks are CPU processes. Each writes context KV, runs a block and takes the vocabulary-parallel argmax.
test_ranks.py has servers.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from support.acceptors import accept, make_acceptor
from support.draft_cases import BASE
from support.draft_probs import one_hot
from support.engine import start
from support.sampling_parameters import VOCABULARY, sampling_info
from support.servers import run_to_end
from support.tensor_parallel_ranks import DFLASH2_NAMES, NAMES, WORLD, draft_block

from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """The folder of what `tensor_parallel_ranks` saves."""
    folder = tmp_path_factory.mktemp("ranks")
    path = f"import sys; sys.path = {sys.path}; from support.tensor_parallel_ranks import run_rank"
    programs = [f"{path}; run_rank({rank}, {str(folder)!r})" for rank in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as pool:
        ranks = pool.map(lambda program: run_to_end("-c", program), programs)
        for rank in ranks:
            assert rank.code == 0, rank.output
    return folder


def test_ranks_draft_the_same_tokens_as_one(of_ranks, tmp_path):
    assert BASE["num_attention_heads"] % WORLD == 0
    for name in NAMES + DFLASH2_NAMES:
        own = tmp_path / f"{name}-whole"
        own.mkdir()
        whole = draft_block(name, own, world_size=1)
        for rank in range(WORLD):
            assert torch.equal(torch.load(of_ranks / f"{name}-{rank}" / "tokens.pt"), whole)


def test_ranks_agree_on_a_weight_update(of_ranks):
    """If one cannot take it, no rank does, none waits for ever, and rank 0 says why."""
    first, second = (json.loads((of_ranks / f"updates-{rank}.json").read_text()) for rank in range(WORLD))
    assert first.pop("none") == second.pop("none") == [True, "Success", True]
    assert first.keys() == second.keys()
    for case, (is_done, message, has_changed) in first.items():
        is_late = case.startswith("in the copies")
        assert not is_done and has_changed == is_late, case
        assert ("may be partly updated" in message) == is_late, case
        assert second[case][::2] == [is_done, has_changed], case
        assert second[case][1].rpartition("Error: ")[2] == message.rpartition("Error: ")[2], case


@pytest.mark.parametrize("top_k", [1, 5])
def test_ranks_take_what_rank_0_chose(top_k):
    """Tokens and verdicts of a rank that would have chosen otherwise."""
    start()
    from sglang.srt.layers.sampler import Sampler

    torch.manual_seed(0)
    logits, width, sites = torch.randn(6, VOCABULARY), 3, []
    sync = SimpleNamespace(
        enabled=lambda site: True, sync=lambda site, values: sites.append(site.slug) or values.fill_(2)
    )
    acceptor = make_acceptor(Sampler(), sync=sync, rule="standard")
    batch = SimpleNamespace(sampling_info=sampling_info(*[{"top_k": top_k}] * 2), return_logprob=False)
    positions = torch.arange(6).view(2, width)
    cycle = SimpleNamespace(
        positions=positions, layout=whole_blocks(2, width), committed=torch.tensor([7, 7])
    )
    block = torch.zeros(2, width, dtype=torch.int64)
    accepted = accept(acceptor, batch, cycle, DraftBlock(block), logits.clone())
    assert sites == ["dflash-accept-greedy" if top_k == 1 else "dflash-accept-sample"]
    assert (accepted.tokens == 2).all()
    drawn = DraftBlock(block, one_hot(block[:, 1:]))
    accepted = accept(acceptor, batch, cycle, drawn, logits)
    assert all((decided == 2).all() for decided in (accepted.accept_len, accepted.tokens, accepted.bonus))
