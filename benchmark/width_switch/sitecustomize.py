"""Make a server report the time of its decode steps, and an adaptive one verify given widths in turn.

Python imports this at start-up if its folder is on PYTHONPATH; benchmark/adaptive.py uses it.

WIDTH_TURNS: numbers of slots to verify, separated by commas, each for TURN_CYCLES cycles; 0 is the server's
own choice. All have their turn, in an order drawn anew (from TURN_SEED): requests that begin together would
otherwise meet the same turn at the same age again and again.

Requests may force their text, as benchmark/held/sitecustomize.py says.

In the widest turn the policy is asked as well, and not obeyed: what its lengths would have kept of the same
blocks is compared with what every fixed width would have. The time of asking is taken off that turn.

/server_info reports, as "busy" and since the start:
- seconds, tokens and number of decode steps per turn, without the first two cycles of a turn, which may pay
  for the turn before;
- blocks of the server's own choice by their length, and the seconds that choosing and learning took;
- accept lengths of blocks that the widest turn verified, and tokens that the policy would have made of them;
- seconds and requests of prefills.
"""

import os
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path

OWN = 0


class Turns:
    def __init__(self):
        self.numbers = [int(number) for number in os.environ["WIDTH_TURNS"].split(",")]
        self._length = int(os.environ["TURN_CYCLES"])
        self._cycles = -1
        self._random = random.Random(int(os.environ["TURN_SEED"]))

    def next_cycle(self) -> None:
        self._cycles += 1
        if self._cycles % (self._length * len(self.numbers)) == 0:
            self._random.shuffle(self.numbers)

    @property
    def number(self) -> int:
        return self.numbers[self._cycles // self._length % len(self.numbers)]

    @property
    def counts(self) -> bool:
        return len(self.numbers) == 1 or self._cycles % self._length >= 2


turns = Turns()
lengths: Counter[int] = Counter()
accepted_of_widest: Counter[int] = Counter()
own_on_widest: Counter[str] = Counter()
decided: Counter[str] = Counter()
seconds: Counter[str] = Counter()


def verify_in_turns(module) -> None:
    """Replace choices by those of the turn."""
    adaptive, chooser = module.AdaptiveLengths, module.LengthChooser
    choose_own, choose, learn = chooser.choose, adaptive.choose, adaptive.on_accept_lens
    cycles: deque = deque()  # turn of each cycle in flight, and lengths that the policy would have chosen
    chosen = None

    def choose_in_turn(self, *arguments):
        nonlocal chosen
        if turns.number not in (OWN, max(turns.numbers)):
            chosen = None
        else:
            chosen = choose_own(self, *arguments)
        if turns.number == OWN:
            return chosen
        requests, _, matches, _ = arguments
        n, depth = len(requests.rows), turns.number - 1
        copies = module.np.zeros(n, dtype=bool)
        if matches.any() and depth:
            copied = self.copies.prefix_accept_probs(requests.modes, matches)[:, :depth]
            drafted = self.drafts.prefix_accept_probs(requests.rows, requests.modes)[:, :depth]
            copies = copied.sum(axis=1) > drafted.sum(axis=1)
        # No seconds are expected, so none are learned from.
        return module.Choice(module.np.full(n, depth), copies, 0.0, 0.0)

    def timed_choose(self, *arguments):
        since = time.perf_counter()
        plan = choose(self, *arguments)
        spent = time.perf_counter() - since
        cycles.append((turns.number, None if chosen is None else chosen.lengths))
        if turns.number == OWN:
            decided["seconds"] += spent
            lengths.update(plan.layout.num_draft_tokens.tolist())
        elif chosen is not None and turns.counts:
            seconds[str(turns.number)] -= spent
        return plan

    def learn_own(self, plan, accept_lens, *rest):
        number, own = cycles.popleft()
        if number == OWN:
            since = time.perf_counter()
            learn(self, plan, accept_lens, *rest)
            decided["seconds"] += time.perf_counter() - since
        elif own is not None:
            accepted_of_widest.update(accept_lens)
            own_on_widest["blocks"] += len(own)
            own_on_widest["tokens"] += sum(1 + min(pair) for pair in zip(accept_lens, own.tolist()))

    chooser.choose, adaptive.choose, adaptive.on_accept_lens = choose_in_turn, timed_choose, learn_own


def time_steps(module) -> None:
    """Attribute time to the latest launched batch, until the next is launched or the server is idle."""
    scheduler = module.Scheduler
    run_batch, process = scheduler.run_batch, scheduler.process_batch_result
    on_idle, internal_state = scheduler.on_idle, scheduler.get_internal_state
    tokens, cycles = Counter(), Counter()
    prefilled = 0
    launches: deque[str] = deque()
    current, since = "", 0.0

    def begin(activity: str) -> None:
        nonlocal current, since
        now = time.perf_counter()
        seconds[current] += now - since
        current, since = activity, now

    def run(self, batch, *rest, **named):
        nonlocal prefilled
        if batch.forward_mode.is_decode():
            turns.next_cycle()
            launches.append(str(turns.number) if turns.counts else "not counted")
            cycles[launches[-1]] += 1
            begin(launches[-1])
        else:
            prefilled += len(batch.reqs)
            begin("prefill")
        return run_batch(self, batch, *rest, **named)

    def process_result(self, batch, result):
        decoded = batch.forward_mode.is_decode()
        before = sum(len(req.output_ids) for req in batch.reqs)
        process(self, batch, result)
        if decoded:
            tokens[launches.popleft()] += sum(len(req.output_ids) for req in batch.reqs) - before

    def idle(self):
        begin("")
        on_idle(self)

    def report(self, request):
        answer = internal_state(self, request)
        answer.internal_state["busy"] = {
            "seconds": {activity: value for activity, value in seconds.items() if activity},
            "tokens": dict(tokens),
            "cycles": dict(cycles),
            "lengths": {str(length): count for length, count in lengths.items()},
            "own_on_widest": dict(own_on_widest),
            "accepted_of_widest": {str(k): count for k, count in accepted_of_widest.items()},
            "decided": dict(decided),
            "prefilled": prefilled,
        }
        return answer

    scheduler.run_batch, scheduler.process_batch_result = run, process_result
    scheduler.on_idle, scheduler.get_internal_state = idle, report


sys.path.append(str(Path(__file__).parent.parent))
import held.sitecustomize  # noqa: E402, F401
from after_import import after_import  # noqa: E402

after_import(
    {
        "sglang_dflash.srt.speculative.width.controller": verify_in_turns,
        "sglang.srt.managers.scheduler": time_steps,
    }
)
