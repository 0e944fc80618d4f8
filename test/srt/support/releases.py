"""What differs in SGLang 0.5.22, the oldest release that we support."""

import sglang

from sglang_dflash.srt.reaches import REACHES

IS_0_5_22 = sglang.__version__.startswith("0.5.22")
REACHES_HERE = tuple(reach for reach in REACHES if not IS_0_5_22 or reach.since == "0.5.22")
