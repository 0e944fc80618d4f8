"""A simulated server with copies: the real texts, matches, estimates and choices; given answers and costs.

All seconds are simulated. The target's text is known in advance, so a token is accepted if it is in the text.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from support.decisions import accept_matching_prefix

from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.cycle.host import ragged_ranges
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.cycle.prompts import Prompts
from sglang_dflash.srt.speculative.cycle.ragged_graphs import AnyRows
from sglang_dflash.srt.speculative.drafters.base import draft_subset
from sglang_dflash.srt.speculative.drafters.copies import CopySource, CopyStats
from sglang_dflash.srt.speculative.width.controller import AdaptiveLengths, WholeBlocks
from sglang_dflash.srt.speculative.width.estimates import CostTable, CycleClock
from sglang_dflash.srt.speculative.width.policy import LengthChooser

BLOCK, VOCABULARY, ROWS = 8, 1000, 32
WIDTHS = np.array([1, 2, 4, BLOCK])
LOADS = np.array([1, 4, 16])
NOISE = 0.05  # standard deviation of the logarithm of a cycle's time
CPU = torch.device("cpu")
_WRONG = VOCABULARY + 1  # in no text


@dataclass
class Text:
    """A request: its prompt, and the answer that the target gives whatever is proposed."""

    prompt: list[int]
    answer: list[int]
    top_k: int = 1  # 1: greedy


def new_text(rng: np.random.Generator, length: int) -> list[int]:
    """Return a text in which hardly any three tokens come twice."""
    return rng.integers(VOCABULARY, size=length).tolist()


def common_text(rng: np.random.Generator, length: int) -> list[int]:
    """Return a text of common phrases: three tokens that came before go on in one of three ways."""
    tokens = [1, 2]
    while len(tokens) < length:
        tokens.append((37 * tokens[-1] + 11 * tokens[-2] + int(rng.integers(3))) % 89)
    return tokens


def edited(rng: np.random.Generator, text: Sequence[int], every: int) -> list[int]:
    """Return the text with about one token in `every` replaced."""
    return [int(rng.integers(VOCABULARY)) if rng.random() < 1 / every else token for token in text]


class OracleDraft:
    """A draft whose tokens are each right with a given probability."""

    def __init__(self, hit_rate: float, writes_context_apart: bool):
        self.hit_rate, self.writes_context_apart = hit_rate, writes_context_apart
        self.forwards = 0
        self.rng = np.random.default_rng(1)
        self.texts: dict[int, list[int]] = {}

    def propose(self, cycle, sampling_info=None, lengths=None):
        """Draft the text's tokens, or a token that is in no text."""
        block = cycle.tokens.clone()
        if cycle.verify_len > 1:
            self.forwards += 1
            places = zip(cycle.req_pool_indices.tolist(), cycle.committed.tolist(), strict=True)
            for i, (row, n) in enumerate(places):
                following = (self.texts[row][n + 1 :] + [_WRONG] * BLOCK)[: cycle.verify_len - 1]
                is_hit = self.rng.random(len(following)) < self.hit_rate
                block[i, 1:] = torch.tensor(np.where(is_hit, following, _WRONG))
        return DraftBlock(block)

    def to_draft(self, rows, lengths, wanted):
        """Run for every verified block if only the forward writes context."""
        return wanted | (lengths > 0) & (not self.writes_context_apart)


class _Clock(CycleClock):
    """Cycles take what the simulation says."""

    def __init__(self):
        super().__init__("cpu")
        self.rng = np.random.default_rng(2)
        self.seconds = 0.0
        self.duration = 0.0
        self.timings: list = []

    def last(self, seconds: float) -> None:
        """Set the seconds of the cycle that is about to stop."""
        self.duration = seconds * np.exp(NOISE * self.rng.standard_normal())
        self.seconds += seconds

    def stop(self, work=None):
        self.timings.append((work, self.duration))

    def finished(self):
        timings, self.timings = self.timings, []
        return timings


