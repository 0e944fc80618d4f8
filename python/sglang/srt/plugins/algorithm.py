"""Our algorithm in the registry of SGLang, which serves `--speculative-algorithm DFLASH`."""

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

# DFLASH is a reserved name, so ours has another in the registry.
NAME = "SGLANG_DFLASH"
# Methods of an algorithm by which SGLang asks what kind it is.
_QUESTIONS = ("is_", "supports_", "has_", "carries_", "need_", "get_num_")


class ServedName(str):
    """The name DFLASH, by which SGLang finds ours instead of its built-in.

    SGLang looks an algorithm up by `name.upper()`. In some twenty other places, and in `/server_info`, it
    reads the name itself, which therefore stays DFLASH.
    """

    def upper(self) -> str:
        """Return the name in the registry."""
        return NAME


class DFlashAlgorithm(CustomSpecAlgo):
    """The plugin's algorithm.

    It answers SGLang's questions about its kind as the built-in DFLASH does, and equals it where SGLang
    compares members (the forward-pass metrics).
    """

    def __eq__(self, other: object) -> bool:
        return other is self or other is SpeculativeAlgorithm.DFLASH

    def __hash__(self) -> int:
        return hash(SpeculativeAlgorithm.DFLASH)

    def create_worker(self, server_args: Any) -> type:
        """Change what a scheduler of ours needs, and return the worker's class."""
        from sglang_dflash.srt.plugins import doors

        return doors.prepare_scheduler(server_args)

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """Return a relay that knows bounds of lengths without the device."""
        from sglang_dflash.srt.speculative.cycle.lengths import KnownLengthsMap

        return KnownLengthsMap(*args[:1], self, *args[1:], **kwargs)

    def build_disagg_draft_input(self, batch: Any, last_tokens_tensor: Any, future_map: Any) -> Any:
        """Carry requests that another server has prefilled into their first cycle."""
        from sglang_dflash.srt.speculative.parallel import build_disagg_draft_input

        return build_disagg_draft_input(batch, last_tokens_tensor, future_map)


def _answer_as_dflash(name: str) -> Callable[..., Any]:
    def answer(self: DFlashAlgorithm, *args: Any, **kwargs: Any) -> Any:
        return getattr(SpeculativeAlgorithm.DFLASH, name)(*args, **kwargs)

    return answer


for _name in vars(SpeculativeAlgorithm):
    if _name.startswith(_QUESTIONS):
        setattr(DFlashAlgorithm, _name, _answer_as_dflash(_name))


def register() -> None:
    """Register the algorithm under its own name, and as PEAGLE, which SGLang does not have."""
    for name in (NAME, "PEAGLE"):
        SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=DFlashAlgorithm)(
            lambda args: None
        )
