"""Verify lengths by a schedule, so that tests meet all of them however acceptance turns out.

The config file of `--speculative-adaptive-config` then also takes a `schedule`: numbers of drafted tokens,
verified in turn instead of what the policy chooses. The policy still learns and decides.
"""

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

_VARIABLE = "SCHEDULED_LENGTHS"  # passes the schedule to the scheduler's process


def read_schedule(module) -> None:
    """Let the settings' file have a `schedule`."""
    parse = module.parse_steps

    def parse_with_schedule(text):
        try:
            fields = json.loads(text)
            schedule = fields.pop("schedule")
        except (ValueError, AttributeError, KeyError, TypeError):
            return parse(text)
        os.environ[_VARIABLE] = json.dumps(schedule)
        fields["candidate_steps"] = sorted({0, *schedule})
        return parse(json.dumps(fields))

    module.parse_steps = parse_with_schedule


def follow_schedule(module) -> None:
    """Replace the policy's choices by those of the schedule, if there is one."""
    choose, cycles = module.Policy.choose, itertools.count()

    def choose_by_schedule(self, rows, extra_context, matches, caps):
        choice = choose(self, rows, extra_context, matches, caps)
        schedule = json.loads(os.environ.get(_VARIABLE, "[]"))
        return scheduled(choice, rows, next(cycles), schedule, matches, caps) if schedule else choice

    module.Policy.choose = choose_by_schedule


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
    return choice._replace(lengths=np.minimum(lengths, caps), copies=copies)