@dataclass
class _Cycle:
    """Fields of `Cycle` that copies and drafts read."""

    bs: int
    verify_len: int
    committed: torch.Tensor
    req_pool_indices: torch.Tensor
    tokens: torch.Tensor

    def of_requests(self, on_host, chosen, _):
        """Keep some requests."""
        fields = self.committed[chosen], self.req_pool_indices[chosen], self.tokens[chosen]
        return _Cycle(len(chosen), self.verify_len, *fields)


@dataclass
class CopySimulation:
    """A server of one batch: each text is a request, and the batch shrinks as they end.

    Args:
        cost: seconds of (requests, slots per request, share of the requests that are drafted for).
        hit_rate: of the draft's tokens.
        copies: whether they are on.
        adaptive: or whole blocks.
        lag: cycles until the host learns of a result; as on a GPU it then does not read matches from the
            device either.
        skips_draft: False for a draft whose forward writes its context.
    """

    cost: Callable[[int, float, float], float]
    hit_rate: float = 0.002
    copies: bool = True
    adaptive: bool = True
    lag: int = 0
    skips_draft: bool = True
    chosen: list[int] = field(default_factory=list)
    probes: int = 0

    def __post_init__(self):
        self.draft = OracleDraft(self.hit_rate, self.skips_draft)
        self.source = CopySource(BLOCK, CopyStats(DFlashMetrics(BLOCK - 1, None)))
        if self.copies:
            self.source.allocate(ROWS, 2000, VOCABULARY, CPU)
            self.source.knows_matches_on_host = self.lag == 0
        self.clock = _Clock()
        self.width = self._adaptive_width() if self.adaptive else WholeBlocks(BLOCK)
        self.tokens = self.cycles = 0

    def _adaptive_width(self) -> AdaptiveLengths:
        verify = np.array([[self.cost(int(n), int(w), 0) for w in WIDTHS] for n in LOADS])
        draft = np.array([self.cost(int(n), 1, 1) - self.cost(int(n), 1, 0) for n in LOADS])
        costs = CostTable(LOADS, WIDTHS, verify, draft)
        chooser = LengthChooser(costs, ROWS, skips_draft=self.skips_draft)
        group = SimpleNamespace(world_size=1, rank_in_group=0)
        return AdaptiveLengths(chooser, AnyRows(), self.clock, group, DFlashMetrics(BLOCK - 1, None), 40)

    def run(self, texts: Sequence[Text]) -> "CopySimulation":
        """Serve the texts as one batch to their end; totals are of this run."""
        self.chosen, self.tokens, self.cycles, self.clock.seconds, before = [], 0, 0, 0.0, self._probes()
        self._prefill(texts)
        under_way: deque = deque()
        running = dict(enumerate(texts))
        while running:
            under_way.append(self._cycle(running))
            if len(under_way) > self.lag:
                self._tell(*under_way.popleft())
        while under_way:
            self._tell(*under_way.popleft())
        self.probes = self._probes() - before
        return self

    def _probes(self) -> int:
        return self.width.report().get("probes", 0)

    def _prefill(self, texts: Sequence[Text]) -> None:
        self.reqs = [_request(row, text.top_k) for row, text in enumerate(texts)]
        self.draft.texts = {row: text.prompt + text.answer for row, text in enumerate(texts)}
        counts = [len(text.prompt) for text in texts]
        starts = [0] * len(texts)
        prompts = Prompts(
            req_pool_indices=torch.arange(len(texts)),
            tokens=torch.tensor([token for text in texts for token in text.prompt]),
            positions=ragged_ranges(starts, counts, CPU),
            prefix_lens=starts,
            extend_lens=counts,
            num_running=0,
            is_continued=[False] * len(texts),
            table_rows=np.arange(len(texts)),
            reqs=self.reqs,
        )
        self.width.begin_prefill(prompts)
        self.source.begin_prefill(prompts)
        self.source.end_prefill(prompts, torch.tensor([text.answer[0] for text in texts]))
        self.committed = {row: len(text.prompt) for row, text in enumerate(texts)}

    def _cycle(self, running: dict[int, Text]):
        rows = list(running)
        committed = torch.tensor([self.committed[row] for row in rows])
        batch = SimpleNamespace(
            reqs=[self.reqs[row] for row in rows],
            req_pool_indices=torch.tensor(rows),
            req_pool_indices_cpu=torch.tensor(rows),
            seq_lens=committed,
            seq_lens_cpu=committed,
            sampling_info=SimpleNamespace(has_custom_logit_processor=False),
        )
        caps = np.full(len(rows), BLOCK - 1)
        plan = self.width.choose(batch, False, self.source.look_up(batch), caps)
        slots = BLOCK if plan.verify_len > 1 else 1
        tokens = torch.tensor([[self.draft.texts[row][n]] * slots for row, n in self._places(rows)])
        cycle = _Cycle(len(rows), slots, committed, batch.req_pool_indices, tokens)
        block, drafted = self._propose(batch, cycle, plan)
        cycle.verify_len = plan.verify_len
        target = [
            (self.draft.texts[row][n + 1 :] + [VOCABULARY] * slots)[: plan.verify_len]
            for row, n in self._places(rows)
        ]
        lengths = torch.from_numpy(plan.max_accept)
        accepted = accept_matching_prefix(block.tokens, torch.tensor(target))
        accept_len = accepted.accept_len.minimum(lengths).int()
        output = SimpleNamespace(tokens=torch.tensor(target), accept_len=accept_len)
        self.source.record(cycle, output, drafted > 0)
        proposals = self.source.proposals
        self.clock.last(self.cost(len(rows), 1 + float(lengths.double().mean()), drafted / len(rows)))
        self.width.on_launched(plan)
        accepted = accepted._replace(accept_len=accept_len)
        accept_lens = accepted.accept_len.tolist()
        self.chosen.append(plan.verify_len)
        self.cycles += len(rows)
        for row, kept in zip(rows, accept_lens, strict=True):
            left = len(self.draft.texts[row]) - 1 - self.committed[row]
            self.tokens += min(kept + 1, left)
            self.committed[row] += kept + 1
            self.reqs[row].kv.kv_committed_len = self.committed[row]
            if kept + 1 >= left:
                del running[row]
        return plan, accept_lens, proposals

    def _propose(self, batch, cycle: _Cycle, plan: CyclePlan) -> tuple[DraftBlock, int]:
        """Return blocks, and the number of requests that were drafted for, as the worker has them."""
        self.source.choose(batch, plan)
        if not plan.copies.size:
            runs_draft = not self.draft.writes_context_apart or self.source.needs_draft()
            on_host = np.arange(cycle.bs if runs_draft else 0)
        else:
            verified = plan.layout.num_draft_tokens
            on_host = np.flatnonzero(self.draft.to_draft(None, verified, (verified > 0) & ~plan.copies))
        block = draft_subset(self.draft, cycle, on_host, plan.layout, None, None)
        return self.source.overlay(block), len(on_host)

    def _places(self, rows):
        return [(row, self.committed[row]) for row in rows]

    def _tell(self, plan, accept_lens, proposals) -> None:
        self.source.stats.on_accept_lens(proposals, accept_lens, plan.max_accept.tolist())
        self.width.on_accept_lens(plan, accept_lens, proposals)

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens per request and cycle."""
        return self.tokens / self.cycles

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.clock.seconds

    @property
    def share_of_plain(self) -> float:
        """Share of cycles that verified nothing but the anchor."""
        return self.chosen.count(1) / len(self.chosen)


def _request(row: int, top_k: int) -> SimpleNamespace:
    params = SimpleNamespace(
        top_k=top_k, logit_bias=None, min_new_tokens=0, frequency_penalty=0.0, presence_penalty=0.0,
        repetition_penalty=1.0,
    )  # fmt: skip
    return SimpleNamespace(
        kv=SimpleNamespace(kv_committed_len=0),
        output_ids=[],
        grammar=None,
        sampling_params=params,
    )
