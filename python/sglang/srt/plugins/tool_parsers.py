"""SGLang's streaming parsers, fed in pieces of a token's size.

Many of SGLang's detectors take one step of a tool call per increment, and a chunk of DFLASH may hold several:
arguments, or a call, are then lost. Others need a marker such as `<tool_call>` in one increment, as it is one
token of their models. So each reads a chunk in pieces of at most a word, with markers whole.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from sglang_dflash.srt.patching import FRONT_END, patches

# A marker, else a word or a sign with the space before it, as tokenizers cut text.
_PIECE = re.compile(r"<[^<>\s]+>| ?\w+| ?[^\w\s<]|\s+(?!\S)|.", re.DOTALL)
# The beginning of a marker at the end of a chunk. No marker of SGLang's detectors is nearly as long.
_OPEN_MARKER = re.compile(r"<[^<>\s]{0,63}\Z")


def pieces_of(text: str) -> list[str]:
    """Cut text into pieces of a token's size; an empty text is one piece."""
    return _PIECE.findall(text) or [""]


def join_results(results: Sequence[Any]) -> Any:
    """Join a detector's results for several pieces into the last of them.

    Consecutive argument deltas of a call become one, as one chunk sends one event.
    """
    last = results[-1]
    for field in ("normal_text", "reasoning_text"):
        if hasattr(last, field):
            setattr(last, field, "".join(getattr(result, field) or "" for result in results))
    if hasattr(last, "calls"):
        calls: list[Any] = []
        for call in [call for result in results for call in result.calls]:
            if calls and not call.name and call.tool_index == calls[-1].tool_index:
                calls[-1].parameters += call.parameters
            else:
                calls.append(call)
        last.calls = calls
    return last


@functools.cache
def piecewise(detector: Any) -> type:
    """Derive a detector that parses a chunk of any length as it parses single tokens."""

    class Piecewise(detector):  # type: ignore[misc]
        reads_pieces = True
        _open_marker = ""

        def parse_streaming_increment(self, new_text: str, *tools: Any) -> Any:
            """Parse a chunk in pieces. A marker that has only begun waits for its end."""
            parse = super().parse_streaming_increment
            text = self._open_marker + new_text
            is_open = _OPEN_MARKER.search(text)
            self._open_marker = is_open.group() if is_open else ""
            return join_results(
                [parse(piece, *tools) for piece in pieces_of(text.removesuffix(self._open_marker))]
            )

        def finish(self, *tools: Any) -> Any:
            """Parse a marker that did not end, and release what the detector held back."""
            text, self._open_marker = self._open_marker, ""
            rest = [super().parse_streaming_increment(text, *tools)] if text else []
            return join_results([*rest, super().finish(*tools)])

    Piecewise.__name__ = detector.__name__
    return Piecewise


def register() -> None:
    """Register detectors that read pieces under SGLang's names."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    for registry in (FunctionCallParser.ToolCallParserEnum, ReasoningParser.DetectorMap):
        for name, detector in registry.items():
            if not hasattr(detector, "reads_pieces"):
                registry[name] = piecewise(detector)


@patches(
    "sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
    at=FRONT_END,
    signature="(self, new_text, tools)",
    feature="streamed calls that a request requires",
    until="0.5.23",
    upstream="https://github.com/sgl-project/sglang/issues/31915",
)
def json_arrays_in_pieces(original: Callable[..., Any], parser: Any, new_text: str, tools: Any) -> Any:
    """Parse a required call in pieces, as a block holds several of its steps.

    SGLang 0.5.22 gives one name or one argument for each chunk, and the rest never.
    """
    return join_results([original(parser, piece, tools) for piece in pieces_of(new_text)])
