"""Changes in every process, and in the process that receives requests."""

from sglang_dflash.srt.plugins import hooks
from sglang_dflash.srt.plugins.change import PIECES, Change, made_by
from sglang_dflash.srt.plugins.changes.cpu import AT_CPU_LOAD

AT_LOAD = (
    Change(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        remove_when="SGLang lets plugins declare flags",
        feature="the flags of sglang-dflash on the command line (their environment variables work)",
        kind="around",
        signature="(parser)",
        why="offer DFLASH's own flags on SGLang's command line",
        build=hooks.add_cli_args,
    ),
    *AT_CPU_LOAD,
)

AT_FRONT_END = (
    Change(
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        remove_when="SGLang checks their types and ranges",
        upstream="https://github.com/sgl-project/sglang/pull/28960",
        feature="checks of sampling parameters",
        signature="(self)",
        why="SGLang does not check types and ranges of sampling parameters; some end the scheduler",
        build=made_by("srt.speculative.request_fields.checking_requests"),
    ),
    *(
        Change(
            target=f"sglang.srt.{parser}",
            remove_when="SGLang's parsers take a chunk of several tokens",
            upstream="https://github.com/sgl-project/sglang/issues/31915",
            feature=PIECES,
            signature=signature,
            why="streamed tool calls lose arguments if one chunk holds several steps of a call",
            build=made_by(f"srt.parser.piecewise.{ours}"),
        )
        for parser, ours, signature in (
            ("function_call.function_call_parser.FunctionCallParser.__init__", "tool_calls_in_pieces", None),
            ("parser.reasoning_parser.ReasoningParser.__init__", "reasoning_in_pieces", None),
            (
                "function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
                "json_arrays_in_pieces",
                "(self, new_text, tools)",
            ),
        )
    ),
)
