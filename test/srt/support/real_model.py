"""SmolLM2-135M-Instruct with its draft and without, under many chat requests at once.

`make model` fetches the target, which is not in the repository. Every request of a test file goes to both
servers in one go, a few at a time. So features meet in one batch, and a step serves several requests.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, Server, dflash_arguments, serve
from support.servers import ENVIRONMENT, MEASURED_COSTS, PLAIN_FLOAT32, UNCOUNTED, warm_start
from support.streaming import stream

TARGET = ROOT / "models" / "smollm2-135m-instruct"
# The first one that is there, as in `make serve`.
DRAFTS = [TARGET.with_name(f"{TARGET.name}-{kind}") for kind in ("dflash2", "dflash")]
CHAT = "/v1/chat/completions"
CONTEXT_LENGTH = 832
# Requests in flight. More would make a CPU verify narrower blocks.
CONCURRENCY = 6
# Two servers were seen to disagree about a log probability by up to half of this, in float32.
TIE = 1e-4

FLAGS = (
    *PLAIN_FLOAT32,
    *("--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", "8192"),
    *("--tool-call-parser", "hermes", "--enable-cache-report"),
)
COPY_AHEAD = "--speculative-copy-ahead"

Job = Callable[[Server], Any]


def pair() -> tuple[Path, Path]:
    """Return the folders of target and draft. If one has no weights, skip the test."""
    found = [next(filter(has_weights, folders), None) for folders in ([TARGET], DRAFTS)]
    for folder, wanted in zip(found, (TARGET, DRAFTS[0])):
        if folder is None:
            pytest.skip(f"{wanted.relative_to(ROOT)} is absent; `make model` fetches the target")
    return found[0], found[1]


def has_weights(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


@contextlib.contextmanager
def served(*arguments: str | Path, environment: Mapping[str, str]) -> Iterator[Server]:
    """Serve the target, if its draft is there too."""
    flags = ("--model-path", pair()[0], *FLAGS, *arguments)
    with serve(*flags, env={**ENVIRONMENT, **environment}, start=warm_start()) as server:
        yield server


def served_alone() -> contextlib.AbstractContextManager[Server]:
    return served(environment=UNCOUNTED)


def served_with_draft() -> contextlib.AbstractContextManager[Server]:
    """Serve with the draft and copies; overlap, widths and prefix cache are at their defaults."""
    return served(*dflash_arguments(pair()[1]), COPY_AHEAD, environment=MEASURED_COSTS)


class Answers(Mapping[str, Any]):
    """Results of jobs, by name, all done. A job that failed raises when its result is read."""

    def __init__(self, server: Server, jobs: Mapping[str, Job]):
        self.server = server
        with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
            self._futures = {name: pool.submit(job, server) for name, job in jobs.items()}

    def __getitem__(self, name: str) -> Any:
        return self._futures[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)


def chat(user: str | list[dict], max_tokens: int | None = 40, **fields: Any) -> dict:
    """Build a greedy chat request; `user` is the only message, or all of them."""
    messages = [{"role": "user", "content": user}] if isinstance(user, str) else user
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    return {"model": "default", "messages": messages, "temperature": 0, **limit, **fields}


def post(request: dict) -> Job:
    """Return a job that posts a chat request and asks for the answer's tokens."""
    body = {**request, "return_meta_info": True, "return_token_ids": True}
    return lambda server: server.post(CHAT, body)


def post_with_margins(request: dict) -> Job:
    """Like `post`, and ask for the best two tokens at every position."""
    return post({"logprobs": True, "top_logprobs": 2, **request})


def stream_chat(request: dict) -> Job:
    """Return a job that lists the chunks of a streamed answer."""
    body = {**request, "stream_options": {"include_usage": True}}
    return lambda server: list(stream(server, body, CHAT))


def converse(turns: Sequence[str], ask: Callable[[dict], Job]) -> Job:
    """Return a job that lists the answers of one conversation; `ask` is `post` or `post_with_margins`."""

    def run(server: Server) -> list[dict]:
        messages = [{"role": "system", "content": "You answer in a few words."}]
        answers = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answers.append(ask(chat(messages, 12))(server))
            messages.append({"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]})
        return answers

    return run
