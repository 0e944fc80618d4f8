"""The implementation of DFLASH that would serve a draft, by its checkpoint alone."""

from sglang_dflash.srt.configs.draft_formats import checkpoint_findings
from sglang_dflash.srt.doctor.checkpoint import Checkpoint


def implementation(draft: Checkpoint) -> str:
    """Name the implementation that serves a draft, and why it is not ours."""
    found = checkpoint_findings(draft.config, str(draft.folder))
    if not found:
        return "sglang-dflash, if no flag or device says otherwise"
    reasons = "; ".join(finding.what for finding in found)
    if not all(finding.builtin_serves for finding in found):
        return f"nobody: {reasons}"
    lost = "".join(f"; {finding.lost}" for finding in found if finding.lost)
    return f"SGLang's built-in DFLASH, on a GPU alone, because {reasons}{lost}"
