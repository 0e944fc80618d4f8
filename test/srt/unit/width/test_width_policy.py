"""Rules of the verify lengths compared with exhaustive search, and the policy on simulated servers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.width_simulation import DEPTH, LOADS, WIDTHS, Cost, Simulation

from sglang_dflash.srt.speculative.width.policy import (
    UNKNOWN_MATCH,
    Acceptance,
    Choice,
    Costs,
    Pace,
    Policy,
    choose_lengths,
    copy_survival,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values)


def choose(policy: Policy, n: int, matches=0, caps=DEPTH) -> Choice:
    """Choose for n requests in the first rows. matches, caps: of each request, or of all."""
    return policy.choose(np.arange(n), 0, np.broadcast_to(matches, n), np.broadcast_to(caps, n))


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

    lengths, expected = choose_lengths(prefix_accept_prob, is_free, verify, draft, ragged_overhead)
    best = max(map(speed, itertools.product(range(max_draft_tokens + 1), repeat=n)))
    assert speed(lengths) >= (1 - 1e-9 if is_draft_lump else 0.9) * best
    assert expected <= speed(lengths) * (1 + 1e-9)


def choose_of(survival, verify, draft, is_free=(False, False), ragged=0.0) -> list[int]:
    survival, verify, draft = (np.array(values, dtype=float) for values in (survival, verify, draft))
    return choose_lengths(survival, np.array(is_free), verify, draft, ragged)[0].tolist()


def test_slots_that_must_not_be_verified_are_not_taken_to_save_time():
    """Plain cycles may be slower than those of two slots by what served cycles say."""
    assert choose_of([[0.0], [0.0]], verify=[3, 2, 2], draft=[0, 0, 0]) == [0, 0]


def test_equal_lengths_of_copies_alone_take_no_draft():
    """A draft would cost more than both slots bring, and unequal lengths cost more as well."""
    costs = dict(verify=[1, 1, 1], draft=[0, 9, 9], ragged=9)
    assert choose_of([[0.9], [0.9]], is_free=(True, True), **costs) == [1, 1]
    assert choose_of([[0.9], [0.9]], is_free=(True, False), **costs) == [0, 0]


# -- costs


COST = Cost()


def table(cost: Cost = COST, **fields) -> Costs:
    verify = np.array([[cost.verify(int(n), int(n * (w - 1))) for w in WIDTHS] for n in LOADS])
    return Costs(LOADS, WIDTHS, verify, np.array([cost.draft_for(int(n)) for n in LOADS]), **fields)


@pytest.mark.parametrize("n", [1, 3, 16, 50, 64])
def test_costs_between_what_was_measured(n):
    verify, draft, ragged = table().of_load(n)
    np.testing.assert_allclose(verify, [COST.verify(n, rows) for rows in range(n * DEPTH + 1)], rtol=1e-9)
    np.testing.assert_allclose(draft, [COST.draft_for(m) for m in range(n + 1)], rtol=1e-9)
    assert ragged == 0.0


def test_costs_beyond_what_was_measured_and_of_padded_rows():
    beyond = table().of_load(128)
    np.testing.assert_allclose(beyond[0], [COST.verify(128, rows) for rows in range(128 * DEPTH + 1)])
    assert beyond[1][128] == pytest.approx(COST.draft_for(128))
    of_one = Costs([1], WIDTHS, np.array([[1.0, 1.4, 1.6, 2.0]]), np.array([0.3])).of_load(5)
    assert of_one[0][[0, 35]] == pytest.approx([5.0, 10.0]) and of_one[1][5] == pytest.approx(1.5)
    padded = table(sizes=[4, 12, 30]).of_load(4)[0]
    expected = [COST.verify(4, rows) for rows in (0, 8, 8, 26, 26, 28)]
    np.testing.assert_allclose(padded[[0, 1, 8, 9, 26, 28]], expected)
    far = table(seconds_per_token=0.001, context=100)
    assert far.of_load(4, 4 * 500)[0][0] == pytest.approx(table().of_load(4)[0][0] + 2.0)
    assert far.of_load(4, -4 * 500)[0][0] == pytest.approx(table().of_load(4)[0][0] / 2)


def test_unequal_lengths_cost_what_was_measured_beyond_their_rows():
    cost = Cost(ragged_overhead=0.3)
    half = np.array([cost.cycle(np.where(np.arange(n) % 2, 0, DEPTH)) for n in LOADS])
    costs = table(cost, mixed=half)
    assert costs.of_load(1)[2] == pytest.approx(0.0) and costs.of_load(6)[2] == pytest.approx(0.3)
    assert table(cost, mixed=half - 1.0).of_load(6)[2] == 0.0, "a cycle that took less is noise"


def test_a_peak_of_the_measurement_is_noise():
    """Other processes only add to what a cycle takes, of fewer tokens and of fewer requests."""
    verify = np.array([[1.0, 1.4, 1.2, 2.0], [1.5, 1.6, 1.7, 1.8]])
    of_rows, of_drafts, _ = Costs([1, 2], WIDTHS, verify, np.array([0.3, 0.2])).of_load(1)
    np.testing.assert_allclose(of_rows[WIDTHS - 1], [1.0, 1.2, 1.2, 1.8])
    assert of_drafts[1] == pytest.approx(0.2)


def test_served_cycles_tell_how_plain_ones_compare():
    """They take 1.5 times what start-up says, beside others. The machine is slower now, and some stall."""
    pace = Pace()
    for number in range(200):
        is_plain = number % 10 > 6
        pace.observe(is_plain, 1.0, (1.5 if is_plain else 1.0) * 3.0 * (100 if number % 30 == 3 else 1))
    assert np.exp(pace.log_ratio) == pytest.approx(1.5, rel=0.1)
    before = pace.log_ratio
    for _ in range(100):
        pace.observe(True, 1.0, 20.0)
    assert pace.log_ratio == pytest.approx(before, abs=0.05), "a slower machine changes no choice"


# -- estimates


def test_survival_of_a_request_is_shrunk_to_the_average():
    acceptance = Acceptance(8, DEPTH)
    start = acceptance.survival(ints(0))
    assert (np.diff(start[0]) < 0).all() and start[0, 0] == pytest.approx(0.7)
    for _ in range(60):
        acceptance.learn(ints(0, 1, 2), ints(7, 7, 7), ints(7, 7, 0))
    good, bad, new = acceptance.survival(ints(0, 2, 5))[:, 0]
    assert bad < 0.25 < new < 0.75 < good
    acceptance.reset(ints(0))
    assert acceptance.survival(ints(0))[0, 0] == pytest.approx(new)


def test_what_was_not_verified_teaches_nothing():
    """Kept to the end of what was verified, or not verified at all."""
    acceptance = Acceptance(8, DEPTH)
    for _ in range(20):
        acceptance.learn(ints(0, 1), ints(2, 0), ints(2, 0))
    after = acceptance.averages
    assert (after[:2] > 0.9).all() and after[2] == pytest.approx(after[1])
    assert acceptance.survival(ints(1)) == pytest.approx(after.cumprod()[None]), "nothing of its record"
    before = acceptance._own_labels[0].copy()
    acceptance.learn(ints(0), ints(0), ints(0))
    assert (acceptance._own_labels[0] == before).all() and before[0] < 20, (
        "a block forgets, a plain cycle not"
    )


def test_copies_of_longer_matches_survive_longer():
    survival = copy_survival(ints(0, UNKNOWN_MATCH, 3, 9, 16, 30), DEPTH)
    assert (survival[0] == 0).all() and (np.diff(survival[1:]) < 0).all()
    assert (np.diff(survival[:, 0]) >= 0).all() and (survival[4] == survival[5]).all()
    assert survival[1, 0] < 0.2 < survival[2, 0] and survival[4, -1] > 0.6


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


WORTH_MEASURING = (
    ("ragged_overhead", COSTS["unequal lengths cost"]),
    ("read", Cost(row=0.03, draft=0.9, read=1e-5)),
)


@pytest.mark.parametrize(
    ("what", "cost", "is_measured"),
    [
        *((*case, is_measured) for case in WORTH_MEASURING for is_measured in (True, False)),
        # A cheaper draft loses nothing without the measurement, as all requests are probed.
        ("read", Cost(row=0.02, draft=0.6, read=1e-5), True),
    ],
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
    server = Simulation(COSTS["busy"], mix.split(), wrong={wrong: 3.0}, noise=0.3, stalls=0.02)
    assert server.run(n, cycles=500, warm=200).of_best_uniform >= 0.85


def test_a_busy_start_up_leaves_no_long_stretch_without_drafts():
    """It measured the draft ten times too dear, which pays."""
    server = Simulation(COSTS["busy"], ["usual"], wrong={"draft": 10.0})
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
    assert np.mean([lengths.sum() for lengths in server.chosen]) < 0.5 and server.policy.num_probes > 5
    server.kinds = ["strong"]
    assert server.run(4, cycles=1500, warm=1000).of_best_uniform > 0.95


def test_a_draft_that_becomes_bad_is_given_up():
    """Averages over all labels so far would hold on to it."""
    server = Simulation(COSTS["rows cost"], ["strong"])
    server.run(16, cycles=600)
    server.kinds = ["random"]
    assert server.run(16, cycles=600).of_best_uniform > 0.95


def test_each_fourth_probe_is_a_plain_cycle():
    """Labels of whole blocks say what was lost. Only plain cycles say what these would have taken."""
    server = Simulation(COSTS["busy"], "strong random".split()).run(4, cycles=600, warm=200)
    chosen = np.stack(server.chosen)
    assert chosen.any(axis=1).mean() > 0.9 and (chosen == 0).all(axis=1).any()


def test_requests_are_probed_in_turn():
    policy, probed = Policy(table(), 8), set()
    for _ in range(100):
        policy.acceptance.learn(np.arange(4), np.full(4, 7), np.zeros(4, dtype=int))
    for _ in range(600):
        lengths = choose(policy, 4).lengths
        probed |= {int(lengths.argmax())} if (lengths > 0).sum() == 1 else set()
    assert probed == {0, 1, 2, 3}


def test_caps_are_kept_and_capped_requests_are_not_probed():
    caps = ints(0, 2, 7, 7)
    server = Simulation(COSTS["rows are free"], ["strong"]).run(4, caps=caps)
    chosen = np.stack(server.chosen)
    assert (chosen <= caps).all() and (chosen[:, 1:] == caps[1:]).mean() > 0.9


def test_copies_are_used_beside_a_useless_draft():
    """They compete with their own survival, and need no draft."""
    policy = Policy(table(), 8)
    for _ in range(100):
        policy.acceptance.learn(np.arange(4), np.full(4, 7), np.zeros(4, dtype=int))
    choice = choose(policy, 4, matches=ints(14, 0, 0, 0))
    assert choice.copies.tolist() == [True, False, False, False] and choice.lengths.tolist() == [7, 0, 0, 0]
    assert policy.seconds(choice) == pytest.approx(COST.verify(4, 7))
    always_drafting = Policy(table(), 8, skips_draft=False)
    always_drafting.acceptance = policy.acceptance
    choice = choose(always_drafting, 4, matches=ints(14, 0, 0, 0))
    assert choice.copies[0] and always_drafting.seconds(choice) > COST.verify(4, 7)
    too_dear = Policy(table(Cost(draft=100.0)), 8, skips_draft=False)
    assert not choose(too_dear, 4, matches=ints(14, 0, 0, 0)).lengths.any()


def test_a_gain_of_less_than_three_percent_is_not_worth_it():
    """A cycle of one request with one sure token takes 1.96 and 1.92 times as long as a plain one."""
    for seconds, length in ((1.96, 0), (1.92, 1)):
        policy = Policy(Costs([1], [1, 2], np.array([[1.0, seconds - 0.1]]), np.array([0.1])), 1)
        policy.acceptance.learn(ints(0), ints(1), ints(1))
        policy.acceptance._labels[:] = policy.acceptance._accepted[:] = 1e6
        assert choose(policy, 1, caps=1).lengths.tolist() == [length]


@pytest.mark.parametrize("mix", ["usual", "strong random", "random"])
@pytest.mark.parametrize("n", [1, 16])
def test_a_start_while_another_process_runs_is_right_within_200_cycles(n, mix):
    """Start-up keeps the less of two times, each one to three times the quiet machine's."""
    of_best = [
        Simulation(COSTS["busy"], mix.split(), busy=3.0, noise=0.1, stalls=0.02, seed=seed)
        .run(n, cycles=400, warm=200)
        .of_best_uniform
        for seed in range(5)
    ]
    assert np.mean(of_best) >= 0.95 and min(of_best) >= 0.8, of_best


@pytest.mark.parametrize("measured", [[1], [1, 4], LOADS])
def test_a_start_that_has_time_for_two_loads_is_enough(measured):
    """Two slow cores have these costs. By those of one request, drafts for many cost too little."""
    server = Simulation(Cost(request=0.2, row=0.14, draft=0.25, each=0.1), ["usual"], loads=measured)
    assert (server.run(16, warm=0).of_best_uniform >= 0.96) == (len(measured) > 1)


def test_what_a_batch_of_new_requests_taught_is_corrected():
    """Their first two blocks accept less. Labels of one request at a time would not outweigh these."""
    server = Simulation(Cost(request=0.1, row=0.03, draft=0.5, each=0.05), ["usual"], of_new=0.3)
    assert server.run(32).of_best_uniform >= 0.93
