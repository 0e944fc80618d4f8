"""Random requests of every kind that users mix, each with a check of its answer."""

import contextlib
import functools
import http.client
import json
import math
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving import TARGET, Server, heldout_prompts
from tokenizers import Tokenizer
from vision_target import random_picture

# In float32 two batch shapes agree on a log probability within about 1e-6; recurrent states carry that on. If
# two tokens are closer than this, the target has no unique answer.
TIE = 2e-5
LONGEST = 64
# Rows and columns of tokens. The longest lies across chunks, and across points at which states are kept.
PICTURES = ((1, 1), (2, 3), (4, 6), (6, 8), (8, 16), (10, 12), (3, 30), (5, 5))
# Seconds a client waits for a server: both may have been stopped (SIGSTOP) to make room for something else.
PATIENCE = 3600
VOCABULARY = json.loads((TARGET / "config.json").read_text())["vocab_size"]
GRAMMARS = (
    {"ebnf": 'root ::= ("ab" | "cd" | "e")+ "z"'},
    {"regex": r"(def|class) [a-z_]{3,12}\(\):\n    return [0-9]{1,6}"},
    {"json_schema": json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})},
)
# Their answers are not compared: under overlap scheduling SGLang's own counts lag by a token.
PENALTIES = (
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 1},
)
# Requests that must be refused, and the words that the refusal must contain.
BAD = (
    ({"input_ids": [5, 1_000_000_000]}, "1000000000"),
    ({"input_ids": [-1]}, "-1"),
    ({"text": "x", "sampling_params": {"temperature": -1}}, "temperature"),
    ({"text": "x", "sampling_params": {"logit_bias": {"1000000000": 1.0}}}, "logit_bias"),
    ({"text": "x", "sampling_params": {"stop_token_ids": [1_000_000_000]}}, "stop_token_ids"),
    ({"text": "x", "sampling_params": {"top_k": 2**40}}, "top_k"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 1_000_000}, "top_logprobs_num"),
    ({"text": "x", "return_logprob": True, "token_ids_logprob": [-7]}, "token_ids_logprob"),
    ({"text": "x", "sampling_params": {"regex": "[a-z"}}, ""),
    ({"text": "x", "sampling_params": {"n": 10**9}}, "n"),
)


@dataclass(frozen=True)
class Known:
    """A greedy request, and the plain target's answer as far as float32 decides it.

    `is_whole`: float32 decides all of it. `reserved`: ids that stand for pictures.
    """

    request: dict[str, Any]
    output_ids: list[int]
    text: str
    finish: dict[str, Any]
    is_whole: bool
    reserved: frozenset[int] = frozenset()

    @property
    def has_pictures(self) -> bool:
        return "image_data" in self.request

    def continued(self, generator: random.Random) -> "Known":
        """Move a part of the answer into the prompt, if nothing else decided on the answer."""
        sampling, length = self.request["sampling_params"], len(self.output_ids)
        if sampling.keys() != {"temperature", "max_new_tokens", "ignore_eos"} or length < 2:
            return self
        # SGLang never answers a prompt with more picture tokens than pictures.
        if self.reserved.intersection(self.output_ids):
            return self
        done = generator.randrange(1, length)
        prompt = self.request["input_ids"] + self.output_ids[:done]
        sampling = {**sampling, "max_new_tokens": length - done, "ignore_eos": True}
        request = self.request | {"input_ids": prompt, "sampling_params": sampling}
        return Known(request, self.output_ids[done:], "", {}, is_whole=False)


