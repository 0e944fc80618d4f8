"""Tool calls and reasoning as the models of SGLang's parsers write them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Write = Callable[[Sequence[Call]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _in_frame(before: str, one: Callable[[str, dict[str, Any]], str], after: str = "", between="") -> Write:
    return lambda calls: before + between.join(one(*call) for call in calls) + after


def _tags(before: str, key: str, value: str, after: str) -> Callable[[str, dict[str, Any]], str]:
    """Return a writer of a call in tags; `{}` is its name, an argument's name or value."""
    return lambda name, arguments: (
        before.format(name)
        + "".join(key.format(k) + value.format(_raw(v)) for k, v in arguments.items())
        + after
    )


def _object(name_field: str = "name", arguments_field: str = "arguments", before="", after=""):
    return lambda name, arguments: before + _json({name_field: name, arguments_field: arguments}) + after


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _typed(mark: str, space: str = ""):
    """Return a writer of a call whose parameters say whether they are strings."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        tag, parameters = f"{mark}{space}parameter", ""
        for key, value in arguments.items():
            is_string = _json(isinstance(value, str))
            parameters += f'<{tag} name="{key}" string="{is_string}">{_raw(value)}</{tag}>\n'
        return f'<{mark}{space}invoke name="{name}">\n{parameters}</{mark}{space}invoke>'

    return one


def _gemma4(name: str, arguments: dict[str, Any]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, list):
            return f"[{','.join(map(value, one))}]"
        return f'<|"|>{one}<|"|>' if isinstance(one, str) else _json(one)

    pairs = ",".join(f"{key}:{value(one)}" for key, one in arguments.items())
    return f"<|tool_call>call:{name}{{{pairs}}}<tool_call|>"


def _kimi_k2(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    written = "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "other"}"<|sep|>'
        f"{_raw(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{written}<|close|>call<|sep|>'


def _minimax_m3(name: str, arguments: dict[str, Any]) -> str:
    mark = "]<]minimax[>["

    def inner(value: Any) -> str:
        if isinstance(value, list):
            return "".join(f"{mark}<item>{_raw(one)}{mark}</item>" for one in value)
        return _raw(value)

    written = "".join(f"{mark}<{key}>{inner(value)}{mark}</{key}>" for key, value in arguments.items())
    return f'{mark}<invoke name="{name}">{written}{mark}</invoke>'


def _beam(name: str, arguments: dict[str, Any]) -> str:
    written = "\n".join(
        f'<rfl:parameter name="{key}">\n{_raw(value)}\n</rfl:parameter>' for key, value in arguments.items()
    )
    return f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{written}"


def _arg_tags(opening: str, newline: str = "\n", mark: str = "", closing: str = "</tool_call>"):
    """Return a writer of a call with a tag for each key and each value."""
    key, value = (f"<{mark}{tag}>{{}}</{mark}{tag}>{newline}" for tag in ("arg_key", "arg_value"))
    return _tags(opening, key, value, closing)


def _functions(parameter: str, end: str) -> Write:
    one = _tags("<tool_call>\n<function={}>\n", parameter, end, "</function>\n</tool_call>")
    return _in_frame("", one, between="\n")


def _deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    code = f"```json\n{_json(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{code}<｜tool▁call▁end｜>"


def _deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"


def _gpt_oss(name: str, arguments: dict[str, Any]) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>"
    return f"{head}{_json(arguments)}<|call|>"


def _inkling(name: str, arguments: dict[str, Any]) -> str:
    call = _json({"name": name, "args": arguments})
    return f"<|message_model|>{name}<|content_invoke_tool_json|>{call}<|end_message|>"


_QWEN = _in_frame("", _object(before="<tool_call>\n", after="\n</tool_call>"), between="\n")
_QWEN_CODER = _functions("<parameter={}>\n", "{}\n</parameter>\n")
_GLM45 = _in_frame("", _arg_tags("<tool_call>{}\n"), between="\n")
_INVOKE = _tags('<invoke name="{}">\n', '<parameter name="{}">', "{}</parameter>\n", "</invoke>")
_MINICPM = _tags('<function name="{}">', '<param name="{}">', "<![CDATA[{}]]></param>", "</function>")
_MUSE = _tags(
    '<atem:invoke name="{}">\n', '<atem:parameter name="{}">', "{}</atem:parameter>\n", "</atem:invoke>"
)
_STEP3 = _tags(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n',
    '<steptml:parameter name="{}">',
    "{}</steptml:parameter>\n",
    "</steptml:invoke><｜tool_call_end｜>",
)
_IFM = _arg_tags("<ifm|tool_call>{}\n", mark="ifm|", closing="</ifm|tool_call>")
_IQUEST = _arg_tags("<iquest_tool_call>{}", newline="", closing="</iquest_tool_call>")
_INTERN = _object("name", "parameters", "<|action_start|> <|plugin|>\n", "<|action_end|>")
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# By the parser's name in SGLang.
TOOL_FORMATS: dict[str, Write] = {
    "apertus2509": _in_frame("<|tools_prefix|>[", lambda n, a: _json({n: a}), "]<|tools_suffix|>", ", "),
    "beam": _in_frame("", _beam, "<|call|>", "<|end|><|start|>assistant"),
    "cohere_command4": _in_frame(
        "<|START_ACTION|>[", _object("tool_name", "parameters"), "]<|END_ACTION|>", ",\n"
    ),
    "deepseekv3": _in_frame(_CALLS_BEGIN, _deepseek_v3, _CALLS_END, "\n"),
    "deepseekv31": _in_frame(_CALLS_BEGIN, _deepseek_v31, _CALLS_END),
    "deepseekv32": _in_frame(
        "<｜DSML｜function_calls>\n", _typed("｜DSML｜"), "\n</｜DSML｜function_calls>", "\n"
    ),
    "deepseekv4": _in_frame("<｜DSML｜tool_calls>\n", _typed("｜DSML｜"), "\n</｜DSML｜tool_calls>", "\n"),
    "deepseekv41": _in_frame("<｜DSML｜ calls>\n", _typed("｜DSML｜", " "), "\n</｜DSML｜ calls>", "\n"),
    "dots": _in_frame("<dots_function_call>\n", _INVOKE, "\n</dots_function_call>", "\n"),
    "gemma4": _in_frame("", _gemma4),
    "gigachat3": _in_frame("<|function_call|>", _object()),
    "gigachat35": _in_frame("<｜GCML｜tool_calls>\n", _typed("｜GCML｜"), "\n</｜GCML｜tool_calls>", "\n"),
    "glm": _GLM45,
    "glm45": _GLM45,
    "glm47": _in_frame("", _arg_tags("<tool_call>{}", newline="")),
    "gpt-oss": _in_frame("", _gpt_oss),
    "hermes": _QWEN,
    "hunyuan": _in_frame("<tool_calls>\n", _arg_tags("<tool_call>{}<tool_sep>\n"), "\n</tool_calls>", "\n"),
    "inkling": _in_frame("", _inkling),
    "interns1": _in_frame("", _INTERN),
    "iquest_q1": _in_frame("", _IQUEST, between="\n"),
    "k2_horizon": _in_frame("<ifm|tool_calls>\n", _IFM, "\n</ifm|tool_calls>", "\n"),
    "kimi_k2": _kimi_k2,
    "kimi_k3": _in_frame("<|open|>tools<|sep|>", _kimi_k3, "<|close|>tools<|sep|>"),
    "lfm2": _in_frame("<|tool_call_start|>[", _python, "]<|tool_call_end|>", ", "),
    "ling3": _GLM45,
    "llama3": _in_frame("<|python_tag|>", _object("name", "parameters"), between=";"),
    "mimo": _functions("<parameter={}>", "{}</parameter>\n"),
    "minicpm5": _in_frame("", _MINICPM, between="\n"),
    "minimax-m2": _in_frame("<minimax:tool_call>\n", _INVOKE, "\n</minimax:tool_call>", "\n"),
    "minimax-m3": _in_frame("]<]minimax[>[<tool_call>", _minimax_m3, "]<]minimax[>[</tool_call>"),
    "mistral": _in_frame("[TOOL_CALLS] [", _object(), "]", ", "),
    "muse": _in_frame(
        " to=tool<|message|><atem:function_calls>\n", _MUSE, "\n</atem:function_calls><|eom|>", "\n"
    ),
    "nanbeige": _QWEN_CODER,
    "poolside_v1": _GLM45,
    "pythonic": _in_frame("[", _python, "]", ", "),
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "qwen3_coder": _QWEN_CODER,
    "response_template": _QWEN,
    "spark25": _in_frame("", _arg_tags("<tool_call>{}\n", newline=""), between="\n"),
    "step3": _in_frame("<｜tool_calls_begin｜>\n", _STEP3, "\n<｜tool_calls_end｜>", "\n"),
    "step3p5": _QWEN_CODER,
    "trinity": _QWEN,
}
# Text before the calls, where it needs a frame. None: calls follow nothing.
TEXT_FRAMES: dict[str, str | None] = {
    "beam": None,
    "gpt-oss": "<|channel|>commentary<|message|>{}<|end|>",
    "inkling": "<|message_model|><|content_text|>{}<|end_message|>",
    "kimi_k3": "<|open|>response<|sep|>{}<|close|>response<|sep|>",
    "muse": " to=user<|message|>{}<|eom|><|start|>assistant",
}

# Before and after the reasoning; other parsers have <think> and </think>.
REASONING_FRAMES: dict[str, tuple[str, str]] = {
    "apertus2509": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "beam": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "cohere_command4": ("", "<|END_THINKING|><|START_TEXT|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "inkling": ("<|message_model|><|content_thinking|>", "<|end_message|><|message_model|><|content_text|>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse": (" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
    "response_template": ("<think>\n", "</think>\n\n"),
}


class TemplateTokenizer:
    """The part of a tokenizer that `response_template` and Hunyuan's parser read."""

    response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>\n", "close": "</think>\n\n", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>\n",
                "close": "\n</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary."""
        return {"<tool_sep>": 1}
