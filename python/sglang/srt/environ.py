"""The plugin's options, each in an environment variable.

Every child process inherits the variables. Command-line flags write them. Users of `sglang.Engine` set them.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Our name where SGLang records who has decided an argument.
SOURCE = "sglang_dflash"
CPU_ATTENTION_BACKEND = "torch_native"
STAND_IN_DIR = str(Path(__file__).parent / "hardware_backend" / "cpu" / "stand_in")


def serves_on_stand_in() -> bool:
    """Return whether this process runs on a CPU's stand-in for `sgl_kernel`."""
    return STAND_IN_DIR in sys.path


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """One option.

    Attributes:
        variable: Name of the environment variable.
        default: Value if the variable is empty or not set.
        parse: Reads the variable's text. It raises ValueError or KeyError if the text is not as `wanted`.
        wanted: What the text must be, for the error message.
        is_extra: Whether the option has its default in basic mode (`BASIC_MODE`).
    """

    variable: str
    default: T
    parse: Callable[[str], T]
    wanted: str = "text"
    is_extra: bool = False

    def get(self) -> T:
        """Return the value in force. Raises ValueError naming the variable if it cannot be used."""
        return self.default if self.is_extra and DFlashOptions.BASIC_MODE.get() else self.requested()

    def requested(self) -> T:
        """Return the value of the variable. Raises ValueError with its name for another text."""
        text = os.environ.get(self.variable)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError, OverflowError) as error:
            raise ValueError(f"{self.variable} must be {self.wanted}, got {text!r}.") from error

    def set(self, value: object) -> None:
        os.environ[self.variable] = str(value)

    def clear(self) -> None:
        os.environ.pop(self.variable, None)


def _switch(name: str, is_extra: bool = False) -> Option[bool]:
    parse = {"0": False, "1": True}.__getitem__
    return Option(name, default=False, parse=parse, wanted="1 or 0", is_extra=is_extra)


def _list_of(kind: Callable[[str], Any], name: str, is_extra: bool = False) -> Option[tuple[Any, ...]]:
    how: Any = {"parse": lambda text: tuple(map(kind, text.split(","))), "is_extra": is_extra}
    return Option(name, default=(), wanted=f"{kind.__name__} values separated by commas", **how)


def _parse_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " "))


class DFlashOptions:
    """Every option. The settings classes that use an option check its range."""

    # Whole blocks, no cycles at start-up, and no option that is extra.
    BASIC_MODE = _switch("SGLANG_DFLASH_BASIC")
    # --speculative-copy-ahead: propose what followed a request's last tokens earlier in its own text.
    COPY_AHEAD = _switch("SGLANG_DFLASH_COPY_AHEAD", is_extra=True)
    # --speculative-dflash-strict: refuse what only SGLang's built-in DFLASH serves, rather than hand it over.
    STRICT = _switch("SGLANG_DFLASH_STRICT")
    # --speculative-draft-sample-method, as it was given: SGLang's own field has no name for who asked.
    DRAFT_SAMPLE_METHOD: Option[str | None] = Option("SGLANG_DFLASH_DRAFT_SAMPLE_METHOD", None, str)
    # The target's depth, from the main process to the schedulers, for drafts that do not name the layers
    # they read.
    TARGET_LAYERS: Option[int | None] = Option("SGLANG_DFLASH_TARGET_LAYERS", None, int, "an integer")
    # --no-speculative-adaptive: verify whole blocks, on a CPU too.
    NO_ADAPTIVE = _switch("SGLANG_DFLASH_NO_ADAPTIVE")
    # A FlashInfer target's lengths are waited for while the draft runs. Off until a GPU shows one request to
    # be at least 1.15 times as fast with it as without (the table of defaults in benchmark/gpu/README.md).
    WAIT_UNDER_DRAFT = _switch("SGLANG_DFLASH_WAIT_UNDER_DRAFT", is_extra=True)
    # Slots that adaptive width measures, from the main process to the schedulers. Empty: verify whole blocks.
    ADAPTIVE: Option[tuple[int, ...]] = _list_of(int, "SGLANG_DFLASH_ADAPTIVE", is_extra=True)
    # Our attention and layers on a CPU for servers without a draft too, as the benchmark's baseline.
    CPU_LAYERS = _switch("SGLANG_DFLASH_CPU_LAYERS")
    # For benchmarks: mean accept lengths to simulate, the bonus token included, of the rows of the request
    # table in turn.
    SIMULATE_ACC_LENS: Option[tuple[float, ...]] = _list_of(float, "SGLANG_DFLASH_SIMULATE_ACC_LENS")
    # --speculative-record: a folder for finished requests, to train a draft on (`observability/record.py`).
    RECORD: Option[str | None] = Option("SGLANG_DFLASH_RECORD", None, os.path.expanduser)
    # --speculative-record-share, of requests, and --speculative-record-limit, of the folder in bytes.
    RECORD_SHARE = Option("SGLANG_DFLASH_RECORD_SHARE", 1.0, float, "a number")
    RECORD_LIMIT = Option("SGLANG_DFLASH_RECORD_LIMIT", 2 * 10**9, _parse_bytes, "a size such as 500MB")
    # --speculative-record-opt-in: record requests that ask for it alone.
    RECORD_OPT_IN = _switch("SGLANG_DFLASH_RECORD_OPT_IN")
    # SGLang's built-in DFLASH serves: from the main process to its children, which report it.
    FALLBACK = _switch("SGLANG_DFLASH_FALLBACK")
    # Observers of the cycle (`cycle/observer.py`), `module:Class` each, separated by commas.
    OBSERVERS: Option[tuple[str, ...]] = _list_of(str, "SGLANG_DFLASH_OBSERVERS")


def check_values() -> None:
    """Raise ValueError for a variable that cannot be read, before a scheduler reads it."""
    for option in vars(DFlashOptions).values():
        if isinstance(option, Option):
            option.requested()
