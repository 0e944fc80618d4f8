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

from sglang_dflash.srt.plugins import patch, patches


class DecodeStatus(detokenizer_manager.DecodeStatus):
    """A stream's state in the detokenizer. What was sent stays sent.

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
    """Patch a detokenizer, and run it: the main function of its process."""
    patch.install(patches.AT_DETOKENIZER)
    run(*args)


def launch_our_detokenizers(
    launch: Callable[..., Any], server_args: Any, port_args: Any, run_detokenizer_process_func: Any
) -> Any:
    """Wrap `Engine._launch_detokenizer_subprocesses`: let detokenizers make our patches."""
    return launch(server_args, port_args, functools.partial(run_detokenizer, run_detokenizer_process_func))


async def stream_to_the_end(
    stream: Callable[..., Any], serving: Any, gen_request: Any, raw_request: Any, model_name: str
) -> Any:
    """Wrap the streams of `OllamaServing`: send the text of the chunk that ends an answer.

    SGLang drops it. Without a draft that is a token, with DFLASH up to a block.
    """

    async def with_last_texts(*args: Any) -> AsyncIterator[dict[str, Any]]:
        async for chunk in serving.tokenizer_manager.generate_request(*args):
            if chunk["meta_info"].get("finish_reason") is not None:
                yield {"text": chunk.get("text", ""), "meta_info": {}}
            yield chunk

    served = copy.copy(serving)
    served.tokenizer_manager = SimpleNamespace(generate_request=with_last_texts)
    return await stream(served, gen_request, raw_request, model_name)
