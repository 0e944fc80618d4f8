"""What differs in SGLang 0.5.22, the oldest release that we support."""

import sglang  # loads our platform plugin before any of SGLang's modules
from sglang_diff.compare import reaches_of

IS_0_5_22 = sglang.__version__.startswith("0.5.22")
REACHES_HERE = tuple(reaches_of(sglang.__version__))
