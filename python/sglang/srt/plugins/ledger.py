"""Every change we make to SGLang, in tables by the time when it is made.

The changes themselves are in `changes/`.

| table | applied | in |
|---|---|---|
| `AT_LOAD` | when SGLang loads its plugins | every process |
| `AT_FRONT_END` | when the arguments turn out to request DFLASH | the process that receives requests |
| `AT_WORKER` | before the worker is built | scheduler processes that run DFLASH; others keep stock code |
| `AT_HAND_OVER` | when SGLang loads its plugins | processes of servers of SGLang's own DFLASH |
| `AT_CPU_ATTENTION` | when our CPU attention is built | with DFLASH, or if SGLang's cannot run a target |

Tests walk the tables; `install.py` checks and applies them. `tools/sglang_diff` compares them with any
SGLang, installed or not. The procedure for a new SGLang is in docs/updating-sglang.md.

SGLang's `HookRegistry` does not make them: it logs a change that fails, and the server runs without it.
"""

from sglang_dflash.srt.plugins.changes.cpu import AT_CPU_ATTENTION
from sglang_dflash.srt.plugins.changes.every_process import AT_FRONT_END, AT_LOAD
from sglang_dflash.srt.plugins.changes.worker import AT_HAND_OVER, AT_WORKER

__all__ = (
    "AT_CPU_ATTENTION",
    "AT_FRONT_END",
    "AT_HAND_OVER",
    "AT_LOAD",
    "AT_WORKER",
    "TABLES",
)

TABLES = {
    "AT_LOAD": AT_LOAD,
    "AT_FRONT_END": AT_FRONT_END,
    "AT_WORKER": AT_WORKER,
    "AT_CPU_ATTENTION": AT_CPU_ATTENTION,
}
