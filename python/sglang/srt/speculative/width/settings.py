"""Settings of `--speculative-adaptive`."""

import dataclasses
import json
import logging
import os
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeFloat, TypeAdapter, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

# Devices on which adaptive width is on by default. "cuda" joins when a GPU has shown the ratios that the
# table of defaults asks for (benchmark/gpu/README.md).
ON_BY_DEFAULT = ("cpu",)

_Steps = tuple[Annotated[int, Field(ge=0)], ...]  # numbers of drafted tokens, in SGLang's words


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class AdaptiveSettings:
    """The config file.

    Attributes:
        candidate_steps: drafted tokens per request that start-up measures, ascending. 0 is plain decoding.
            The last is the most that a request verifies. None: on a CPU 0, 1, 3, 7, .. up to all of them.
            On a GPU 0, about half and all, and whole blocks while rows are free. If steps are given, a GPU
            follows them at every load.
        probe_share: share of the time that probes may cost.
    """

    candidate_steps: _Steps | None = None
    probe_share: NonNegativeFloat = 0.005

    @field_validator("candidate_steps")
    @classmethod
    def _check_order(cls, steps: _Steps | None) -> _Steps | None:
        if steps is not None and (len(steps) < 2 or any(a >= b for a, b in pairwise(steps))):
            raise ValueError("two steps or more must ascend (--speculative-num-draft-tokens fixes one)")
        return steps

    @classmethod
    def read(cls, path: str | None) -> "AdaptiveSettings":
        """Read a JSON file; None gives the defaults. Raises ValueError as `parse` does."""
        if path is None:
            return cls()
        try:
            with open(os.path.expanduser(path)) as file:
                return cls.parse(file.read())
        except OSError as error:
            reason = f"cannot be read ({error.strerror})."
        except ValueError as error:
            reason = str(error)
        raise ValueError(f"--speculative-adaptive-config {path!r}: {reason}")

    @classmethod
    def parse(cls, text: str) -> "AdaptiveSettings":
        """Parse a JSON object. Raises ValueError that lists all that is wrong.

        EAGLE's form gives the defaults, and a warning.
        """
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            errors = error.errors()
        if any(error["loc"] and str(error["loc"][0]).isdigit() for error in errors):
            logger.warning(
                "DFLASH does not follow --speculative-adaptive-config: keys are batch sizes, which is "
                "EAGLE's form. DFLASH finds out by itself what pays at which batch size: give "
                '{"candidate_steps": [0, 1, 3, 7]}.'
            )
            return cls()
        found = [
            f"{'.'.join(map(str, error['loc'])) or 'file'}: {error['msg']}, got {error['input']!r}"
            for error in errors
        ]
        known = ", ".join(field.name for field in dataclasses.fields(cls))
        raise ValueError(f"{'; '.join(found)}. A JSON object is expected, with any of {known}.")

    def verify_lens(self, block_size: int, device: str) -> tuple[int, ...]:
        """Return the slots to verify on the server's device, the anchor included, ascending.

        Raises:
            ValueError: a candidate does not fit into the block.
        """
        drafted = block_size - 1
        if self.candidate_steps is not None:
            steps = list(self.candidate_steps)
        elif device != "cpu":
            steps = sorted({0, max(block_size // 2 - 1, 0), drafted})
        else:
            powers = (2**j - 1 for j in range(block_size.bit_length() + 1))
            steps = [*(k for k in powers if k < drafted), drafted]
        if steps[-1] > drafted:
            raise ValueError(
                f"--speculative-adaptive: {steps[-1]} drafted tokens are to be verified, but a block of "
                f"{block_size} holds {drafted}."
            )
        return tuple(k + 1 for k in steps)

    def to_environment(self) -> None:
        DFlashOptions.ADAPTIVE.set(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_environment(cls) -> "AdaptiveSettings | None":
        """Return what the main process resolved; None if the server is not adaptive."""
        text = DFlashOptions.ADAPTIVE.get()
        return cls.parse(text) if text else None
