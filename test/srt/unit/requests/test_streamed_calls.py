"""Streamed tool calls and reasoning, for every parser of SGLang and chunks of many tokens."""

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import TARGET
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from support.releases import IS_0_5_22
from support.servers import run_to_end
from support.tool_formats import REASONING_FRAMES, TEXT_FRAMES, TOOL_FORMATS, TemplateTokenizer
from tokenizers import Tokenizer

from sglang_dflash.srt.plugins import tool_parsers

CHUNKS = (1, 8, 32, 128)
NEWER_PARSERS = {"beam", "response_template"} if IS_0_5_22 else set()
WEATHER = ("get_weather", {"city": "Paris, near the Seine", "unit": "celsius"})
PLAN = ("make_plan", {"days": 3, "stops": ["Lyon", "Nice"], "note": 'a "big" {trip}, 5 > 3'})
TIME = ("get_time", {"zone": "UTC"})
STRING = {"type": "string"}
TOOLS = [
    Tool(type="function", function={"name": name, "parameters": {"type": "object", "properties": properties}})
    for name, properties in (
        ("get_weather", {"city": STRING, "unit": STRING}),
        ("make_plan", {"days": {"type": "integer"}, "stops": {"type": "array"}, "note": STRING}),
        ("get_time", {"zone": STRING}),
    )
]
TEXT = "Let me look: 1 < 2 and <b>.\n"
# SGLang streams their second call as text, or drops it, from single tokens too. GigaChat 3 has one call.
ONE_CALL_A_STREAM = ("mistral", "interns1", "gigachat3")
READ_THE_TOKENIZER = ("response_template", "hunyuan")


@pytest.fixture(autouse=True)
def reading_pieces(monkeypatch):
    """Make SGLang's parsers those of a server with DFLASH."""
    for parser, registry in ((FunctionCallParser, "ToolCallParserEnum"), (ReasoningParser, "DetectorMap")):
        monkeypatch.setattr(parser, registry, dict(getattr(parser, registry)))
    tool_parsers.register()
    parse = functools.partialmethod(
        functools.partial(tool_parsers.json_arrays_in_pieces, JsonArrayParser.parse_streaming_increment)
    )
    monkeypatch.setattr(JsonArrayParser, "parse_streaming_increment", parse)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{TARGET}/tokenizer.json")


def chunks_of(tokenizer: Tokenizer, text: str, size: int) -> list[str]:
    """Cut text every `size` tokens, or later where a token ends inside a character."""
    chunks, held = [], []
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        held.append(token)
        if len(held) >= size and not (chunk := tokenizer.decode(held)).endswith("�"):
            chunks.append(chunk)
            held = []
    chunks.append(tokenizer.decode(held))
    assert "".join(chunks) == text
    return chunks


def parser_of(kind: type, name: str, *arguments: object):
    is_read = name in READ_THE_TOKENIZER
    return kind(*arguments, name, tokenizer=TemplateTokenizer() if is_read else None)


def tool_parser(name: str) -> FunctionCallParser:
    return parser_of(FunctionCallParser, name, TOOLS)


def joined(items) -> list[tuple[str, object]]:
    """Join streamed items into calls, as a client does."""
    calls: dict[int, list[str]] = {}
    for item in items:
        call = calls.setdefault(item.tool_index, ["", ""])
        call[0] += item.name or ""
        call[1] += item.parameters
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def streamed(parser: FunctionCallParser, chunks: list[str]) -> tuple[list[tuple[str, object]], str]:
    parsed = [*map(parser.parse_stream_chunk, chunks), parser.parse_stream_end()]
    return joined(item for _, items in parsed for item in items), "".join(text or "" for text, _ in parsed)


def test_every_parser_has_a_format():
    assert set(TOOL_FORMATS) - NEWER_PARSERS == set(FunctionCallParser.ToolCallParserEnum)
    assert set(REASONING_FRAMES) - NEWER_PARSERS < set(ReasoningParser.DetectorMap)


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - NEWER_PARSERS))
def test_streamed_calls_are_those_of_the_whole_answer(tokenizer, name):
    """Check one call, two, and one after text; and text without a call, at every size of chunk."""
    write, frame = TOOL_FORMATS[name], TEXT_FRAMES.get(name, "{}")
    answers = {write([WEATHER]): [WEATHER], write([PLAN]): [PLAN]}
    if name not in ONE_CALL_A_STREAM:
        answers[write([WEATHER, TIME])] = [WEATHER, TIME]
    if frame is not None:
        answers |= {frame.format(TEXT) + write([TIME]): [TIME], frame.format(TEXT): []}
    for answer, calls in answers.items():
        text, whole = tool_parser(name).parse_non_stream(answer)
        assert [(call.name, json.loads(call.parameters)) for call in whole] == calls, answer
        found = [streamed(tool_parser(name), chunks_of(tokenizer, answer, size)) for size in CHUNKS]
        assert [one[0] for one in found] == [calls] * len(CHUNKS), answer
        assert len({one[1] for one in found}) == 1
        if calls:  # without a call some parsers give back the frame too
            assert found[0][1].strip() == text.strip()


