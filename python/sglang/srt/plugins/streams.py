"""State of a stream between two chunks, right for chunks of many tokens.

SGLang's streams were written for a token a step. A step of DFLASH may end inside a character, and it may hold
an answer's last words together with its end.
"""

import copy
import functools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers import detokenizer_manager

from sglang_dflash.srt import patching
from sglang_dflash.srt.patching import DETOKENIZER, FRONT_END, patches
from sglang_dflash.srt.plugins.patches import patches_at

STREAMS = "streamed text whose chunks end inside characters"


@patches(
    "sglang.srt.managers.detokenizer_manager.DecodeStatus",
    at=DETOKENIZER,
    signature="(decoded_text, decode_ids, surr_offset, read_offset)",
    feature=STREAMS,
    upstream="https://github.com/sgl-project/sglang/pull/31564",
)
class DecodeStatus(detokenizer_manager.DecodeStatus):
    """A stream's state, whose text is sent once although blocks end inside characters.

    If a chunk ends inside a character, SGLang sends the printable text before it. With the next chunk that
    may be less text, and SGLang's offset goes back.
    """

    _sent_offset = 0

    @property
    def sent_offset(self) -> int:
        """Number of characters that were sent."""
        return self._sent_offset

    @sent_offset.setter
    def sent_offset(self, offset: int) -> None:
        self._sent_offset = max(self._sent_offset, offset)


def run_detokenizer(run: Callable[..., None], *args: Any) -> None:
    """Patch a detokenizer, and run it, as the main function of its process."""
    patching.install(patches_at(DETOKENIZER))
    run(*args)


@patches(
    "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
    at=FRONT_END,
    signature="(server_args, port_args, run_detokenizer_process_func)",
    feature=STREAMS,
    upstream="docs/dev/upstream/plugin-doors.md",
)
def launch_our_detokenizers(
    original: Callable[..., Any], server_args: Any, port_args: Any, run_detokenizer_process_func: Any
) -> Any:
    """Patch the detokenizers, which do not know which algorithm their server runs."""
    return original(server_args, port_args, functools.partial(run_detokenizer, run_detokenizer_process_func))


@patches(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing._stream_chat_response",
    at=FRONT_END,
    signature="(self, gen_request, raw_request, model_name)",
    feature="whole answers in Ollama's streams",
    upstream="https://github.com/sgl-project/sglang/pull/17961",
)
@patches(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing._stream_generate_response",
    at=FRONT_END,
    signature="(self, gen_request, raw_request, model_name)",
    feature="whole answers in Ollama's streams",
    upstream="https://github.com/sgl-project/sglang/pull/17961",
)
async def stream_to_the_end(
    original: Callable[..., Any], serving: Any, gen_request: Any, raw_request: Any, model_name: str
) -> Any:
    """Send the text of the chunk that ends an answer, which SGLang drops: up to a block."""

    async def with_last_texts(*args: Any) -> AsyncIterator[dict[str, Any]]:
        async for chunk in serving.tokenizer_manager.generate_request(*args):
            if chunk["meta_info"].get("finish_reason") is not None:
                yield {"text": chunk.get("text", ""), "meta_info": {}}
            yield chunk

    served = copy.copy(serving)
    served.tokenizer_manager = SimpleNamespace(generate_request=with_last_texts)
    return await original(served, gen_request, raw_request, model_name)
