"""Requests with texts of several bytes a character, streamed on every endpoint: joined is whole."""

import concurrent.futures
import random

from serving import Server
from support.forced_texts import prompt_for
from support.releases import IS_0_5_22
from support.scripts import text_of
from support.streaming import ENDPOINTS, Endpoint

LIMIT = 400


def draw_request(draw: random.Random, endpoint: Endpoint) -> tuple[str, str, dict]:
    """A text, what is said of it, and sampling fields: half of them with a stop, some with two answers."""
    text, sampling = text_of(draw), {}
    said = text
    places = [at for at in range(1, len(text) - 3) if not text[at].isascii()]
    if places and draw.random() < 0.5:
        begin = draw.choice(places)  # the token before the text is ASCII, and cannot begin the stop
        stop = text[begin : begin + draw.randrange(1, 4)]
        if not stop[1:].isascii():  # SGLang sends its beginning if a chunk ends inside its next character
            stop = stop[0]
        sampling["stop"] = [stop, "never said"]
        said = text.partition(stop)[0]
    if endpoint.takes_n and draw.random() < 0.25:
        sampling["n"] = 2
    if endpoint.path == "/generate":
        sampling["stream_interval"] = draw.randrange(1, 6)
    return text, said, sampling


# SGLang 0.5.22 takes what transformers' chat template returns for tokens, and answers 500.
WORKING = [each for each in ENDPOINTS if not (IS_0_5_22 and each.path == "/api/chat")]


def differing(server: Server, count: int, seed: int = 0) -> list[tuple]:
    """Send `count` requests, whole and streamed; return those that differ from each other or the text."""

    # SGLang's Ollama streams take each chunk for the whole text so far.
    is_incremental = server.get("/server_info")["incremental_streaming_output"]
    endpoints = [each for each in WORKING if not (is_incremental and each.path.startswith("/api/"))]

    def differs(number: int) -> tuple | None:
        endpoint, draw = endpoints[number % len(endpoints)], random.Random(f"{seed} {number}")
        text, said, sampling = draw_request(draw, endpoint)
        whole = endpoint.whole(server, prompt_for(text), LIMIT, **sampling)
        joined = endpoint.streamed(server, prompt_for(text), LIMIT, **sampling)
        is_right = len(whole) == sampling.get("n", 1) and all(answer.endswith(said) for answer in whole)
        return None if is_right and joined == whole else (endpoint.path, sampling, said, whole, joined)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return [found for found in pool.map(differs, range(count)) if found]
