"""Make a server report the time of its decode steps, and an adaptive one verify given widths in turn.

Python imports this at start-up if its folder is on PYTHONPATH; benchmark/adaptive.py uses it. A `schedule` of
the adaptive config file cannot replace it: the policy chooses in some turns, and learns from these only.

WIDTH_TURNS: numbers of slots to verify, separated by commas, each for TURN_CYCLES cycles; 0 is the server's
own choice. All have their turn, in an order drawn anew (from TURN_SEED): requests that begin together would
otherwise meet the same turn at the same age again and again.

/server_info reports, as "busy" and since the start:
- seconds, tokens and number of decode steps per turn, without the first two cycles of a turn, which may pay
  for the turn before;
- the widths of the server's own choice, and the seconds that choosing and learning took;
- accept lengths of blocks that the widest turn verified;
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
widths: Counter[int] = Counter()
accepted_of_widest: Counter[int] = Counter()
decided: Counter[str] = Counter()


def verify_in_turns(module) -> None:
    chooser = module.WidthChooser
    choose, on_accept_lens = chooser.choose, chooser.on_accept_lens
    numbers: deque[int] = deque()

    def choose_in_turn(self, rows, modes, num_tokens):
        numbers.append(turns.number)
        if turns.number == OWN:
            choice = choose(self, rows, modes, num_tokens)
            widths[choice.width] += 1
            return choice
        index, unknown = self.costs.widths.tolist().index(turns.number), 0.0 * self.costs.widths
        return module.Choice(len(rows), turns.number, index, False, unknown, unknown)

    def learn_own(self, rows, modes, width, accepted):
        number = numbers.popleft()
        if number == OWN:
            on_accept_lens(self, rows, modes, width, accepted)
        elif number == max(turns.numbers):
            accepted_of_widest.update(accepted.tolist())

    chooser.choose, chooser.on_accept_lens = choose_in_turn, learn_own


def learn_own_times(module) -> None:
    clock = module.CycleClock
    start, finished = clock.start, clock.finished
    numbers: deque[int] = deque()

    def start_cycle(self):
        numbers.append(turns.number)
        start(self)

    def finished_own(self):
        return [timing for timing in finished(self) if numbers.popleft() == OWN]

    clock.start, clock.finished = start_cycle, finished_own


def time_decisions(module) -> None:
    """Count the seconds that a server of one width would not spend."""
    adaptive = module.AdaptiveWidth
    choose_width, on_launched = adaptive.choose_width, adaptive.on_launched
    on_accept_lens = adaptive.on_accept_lens
    numbers: deque[int] = deque()

    def timed(number, function, *args):
        since = time.perf_counter()
        result = function(*args)
        if number == OWN:
            decided["seconds"] += time.perf_counter() - since
        return result

    def choose(self, *arguments):
        numbers.append(turns.number)
        return timed(turns.number, choose_width, self, *arguments)

    def launched(self, *arguments):
        timed(turns.number, on_launched, self, *arguments)

    def learn(self, *arguments):
        return timed(numbers.popleft(), on_accept_lens, self, *arguments)

    adaptive.choose_width, adaptive.on_launched, adaptive.on_accept_lens = choose, launched, learn


def time_steps(module) -> None:
    """Attribute time to the latest launched batch, until the next is launched or the server is idle."""
    scheduler = module.Scheduler
    run_batch, process = scheduler.run_batch, scheduler.process_batch_result
    on_idle, internal_state = scheduler.on_idle, scheduler.get_internal_state
    seconds, tokens, cycles = Counter(), Counter(), Counter()
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
            "widths": {str(width): count for width, count in widths.items()},
            "accepted_of_widest": {str(k): count for k, count in accepted_of_widest.items()},
            "decided": dict(decided),
            "prefilled": prefilled,
        }
        return answer

    scheduler.run_batch, scheduler.process_batch_result = run, process_result
    scheduler.on_idle, scheduler.get_internal_state = idle, report


sys.path.append(str(Path(__file__).parent.parent))
from after_import import after_import  # noqa: E402

after_import(
    {
        "sglang_dflash.srt.speculative.width.chooser": verify_in_turns,
        "sglang_dflash.srt.speculative.width.clock": learn_own_times,
        "sglang_dflash.srt.speculative.width.adaptive": time_decisions,
        "sglang.srt.managers.scheduler": time_steps,
    }
)
