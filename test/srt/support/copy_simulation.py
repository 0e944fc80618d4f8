"""A simulated server with copies: the real texts, matches, estimates and choices; given answers and costs.

All seconds are simulated. The target's text is known in advance, so a token is accepted if it is in the text.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from support.decisions import accept_matching_prefix

from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.dflash_info import DraftBlock, Prompts, packed_ranges
from sglang_dflash.srt.speculative.drafters.copy_ahead import CopyAhead
from sglang_dflash.srt.speculative.drafters.copy_stats import CopyStats
from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth, FixedWidth
from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock, CycleTiming
from sglang_dflash.srt.speculative.width.copies import CopyWidths
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate

BLOCK, VOCABULARY, ROWS = 8, 1000, 32
WIDTHS = np.array([1, 2, 4, BLOCK])
LOADS = np.array([1, 4, 16])
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
    """Return the text with a token in about `every` so many replaced."""
    return [int(rng.integers(VOCABULARY)) if rng.random() < 1 / every else token for token in text]


class OracleDraft:
    """A draft whose tokens are each right with a given probability."""

    mask_token_id, num_draft_rows, has_own_table = 999, BLOCK - 1, False
    defers_plain_cycles = False

    def __init__(self, hit_rate: float, writes_context_apart: bool = True):
        self.hit_rate, self.writes_context_apart = hit_rate, writes_context_apart
        self.forwards = 0
        self.rng = np.random.default_rng(1)
        self.texts: dict[int, list[int]] = {}

    def propose(self, cycle, sampling_info=None):
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

    def begin_prefill(self, *_):
        """Do nothing."""

    prefill = admit_prefilled = draw = absorb = commit = begin_prefill


class _Clock(CycleClock):
    """Cycles take what the simulation says."""

    def __init__(self, cost, noise: float):
        super().__init__("cpu")
        self.cost, self.noise, self.rng = cost, noise, np.random.default_rng(2)
        self.seconds = 0.0

    def finished(self):
        return [self._timed(*timing) for timing in super().finished()]

    def stop(self, num_requests, width, num_tokens, was_drafted=True):
        super().stop(num_requests, width, num_tokens, was_drafted)
        self.seconds += self.cost(num_requests, width, width > 1 and was_drafted)

    def _timed(self, num_requests, width, num_tokens, _, gap, previous_width, was_drafted):
        seconds = self.cost(num_requests, width, width > 1 and was_drafted)
        seconds *= np.exp(self.noise * self.rng.standard_normal())
        return CycleTiming(num_requests, width, num_tokens, seconds, None, None, was_drafted)


@dataclass
class CopySimulation:
    """A server of one batch: each text is a request, and the batch shrinks as they end.

    Args:
        cost: seconds of (requests, width, whether the draft runs).
        hit_rate: of the draft's tokens.
        copies: whether they are on.
        adaptive: or whole blocks.
        lag: cycles until the host learns of a result; it then does not read matches from the device either.
        skips_draft: False for a draft whose forward writes its context.
    """

    cost: Callable[[int, int, bool], float]
    hit_rate: float = 0.002
    copies: bool = True
    adaptive: bool = True
    lag: int = 0
    noise: float = 0.05
    skips_draft: bool = True
    chosen: list[int] = field(default_factory=list)
    probes: int = 0
    copied_blocks: int = 0

    def __post_init__(self):
        self.draft = OracleDraft(self.hit_rate, self.skips_draft)
        self.drafter = CopyAhead(self.draft, BLOCK, CopyStats(DFlashMetrics(BLOCK - 1, None)))
        self.drafter.allocate(ROWS, 2000, VOCABULARY, CPU)
        self.drafter.knows_matches_on_host = self.lag == 0
        self.clock = _Clock(self.cost, self.noise)
        self.width = self._adaptive_width() if self.adaptive else FixedWidth(BLOCK)
        self.tokens = self.cycles = 0

    def _adaptive_width(self) -> AdaptiveWidth:
        seconds = [[self.cost(int(n), int(w), w > 1) for w in WIDTHS] for n in LOADS]
        skips = self.skips_draft and self.copies
        draft = [self.cost(int(n), BLOCK, True) - self.cost(int(n), BLOCK, False) for n in LOADS]
        costs = CostTable(LOADS, WIDTHS, np.array(seconds), draft=np.array(draft) if skips else 0.0)
        copies = CopyWidths(costs, ROWS, BLOCK - 1, skips) if self.copies else None
        chooser = WidthChooser(costs, SurvivalEstimate(ROWS, BLOCK - 1))
        backends = SimpleNamespace(apply=lambda width: None)
        group = SimpleNamespace(world_size=1, rank_in_group=0)
        return AdaptiveWidth(chooser, backends, self.clock, ROWS, group, copies=copies)

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
            positions=packed_ranges(starts, counts, CPU),
            prefix_lens=starts,
            extend_lens=counts,
            num_running=0,
            is_continued=[False] * len(texts),
            reqs=self.reqs,
        )
        self.width.begin_prefill(prompts)
        self.drafter.begin_prefill(prompts)
        self.drafter.prefill(prompts, None, None, torch.tensor([text.answer[0] for text in texts]))
        self.committed = {row: len(text.prompt) for row, text in enumerate(texts)}

    def _cycle(self, running: dict[int, Text]):
        rows = list(running)
        committed = torch.tensor([self.committed[row] for row in rows])
        batch = SimpleNamespace(
            reqs=[self.reqs[row] for row in rows],
            req_pool_indices=torch.tensor(rows),
            seq_lens=committed,
            seq_lens_cpu=committed,
        )
        matches = self.drafter.look_up(batch) if self.copies else None
        plan = self.width.choose_width(batch, False, matches)
        drafter = self.drafter if self.copies else self.draft
        slots = BLOCK if plan.width > 1 else 1
        cycle = SimpleNamespace(
            bs=len(rows), verify_len=slots, committed=committed, req_pool_indices=batch.req_pool_indices,
            tokens=torch.tensor([[self.draft.texts[row][n]] * slots for row, n in self._places(rows)]),
        )  # fmt: skip
        block = (drafter.propose if plan.drafts else drafter.propose_copies)(cycle).narrowed(plan.width)
        cycle.verify_len = plan.width
        target = [
            (self.draft.texts[row][n + 1 :] + [VOCABULARY] * BLOCK)[: plan.width]
            for row, n in self._places(rows)
        ]
        accepted = accept_matching_prefix(block.tokens, torch.tensor(target))
        drafter.commit(
            cycle, None, SimpleNamespace(tokens=torch.tensor(target), accept_len=accepted.accept_len)
        )
        proposals = self.drafter.proposals if self.copies else None
        was_drafted = proposals is None or proposals.was_drafted
        if self.adaptive:
            self.width.on_launched(plan, was_drafted)
        else:
            self.clock.seconds += self.cost(len(rows), plan.width, was_drafted)
        accept_lens = accepted.accept_len.tolist()
        self.chosen.append(plan.width)
        self.cycles += len(rows)
        for row, kept in zip(rows, accept_lens, strict=True):
            left = len(self.draft.texts[row]) - 1 - self.committed[row]
            self.tokens += min(kept + 1, left)
            self.committed[row] += kept + 1
            self.reqs[row].kv.kv_committed_len = self.committed[row]
            if kept + 1 >= left:
                del running[row]
        return plan, accept_lens, proposals

    def _places(self, rows):
        return [(row, self.committed[row]) for row in rows]

    def _tell(self, plan, accept_lens, proposals) -> None:
        if proposals is not None:
            self.drafter.stats.on_accept_lens(proposals, accept_lens, plan.width - 1)
        self.width.on_accept_lens(plan, accept_lens, proposals)

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens per request and cycle."""
        return self.tokens / self.cycles

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.clock.seconds

    def share_of_width(self, width: int) -> float:
        """Return the share of cycles that verified so many slots."""
        return Counter(self.chosen)[width] / len(self.chosen)


def _request(row: int, top_k: int) -> SimpleNamespace:
    params = SimpleNamespace(
        top_k=top_k, logit_bias=None, min_new_tokens=0, frequency_penalty=0.0, presence_penalty=0.0,
        repetition_penalty=1.0,
    )  # fmt: skip
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=row, kv_committed_len=0),
        output_ids=[],
        grammar=None,
        sampling_params=params,
    )
