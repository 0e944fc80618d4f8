"""Rules of the verify width compared with exhaustive search, and the chooser on simulated servers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.width_simulation import WIDTHS, Simulation, best_speed, mean_tokens, smooth_cost, staircase_cost

from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.policy import (
    Constants,
    Exploration,
    WidthState,
    contender,
    expected_tokens,
    explore,
    fastest_width,
    never_cheaper_when_wider,
    probe_loss,
    update_width,
)

GOOD = np.array([0.85, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5])
WEAK = np.array([0.35, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2])
RANDOM = np.full(7, 0.002)
# Least speed in multiples of the best fixed width, which knows everything from the first cycle on.
BAR = 0.97

seconds_rows = st.lists(st.floats(0.1, 100), min_size=1, max_size=8).map(np.array)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 4))
def test_expected_tokens_are_the_mean_over_all_outcomes(seed, n, depth):
    accept_probs = np.random.default_rng(seed).random((n, depth))
    widths = np.arange(1, depth + 2)
    mean = np.zeros(len(widths))
    for request in accept_probs:
        for outcome in itertools.product((0, 1), repeat=depth):
            probability = np.prod(np.where(outcome, request, 1 - request))
            for index, width in enumerate(widths):
                mean[index] += probability * (1 + np.cumprod(outcome[: width - 1]).sum())
    np.testing.assert_allclose(expected_tokens(accept_probs, widths), mean, rtol=1e-9)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 8),
    st.sampled_from([smooth_cost(), staircase_cost(), smooth_cost(0.02, 0.2)]),
)
def test_the_best_width_is_the_best_of_all(seed, n, cost):
    accept_probs = np.random.default_rng(seed).random((n, 7))
    seconds = np.array([cost(n, int(w)) for w in WIDTHS])
    tokens = expected_tokens(accept_probs, WIDTHS)
    speeds = [tokens[i] / seconds[i] for i in range(len(WIDTHS))]
    chosen = fastest_width(tokens, seconds, free_rows=1.0)
    assert speeds[chosen] == pytest.approx(max(speeds))


def test_a_staircase_is_climbed_to_its_top_not_to_its_first_step():
    """Width 2 pays for a new tile and loses; width 8 fills the same tile and wins."""
    tokens, seconds = np.array([1.0, 1.5, 2.1, 2.6]), np.array([1.0, 1.6, 1.6, 1.6])
    assert tokens[1] / seconds[1] < tokens[0] / seconds[0] < tokens[3] / seconds[3]
    assert fastest_width(tokens, seconds) == 3


def test_free_rows_keep_the_widest():
    tokens, seconds = np.array([1.0, 1.0, 1.0]), np.array([1.0, 1.01, 1.02])
    assert fastest_width(tokens, seconds) == 2
    assert fastest_width(tokens, seconds, free_rows=1.0) == 0


@given(seconds_rows)
def test_monotone_costs_are_the_nearest_ones(row):
    fitted = never_cheaper_when_wider(row)
    assert (np.diff(fitted) >= -1e-9).all()
    assert fitted.sum() == pytest.approx(row.sum())
    # Optimal iff no step up or down of a tail or pool improves it; compare with the known minimax formula.
    n = len(row)
    minimax = [max(min(row[a : b + 1].mean() for b in range(k, n)) for a in range(k + 1)) for k in range(n)]
    np.testing.assert_allclose(fitted, minimax, rtol=1e-9)


@pytest.mark.parametrize(("gain", "decisions"), [(1.15, 1), (1.03, 5), (1.01, 25), (1.004, None)])
def test_a_width_moves_the_sooner_the_more_it_gains(gain, decisions):
    state = WidthState(0, np.zeros(2), cycles=100, num_requests=4)
    tokens, seconds = np.array([1.0, gain * 1.2]), np.array([1.0, 1.2])
    moved_at = None
    for decision in range(1, 200):
        state = update_width(state, tokens, seconds, 4)
        if state.index == 1:
            moved_at = decision
            break
    assert moved_at == decisions


def test_a_width_stays_a_while_unless_the_load_doubles_or_halves():
    better = np.array([1.0, 1.25]), np.array([1.0, 1.2])
    fresh = WidthState.fresh(0, 2, 8)
    for load in (5, 8, 15):
        state = fresh
        for _ in range(Constants.dwell - 1):
            state = update_width(state, *better, load)
            assert state.index == 0
        assert update_width(state, *better, load).index == 1
    assert update_width(fresh, *better, 16).index == update_width(fresh, *better, 4).index == 1


@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.sampled_from([0.001, 0.005, 0.02]))
def test_probing_never_costs_more_than_its_share(seed, current, share):
    rng = np.random.default_rng(seed)
    tokens = 1 + np.cumsum(rng.random(4))
    seconds = np.cumsum(rng.random(4) + 0.05)
    uncertainty = rng.choice([0.0, 0.05, 0.3]) * rng.random(4)
    constants, state = Constants(probe_share=share), Exploration()
    lost, passed, probed = 0.0, 0.0, set()
    for _ in range(3000):
        state, index = explore(state, current, tokens, seconds, uncertainty, constants)
        passed += seconds[current]
        if index is not None:
            lost += probe_loss(current, index, tokens, seconds)
            probed.add(index)
        assert lost <= share * (passed + 200 * seconds[current]) + 1e-9
    if share == 0.02 and uncertainty.max() < 0.03:
        assert (
            probed >= set(range(current + 1, 4))
            or max(probe_loss(current, i, tokens, seconds) for i in range(4)) > 20 * seconds[current]
        )


# -- on simulated servers


@pytest.mark.parametrize("n", [1, 16, 64])
@pytest.mark.parametrize("accept_probs", [GOOD, WEAK, RANDOM], ids=["good", "weak", "random"])
@pytest.mark.parametrize(
    "cost", [smooth_cost(), staircase_cost(), smooth_cost(0.5, 0.002)], ids=["smooth", "stairs", "dear draft"]
)
def test_never_much_slower_than_the_best_fixed_width(n, accept_probs, cost):
    server = Simulation(cost, noise=0.1).run(1000, accept_probs, range(n))
    assert server.speed >= BAR * best_speed(cost, accept_probs, n)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_wrong_costs_at_start_up_are_corrected(factor):
    """The table says that wide blocks cost twice or half their true cost."""
    cost = smooth_cost(0.3, 0.03)
    server = Simulation(cost, noise=0.1, table=lambda n, w: cost(n, w) * (factor if w > 2 else 1.0))
    server.run(2500, GOOD, range(8))
    assert server.run(500, GOOD, range(8)).speed >= 0.95 * best_speed(cost, GOOD, 8)


@pytest.mark.parametrize("seed", range(3))
def test_costs_a_little_wrong_at_start_up_are_corrected_soon(seed):
    """By a tenth, which makes the second best width the best; measured on two busy cores."""
    cost = {1: 31.4, 2: 49.7, 4: 55.8, 8: 68.8}
    accept_probs = np.array([0.83, 0.66, 0.57, 0.53, 0.55, 0.54, 0.8])
    table = {**cost, 4: 1.1 * cost[4], 8: 0.94 * cost[8]}
    server = Simulation(lambda n, w: cost[w], noise=0.12, seed=seed, table=lambda n, w: table[w])
    server.run(300, accept_probs, range(16))
    assert server.usual() == 4
    assert server.speed >= BAR * best_speed(server.cost, accept_probs, 16)


def test_a_contender_may_well_be_faster():
    tokens, seconds = np.array([1.0, 1.8, 2.6, 3.0]), np.array([1.0, 1.5, 2.0, 2.2])
    speed = tokens / seconds
    assert contender(3, tokens, seconds, np.array([0.1, 0.1, 0.1, 0.0])) == 2
    assert contender(3, tokens, seconds, np.array([0.1, 0.1, 0.01, 0.0])) == 1, (
        "the nearest one is well known"
    )
    assert contender(3, tokens, seconds, np.full(4, 0.01)) is None
    assert np.log(speed[3] / speed[0]) > 0.3
    assert contender(3, tokens, seconds, np.array([0.15, 0.01, 0.01, 0.0])) is None, (
        "more than two standard deviations slower"
    )


@pytest.mark.parametrize("accepted", [0, 7], ids=["nothing accepted", "everything accepted"])
@pytest.mark.parametrize("accept_probs", [GOOD, RANDOM], ids=["good", "random"])
def test_a_few_tokens_do_not_decide_for_many_requests(accept_probs, accepted):
    """The server's own warm-up request, say."""
    cost = smooth_cost()
    server = Simulation(cost)
    for _ in range(2):
        server.chooser.on_accept_lens(np.array([0]), np.array([0]), 8, np.array([accepted]))
    assert server.run(100, accept_probs, range(48)).speed >= 0.95 * best_speed(cost, accept_probs, 48)