@pytest.mark.parametrize("name", ReasoningParser.DetectorMap)
def test_streamed_reasoning_is_that_of_the_whole_answer(tokenizer, name):
    before, after = REASONING_FRAMES.get(name, ("<think>", "</think>"))
    thought, said = "Is a < b, or x<y? [1] and {2}.\n\nSo it is 5.", "The answer is <b>5</b> [5]."
    answer = before + thought + after + said
    whole = [text.strip() for text in parser_of(ReasoningParser, name).parse_non_stream(answer)]
    assert whole == [thought, said] or name == "minimax-append-think"  # which takes all for the answer
    found = []
    for size in CHUNKS:
        parser = parser_of(ReasoningParser, name)
        parsed = [
            *map(parser.parse_stream_chunk, chunks_of(tokenizer, answer, size)),
            parser.parse_stream_end(),
        ]
        found.append(["".join(part or "" for part in parts).strip() for parts in zip(*parsed, strict=True)])
    assert found == [whole] * len(CHUNKS)


def test_required_calls_are_streamed_whole(tokenizer):
    """Check the parser of JSON arrays, which SGLang uses without a FunctionCallParser."""
    calls = [WEATHER, PLAN, TIME]
    answer = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])
    for size in CHUNKS:
        parser = JsonArrayParser()
        chunks = chunks_of(tokenizer, answer, size)
        found = [parser.parse_streaming_increment(chunk, TOOLS) for chunk in chunks] + [parser.finish(TOOLS)]
        assert joined(item for one in found for item in one.calls) == calls


def test_arguments_in_a_row_are_one_item():
    """A chunk gives few events: a name and its arguments."""
    _, items = tool_parser("hermes").parse_stream_chunk(TOOL_FORMATS["hermes"]([PLAN, TIME]))
    assert [(item.tool_index, item.name) for item in items] == [(0, "make_plan"), (1, "get_time")]


@given(st.text('ab <>/|_\n"{é▁你', max_size=40), st.integers(1, 9))
def test_no_text_is_lost(text, size):
    """Every text comes back whole: its pieces, and the chunks of an answer that ends anywhere."""
    assert "".join(tool_parsers.pieces_of(text)) == text
    parser = ReasoningParser("mimo", force_reasoning=True)
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    parsed = [*map(parser.parse_stream_chunk, chunks), parser.parse_stream_end()]
    assert "".join((reasoning or "") + (said or "") for reasoning, said in parsed) == text


def test_a_detector_reads_pieces_once():
    """A second server in the process changes nothing, and SGLang still knows the detector."""
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector

    tool_parsers.register()
    assert type(tool_parser("qwen").detector) is tool_parsers.piecewise(Qwen25Detector)


WORKER = """
import os
from sglang_dflash.srt.plugins import algorithm, http_workers
from sglang_dflash.srt.plugins.algorithm import ServedName
from sglang.srt.entrypoints import http_server
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
assert os.environ[algorithm.HTTP_WORKERS] == f"{http_workers.__name__}:app"
assert http_workers.app is http_server.app
assert SpeculativeAlgorithm.from_string(ServedName("DFLASH")).is_dflash()
assert all(hasattr(one, "reads_pieces") for one in FunctionCallParser.ToolCallParserEnum.values())
try:
    GenerateReqInput(text="a", sampling_params={"top_k": "x"}).normalize_batch_and_arguments()
except ValueError as error:
    print("refused:", error)
"""


def test_http_workers_load_the_plugin():
    """SGLang loads no plugin in the workers of --tokenizer-worker-num; they import our application."""
    ended = run_to_end("-c", WORKER)
    assert ended.code == 0 and "refused: sampling_params: top_k cannot be" in ended.output, ended.output
