"""Streams of a server: events, and every endpoint's whole and streamed answers."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serving import Server


def stream(server: Server, request: dict, path: str = "/generate") -> Iterator[dict]:
    """POST with streaming on; closing the iterator closes the connection."""
    body = json.dumps({**request, "stream": True}).encode()
    call = urllib.request.Request(server.url + path, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=300) as response:
        for line in response:
            data = line.decode().strip()
            if data.startswith("event:"):  # its data repeat it
                continue
            data = data.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint that streams takes a request, and where its answers and events hold text.

    `texts` lists (choice, text) of an answer, `delta` of an event. `stop` and `n` name its fields.
    """

    path: str
    request: Callable[[str, int, dict], dict]
    texts: Callable[[dict], list[tuple[int, str]]]
    delta: Callable[[dict], list[tuple[int, str]]]
    takes_n: bool = False

    def body(self, prompt: str, limit: int, sampling: dict, is_stream: bool = True) -> dict:
        request = self.request(prompt, limit, sampling)
        request.get("parameters", request)["stream"] = is_stream
        return request

    def whole(self, server: Server, prompt: str, limit: int, **sampling) -> list[str]:
        """An answer's texts by choice."""
        answer = server.post(self.path, self.body(prompt, limit, sampling, is_stream=False))
        return [text for _, text in sorted(self.texts(answer))]

    def streamed(self, server: Server, prompt: str, limit: int, **sampling) -> list[str]:
        """A stream's texts by choice."""
        said: dict[int, str] = {}
        for event in stream(server, self.body(prompt, limit, sampling), self.path):
            for choice, text in self.delta(event):
                said[choice] = said.get(choice, "") + text
        return [said[choice] for choice in sorted(said)]


class Native(Endpoint):
    """/generate, whose events hold the whole text so far unless the server's option is on."""

    def streamed(self, server: Server, prompt: str, limit: int, **sampling) -> list[str]:
        is_incremental, said = server.get("/server_info")["incremental_streaming_output"], {}
        for event in stream(server, self.body(prompt, limit, sampling), self.path):
            choice, text = event.get("index", 0), event["text"]
            before = said.get(choice, "")
            assert is_incremental or text.startswith(before), f"{before!r} was taken back: {text!r}"
            said[choice] = before + text if is_incremental else text
        return [said[choice] for choice in sorted(said)]


def _native(prompt: str, limit: int, sampling: dict) -> dict:
    return {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": limit, **sampling}}


def _openai(prompt: str, limit: int, sampling: dict) -> dict:
    return {"model": "default", "prompt": prompt, "max_tokens": limit, "temperature": 0, **sampling}


def _chat(prompt: str, limit: int, sampling: dict) -> dict:
    request = _openai(prompt, limit, sampling)
    return {**request, "messages": [{"role": "user", "content": request.pop("prompt")}]}


def _messages(prompt: str, limit: int, sampling: dict) -> dict:
    request = _chat(prompt, limit, sampling)
    return {**request, "stop_sequences": request.pop("stop", [])}


def _responses(prompt: str, limit: int, sampling: dict) -> dict:
    return {"model": "default", "input": prompt, "max_output_tokens": limit, "temperature": 0, **sampling}


def _vertex(prompt: str, limit: int, sampling: dict) -> dict:
    request = _native(prompt, limit, sampling)
    return {"instances": [{"text": request.pop("text")}], "parameters": request}


def _ollama(prompt: str, limit: int, sampling: dict) -> dict:
    request = _chat(prompt, limit, {})
    options = {"temperature": 0, "num_predict": limit, **sampling}
    return {"model": "default", "prompt": prompt, "messages": request["messages"], "options": options}


def _choices(*path: str) -> Callable[[dict], list[tuple[int, str]]]:
    def read(answer: dict) -> list[tuple[int, str]]:
        found = []
        for choice in answer["choices"]:
            value = choice
            for name in path:
                value = value.get(name)
            found.append((choice["index"], value or ""))
        return found

    return read


def _one(read: Callable[[dict], str]) -> Callable[[dict], list[tuple[int, str]]]:
    return lambda answer: [(0, read(answer))]


def _natives(answer: dict | list) -> list[tuple[int, str]]:
    answers = answer if isinstance(answer, list) else [answer]
    return [(index, each["text"]) for index, each in enumerate(answers)]


def _response_text(answer: dict) -> str:
    parts = [part for item in answer["output"] for part in item.get("content") or ()]
    return "".join(part["text"] for part in parts)


ENDPOINTS = (
    Native("/generate", _native, _natives, _natives, takes_n=True),
    Endpoint("/v1/completions", _openai, _choices("text"), _choices("text"), takes_n=True),
    Endpoint(
        "/v1/chat/completions",
        _chat,
        _choices("message", "content"),
        _choices("delta", "content"),
        takes_n=True,
    ),
    Endpoint(
        "/invocations", _chat, _choices("message", "content"), _choices("delta", "content"), takes_n=True
    ),
    Endpoint(
        "/v1/responses",
        _responses,
        _one(_response_text),
        _one(lambda event: event["delta"] if event["type"] == "response.output_text.delta" else ""),
    ),
    Endpoint(
        "/v1/messages",
        _messages,
        _one(lambda answer: "".join(block["text"] for block in answer["content"])),
        _one(lambda event: event.get("delta", {}).get("text", "")),
    ),
    Endpoint(
        "/api/chat",
        _ollama,
        _one(lambda answer: answer["message"]["content"]),
        _one(lambda event: event["message"]["content"]),
    ),
    Endpoint(
        "/api/generate",
        _ollama,
        _one(lambda answer: answer["response"]),
        _one(lambda event: event["response"]),
    ),
    Native(
        "/vertex_generate", _vertex, lambda answer: _natives(answer["predictions"]), _natives, takes_n=True
    ),
)