def known_requests(plain: Server, count: int, seed: int, image_tokens: Sequence[int] = ()) -> list[Known]:
    """Make greedy requests of all kinds, and let the target alone answer them in float32.

    image_tokens: ids of a picture in a prompt, the vocabulary's last ones, which texts then do without. A
    third of the requests has one picture or two, and some have the same ones.
    """
    reserved = frozenset(range(min(image_tokens), VOCABULARY)) if image_tokens else frozenset()
    generator = random.Random(seed)
    pictures = [random_picture(generator, *size) for size in PICTURES] if image_tokens else []
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts()]
    shared = tokenizer.encode("".join(texts[:8])).ids[:300]
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    processor = DisallowedTokensLogitsProcessor.to_str()
    requests = []
    for _ in range(count):
        ids = tokenizer.encode(generator.choice(texts) + generator.choice(texts)).ids
        ids = ids[: generator.choice((1, 7, 40, 63, 64, 65, 128, 200, 400))]
        if generator.random() < 0.3:
            ids = shared[: generator.choice((16, 64, 100, 256))] + ids
        ids = [token for token in ids if token not in reserved] or [5]
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": generator.choice((1, 2, 8, 9, 24, 48, LONGEST)),
        }
        sampling["ignore_eos"] = generator.random() < 0.5
        kind = generator.random()
        if kind < 0.2:
            sampling |= generator.choice(GRAMMARS) | {"ignore_eos": False}
        elif kind < 0.3:
            sampling["logit_bias"] = {
                str(generator.randrange(5, VOCABULARY)): generator.choice((-100.0, 4.0))
            }
        elif kind < 0.4:
            sampling["stop_token_ids"] = [generator.randrange(5, VOCABULARY) for _ in range(40)]
        elif kind < 0.5:
            sampling["stop"] = [generator.choice(("\n\n", "self", "):", "return", " = "))]
        request = {"input_ids": ids, "sampling_params": sampling}
        if 0.5 <= kind < 0.6:
            sampling["custom_params"] = {"token_ids": generator.sample(range(5, VOCABULARY), 50)}
            request["custom_logit_processor"] = processor
        if pictures and generator.random() < 1 / 3:
            shown = generator.sample(pictures, generator.choice((1, 1, 2)))
            places = [generator.randint(0, len(ids)) for _ in shown]
            for at in sorted(places, reverse=True):  # none within another's tokens
                ids[at:at] = image_tokens
            request["image_data"] = shown
        requests.append(request)
    bodies = [{**request, "return_logprob": True, "top_logprobs_num": 2} for request in requests]
    # SGLang's own processor takes one list of tokens a batch.
    alone = [body for body in bodies if "custom_logit_processor" in body]
    together = [body for body in bodies if "custom_logit_processor" not in body]
    answers = dict(zip(map(id, together), plain.generate_many(together, 16), strict=True))
    answers |= zip(map(id, alone), plain.generate_many(alone, 1), strict=True)
    return [
        replace(_known(request, answers[id(body)]), reserved=reserved)
        for request, body in zip(requests, bodies, strict=True)
    ]


def _known(request: dict, answer: dict) -> Known:
    # Under a grammar only one token may be left, the others at -inf.
    leads = [
        values[0] - values[1]
        if len(values := [value for value, *_ in top or [] if value is not None]) > 1
        else math.inf
        for top in answer["meta_info"]["output_top_logprobs"]
    ]
    decided = next((i for i, lead in enumerate(leads) if lead < TIE), len(leads))
    output = answer["output_ids"]
    is_whole = decided >= len(output)
    return Known(request, output[:decided], answer["text"], answer["meta_info"]["finish_reason"], is_whole)


class Wrong(Exception):
    """An answer that is not as it must be."""


def send_random(
    server: Server, known: Sequence[Known], generator: random.Random, name: str
) -> tuple[str, dict, dict | None]:
    """Send one random request and check its answer.

    `name` is unique, for aborts. Raises Wrong.

    Returns:
        The request's kind, the request, and the answer's `meta_info`, or None if it was not answered.
    """
    kinds: tuple[tuple[float, Callable], ...] = (
        (0.32, _greedy),
        (0.15, _streamed),
        (0.08, _with_logprobs),
        (0.10, _sampled),
        (0.07, _penalized),
        (0.05, _completion),
        (0.03, _chat),
        (0.02, _with_tools),
        (0.03, _to_the_end),
        (0.05, _aborted),
        (0.05, _walked_away),
        (0.05, _bad),
    )
    [send] = generator.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
    kind, request = send.__name__.strip("_"), {}
    if send in (_completion, _to_the_end):  # their prompts have no pictures
        known = [one for one in known if not one.has_pictures]
    try:
        return kind, request, send(server, generator.choice(known), generator, name, request)
    except Wrong as wrong:
        raise Wrong(json.dumps({"kind": kind, "request": request, "wrong": str(wrong)})) from wrong


def _post(server: Server, request: dict) -> dict:
    try:
        return server.post("/generate", request, PATIENCE)
    except urllib.error.HTTPError as error:
        raise Wrong(f"HTTP {error.code}: {error.read().decode()[:500]}") from error


