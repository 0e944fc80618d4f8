"""SGLang's application for HTTP workers (`--tokenizer-worker-num`), which load no plugin."""

from sglang.srt.plugins import load_plugins

from sglang_dflash.srt.patching import FRONT_END, install
from sglang_dflash.srt.plugins import algorithm, patches

load_plugins()
install(patches.patches_at(FRONT_END))
algorithm.register_in_front_end()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ("app",)
