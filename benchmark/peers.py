"""Other engines that answer the prompts of the benchmark on a CPU, each skipped by name where it is absent.

| peer | measured if |
|---|---|
| transformers with prompt lookup | always: SGLang requires it; it answers one request after the other |
| llama.cpp | `llama-server` is on the PATH and a GGUF file of the target is beside its weights, or given |
| vLLM | `vllm` is on the PATH (its CPU wheel needs an environment of its own) |

They get the token ids that SGLang gets, decode greedily, and keep no prefix of an earlier round.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from prompt_sets import RequestMaker
from serving import Server, answer_many, serve

LOOKUP_TOKENS = 10  # that transformers copies at most from the text so far
SLOTS = 16  # of llama-server: requests that it runs at once
SLOT_TOKENS = 1024  # of a prompt and its answer


@dataclass(frozen=True)
class Peer:
    """A server of the benchmark's plan that is not SGLang. Fields as of its `Variant`.

    serve: starts it; what it gives answers `generate_many` and `flush_cache` as a `Server` does.
    """

    name: str
    version: str
    serve: Callable[[], contextlib.AbstractContextManager[Any]]
    skips: tuple[str, ...] = ()
    is_greedy: bool = True
    phase_file: None = None


def find(target: str, dtype: str, threads: int | None, gguf: Path | None) -> list[Peer]:
    """Return the peers that are installed, and print which are not.

    threads: None for their own default. gguf: the target for llama.cpp; None: a file beside its weights.
    """
    maker = RequestMaker(target)
    found = [
        Peer("transformers", transformers.__version__, lambda: _transformers(target, dtype, threads, maker))
    ]
    gguf = gguf or next(iter(sorted(Path(target).glob("*.gguf"))), None)
    if shutil.which("llama-server") and gguf is not None:
        arguments = ["-m", str(gguf), "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS)]
        arguments += ["-t", str(threads)] if threads else []
        found.append(
            Peer(
                "llama.cpp", _version("llama-server"), lambda: _endpoint("llama-server", (), arguments, maker)
            )
        )
    else:
        print("llama.cpp is not measured: there is no llama-server on the PATH, or no GGUF file (--gguf)")
    if shutil.which("vllm"):
        options = ["--dtype", dtype, "--no-enable-prefix-caching", "--max-model-len", str(SLOT_TOKENS)]
        launcher = ("serve", target)
        found.append(Peer("vLLM", _version("vllm"), lambda: _endpoint("vllm", launcher, options, maker)))
    else:
        print("vLLM is not measured: there is no vllm on the PATH")
    return found


def _version(program: str) -> str:
    """Return the first line of what a program says of its version."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return (said.stdout or said.stderr).strip().splitlines()[0]


@contextlib.contextmanager
def _endpoint(
    program: str, launcher: Sequence[str], arguments: Sequence[str], maker: RequestMaker
) -> Iterator["Completions"]:
    with serve(*arguments, python=program, launcher=launcher) as server:
        yield Completions(server, maker)


class Completions:
    """A server with OpenAI's /v1/completions, which answers as SGLang's /generate does."""

    def __init__(self, server: Server, maker: RequestMaker):
        self._server, self._maker = server, maker
        self._model = server.get("/v1/models")["data"][0]["id"]

    def flush_cache(self) -> None:
        """Do nothing: each request asks for no cached prefix."""

    def generate_many(
        self, bodies: Sequence[dict], concurrency: int, due: Sequence[float] = ()
    ) -> list[dict]:
        """Answer all requests as `answer_many` does."""
        return answer_many(self._generate, bodies, concurrency, due)

    def _generate(self, body: dict) -> dict:
        sampling = body["sampling_params"]
        answer = self._server.post(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": token_ids(body, self._maker),
                "max_tokens": sampling["max_new_tokens"],
                "temperature": 0,
                "ignore_eos": sampling.get("ignore_eos", False),
                "cache_prompt": False,
            },
        )
        return as_answer(answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])


@contextlib.contextmanager
def _transformers(target: str, dtype: str, threads: int | None, maker: RequestMaker) -> Iterator[Any]:
    import torch

    if threads:
        torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    yield PromptLookup(model, maker)


class PromptLookup:
    """transformers with prompt lookup. It serves one request at a time, as its batches speculate not."""

    def __init__(self, model: Any, maker: RequestMaker):
        self._model, self._maker = model, maker

    def flush_cache(self) -> None:
        """Do nothing: a call keeps no prefix."""

    def generate_many(
        self, bodies: Sequence[dict], concurrency: int, due: Sequence[float] = ()
    ) -> list[dict]:
        """Answer all requests one after the other, whatever the concurrency is."""
        return answer_many(self._generate, bodies, 1, due)

    def _generate(self, body: dict) -> dict:
        import torch

        sampling = body["sampling_params"]
        ids = torch.tensor([token_ids(body, self._maker)])
        most = sampling["max_new_tokens"]
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=most,
                min_new_tokens=most if sampling.get("ignore_eos") else None,
                prompt_lookup_num_tokens=LOOKUP_TOKENS,
            )
        count = output.shape[1] - ids.shape[1]
        return as_answer(count, "length" if count == most else "stop")


def token_ids(body: dict, maker: RequestMaker) -> list[int]:
    """Return the prompt of a /generate request as token ids."""
    return body["input_ids"] if "input_ids" in body else maker.tokenizer(body["text"])["input_ids"]


def as_answer(tokens: int, finish_reason: str) -> dict:
    """Return what the benchmark reads of SGLang's answers."""
    return {"meta_info": {"completion_tokens": tokens, "finish_reason": {"type": finish_reason}}}