def compare_with_known(known: Known, answer: dict) -> dict:
    got = answer["output_ids"]
    if got[: len(known.output_ids)] != known.output_ids:
        raise Wrong(f"{got} instead of {known.output_ids}")
    meta = answer["meta_info"]
    if known.is_whole and (got, answer["text"], meta["finish_reason"]) != (
        known.output_ids,
        known.text,
        known.finish,
    ):
        raise Wrong(
            f"{got}, {answer['text']!r}, {meta['finish_reason']} instead of {known.text!r}, {known.finish}"
        )
    if meta["completion_tokens"] != len(got):
        raise Wrong(f"{meta['completion_tokens']} tokens are counted, {len(got)} were received")
    return meta


def _greedy(server, known: Known, generator, name, request) -> dict:
    if generator.random() < 0.25:
        known = known.continued(generator)
    request |= known.request
    if generator.random() < 0.15 and not known.has_pictures:
        sampling = {**known.request["sampling_params"], "n": 2}
        answers = _post(server, request | {"sampling_params": sampling})
        return [compare_with_known(known, answer) for answer in answers][0]
    return compare_with_known(known, _post(server, request))


def _streamed(server, known: Known, generator, name, request) -> dict:
    request |= known.request | {"stream": True}
    emitted: list[int] = []
    chunk: dict = {"error": "nothing was received"}
    with _open(server, request) as response:
        for chunk in _chunks(response):
            if "error" in chunk:
                break
            ids = chunk["output_ids"]
            if ids[: len(emitted)] != emitted:
                raise Wrong(f"{emitted} was emitted, and taken back for {ids}")
            emitted = ids
    if "error" in chunk:
        raise Wrong(f"ended after {len(emitted)} tokens: {chunk['error']}")
    return compare_with_known(known, chunk)


def _with_logprobs(server, known: Known, generator, name, request) -> dict:
    request |= known.request | {
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, VOCABULARY - 1],
    }
    answer = _post(server, request)
    meta = compare_with_known(known, answer)
    for field in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        if len(meta[field]) != len(answer["output_ids"]):
            raise Wrong(f"{len(meta[field])} {field} for {len(answer['output_ids'])} tokens")
    if [token for _, token, *_ in meta["output_token_logprobs"]] != answer["output_ids"]:
        raise Wrong("log probabilities of other tokens")
    return meta


def _loose(server, known: Known, generator, request, **sampling) -> dict:
    """Send a request without a known answer; check the number and range of its tokens."""
    length = generator.choice((1, 5, 24, 40))
    sampling |= {"max_new_tokens": length, "ignore_eos": True}
    known_sampling = known.request["sampling_params"]
    if "custom_params" in known_sampling:  # of its logit processor
        sampling["custom_params"] = known_sampling["custom_params"]
    request |= known.request | {"sampling_params": sampling}
    answer = _post(server, request)
    got, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
    if len(got) != length or reason["type"] != "length" or not all(0 <= token < VOCABULARY for token in got):
        raise Wrong(f"{len(got)} tokens of {length}, {reason}: {got}")
    return answer["meta_info"]


def _sampled(server, known, generator, name, request) -> dict:
    choices = ({}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9})
    return _loose(
        server,
        known,
        generator,
        request,
        temperature=generator.choice((0.3, 0.7, 1.0, 1.3)),
        **generator.choice(choices),
    )


def _penalized(server, known, generator, name, request) -> dict:
    return _loose(server, known, generator, request, temperature=0.8, **generator.choice(PENALTIES))


def _completion(server, known: Known, generator, name, request) -> None:
    """Send to OpenAI's endpoint."""
    sampling = known.request["sampling_params"]
    request |= {
        "model": "default",
        "prompt": known.request["input_ids"],
        "temperature": 0,
        "max_tokens": sampling["max_new_tokens"],
    }
    try:
        answer = server.post("/v1/completions", request, PATIENCE)
    except urllib.error.HTTPError as error:
        raise Wrong(f"HTTP {error.code}: {error.read().decode()[:500]}") from error
    if answer["usage"]["completion_tokens"] > sampling["max_new_tokens"]:
        raise Wrong(f"{answer['usage']} for {sampling['max_new_tokens']} tokens")


def _chat_completion(server, request: dict, **more: Any) -> dict:
    """Send to OpenAI's chat endpoint, and check the usage."""
    try:
        answer = server.post("/v1/chat/completions", {"model": "default", **request, **more}, PATIENCE)
    except urllib.error.HTTPError as error:
        raise Wrong(f"HTTP {error.code}: {error.read().decode()[:500]}") from error
    usage = answer["usage"]
    if not usage.get("reasoning_tokens", 0) <= usage["completion_tokens"] <= request["max_tokens"]:
        raise Wrong(f"{usage} for {request['max_tokens']} tokens")
    return answer["choices"][0]


