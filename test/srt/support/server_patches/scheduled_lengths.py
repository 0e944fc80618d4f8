"""Verify lengths by a schedule, so that tests meet all of them however acceptance turns out.

The config file of `--speculative-adaptive-config` then also takes a `schedule`: numbers of drafted tokens,
verified in turn instead of what the policy chooses, and `draft_slots`, that the draft fills in turn, null for
whole blocks. The policy still learns and decides.
"""

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dflash.srt.speculative.cycle.plan import NO_WORK

# These pass the schedules to the scheduler's process.
_VARIABLE, _DRAFT_SLOTS = "SCHEDULED_LENGTHS", "SCHEDULED_DRAFT_SLOTS"


def read_schedule(module) -> None:
    """Let the settings' file have a `schedule`."""
    parse = module.AdaptiveSettings.parse

    def parse_with_schedule(text):
        try:
            fields = json.loads(text)
            schedule = fields.pop("schedule")
        except (ValueError, AttributeError, KeyError, TypeError):
            return parse(text)
        os.environ[_VARIABLE] = json.dumps(schedule)
        os.environ[_DRAFT_SLOTS] = json.dumps(fields.pop("draft_slots", [None]))
        fields["candidate_steps"] = sorted({0, *schedule})
        return parse(json.dumps(fields))

    module.AdaptiveSettings.parse = staticmethod(parse_with_schedule)


def follow_schedule(module) -> None:
    """Replace the policy's choices by those of the schedule, if there is one."""
    choose, cycles = module.LengthChooser.choose, itertools.count()

    def choose_by_schedule(self, requests, extra_context, matches, caps):
        choice = choose(self, requests, extra_context, matches, caps)
        schedule = json.loads(os.environ.get(_VARIABLE, "[]"))
        return scheduled(choice, requests.rows, next(cycles), schedule, matches, caps) if schedule else choice

    module.LengthChooser.choose = choose_by_schedule


def narrow_drafts(module) -> None:
    """Plan cycles with draft blocks of the schedule's widths, if there is one."""
    choose, cycles = module.AdaptiveLengths.choose, itertools.count()

    def choose_with_draft_slots(self, *args, **kwargs):
        widths = json.loads(os.environ.get(_DRAFT_SLOTS, "[null]"))
        plan, draft_slots = choose(self, *args, **kwargs), widths[next(cycles) % len(widths)]
        if draft_slots is None:
            return plan
        # The policy has no estimates of widths that it would not choose.
        return plan._replace(draft_slots=max(draft_slots, plan.verify_len - 1), work=NO_WORK)

    module.AdaptiveLengths.choose = choose_with_draft_slots


def scheduled(
    choice: Any, rows: np.ndarray, cycle: int, schedule: Sequence[int], matches: np.ndarray, caps: np.ndarray
) -> Any:
    """Replace a choice by the schedule's.

    Each row of the request table starts at another place. A request alone follows the schedule as it is.

    Args:
        choice: the policy's.
        rows: of the request table. [n]
        cycle: number of the cycle.
        schedule: numbers of drafted tokens.
        matches: lengths of the requests' matches. Two of three are copied. [n]
        caps: most drafted tokens of each request. [n]
    """
    place = np.full(len(rows), cycle) + (5 * rows if len(rows) > 1 else 0)
    copies = (matches > 0) & (place % 3 > 0)
    lengths = np.array(schedule)[place % len(schedule)]
    return choice._replace(lengths=np.minimum(lengths, caps), copies=copies, num_cycles=1)