def test_first_tokens_of_answers_say_little_about_later_ones():
    """First tokens are accepted less often, which makes width 1 the fastest; later ones are not."""

    def cost(n, width):
        return {1: 1.0, 2: 1.9, 4: 2.3, 8: 3.0}[width]

    server = Simulation(cost, noise=0.1, young=0.7, grown_up=20)
    assert best_speed(cost, 0.7 * GOOD, 48) == 48
    server.run(25, GOOD, range(48))
    assert server.run(150, GOOD, range(48)).chosen.count(4) > 120


@pytest.mark.parametrize(
    ("knows_reads", "is_enough"), [(True, True), (False, False)], ids=["known", "not known"]
)
def test_long_contexts_make_wide_blocks_cheap(knows_reads, is_enough):
    """Reading them costs the same at every width; taken for a slower machine, it would keep width 1."""
    cost = smooth_cost(0.3, 0.06)
    server = Simulation(cost, noise=0.1, reads=1e-4, knows_reads=knows_reads)
    server.run(100, GOOD, range(32))
    assert server.usual() == 1
    server.context = 4000
    server.run(400, GOOD, range(32))
    best = best_speed(lambda n, width: cost(n, width) + 1e-4 * n * 4000, GOOD, 32)
    assert bool(server.speed >= BAR * best) is is_enough


