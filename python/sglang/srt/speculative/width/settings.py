"""Settings of `--speculative-adaptive`."""

import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

# Devices on which adaptive width is on by default. "cuda" joins when a GPU has shown the ratios that the
# table of defaults asks for (benchmark/gpu/README.md).
ON_BY_DEFAULT = ("cpu",)
# Keys of earlier versions, and what replaced them.
_GONE = {"probe_share": "this key is gone: probes are spaced by what they cost, with no setting"}


@dataclass(frozen=True)
class AdaptiveSettings:
    """The config file.

    Attributes:
        candidate_steps: drafted tokens per request that start-up measures, ascending. 0 is plain decoding.
            The last is the most that a request verifies. None: 0, about half and all.
    """

    candidate_steps: tuple[int, ...] | None = None

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
        values = json.loads(text)
        keys = values if isinstance(values, dict) else {}
        if any(key.isdigit() for key in keys):
            logger.warning(
                "DFLASH does not follow --speculative-adaptive-config: keys are batch sizes, EAGLE's form. "
                'It finds out by itself what pays at which size: give {"candidate_steps": [0, 3, 7]}.'
            )
            return cls()
        problems = [f"{key}: {_GONE.get(key, 'unknown')}" for key in keys if key != "candidate_steps"]
        if (steps := keys.get("candidate_steps")) is not None and not _are_steps(steps):
            problems.append(
                f"candidate_steps: {steps!r} are not two or more ascending whole numbers from 0 on "
                "(--speculative-num-draft-tokens fixes one)"
            )
        if problems or values is not keys:
            problems.append("a JSON object is expected, with candidate_steps or nothing")
            raise ValueError("; ".join(problems) + ".")
        return cls(steps and tuple(steps))

    def verify_lens(self, block_size: int) -> tuple[int, ...]:
        """Return the slots to verify, the anchor included, ascending.

        Raises:
            ValueError: a candidate does not fit into the block.
        """
        drafted = block_size - 1
        steps = self.candidate_steps or sorted({0, max(block_size // 2 - 1, 0), drafted})
        if steps[-1] > drafted:
            raise ValueError(
                f"--speculative-adaptive: {steps[-1]} drafted tokens are to be verified, but a block of "
                f"{block_size} holds {drafted}."
            )
        return tuple(k + 1 for k in steps)

    def to_environment(self) -> None:
        DFlashOptions.ADAPTIVE.set(json.dumps(asdict(self)))

    @classmethod
    def from_environment(cls) -> "AdaptiveSettings | None":
        """Return what the main process resolved; None if the server is not adaptive."""
        text = DFlashOptions.ADAPTIVE.get()
        return cls.parse(text) if text else None


def _are_steps(steps: Any) -> bool:
    """Return whether a value of the file is two or more ascending whole numbers from 0 on."""
    are_numbers = isinstance(steps, list) and len(steps) > 1 and all(type(k) is int for k in steps)
    return are_numbers and steps == sorted({*steps}) and steps[0] >= 0
