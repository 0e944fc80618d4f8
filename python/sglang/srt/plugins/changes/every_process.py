"""Changes in every process, and in the process that receives requests."""

from sglang_dflash.srt.plugins import hooks
from sglang_dflash.srt.plugins.change import Change, made_by
from sglang_dflash.srt.plugins.changes.cpu import AT_CPU_LOAD

AT_LOAD = (
    Change(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        remove_when="SGLang lets plugins declare flags",
        upstream="docs/dev/upstream/plugin-doors.md",
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
    Change(
        target="sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
        until="0.5.23",
        remove_when="SGLang 0.5.22 is not supported any more",
        upstream="https://github.com/sgl-project/sglang/issues/31915",
        feature="streamed calls that a request requires",
        signature="(self, new_text, tools)",
        why="SGLang 0.5.22 loses arguments if one chunk holds several steps of a required call",
        build=made_by("srt.parser.piecewise.json_arrays_in_pieces"),
    ),
)
