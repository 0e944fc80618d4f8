"""Settings of `--speculative-adaptive`."""

import json
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# Devices that are adaptive by default. "cuda" joins with the ratios of the table in benchmark/gpu/README.md.
ON_BY_DEFAULT = ("cpu",)
_GONE = {"probe_share": "this key is gone: probes are spaced by what they cost, with no setting"}


def read_steps(path: str | None) -> tuple[int, ...] | None:
    """Read the drafted tokens per request that start-up measures, ascending, from a JSON file.

    0 is plain decoding. The last is the most that a request verifies. None: 0, about half and all. Raises
    ValueError as `parse_steps` does.
    """
    try:
        return None if path is None else parse_steps(Path(os.path.expanduser(path)).read_text())
    except OSError as error:
        reason = f"cannot be read ({error.strerror})."
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"--speculative-adaptive-config {path!r}: {reason}")


def parse_steps(text: str) -> tuple[int, ...] | None:
    """Parse a JSON object. Raises ValueError with all that is wrong, but for EAGLE's form."""
    values = json.loads(text)
    keys = values if isinstance(values, dict) else {}
    if any(key.isdigit() for key in keys):
        logger.warning(
            "DFLASH does not follow --speculative-adaptive-config: keys are batch sizes, EAGLE's form. "
            'It finds out by itself what pays at which size: give {"candidate_steps": [0, 3, 7]}.'
        )
        return None
    problems = [f"{key}: {_GONE.get(key, 'unknown')}" for key in keys if key != "candidate_steps"]
    if (steps := keys.get("candidate_steps")) is not None:
        are_numbers = isinstance(steps, list) and len(steps) > 1 and all(type(k) is int for k in steps)
        if not are_numbers or steps != sorted({*steps}) or steps[0] < 0:
            problems.append(
                f"candidate_steps: {steps!r} are not two or more ascending whole numbers from 0 on "
                "(--speculative-num-draft-tokens fixes one)"
            )
    if problems or values is not keys:
        problems.append("a JSON object is expected, with candidate_steps or nothing")
        raise ValueError("; ".join(problems) + ".")
    return steps and tuple(steps)


def lens_to_verify(steps: tuple[int, ...] | None, block_size: int) -> tuple[int, ...]:
    """Return the slots to verify, ascending. Raises ValueError for more than the block holds."""
    drafted = block_size - 1
    steps = steps or (*sorted({0, max(block_size // 2 - 1, 0), drafted}),)
    if steps[-1] > drafted:
        raise ValueError(
            f"--speculative-adaptive: {steps[-1]} drafted tokens are to be verified, but a block of "
            f"{block_size} holds {drafted}."
        )
    return tuple(k + 1 for k in steps)
