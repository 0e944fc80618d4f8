"""Verify widths for the sake of copies: estimates, choices, and simulated servers with a useless draft."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.copy_simulation import (
    BLOCK,
    WIDTHS,
    CopySimulation,
    Text,
    common_text,
    edited,
    new_text,
)

from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE
from sglang_dflash.srt.speculative.width.chooser import Choice
from sglang_dflash.srt.speculative.width.copies import CopyEstimate, CopyWidths
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import MODES

GREEDY, SAMPLED = MODES.index("greedy"), MODES.index("sampled")
WHOLE = RULE.longest


def ints(*values: int) -> np.ndarray:
    return np.array(values)


# -- the estimate


def test_every_compared_token_is_a_label_at_its_own_length():
    """A match of 14 whose third token is wrong, and one of 5 in a plain cycle."""
    estimate = CopyEstimate(BLOCK - 1, memory=1e12)
    before = estimate.averages()[GREEDY]
    for _ in range(50):
        estimate.learn(ints(GREEDY), ints(14), ints(2), 7)
        estimate.learn(ints(GREEDY), ints(5), ints(1), 1)
    after = estimate.averages()[GREEDY]
    assert after[14] > 0.95 and after[15] > 0.95 and after[WHOLE] < 0.1 and after[5] > 0.95
    assert (after[:5] == before[:5]).all() and after[0] == 0
    assert (estimate.averages()[SAMPLED] == before).all(), "modes are learned apart"


def test_a_longer_match_is_expected_to_be_better():
    averages = CopyEstimate(BLOCK - 1).averages()[GREEDY, RULE.shortest :]
    assert (np.diff(averages) > 0).all() and averages[0] == 0.5


def test_tokens_are_those_of_a_copy_that_grows_with_each_token():
    estimate = CopyEstimate(BLOCK - 1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        estimate.learn(ints(GREEDY, SAMPLED), rng.integers(3, 17, 2), rng.integers(0, 8, 2), 7)
    averages = estimate.averages()
    for mode, length in ((GREEDY, 3), (SAMPLED, 12), (GREEDY, WHOLE)):
        survival, want = 1.0, [1.0]
        for k in range(BLOCK - 1):
            survival *= averages[mode, min(length + k, WHOLE)]
            want.append(want[-1] + survival)
        got = estimate.tokens(ints(mode), ints(length), WIDTHS)[0]
        assert got == pytest.approx([want[width - 1] for width in WIDTHS])
    assert estimate.tokens(ints(GREEDY), ints(0), WIDTHS).tolist() == [[1, 1, 1, 1]], "no match, no copy"


# -- the choice


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_the_fastest_of_all_options_is_chosen(seed, n, index, skips_draft):
    rng = np.random.default_rng(seed)
    seconds = 1 + np.cumsum(rng.random(4))
    draft = 0.8 * (seconds[1] - 1) * rng.random()
    costs = CostTable(ints(1, 8), WIDTHS, np.stack([seconds, seconds]), draft=np.full(2, draft))
    copies = CopyWidths(costs, 8, BLOCK - 1, skips_draft)
    matches, modes = rng.integers(0, 17, n), rng.integers(0, 4, n)
    matches[0] = 9
    by_draft = 1 + np.concatenate(([0.0], np.cumsum(rng.random(3))))
    base = Choice(n, int(WIDTHS[index]), index, False, n * by_draft, seconds)
    chosen = copies.choose(base, modes, matches)
    copied = copies.estimate.tokens(modes, matches, WIDTHS)
    speeds = {}
    for i in range(index, 4):
        better = np.where(matches > 0, np.maximum(copied[:, i], by_draft[i]), by_draft[i])
        speeds[i, True] = better.sum() / seconds[i]
        if skips_draft:
            speeds[i, False] = copied[:, i].sum() / (seconds[i] - draft * (i > 0))
    fastest = max(speeds.values())
    if chosen is base:
        assert fastest <= 1.03 * speeds[index, True] + 1e-9
    else:
        assert speeds[chosen.index, chosen.drafts] == pytest.approx(fastest)
        assert chosen.width == WIDTHS[chosen.index]


def test_without_a_match_or_in_a_probe_the_drafts_width_stays():
    costs = CostTable(ints(1, 8), WIDTHS, np.full((2, 4), [1.0, 1.1, 1.2, 1.3]))
    copies, ones = CopyWidths(costs, 8, BLOCK - 1, True), np.ones(4)
    plain, probe = (Choice(1, 1, 0, is_probe, ones, 1 + 0.1 * ones) for is_probe in (False, True))
    assert copies.choose(plain, ints(GREEDY), ints(0)) is plain
    assert copies.choose(probe, ints(GREEDY), ints(WHOLE)) is probe
    assert copies.choose(plain, ints(GREEDY), ints(WHOLE)).width == 8


def test_results_tell_which_copies_go_on():
    """As on a GPU, where the host learns of matches with the accept lengths."""
    costs = CostTable(ints(1, 8), WIDTHS, np.ones((2, 4)))
    copies, rows = CopyWidths(costs, 8, BLOCK - 1, True), np.arange(4)
    modes, none = np.zeros(4, dtype=int), np.zeros(4, dtype=int)
    unknown = copies.expected_matches(rows)
    assert unknown.tolist() == [1, 1, 1, 1]
    copies.on_accept_lens(rows, modes, unknown, ints(5, -5, 0, 16), 0, none)
    assert copies.expected_matches(rows).tolist() == [6, 1, 1, 16], "after a plain cycle"
    after = copies.estimate.averages()[GREEDY]
    assert after[1] == pytest.approx((2 + 4 * _unlearned(1)) / 8), "two of four matched and were right"
    assert (after[2:] == CopyEstimate(BLOCK - 1).averages()[GREEDY, 2:]).all(), "none was expected"
    copies.on_accept_lens(rows, modes, ints(6, 6, 6, 6), ints(6, -6, 0, 6), 3, ints(3, 3, 0, 2))
    assert copies.expected_matches(rows).tolist() == [9, 1, 1, 1], "after a verified one"
    after = copies.estimate.averages()[GREEDY]
    assert after[6] == pytest.approx((2 + 4 * _unlearned(6)) / 7), "one was passed over for the draft"
    copies.reset(ints(0))
    assert copies.expected_matches(ints(0)).tolist() == [1]


def _unlearned(length: int) -> float:
    return CopyEstimate(BLOCK - 1).averages()[GREEDY, length]


def test_cycles_without_the_draft_teach_what_others_take():
    table = CostTable(ints(1, 8), ints(1, 8), np.array([[1.0, 2.0], [3.0, 6.0]]), draft=ints(1, 3) / 2)
    assert table.draft_share(1).tolist() == [0.0, 0.25] and table.draft_share(8).tolist() == [0.0, 0.25]
    for _ in range(50):
        assert abs(table.observe(8, 8, 4.5, was_drafted=False)) < 1e-6
        assert abs(table.observe(8, 1, 3.0, was_drafted=False)) < 1e-6
    assert table.seconds(8).tolist() == pytest.approx([3.0, 6.0])


# -- on simulated servers


def cost(row: float, draft: float = 0.3):
    """Seconds of a cycle: a plain step takes 1, each further row `row`, a draft `draft`."""
    return lambda n, width, drafts: 1 + row * n * (width - 1) + draft * drafts


def texts(kind: str, count: int, seed: int = 3) -> list[Text]:
    """Make requests that edit their prompt (also sampled), write new text or common phrases."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        if kind == "common":
            made.append(Text(common_text(rng, 300), common_text(rng, 400)))
            continue
        prompt = new_text(rng, 300)
        if kind == "new":
            made.append(Text(prompt, new_text(rng, 400)))
        else:
            every, top_k = (6, 50) if kind == "sampled edit" else (25, 1)
            made.append(Text(prompt, edited(rng, prompt, every), top_k))
    return made


