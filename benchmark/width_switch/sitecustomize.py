"""A server that says what its decode steps took; an adaptive one also verifies given widths in turn. Python
imports this at start-up wherever its folder is on PYTHONPATH; used by benchmark/adaptive.py.

WIDTH_TURNS: numbers of slots to verify, separated by commas, each for TURN_CYCLES cycles; 0 is the server's
own choice. All have their turn, in an order drawn anew (from TURN_SEED), as requests that begin together
would meet the same turn at the same age again and again. A cycle of another turn than its own teaches the
policy nothing. /server_info says, as "busy", since the start: of every turn's number the decode steps'
seconds, tokens and count, but for the first two cycles of a turn, which may pay for the turn before; how many
cycles of its own choice had which width, and the seconds that choosing and learning took; how often how many
drafted tokens were kept where the widest turn verified them; and the seconds and requests of prefills."""

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
        self._each = int(os.environ["TURN_CYCLES"])
        self._cycles = -1
        self._random = random.Random(int(os.environ["TURN_SEED"]))

    def next_cycle(self) -> None:
        self._cycles += 1
        if self._cycles % (self._each * len(self.numbers)) == 0:
            self._random.shuffle(self.numbers)

    @property
    def number(self) -> int:
        return self.numbers[self._cycles // self._each % len(self.numbers)]

    @property
    def counts(self) -> bool:
        return len(self.numbers) == 1 or self._cycles % self._each >= 2


turns = Turns()
widths: Counter[int] = Counter()
kept_of_widest: Counter[int] = Counter()
decided: Counter[str] = Counter()


def verify_in_turns(module) -> None:
    chooser = module.WidthChooser
    ask, kept = chooser.choose, chooser.on_accept_lens
    numbers: deque[int] = deque()

    def asked(self, slots, modes, num_tokens):
        numbers.append(turns.number)
        if turns.number == OWN:
            choice = ask(self, slots, modes, num_tokens)
            widths[choice.width] += 1
            return choice
        nothing = 0.0 * self.costs.widths
        return module.Choice(
            len(slots), turns.number, self.costs.widths.tolist().index(turns.number), False, nothing, nothing
        )

    def is_kept(self, slots, modes, width, accepted):
        number = numbers.popleft()
        if number == OWN:
            kept(self, slots, modes, width, accepted)
        elif number == max(turns.numbers):
            kept_of_widest.update(accepted.tolist())

    chooser.choose, chooser.on_accept_lens = asked, is_kept


def teach_own_times(module) -> None:
    """And time what a server of one width would not do."""
    adaptive = module.AdaptiveWidth
    ask, tell = adaptive.choose_width, adaptive.on_launched
    kept, follow = adaptive.on_accept_lens, adaptive._follow
    untold: deque[int] = deque()
    unfollowed: deque[int] = deque()

    def timed(number, function, *args):
        since = time.perf_counter()
        result = function(*args)
        if number == OWN:
            decided["seconds"] += time.perf_counter() - since
        return result

    def asked(self, batch, draws_drafts):
        width = timed(turns.number, ask, self, batch, draws_drafts)
        untold.append(turns.number)
        unfollowed.append(turns.number)
        return width

    def told(self):
        timed(turns.number, tell, self)

    def is_kept(self, accepted):
        return timed(untold.popleft(), kept, self, accepted)

    def followed(self, laps):
        follow(self, [lap for lap in laps if unfollowed.popleft() == OWN])

    adaptive.choose_width, adaptive.on_launched = asked, told
    adaptive.on_accept_lens, adaptive._follow = is_kept, followed


def time_steps(module) -> None:
    """Time goes to the batch launched last, until the next is launched or there is none."""
    scheduler = module.Scheduler
    run_batch, process = scheduler.run_batch, scheduler.process_batch_result
    on_idle, state = scheduler.on_idle, scheduler.get_internal_state
    seconds, tokens, cycles = Counter(), Counter(), Counter()
    prefilled = 0
    launches: deque[str] = deque()
    doing, since = "", 0.0

    def now_does(what: str) -> None:
        nonlocal doing, since
        now = time.perf_counter()
        seconds[doing] += now - since
        doing, since = what, now

    def launched(self, batch, *rest, **named):
        nonlocal prefilled
        if batch.forward_mode.is_decode():
            turns.next_cycle()
            launches.append(str(turns.number) if turns.counts else "not counted")
            cycles[launches[-1]] += 1
            now_does(launches[-1])
        else:
            prefilled += len(batch.reqs)
            now_does("prefill")
        return run_batch(self, batch, *rest, **named)

    def processed(self, batch, result):
        decoded = batch.forward_mode.is_decode()
        before = sum(len(req.output_ids) for req in batch.reqs)
        process(self, batch, result)
        if decoded:
            tokens[launches.popleft()] += sum(len(req.output_ids) for req in batch.reqs) - before

    def idle(self):
        now_does("")
        on_idle(self)

    def told(self, request):
        answer = state(self, request)
        answer.internal_state["busy"] = {
            "seconds": {what: value for what, value in seconds.items() if what},
            "tokens": dict(tokens),
            "cycles": dict(cycles),
            "widths": {str(width): count for width, count in widths.items()},
            "kept_of_widest": {str(kept): count for kept, count in kept_of_widest.items()},
            "decided": dict(decided),
            "prefilled": prefilled,
        }
        return answer

    scheduler.run_batch, scheduler.process_batch_result = launched, processed
    scheduler.on_idle, scheduler.get_internal_state = idle, told


sys.path.append(str(Path(__file__).parent.parent))
from after_import import after_import  # noqa: E402

after_import(
    {
        "sglang_dflash.srt.speculative.width.chooser": verify_in_turns,
        "sglang_dflash.srt.speculative.width.adaptive": teach_own_times,
        "sglang.srt.managers.scheduler": time_steps,
    }
)
