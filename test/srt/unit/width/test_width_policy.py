"""Rules of the verify lengths compared with exhaustive search, and the chooser on simulated servers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.width_simulation import DEPTH, LOADS, WIDTHS, Cost, Simulation

from sglang_dflash.kernels.ops.speculative.copy_ahead import LONGEST_MATCH
from sglang_dflash.srt.speculative.cycle.plan import BatchRequests, CycleWork
from sglang_dflash.srt.speculative.width.estimates import MODES, AcceptanceEstimate, CopyEstimate, CostTable
from sglang_dflash.srt.speculative.width.extrapolation import extrapolate
from sglang_dflash.srt.speculative.width.policy import HOLD, LengthChooser, choose_lengths

GREEDY, SAMPLED = MODES.index("greedy"), MODES.index("sampled")


def ints(*values: int) -> np.ndarray:
    return np.array(values)


def greedy(n: int, num_prefills: int = 0) -> BatchRequests:
    """Describe n greedy requests in the first rows."""
    rows, modes = np.arange(n), np.zeros(n, dtype=int)
    return BatchRequests((rows.tolist(), False, num_prefills), rows, rows, modes)


# -- the rules


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_lengths_are_the_best_of_all(seed, n, max_draft_tokens, is_draft_lump):
    """Costs are staircases. With a price of each drafted request the choice is near the best."""
    rng = np.random.default_rng(seed)
    prefix_accept_prob = rng.random((n, max_draft_tokens)).cumprod(axis=1)
    steps = np.sort(rng.random(4)) + 0.5
    verify = steps[np.arange(n * max_draft_tokens + 1) * 4 // (n * max_draft_tokens + 1)]
    each = 0.0 if is_draft_lump else 0.1 * rng.random()
    draft = 0.2 * rng.random() + each * np.arange(n + 1)
    draft[0] = 0.0
    is_free, ragged_overhead = rng.random(n) < 0.3, max(0.0, rng.random() - 0.5)

    def speed(lengths):
        lengths = np.array(lengths)
        tokens = n + sum(prefix_accept_prob[i, :length].sum() for i, length in enumerate(lengths))
        seconds = verify[lengths.sum()] + draft[((lengths > 0) & ~is_free).sum()]
        return tokens / (seconds + ragged_overhead * bool((lengths != lengths[0]).any()))

    lengths, tokens, seconds = choose_lengths(prefix_accept_prob, is_free, verify, draft, ragged_overhead)
    best = max(map(speed, itertools.product(range(max_draft_tokens + 1), repeat=n)))
    assert speed(lengths) >= (1 - 1e-9 if is_draft_lump else 0.9) * best
    assert tokens == pytest.approx(
        n + sum(prefix_accept_prob[i, :length].sum() for i, length in enumerate(lengths))
    )
    assert seconds >= verify[lengths.sum()]


# -- costs


COST = Cost()


def table(cost: Cost = COST, plain: float = 1.0, **fields) -> CostTable:
    verify = np.array([[cost.verify(int(n), int(n * (w - 1))) for w in WIDTHS] for n in LOADS])
    verify[:, 0] *= plain
    return CostTable(LOADS, WIDTHS, verify, np.array([cost.draft_for(int(n)) for n in LOADS]), **fields)


@pytest.mark.parametrize("n", [1, 3, 16, 50, 64])
def test_costs_between_what_was_measured(n):
    cost, costs = Cost(), table()
    want = [cost.verify(n, drafted) for drafted in range(n * DEPTH + 1)]
    np.testing.assert_allclose(costs.verify(n), want, rtol=1e-9)
    np.testing.assert_allclose(costs.draft(n), [cost.draft_for(m) for m in range(n + 1)], rtol=1e-9)


def test_costs_beyond_what_was_measured_and_of_padded_forwards():
    assert table().verify(128)[0] == pytest.approx(2 * table().verify(64)[0])
    padded = table(padded=True)
    assert padded.verify(5)[0] == table().verify(8)[0] and padded.draft(3)[3] == table().draft(4)[4]
    far = table(seconds_per_context_token=0.001, context=100)
    assert far.verify(4, 4 * 500)[0] == pytest.approx(table().verify(4)[0] + 2.0)


def test_unequal_lengths_cost_what_was_measured_beyond_their_rows():
    cost = Cost(ragged_overhead=0.3)
    half = np.array([cost.cycle(np.where(np.arange(n) % 2, 0, DEPTH)) for n in LOADS])
    costs = table(cost, mixed_sample=half)
    assert costs.ragged_overhead(1) == pytest.approx(0.0) and costs.ragged_overhead(6) == pytest.approx(0.3)
    assert table(cost, mixed_sample=half - 1.0).ragged_overhead(6) == 0.0, "a cycle that took less is noise"
    assert table(cost).ragged_overhead(6) == 0.0


@pytest.mark.parametrize("num_measured", [1, 2, 3])
def test_a_load_that_was_not_measured_costs_what_its_requests_and_rows_do(num_measured):
    """In proportion to requests, four times as many rows would seem nearly free."""
    cost = Cost(row=0.01, request=0.01 if num_measured == 1 else 0.02)  # one load tells of rows alone
    verify = np.array([[cost.verify(int(n), int(n * (w - 1))) for w in WIDTHS] for n in LOADS])
    measured = slice(0, num_measured)
    found = extrapolate(verify[measured], LOADS.tolist(), WIDTHS)
    assert found == pytest.approx(verify)
    draft = np.array([[cost.draft_for(int(n), slots) for slots in (3, DEPTH)] for n in LOADS])
    assert (extrapolate(draft[measured], LOADS.tolist(), ints(4, 8))[measured] == draft[measured]).all()


def test_unequal_lengths_cost_as_much_at_a_load_that_was_not_measured():
    half = np.array([Cost(ragged_overhead=0.3).cycle(np.where(np.arange(n) % 2, 0, DEPTH)) for n in (1, 2)])
    assert table(mixed_sample=half).ragged_overhead(64) == pytest.approx(0.3)


def test_a_peak_of_the_measurement_is_noise():
    """Other processes only add to what a cycle takes, of fewer tokens and of fewer requests."""
    verify = np.array([[1.0, 1.4, 1.2, 2.0], [1.5, 1.6, 1.7, 1.8]])
    costs = CostTable(ints(1, 2), WIDTHS, verify, np.array([0.3, 0.2]))
    np.testing.assert_allclose(costs.verify(1)[WIDTHS - 1], [1.0, 1.2, 1.2, 1.8])
    assert costs.draft(1)[1] == pytest.approx(0.2)


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_served_cycles_correct_what_start_up_measured(pace):
    """An anchor-only cycle was measured far too cheap. The machine may be slower now, and some stall."""
    plain, whole = CycleWork(8, 0, 0), CycleWork(8, 8 * DEPTH, 8)
    right, wrong = table(), table(plain=0.3, tries=0)
    for number in range(80):
        work = (plain, whole)[number % 2]
        wrong.observe(work, right.expected(work) * pace * (100 if number % 30 == 3 else 1))
    ratio = right.expected(whole) / right.expected(plain)
    assert wrong.expected(whole) / wrong.expected(plain) == pytest.approx(ratio, rel=0.15)
    before = wrong.expected(whole) / wrong.expected(plain)
    for _ in range(100):
        wrong.observe(plain, 5 * right.expected(plain))
    after = wrong.expected(whole) / wrong.expected(plain)
    assert after == pytest.approx(before, rel=0.05), "a slower machine changes all costs by one factor"


# -- estimates


def test_survival_of_a_request_is_shrunk_to_its_modes_average():
    estimate = AcceptanceEstimate(8, DEPTH)
    start = estimate.prefix_accept_probs(ints(0), ints(GREEDY))
    assert (np.diff(start[0]) < 0).all() and start[0, 0] == pytest.approx(0.7)
    for _ in range(60):
        estimate.learn(ints(0, 1, 2), np.zeros(3, dtype=int), ints(7, 7, 7), ints(7, 7, 0))
    good, bad, new = estimate.prefix_accept_probs(ints(0, 2, 5), np.zeros(3, dtype=int))[:, 0]
    assert bad < 0.25 < new < 0.75 < good
    assert estimate.prefix_accept_probs(ints(0), ints(SAMPLED))[0, 0] > 0.7, (
        "its own labels count in every mode"
    )
    assert (estimate.prefix_accept_probs(ints(5), ints(SAMPLED)) == start).all(), "modes are learned apart"
    estimate.reset(ints(0))
    assert estimate.prefix_accept_probs(ints(0), ints(GREEDY))[0, 0] == pytest.approx(new)


def test_what_was_not_verified_teaches_nothing():
    """Kept to the end of what was verified, or not verified at all."""
    estimate = AcceptanceEstimate(8, DEPTH)
    before = estimate.averages
    for _ in range(20):
        estimate.learn(ints(0, 1), ints(0, 0), ints(2, 0), ints(2, 0))
    after = estimate.averages[GREEDY]
    assert (after[:2] > 0.9).all() and after[2] == pytest.approx(after[1])
    assert (estimate.averages[SAMPLED] == before[SAMPLED]).all()


def test_every_compared_token_of_a_copy_is_a_label_at_its_own_length():
    """A match of 14 whose third token is wrong, and one of 5 of which one token was compared."""
    estimate = CopyEstimate(DEPTH)
    before = estimate.averages
    for _ in range(80):
        estimate.learn(ints(GREEDY, GREEDY), ints(14, 5), ints(3, 1), ints(2, 1))
    after = estimate.averages[GREEDY]
    assert after[14] > 0.95 and after[15] > 0.95 and after[LONGEST_MATCH] < 0.1 and after[5] > 0.95
    assert (after[:5] == before[GREEDY, :5]).all()
    assert (estimate.averages[SAMPLED] == before[SAMPLED]).all()
    copied, nothing = estimate.prefix_accept_probs(ints(GREEDY, GREEDY), ints(14, 0))
    assert copied[:2] == pytest.approx(after[14:16].cumprod()) and (nothing == 0).all()


# -- on simulated servers

COSTS = {
    "rows cost": Cost(),
    "stairs": Cost(row=0.01, step=8, each=0.0),
    "dear draft": Cost(row=0.002, draft=0.2, each=0.05),
    "rows are free": Cost(row=0.0005, each=0.001),
    "unequal lengths cost": Cost(row=0.005, ragged_overhead=0.2),
    "busy": Cost(request=0.1, row=0.06, draft=0.3, each=0.05),
}
LOADS_AND_MIXES = [
    *((1, "usual"), (64, "weak"), (64, "random"), (16, "strong random"), (64, "strong usual weak random"))
]


@pytest.mark.parametrize(("n", "mix"), LOADS_AND_MIXES)
@pytest.mark.parametrize("cost", [cost for cost in COSTS if cost != "busy"])
def test_never_much_slower_than_the_best_width_for_all(n, mix, cost):
    """It is compared with a width chosen with acceptance known, in a batch that never changes."""
    assert Simulation(COSTS[cost], mix.split()).run(n).of_best_uniform >= 0.96


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize(
    "what, cost",
    [("ragged_overhead", COSTS["unequal lengths cost"]), ("read", Cost(row=0.02, draft=0.6, read=1e-5))],
)
def test_what_is_worth_measuring(what, cost, is_measured):
    """Without the measurement a batch loses to the best width for all at first, where contexts get long."""
    ignored = "" if is_measured else what
    server = Simulation(cost, "usual usual usual weak".split(), ignored=ignored).run(16)
    server.context = 8192
    assert (server.run(16, cycles=100, warm=0).of_best_uniform >= 0.97) == is_measured


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("wrong", ["plain", "verify", "draft"])
@pytest.mark.parametrize("mix", ["usual", "strong random"])
def test_a_start_up_on_a_busy_machine_is_corrected(mix, wrong, n):
    """It measured one kind of work three times too dear. Cycles are uneven while serving, and some stall."""
    server = Simulation(
        COSTS["busy"], mix.split(), wrong={wrong: 3.0}, is_steady=False, noise=0.3, stalls=0.02
    )
    assert server.run(n, cycles=500, warm=200).of_best_uniform >= 0.85


def test_a_busy_start_up_leaves_no_long_stretch_without_drafts():
    """It measured the draft ten times too dear, which pays."""
    server = Simulation(COSTS["busy"], ["usual"], wrong={"draft": 10.0}, is_steady=False)
    is_plain = "".join(str(int(lengths[0] == 0)) for lengths in server.run(1, warm=0).chosen)
    assert max(map(len, is_plain.split("0"))) < 50 and is_plain[200:].count("1") < 10


def test_an_unnoticed_error_of_start_up_is_corrected_by_probes():
    server = Simulation(COSTS["busy"], ["usual"], wrong={"verify": 3.0})
    assert server.run(1, cycles=3000, warm=1500).of_best_uniform >= 0.9


def test_load_that_comes_and_goes_changes_no_choice():
    server = Simulation(COSTS["busy"], ["usual"], pace=lambda number: 1 + 3 * (number // 50 % 2))
    assert server.run(16).of_best_uniform >= 0.97


def test_the_time_between_cycles_counts():
    """It makes whole blocks worth while, and start-up cannot measure it."""
    server = Simulation(Cost(row=0.1, draft=0.6, gap=0.75), "usual usual usual weak".split())
    assert server.run(4).of_best_uniform >= 0.97


def test_mixed_batches_gain():
    for mix in ("strong weak", "strong random"):
        assert Simulation(COSTS["dear draft"], mix.split()).run(64).of_best_uniform > 1.15


def test_a_draft_that_becomes_good_is_found():
    """Probes cost half a percent of the time."""
    server = Simulation(COSTS["rows cost"], ["random"]).run(4, cycles=1500)
    assert np.mean([lengths.sum() for lengths in server.chosen]) < 0.5 and server.chooser.num_probes > 5
    server.kinds = ["strong"]
    assert server.run(4, cycles=1500, warm=1000).of_best_uniform > 0.95


def test_a_draft_that_becomes_bad_is_given_up():
    """Averages over all labels so far would hold on to it."""
    server = Simulation(COSTS["rows cost"], ["strong"])
    server.run(16, cycles=600)
    server.kinds = ["random"]
    assert server.run(16, cycles=600).of_best_uniform > 0.95


ROWS_OF_THE_DRAFT_COST = Cost(row=0.02, draft=0.05, each=0.06)


@pytest.mark.parametrize("mix", ["usual", "strong random"])
def test_a_narrower_draft_block_is_used_where_it_pays(mix):
    """Its tokens are accepted as often, and three rows of the draft cost less than seven."""
    whole = Simulation(ROWS_OF_THE_DRAFT_COST, mix.split()).run(16, cycles=3000, warm=2000)
    server = Simulation(ROWS_OF_THE_DRAFT_COST, mix.split(), narrow=1.0).run(16, cycles=3000, warm=2000)
    assert server.speed > 1.02 * whole.speed


@pytest.mark.parametrize("n", [1, 16])
def test_looking_for_a_narrower_block_costs_less_than_a_hundredth(n):
    """Its tokens are accepted half as often: from the first cycle on, it is hardly used."""
    speed = {0.0: 0.0, 0.5: 0.0}
    for seed, narrow in itertools.product(range(3), speed):
        server = Simulation(ROWS_OF_THE_DRAFT_COST, ["usual"], narrow=narrow, seed=seed)
        speed[narrow] += server.run(n, cycles=1000, warm=0).speed
        assert 0 < server.narrow_cycles < 60 if narrow else server.narrow_cycles == 0
    assert speed[0.5] > 0.99 * speed[0.0]


def test_a_narrower_block_that_becomes_worse_is_given_up():
    server = Simulation(ROWS_OF_THE_DRAFT_COST, ["usual"], narrow=1.0)
    assert server.run(16, cycles=2000, warm=1000).narrow_cycles > 800
    server.narrow = 0.6
    assert server.run(16, cycles=1000, warm=500).narrow_cycles < 50


def test_labels_of_narrower_blocks_count_for_a_request_by_their_factor():
    """Half of the tokens of narrower blocks are accepted. One request's are as good as a whole block's."""
    estimate, mode = AcceptanceEstimate(4, DEPTH, narrow_slots=3), ints(GREEDY)
    for _ in range(300):
        estimate.learn(ints(1), mode, drafted=ints(1), accepted=ints(1))
        estimate.learn(ints(2), mode, drafted=ints(1), accepted=ints(0))
        estimate.learn(ints(1), mode, drafted=ints(1), accepted=ints(0), is_narrow=True)
        estimate.learn(ints(2), mode, drafted=ints(1), accepted=ints(0), is_narrow=True)
        estimate.learn(ints(1), mode, drafted=ints(1), accepted=ints(1), is_narrow=True)
        estimate.learn(ints(2), mode, drafted=ints(1), accepted=ints(0), is_narrow=True)
    factors = estimate.narrow_factors()[GREEDY]
    assert factors[0] == pytest.approx(0.5, abs=0.05) and (factors[3:] == 0).all()
    whole, narrow = (
        estimate.prefix_accept_probs(ints(1, 2), ints(0, 0), is_narrow) for is_narrow in (False, True)
    )
    assert whole[0, 0] > 0.8 and whole[1, 0] < 0.15
    assert narrow[:, 0] == pytest.approx(factors[0] * whole[:, 0])


def test_caps_are_kept_and_capped_requests_are_not_probed():
    caps = ints(0, 2, 7, 7)
    server = Simulation(COSTS["rows are free"], ["strong"]).run(4, caps=caps)
    chosen = np.stack(server.chosen)
    assert (chosen <= caps).all() and (chosen[:, 1:] == caps[1:]).mean() > 0.9


def test_a_choice_without_copies_is_for_several_cycles():
    chooser, caps = LengthChooser(table(), 8, probe_share=0.0), ints(DEPTH, DEPTH)
    assert chooser.choose(greedy(2), 0, ints(0, 0), caps).num_cycles == HOLD
    rows, modes = np.arange(2), np.zeros(2, dtype=int)
    for _ in range(100):
        chooser.drafts.learn(rows, modes, np.full(2, 7), np.zeros(2, dtype=int))
    assert chooser.choose(greedy(2), 0, ints(0, 0), caps).num_cycles == HOLD
    assert chooser.choose(greedy(2), 0, ints(9, 0), caps).num_cycles == 1


def test_copies_are_used_beside_a_useless_draft():
    """They compete with their own prefix_accept_prob, and need no draft."""
    chooser = LengthChooser(table(), 8)
    rows, modes = np.arange(4), np.zeros(4, dtype=int)
    for _ in range(100):
        chooser.drafts.learn(rows, modes, np.full(4, 7), np.zeros(4, dtype=int))
        chooser.copies.learn(modes, np.full(4, 9), np.full(4, 7), np.full(4, 7))
    arguments = greedy(4), 0, ints(9, 0, 0, 0), np.full(4, DEPTH)
    choice = chooser.choose(*arguments)
    assert choice.copies.tolist() == [True, False, False, False]
    assert choice.lengths.tolist() == [7, 0, 0, 0]
    always_drafting = LengthChooser(table(), 8, skips_draft=False)
    always_drafting.drafts, always_drafting.copies = chooser.drafts, chooser.copies
    choice = always_drafting.choose(*arguments)
    assert choice.lengths.tolist() == [7, 0, 0, 0] and choice.seconds > Cost().verify(4, 7)
