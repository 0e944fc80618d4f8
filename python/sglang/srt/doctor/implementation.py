"""The implementation of DFLASH that would serve a draft, by its checkpoint alone."""

from sglang_dflash.srt.configs.draft_quantization import find_quantization, read_quantization
from sglang_dflash.srt.configs.draft_variants import draft_findings
from sglang_dflash.srt.configs.flat_peagle import is_flat_peagle
from sglang_dflash.srt.configs.not_served import NotServed
from sglang_dflash.srt.configs.peagle_config import config_class
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.doctor.checkpoint import Checkpoint


def implementation(draft: Checkpoint) -> str:
    """Name the implementation that serves a draft, and why it is not ours."""
    found = _not_served(draft)
    if not found:
        return "sglang-dflash, if no flag or device says otherwise"
    reasons = "; ".join(finding.what for finding in found)
    if not all(finding.builtin_serves for finding in found):
        return f"nobody: {reasons}"
    lost = "".join(f"; {finding.lost}" for finding in found if finding.lost)
    return f"SGLang's built-in DFLASH, on a GPU alone, because {reasons}{lost}"


def _not_served(draft: Checkpoint) -> list[NotServed]:
    """List why ours does not serve a checkpoint. Flags and devices may add reasons."""
    config = draft.config
    if is_speculators_config(config) or is_flat_peagle(config, str(draft.folder)):
        return []
    found = draft_findings(config, config_class(config.get("architectures")).nested_fields())
    try:
        quantization = find_quantization(config, str(draft.folder))
        if quantization:
            read_quantization(quantization)
    except ValueError as error:
        found.append(NotServed(str(error).rstrip("."), True))
    return found
