"""Run an agent with tools through the OpenAI client: streamed calls, their results, and the answer.

    python examples/agent_tools.py [URL]          # the server runs with --tool-call-parser

A chunk may hold several tokens, and so several pieces of a call. With a model that calls tools of its own
accord, leave out `tool_choice`.
"""

import json
import sys

from openai import OpenAI

STOCK = {"apples": 12, "pears": 0, "plums": 30}
FRUIT = {"type": "object", "properties": {"fruit": {"enum": list(STOCK)}}, "required": ["fruit"]}
FUNCTION = {"name": "count_stock", "description": "Boxes of a fruit.", "parameters": FRUIT, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]


def stream_turn(client: OpenAI, messages: list[dict], tool_choice: str) -> dict:
    """Print a turn's text as it comes, and return its message, with whole calls."""
    text, calls = "", {}
    stream = client.chat.completions.create(
        model="default", messages=messages, tools=TOOLS, tool_choice=tool_choice, max_tokens=96, stream=True
    )
    for delta in (choice.delta for chunk in stream for choice in chunk.choices):
        text += delta.content or ""
        print(delta.content or "", end="", flush=True)
        for piece in delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id, "type": "function", "function": {}})
            for field in ("name", "arguments"):
                given = getattr(piece.function, field) or ""
                call["function"][field] = call["function"].get(field, "") + given
    return {"role": "assistant", "content": text, "tool_calls": list(calls.values())}


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": "How many boxes of pears do we have?"}]
    messages.append(stream_turn(client, messages, tool_choice="required"))
    for call in messages[-1]["tool_calls"]:
        function = call["function"]
        result = STOCK[json.loads(function["arguments"])["fruit"]]
        print(f"{function['name']}({function['arguments']}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    stream_turn(client, messages, tool_choice="none")
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
