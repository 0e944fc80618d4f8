"""Records of server arguments that the launcher resolves, for a pretended GPU."""

from pathlib import Path

import pytest
import sglang  # noqa: F401  it loads our platform plugin before any of SGLang's modules
from serving import DRAFT, TARGET
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.server_args import ServerArgs
from support.drafts import make_draft

from sglang_dflash.srt import patching
from sglang_dflash.srt.plugins import algorithm, entry_points


def changed_draft(changes: dict, tmp_path: Path) -> Path:
    """Return the bundled draft, or a copy with changes to its config."""
    return make_draft(tmp_path / "draft", base=DRAFT, **changes) if changes else DRAFT


def record_of(draft=DRAFT, **arguments) -> ServerArgs:
    """Return a record of a server on a GPU, as SGLang's step of speculative decoding finds it."""
    defaults = {
        "model_path": str(TARGET),
        "device": "cuda",
        "attention_backend": "fa3",
        "page_size": 1,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(draft),
        "speculative_draft_model_revision": "main",
    }
    return ServerArgs(**defaults | arguments)


def resolve(record: ServerArgs) -> ServerArgs:
    """Resolve a record as the launcher does with the plugin."""
    algorithm.register()  # unless the plugin was loaded
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(patching, "install", lambda table: None)  # of the front end, for this process
        entry_points.resolve_speculative_decoding(record, speculative_hook.handle_speculative_decoding)
    return record


def quantize_draft(method: str, is_given: bool = True) -> dict:
    """Return the fields of --speculative-draft-model-quantization, or of the target's if not given."""
    name = "speculative_draft_model_quantization"
    return {name: method, "_speculative_draft_quantization_explicitly_set": is_given}
