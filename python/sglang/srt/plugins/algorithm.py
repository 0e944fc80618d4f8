"""Our algorithm, parsers, models and attention in SGLang's own registries.

`patches.py` lists what SGLang has no registry for.
"""

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_dflash.srt import patching
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.patching import WORKER
from sglang_dflash.srt.plugins.patches import patches_at
from sglang_dflash.srt.plugins.refusals import check_activation
from sglang_dflash.srt.reaches import WAIT, require

# SGLang reserves the name DFLASH, so our algorithm has another name in the registry.
NAME = "SGLANG_DFLASH"
# Methods of an algorithm by which SGLang asks what kind it is.
_QUESTIONS = ("is_", "supports_", "has_", "carries_", "need_", "get_num_")
# SGLang's variable for the application that its HTTP workers import. 0.5.22 has none.
HTTP_WORKERS = "SGLANG_HTTP_SERVER_APP_PATH"


class ServedName(str):
    """The name DFLASH, by which SGLang finds our algorithm instead of its built-in.

    SGLang looks an algorithm up by `name.upper()`, and `_build_hybrid_req_pool` refuses ReplaySSM for DFLASH
    by it. About twenty other places, and `/server_info`, read the name itself.
    """

    def upper(self) -> str:
        """Return the name in the registry."""
        return NAME


class DFlashAlgorithm(CustomSpecAlgo):
    """The plugin's algorithm, which answers SGLang's questions as the built-in DFLASH does.

    It equals the built-in, because SGLang's forward-pass metrics compare members.
    """

    def __eq__(self, other: object) -> bool:
        return other is self or other is SpeculativeAlgorithm.DFLASH

    def __hash__(self) -> int:
        return hash(SpeculativeAlgorithm.DFLASH)

    def create_worker(self, server_args: Any) -> type:
        """Patch what a scheduler with our algorithm needs, and return the worker's class."""
        return prepare_scheduler()

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """Return SGLang's relay between steps, or ours, with which a cycle waits for its lengths."""
        from sglang.srt.managers.overlap_utils import FutureMap

        relay = FutureMap
        if DFlashOptions.WAIT_UNDER_DRAFT.get():
            from sglang_dflash.srt.speculative.cycle.lengths import LateLengths

            require(WAIT)
            relay = LateLengths
        return relay(*args[:1], self, *args[1:], **kwargs)

    def build_disagg_draft_input(self, batch: Any, last_tokens_tensor: Any, future_map: Any) -> Any:
        """Carry requests that another server has prefilled into their first cycle."""
        from sglang_dflash.srt.speculative.disaggregation import build_disagg_draft_input

        return build_disagg_draft_input(batch, last_tokens_tensor, future_map)


def _answer_as_dflash(name: str) -> Callable[..., Any]:
    def answer(self: DFlashAlgorithm, *args: Any, **kwargs: Any) -> Any:
        return getattr(SpeculativeAlgorithm.DFLASH, name)(*args, **kwargs)

    return answer


for _name in vars(SpeculativeAlgorithm):
    if _name.startswith(_QUESTIONS):
        setattr(DFlashAlgorithm, _name, _answer_as_dflash(_name))


def register() -> None:
    """Register the algorithm, once, under its name and as PEAGLE, which SGLang does not have."""
    if get_spec(NAME) is not None:
        return
    for name in (NAME, "PEAGLE"):
        SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=DFlashAlgorithm)(
            lambda args: None
        )


def register_in_front_end() -> None:
    """Register parsers that take a chunk of many tokens, and the application of HTTP workers."""
    from sglang_dflash.srt.plugins import tool_parsers

    tool_parsers.register()
    os.environ.setdefault(HTTP_WORKERS, "sglang_dflash.srt.plugins.http_workers:app")


def register_in_scheduler() -> None:
    """Register our draft models, which replace two that SGLang has under the same names."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register("sglang_dflash.srt.models", overwrite=True, strict=True)


def prepare_scheduler() -> type:
    """Patch what a scheduler that runs our DFLASH needs, and return the worker's class."""
    from sglang_dflash.srt.plugins.server_info import check_ranks_run_ours

    check_ranks_run_ours()
    check_activation()
    try:
        patching.install(patches_at(WORKER))
    except patching.Mismatch as mismatch:
        # The arguments are resolved by our rules, so SGLang's own worker cannot take over here.
        raise SystemExit(f"sglang-dflash: {mismatch} {patching.HELP}") from mismatch
    register_in_scheduler()
    from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker

    return DFlashWorker
