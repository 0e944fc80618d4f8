"""Verify lengths for the sake of copies: simulated servers with a useless draft, and with a useful one."""

import numpy as np
import pytest
from support.copy_simulation import CopySimulation, Text, common_text, edited, new_text

from sglang_dflash.srt.speculative.width.estimates import MODES


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


@pytest.mark.parametrize(
    ("kind", "count", "skips_draft"),  # False: a draft that always runs
    [("edit", 1, True), ("edit", 4, False), ("sampled edit", 1, False), ("sampled edit", 4, True)],
)
def test_copies_are_used_however_weak_the_draft_is(kind, count, skips_draft):
    adaptive = served(kind, count, skips_draft=skips_draft)
    whole = served(kind, count, adaptive=False, skips_draft=skips_draft)
    assert whole.tokens_per_cycle > 1.6
    assert adaptive.tokens_per_cycle >= 0.95 * whole.tokens_per_cycle
    assert adaptive.speed > whole.speed, "text between two copies is decoded plainly"
    if skips_draft:
        assert adaptive.draft.forwards < 40, "it runs at first, and in probes"


@pytest.mark.parametrize(
    ("kind", "count", "lag"), [("new", 1, 0), ("new", 4, 2), ("common", 1, 2), ("common", 4, 0)]
)
def test_text_without_repetition_is_decoded_plainly(kind, count, lag):
    with_copies, without = (served(kind, count, copies=copies, lag=lag) for copies in (True, False))
    assert without.share_of_plain > 0.95
    # If matches are known late, some cycles verify in case there is one, at no loss.
    assert with_copies.share_of_plain > (0.7 if lag else 0.9)
    assert with_copies.probes < 0.125 * with_copies.cycles
    assert with_copies.speed >= 0.99 * without.speed


@pytest.mark.parametrize("count", [1, 4])
def test_late_knowledge_is_enough(count):
    """Where rows are cheap, blocks stay wide from the end of one copy to the next."""
    late = served("edit", count, lag=2)
    whole = served("edit", count, lag=2, adaptive=False)
    assert late.tokens_per_cycle > 0.9 * whole.tokens_per_cycle
    assert late.speed > 1.05 * whole.speed


@pytest.mark.parametrize(("row", "is_wide"), [(0.005, True), (0.1, False)])
def test_one_copying_request_in_a_batch(row, is_wide):
    """It is verified widely if that pays, and the others plainly."""
    batch = [*texts("edit", 1), *texts("new", 3)]
    server = CopySimulation(cost(row)).run(batch).run(batch)
    whole = CopySimulation(cost(row), adaptive=False).run(batch).run(batch)
    # The batch ends with its slowest request: tokens per second of each cycle are not all of its speed.
    assert server.speed >= 0.9 * max(whole.speed, plain_speed(batch))
    assert (server.share_of_plain < 0.9) is is_wide


def plain_speed(batch: list[Text]) -> float:
    """Tokens per second of plain cycles; each takes a second."""
    lengths = [len(text.answer) for text in batch]
    return sum(lengths) / max(lengths)


@pytest.mark.parametrize(("kind", "hit_rate"), [("edit", 0.85), ("edit", 0.5), ("new", 0.5)])
def test_with_a_useful_draft_nothing_is_lost(kind, hit_rate):
    fixed = served(kind, 4, hit_rate=hit_rate, adaptive=False)
    adaptive = served(kind, 4, hit_rate=hit_rate)
    without = served(kind, 4, hit_rate=hit_rate, copies=False)
    assert adaptive.speed >= 0.97 * max(fixed.speed, without.speed)


def test_the_draft_is_not_judged_by_copies():
    """What copies yield is no reason to draft, nor what drafts yield a reason to copy."""
    server = served("edit", 4, hit_rate=0.002)
    report = server.width.report()
    assert server.source.stats.report()["cycles_without_draft"] > 50
    assert report["accept_probs"]["greedy"][0] < 0.2
    assert server.width.chooser.copies.averages[MODES.index("greedy"), -1] > 0.9
