"""`--speculative-adaptive` and its config file: which widths there are, and the policy's constants."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_dflash.srt.speculative.width.policy import Constants

VARIABLE = "SGLANG_DFLASH_ADAPTIVE"  # how the main process tells the others: the settings as JSON
NEVER_VARIABLE = "SGLANG_DFLASH_NO_ADAPTIVE"  # 1: not by default either

_CONSTANTS = {field.name: field.type for field in dataclasses.fields(Constants)}
_KEYS = ("candidate_steps", "schedule", *_CONSTANTS)


@dataclass(frozen=True)
class AdaptiveSettings:
    """candidate_steps: drafted tokens that a cycle may verify, ascending, SGLang's word for them; 0 is plain
    decoding. None: 0, 1, 3, 7, .. up to all of them. schedule: numbers of drafted tokens to verify in turn,
    cycle by cycle, instead of choosing: for tests and measurements. constants: the policy's, by name."""

    candidate_steps: tuple[int, ...] | None = None
    schedule: tuple[int, ...] = ()
    constants: Constants = Constants()

    @classmethod
    def read(cls, path: str | None) -> "AdaptiveSettings":
        """Of a JSON file; the defaults where none is given. Raises ValueError naming what is wrong."""
        if path is None:
            return cls()
        where = f"--speculative-adaptive-config {path!r}"
        try:
            with open(os.path.expanduser(path)) as file:
                given = json.load(file)
        except OSError as error:
            raise ValueError(f"{where}: cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}).") from None
        try:
            return cls.of(given)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def of(cls, given: Any) -> "AdaptiveSettings":
        if not isinstance(given, dict):
            raise ValueError(f"a JSON object is wanted, with any of {', '.join(_KEYS)}.")
        if given and all(key.isdigit() for key in given):
            raise ValueError(
                "keys are batch sizes, which is EAGLE's form. DFLASH finds out by itself what pays at which batch size: "
                'give {"candidate_steps": [0, 1, 3, 7]}.'
            )
        unknown = [key for key in given if key not in _KEYS]
        if unknown:
            raise ValueError(f"unknown {', '.join(map(repr, unknown))}; known are {', '.join(_KEYS)}.")
        constants = {}
        for name in _CONSTANTS.keys() & given.keys():
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")
            constants[name] = value
        candidates, schedule = given.get("candidate_steps"), given.get("schedule", [])
        if candidates is not None:
            _check_steps("candidate_steps", candidates)
            if not candidates or any(a >= b for a, b in pairwise(candidates)):
                raise ValueError(f"candidate_steps must ascend and not be empty, got {candidates}.")
            candidates = tuple(candidates)
        _check_steps("schedule", schedule)
        return cls(candidates, tuple(schedule), Constants(**constants))

    def widths(self, block_size: int) -> tuple[int, ...]:
        """Slots to verify, the anchor counted, ascending. Raises ValueError for candidates that the block
        does not hold."""
        drafted = block_size - 1
        if self.schedule:
            steps: Sequence[int] = sorted(set(self.schedule))
        elif self.candidate_steps is None:
            steps = [
                *(k for k in (2**j - 1 for j in range(block_size.bit_length() + 1)) if k < drafted),
                drafted,
            ]
        else:
            steps = self.candidate_steps
        if steps[-1] > drafted:
            raise ValueError(
                f"--speculative-adaptive: {steps[-1]} drafted tokens are to be verified, but a block of {block_size} "
                f"holds {drafted}."
            )
        return tuple(k + 1 for k in steps)

    def to_environment(self) -> None:
        os.environ[VARIABLE] = json.dumps(
            {
                "candidate_steps": self.candidate_steps,
                "schedule": self.schedule,
                **dataclasses.asdict(self.constants),
            }
        )

    @classmethod
    def from_environment(cls) -> "AdaptiveSettings | None":
        """What the main process resolved; None where the server is not adaptive."""
        text = os.environ.get(VARIABLE)
        return cls.of(json.loads(text)) if text else None


def _check_steps(name: str, steps: Any) -> None:
    if not isinstance(steps, list) or any(
        isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in steps
    ):
        raise ValueError(f"{name} must be a list of numbers of drafted tokens, none negative, got {steps!r}.")