def test_a_change_of_acceptance_is_followed_down_and_up():
    cost = smooth_cost(0.3, 0.02)
    server = Simulation(cost, noise=0.1).run(500, GOOD, range(16))
    wide = server.usual()
    server.run(1000, RANDOM, range(16))
    assert server.chosen[150:].count(1) > 0.9 * 850, (
        "16 requests show within 150 cycles that a draft is useless"
    )
    assert server.speed >= 0.95 * best_speed(cost, RANDOM, 16)
    server.run(1500, GOOD, range(16))
    assert server.usual() == wide
    assert server.speed >= 0.93 * best_speed(cost, GOOD, 16)


def test_a_change_of_load_is_followed_at_once():
    cost = smooth_cost(0.1, 0.03)
    server = Simulation(cost).run(300, WEAK, range(2))
    few = server.usual()
    server.run(20, WEAK, range(64))
    assert few > 1
    assert set(server.chosen[1:]) == {1}
    assert set(server.run(20, WEAK, range(2)).settled[1:]).isdisjoint({1})


def test_a_decision_holds_while_few_requests_change():
    def choose(count):
        return chooser.choose(np.arange(count), np.zeros(count, dtype=int))

    chooser = Simulation(smooth_cost()).run(50, GOOD, range(16)).chooser
    chooser.on_prefill(np.arange(16))
    choose(16)
    held = choose(16)
    chooser.on_prefill(np.arange(4))
    assert choose(16) is held, "four of sixteen are new"
    assert choose(11) is not held, "nine have left"
    held = choose(11)
    chooser.on_prefill(np.arange(3))
    assert choose(11) is not held, "three of eleven are new"