def _chat(server, known: Known, generator, name, request) -> None:
    """Chat with thoughts and a stop string, which may end inside a block."""
    request |= {
        "messages": [{"role": "user", "content": generator.choice(("x", "def main():", "import os"))}],
        "temperature": 0,
        "max_tokens": generator.choice((1, 8, 40)),
        "stop": [generator.choice(("\n", "(", "self", " = "))],
    }
    _chat_completion(server, request)


def _with_tools(server, known: Known, generator, name, request) -> None:
    """Have a tool called; the streamed call equals the whole answer's."""
    parameters = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    request |= {
        "messages": [{"role": "user", "content": generator.choice(("call", "call f", "again"))}],
        **{"temperature": 0, "max_tokens": 100, "tools": tools, "tool_choice": "required"},
    }
    message = _chat_completion(server, request)["message"]
    whole = [_call(call) for call in message.get("tool_calls") or []]
    streamed: list[list[str]] = []
    with _open(server, {"model": "default", **request, "stream": True}, "/v1/chat/completions") as response:
        for chunk in _chunks(response):
            for call in chunk["choices"][0]["delta"].get("tool_calls") or [] if chunk["choices"] else []:
                streamed += [["", ""]] * (call["index"] + 1 - len(streamed))
                pair = zip(streamed[call["index"]], _call(call), strict=True)
                streamed[call["index"]] = [before + more for before, more in pair]
    # Of a call that `max_tokens` has cut, the whole answer has nothing, and the stream what there was.
    if whole and streamed != whole:
        raise Wrong(f"streamed {streamed}, whole {whole}")


def _call(call: dict) -> list[str]:
    return [call["function"].get(field) or "" for field in ("name", "arguments")]


def _to_the_end(server, known: Known, generator, name, request) -> dict:
    """Ask for more than the context or the pool holds: the answer ends with `length` at what fits."""
    ids = known.request["input_ids"]
    left = _context_length(server.url) - len(ids)
    request |= {"input_ids": ids}
    request["sampling_params"] = {"temperature": 0, "max_new_tokens": left, "ignore_eos": True}
    answer = _post(server, request)
    meta = answer["meta_info"]
    if meta["finish_reason"]["type"] != "length" or meta["completion_tokens"] != len(answer["output_ids"]):
        raise Wrong(f"{meta['finish_reason']}, {meta['completion_tokens']}, {len(answer['output_ids'])}")
    return meta


@functools.cache
def _context_length(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE) as response:
        return json.load(response)["data"][0]["max_model_len"]


def _aborted(server, known: Known, generator, name, request) -> None:
    request |= known.request | {"rid": name}
    request["sampling_params"] = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}

    def abort() -> None:
        with contextlib.suppress(OSError):  # if the server has ended, the request itself reports it
            server.post("/abort_request", {"rid": name}, PATIENCE)

    timer = threading.Timer(generator.random(), abort)
    timer.start()
    try:
        answer = server.post("/generate", request, PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()  # the answer if it is aborted before it runs
        return
    finally:
        timer.join()
    if answer["meta_info"]["finish_reason"]["type"] not in ("abort", "length"):
        raise Wrong(str(answer["meta_info"]["finish_reason"]))


def _walked_away(server, known: Known, generator, name, request) -> None:
    """Close the connection, before the first token or after some."""
    request |= known.request | {"stream": True}
    request["sampling_params"] = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    length = generator.choice((0, 1, 10))
    with _open(server, request) as response:
        for number, _ in enumerate(_chunks(response)):
            if number >= length:
                return


def _bad(server, known, generator, name, request) -> None:
    bad, words = generator.choice(BAD)
    request |= bad
    try:
        answer = server.post("/generate", request, PATIENCE)
    except urllib.error.HTTPError as error:
        message = error.read().decode()
        if error.code != 400 or words not in message:
            raise Wrong(f"HTTP {error.code}, should name {words!r}: {message[:500]}") from error
        return
    raise Wrong(f"was answered: {str(answer)[:500]}")


def _open(server: Server, request: dict, path: str = "/generate") -> http.client.HTTPResponse:
    call = urllib.request.Request(
        server.url + path,
        data=json.dumps(request).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        return urllib.request.urlopen(call, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        raise Wrong(f"HTTP {error.code}: {error.read().decode()[:500]}") from error


def _chunks(response):
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data and data != "[DONE]":
            yield json.loads(data)
