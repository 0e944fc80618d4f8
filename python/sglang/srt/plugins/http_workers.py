"""SGLang's application for HTTP workers (`--tokenizer-worker-num`), which load no plugin."""

from sglang.srt.plugins import load_plugins

from sglang_dflash.srt.plugins import algorithm, patch, patches

load_plugins()
patch.install(patches.AT_FRONT_END)
algorithm.register_in_front_end()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ("app",)
