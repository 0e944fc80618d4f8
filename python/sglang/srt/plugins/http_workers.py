"""SGLang's application for HTTP workers (`--tokenizer-worker-num`), which load no plugin."""

from sglang.srt.plugins import load_plugins

from sglang_dflash.srt.plugins import doors, install, ledger

load_plugins()
install.install(ledger.AT_FRONT_END)
doors.open_in_front_end()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ("app",)
