"""What differs in SGLang 0.5.22, the oldest release that we support."""

from collections.abc import Iterable

import sglang  # loads our platform plugin before any of SGLang's modules
from sglang_diff.compare import reaches_of
from sglang_diff.reaches import Reach

from sglang_dflash.srt.reaches import ON_CPU, ROWS, WAIT

IS_0_5_22 = sglang.__version__.startswith("0.5.22")
REACHES_HERE = tuple(reaches_of(sglang.__version__))


def needed_by(ledger: Iterable[Reach]) -> dict[str | None, dict[str, list[str]]]:
    """Return what a ledger writes and overrides, as `reaches.NEEDED` has it."""
    needed: dict[str | None, dict[str, list[str]]] = {None: {}, ROWS: {}, WAIT: {}, ON_CPU: {}}
    for reach in ledger:
        if reach.kind != "read":
            names = needed[reach.feature].setdefault(reach.owner.removeprefix("sglang.srt."), [])
            names += [name for name in reach.names if name not in names]
    return needed


NEEDED_HERE = needed_by(REACHES_HERE)