def test_two_kinds_of_requests():
    """Each request's acceptance is remembered: when the good ones end, the width changes."""
    cost = smooth_cost(0.3, 0.02)
    accept_probs = np.concatenate([np.tile(GOOD, (8, 1)), np.tile(RANDOM, (8, 1))])
    server = Simulation(cost).run(600, accept_probs, range(16))
    mixed = max(
        (8 * mean_tokens(GOOD, int(w)) + 8 * mean_tokens(RANDOM, int(w))) / cost(16, int(w)) for w in WIDTHS
    )
    assert server.speed >= BAR * mixed
    estimate = server.chooser.estimate
    all_greedy = np.zeros(8, dtype=int)
    good = expected_tokens(estimate.accept_probs(np.arange(8), all_greedy), WIDTHS)[-1] / 8
    bad = expected_tokens(estimate.accept_probs(np.arange(8, 16), all_greedy), WIDTHS)[-1] / 8
    assert good > 1.3 * bad
    estimate.reset(np.arange(16))
    fresh = estimate.accept_probs(np.arange(16), np.zeros(16, dtype=int))
    assert (fresh == fresh[0]).all()


def test_modes_are_learned_apart():
    estimate = SurvivalEstimate(8, 3)
    for _ in range(100):
        estimate.learn(np.array([0, 1]), np.array([0, 2]), 3, np.array([[3, 0]]))
    estimate.reset(np.arange(2))
    greedy, sampled, drawn = (estimate.averages(mode)[64][0] for mode in range(3))
    assert greedy > 0.95 and drawn < 0.05 and 0.5 < sampled < 0.9


@pytest.mark.parametrize("seed", range(2))
def test_no_thrashing_at_a_boundary(seed):
    """Two widths equally fast, noisy times: at most one move in a hundred cycles."""
    per_draft = (mean_tokens(GOOD, 4) / mean_tokens(GOOD, 2) - 1) / 2

    def cost(n, width):
        # Widths 2 and 4 exactly as fast as each other, the others slower.
        return {1: 0.8, 2: 1.0, 4: 1 + 2 * per_draft, 8: 3.0}[width]

    server = Simulation(cost, noise=0.2, seed=seed).run(2000, GOOD, range(4))
    assert server.moves() <= 20
    assert server.speed >= BAR * best_speed(cost, GOOD, 4)


def test_probing_keeps_to_its_budget():
    cost = smooth_cost(0.5, 0.05)
    server = Simulation(cost).run(200, RANDOM, range(16))
    server.run(2000, RANDOM, range(16))
    assert set(server.chosen) - {1}, "never probed"
    assert server.speed >= 0.994 * best_speed(cost, RANDOM, 16)


# -- estimates and costs