def served(kind: str, count: int, row: float = 0.005, **fields) -> CopySimulation:
    """Serve a batch after another one, from which the server knows its draft."""
    server = CopySimulation(cost(row), **fields)
    return server.run(texts(kind, count, seed=2)).run(texts(kind, count))


@pytest.mark.parametrize("skips_draft", [True, False], ids=["any draft", "a draft that always runs"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", ["edit", "sampled edit"])
def test_copies_are_used_however_weak_the_draft_is(kind, count, skips_draft):
    adaptive = served(kind, count, skips_draft=skips_draft)
    whole = served(kind, count, adaptive=False, skips_draft=skips_draft)
    assert whole.tokens_per_cycle > 1.6
    assert adaptive.tokens_per_cycle >= 0.95 * whole.tokens_per_cycle
    assert adaptive.speed > whole.speed, "text between two copies is decoded plainly"
    if skips_draft:
        assert adaptive.draft.forwards < 40, "it runs at first, and in probes"


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", ["new", "common"])
def test_text_without_repetition_is_decoded_plainly(kind, count, lag):
    with_copies, without = (served(kind, count, copies=copies, lag=lag) for copies in (True, False))
    assert without.share_of_width(1) > 0.95
    assert with_copies.share_of_width(1) > 0.9
    assert with_copies.probes <= without.probes + 2
    assert with_copies.speed >= 0.99 * without.speed


@pytest.mark.parametrize("count", [1, 4])
def test_late_knowledge_is_enough(count):
    """Where rows are cheap, blocks stay wide from the end of one copy to the next."""
    late, whole = served("edit", count, lag=2), served("edit", count, lag=2, adaptive=False)
    assert late.tokens_per_cycle > 0.95 * whole.tokens_per_cycle
    assert late.speed > 1.05 * whole.speed


@pytest.mark.parametrize(("row", "is_wide"), [(0.005, True), (0.1, False)])
def test_one_copying_request_in_a_batch(row, is_wide):
    """It is verified widely if the batch gains, as all requests get the same width."""
    batch = [*texts("edit", 1), *texts("new", 3)]
    server = CopySimulation(cost(row)).run(batch).run(batch)
    whole = CopySimulation(cost(row), adaptive=False).run(batch).run(batch)
    assert server.speed >= 0.97 * max(whole.speed, plain_speed(batch))
    assert (server.share_of_width(1) < 0.9) is is_wide


def plain_speed(batch: list[Text]) -> float:
    """Tokens per second of plain cycles; each takes a second."""
    lengths = [len(text.answer) for text in batch]
    return sum(lengths) / max(lengths)


@pytest.mark.parametrize("kind", ["edit", "new"])
@pytest.mark.parametrize("hit_rate", [0.85, 0.5])
def test_with_a_useful_draft_nothing_is_lost(kind, hit_rate):
    fixed = served(kind, 4, hit_rate=hit_rate, adaptive=False)
    adaptive = served(kind, 4, hit_rate=hit_rate)
    without = served(kind, 4, hit_rate=hit_rate, copies=False)
    assert adaptive.speed >= 0.97 * max(fixed.speed, without.speed)


def test_the_draft_is_not_judged_by_copies():
    """What copies yield is no reason to draft, nor what drafts yield a reason to copy."""
    server = served("edit", 4, hit_rate=0.002)
    report = server.width.report()
    assert report["undrafted"] > 50
    assert report["accept_probs"]["greedy"]["from_token_64"][0] < 0.05
    assert report["copy_accept_probs"]["greedy"][-1] > 0.9