def labels(accepted: np.ndarray, drafted: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Label a block of `depth` drafted tokens from the accept lengths of a verify of `drafted` tokens.

    Args:
        accepted: accepted drafted tokens per request. [n]
        drafted: drafted tokens that were verified.
        depth: drafted tokens of the whole block, K.

    Returns:
        is_labelled, is_accepted: both [n, K] bool.
    """
    position = np.arange(depth)
    is_accepted = position < accepted[:, None]
    return (position <= accepted[:, None]) & (position < drafted), is_accepted


def test_labels():
    is_labelled, is_accepted = labels(np.array([0, 2, 3]), drafted=3, depth=5)
    assert is_labelled.tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert is_accepted.tolist() == [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]


def test_averages_are_those_of_the_labels():
    """Labels counted one by one; two modes, three ages, blocks of different widths."""
    rng = np.random.default_rng(3)
    estimate = SurvivalEstimate(8, 5, memory=1e12)
    labelled, right = np.zeros((2, 3, 5)), np.zeros((2, 3, 5))
    num_emitted = np.array([0, 0, 0, 10, 10, 40, 40, 70])
    estimate.reset(np.arange(8), num_emitted)
    for _ in range(20):
        modes, drafted = rng.integers(0, 2, 8), int(rng.integers(1, 6))
        accepted = rng.integers(0, drafted + 1, 8)
        estimate.learn(np.arange(8), modes, drafted, accepted[None])
        for request, is_labelled, is_right in zip(range(8), *labels(accepted, drafted, 5), strict=True):
            age = 0 if num_emitted[request] < 16 else 1 if num_emitted[request] < 64 else 2
            labelled[modes[request], age] += is_labelled
            right[modes[request], age] += is_labelled & is_right
        num_emitted += accepted + 1
    for mode in range(2):
        young, middle, old = estimate.averages(mode).values()
        before = 0.7
        for k in range(5):
            before = (right[mode, 0, k] + 2 * before) / (labelled[mode, 0, k] + 2)
            assert young[k] == pytest.approx(before)
        for age, younger, found in ((1, young, middle), (2, middle, old)):
            expected = 1 / (1 + np.exp(-np.log(younger / (1 - younger)) - 0.5))
            assert found == pytest.approx((right[mode, age] + 2 * expected) / (labelled[mode, age] + 2))


@pytest.mark.parametrize("drafted", [5, 0])
def test_cycles_learned_together_are_learned_as_one_after_the_other(drafted):
    rng = np.random.default_rng(4)
    rows, modes = np.arange(6), np.array([0, 0, 1, 1, 3, 0])
    together, one_by_one = (SurvivalEstimate(6, 5, memory=20.0) for _ in range(2))
    for estimate in (together, one_by_one):
        estimate.reset(rows, np.array([0, 15, 0, 60, 3, 0]))
        estimate.learn(rows, modes, 3, np.array([[3, 1, 0, 2, 3, 3]]))
        estimate.averages(0)  # labels are compared with the averages of here
    accepted = rng.integers(0, drafted + 1, (7, 6))
    together.learn(rows, modes, drafted, accepted)
    for cycle in accepted:
        one_by_one.learn(rows, modes, drafted, cycle[None])
    assert together.accept_probs(rows, modes) == pytest.approx(one_by_one.accept_probs(rows, modes))
    for mode in range(4):
        for age, average in together.averages(mode).items():
            assert average == pytest.approx(one_by_one.averages(mode)[age])


def test_an_estimate_finds_the_truth_and_keeps_what_is_not_observed():
    rng = np.random.default_rng(0)
    estimate = SurvivalEstimate(16, 7, memory=3000)
    rows, modes = np.arange(16), np.zeros(16, dtype=int)
    for _ in range(600):
        is_accepted = rng.random((16, 7)) < GOOD
        estimate.learn(rows, modes, 7, is_accepted.cumprod(axis=1).sum(axis=1)[None])
    assert estimate.averages(0)[64] == pytest.approx(GOOD, abs=0.06)
    before = estimate.averages(0)[64]
    for _ in range(5000):
        estimate.age()
    assert estimate.averages(0)[64] == pytest.approx(before, abs=0.06)
    for _ in range(10):
        estimate.learn(rows[:4], modes[:4], 7, np.zeros((1, 4), dtype=int))
    assert estimate.averages(0)[64][0] < 0.3, "a few probes are believed after a long time without"


def test_costs_between_and_beyond_what_was_measured():
    measured = np.array([[1.0, 2.0], [3.0, 6.0]])
    table = CostTable(np.array([2, 6]), np.array([1, 4]), measured)
    assert table.seconds(1).tolist() == pytest.approx([1.0, 2.0])
    assert table.seconds(4).tolist() == pytest.approx([2.0, 4.0])
    assert table.seconds(12).tolist() == pytest.approx([6.0, 12.0])
    padded = CostTable(np.array([2, 6]), np.array([1, 4]), measured, padded=True)
    assert padded.seconds(3).tolist() == pytest.approx([3.0, 6.0])


def test_a_longer_context_costs_every_width_the_same():
    measured = np.array([[1.0, 2.0], [3.0, 6.0]])
    table = CostTable(np.array([2, 6]), np.array([1, 4]), measured, reads=np.array([0.01, 0.01]), context=100)
    assert table.seconds(2).tolist() == table.seconds(2, 200).tolist() == pytest.approx([1.0, 2.0])
    assert table.seconds(2, 300).tolist() == pytest.approx([2.0, 3.0])
    assert table.seconds(4, 500).tolist() == pytest.approx([3.0, 5.0])
    assert table.seconds(6, 0).tolist() == pytest.approx([1.5, 3.0]), "no cycle is free"
    for _ in range(30):
        assert abs(table.observe(2, 1, 2.0, num_tokens=300)) < 1e-6
    assert table.seconds(2).tolist() == pytest.approx([1.0, 2.0]), "a long context is no slower machine"


def test_costs_follow_a_slower_machine_and_outlast_a_pause():
    table = CostTable(np.array([1, 8]), np.array([1, 4]), np.array([[1.0, 2.0], [3.0, 6.0]]))
    for _ in range(100):
        table.observe(8, 4, 9.0)
    assert table.seconds(8)[1] == pytest.approx(9.0, rel=0.02)
    assert 3.2 < table.seconds(8)[0] < 4.6, "what slows one width mostly slows them all"
    before = table.seconds(8)[1]
    table.observe(8, 4, 900.0)
    assert table.seconds(8)[1] < 1.12 * before
    table.observe_gaps(8, 4, [0.5])
    table.observe_gaps(8, 1, [100.0])
    assert table.gap(8)[0] < 0.6
    assert table.seconds(8).tolist() == pytest.approx(table.cycle_seconds(8) + table.gap(8))


def test_gaps_after_verified_blocks_are_kept_apart_if_the_host_waits_for_lengths():
    table = CostTable(np.array([1, 8]), np.array([1, 2, 4]), np.ones((2, 3)), waits_for_accept_lens=True)
    assert table.gap(1).tolist() == [0.0, 0.0, 0.0]
    table.observe_gaps(1, 4, [0.5])
    assert table.gap(8).tolist() == [0.5, 0.5, 0.5], "nothing is known about plain cycles"
    table.observe_gaps(8, 1, [0.01])
    assert table.gap(1).tolist() == [0.01, 0.5, 0.5]
    table.observe_gaps(1, 2, [0.1])
    assert table.gap(1)[0] == 0.01 and 0.1 < table.gap(1)[1] == table.gap(1)[2] < 0.5


def test_a_slower_machine_slows_all_widths_and_one_slow_cycle_hardly_any():
    table = CostTable(np.array([1, 8]), np.array([1, 4]), np.array([[1.0, 2.0], [3.0, 6.0]]))
    for _ in range(20):
        table.observe(8, 4, 1.2 * 6.0)
    assert table.seconds(8).tolist() == pytest.approx([1.2 * 3.0, 1.2 * 6.0], rel=0.03)
    assert table.seconds(1).tolist() == pytest.approx([1.2, 2.4], rel=0.03)
    table.observe(8, 1, 1.5 * 3.6)
    assert table.seconds(8)[0] < 1.25 * 3.6


def test_cycles_observed_together_weigh_as_much():
    one_by_one, together = (
        CostTable(np.array([1, 8]), np.array([1, 4]), np.array([[1.0, 2.0], [3.0, 6.0]])) for _ in range(2)
    )
    for _ in range(4):
        one_by_one.observe(8, 4, 7.0)
    together.observe(8, 4, 7.0, cycles=4)
    assert together.seconds(8).tolist() == pytest.approx(one_by_one.seconds(8).tolist(), rel=0.01)


def test_costs_are_uncertain_until_they_were_observed():
    table = CostTable(np.array([1, 8]), np.array([1, 2, 4]), np.ones((2, 3)))
    assert table.uncertainty(8, 1).tolist() == pytest.approx([0.1 * 2**0.5, 0.0, 0.1 * 2**0.5])
    assert 0 < table.uncertainty(4, 1)[2] < table.uncertainty(8, 1)[2], (
        "between two rows their errors partly cancel"
    )
    for _ in range(40):
        table.observe(8, 2, 1.0)
        table.observe(8, 4, 1.0)
    seen, unseen = table.uncertainty(8, 1)[[2, 0]]
    assert seen < 0.04 < unseen
    for _ in range(40):
        table.observe(8, 2, 1.0)
    assert seen < table.uncertainty(8, 1)[2] < 0.06, "what is not observed may have changed"
