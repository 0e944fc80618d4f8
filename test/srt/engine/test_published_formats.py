"""Drafts in the formats that people publish, each on SGLang's scheduler.

Greedy tokens are the target's. Every request takes as many cycles as the same draft in plain PyTorch, with
the same (dequantized) weights. A quantized draft's accept length is near the unquantized one's.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    PEAGLE_DRAFT,
    ROOT,
    SPECULATORS_DRAFT,
    TARGET,
    WHOLE_BLOCKS,
    dflash_arguments,
)
from support.drafts import make_draft
from support.flat_peagle import INPUTS, SOURCE, amazon, nemo
from support.packed_drafts import SCHEMES, pack_for_modelopt, pack_plain_fp8, write, write_packed
from support.scheduled import Job, run
from support.servers import PLAIN_FLOAT32
from transformers import AutoModelForCausalLM

from sglang_dflash.srt.doctor import measure
from sglang_dflash.srt.doctor.pair import Checkpoint, Pair
from sglang_dflash.srt.doctor.readings import AS_CONFIGURED, blocks, draft_everywhere

pytestmark = pytest.mark.server
GOLDEN = ROOT / "test" / "srt" / "golden" / "tiny-speculators"
NEW_TOKENS = 48
# Least of the unquantized draft's accept length that is kept.
EIGHT_BITS, FOUR_BITS = 0.97, 0.90


@dataclass(frozen=True)
class Format:
    """A format: how to write a tiny draft in it.

    source: the same draft as it is bundled. kept: least share of its accept length; None: it drafts
    otherwise. alone: the checkpoint is the model path. algorithm: the flag's value. least: accept length
    below which the comparison of cycles would prove nothing.
    """

    write: Callable[[Path], Path]
    source: Path = DRAFT
    kept: float | None = None
    alone: bool = False
    algorithm: str = "DFLASH"
    least: float = 1.5


def quantized(scheme: str) -> Format:
    kept = FOUR_BITS if "4" in scheme.removesuffix("A16").removesuffix("A4") else EIGHT_BITS
    return Format(lambda folder: write_packed(folder, DRAFT, scheme), kept=kept)


def by(pack: Callable, kept: float, source: Path = DRAFT) -> Format:
    def write_draft(folder: Path) -> Path:
        packed, quantization, _ = pack(load_file(source / "model.safetensors"))
        return write(folder, source, packed, quantization)

    return Format(write_draft, source, kept)


def speculators_dflash2(folder: Path) -> Path:
    """Write what speculators 0.9.0 saved: its config.json, and tensors in z-lab's names."""
    config = json.loads((GOLDEN / "dflash2" / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(TARGET)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(DFLASH2_DRAFT / "model.safetensors")
    return folder


def native_names(folder: Path) -> Path:
    """Write the names of Muse's native exports."""
    renamed = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}

    def rename(tensors: dict) -> dict:
        return {
            next(
                (new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), name
            ): t
            for name, t in tensors.items()
        }

    return make_draft(folder, rename)


def with_options(**options) -> Callable[[Path], Path]:
    return lambda folder: make_draft(folder, dflash_config=options)


def shortened(folder: Path, base: Path = DRAFT) -> Path:
    short = {"max_position_embeddings": 16}
    return make_draft(folder, base=base, **(short if base == DRAFT else {"transformer_layer_config": short}))


LIKE_THE_BUNDLED = {
    "num_depths": 7,
    "norm_before_residual": SOURCE["norm_before_residual"],
    "with_norms": True,
}
FORMATS = {
    **{scheme: quantized(scheme) for scheme in SCHEMES},
    "ModelOpt NVFP4": by(pack_for_modelopt, FOUR_BITS),
    "DFlash2, ModelOpt NVFP4": by(pack_for_modelopt, FOUR_BITS, DFLASH2_DRAFT),
    "plain FP8": by(functools.partial(pack_plain_fp8, in_blocks=False), EIGHT_BITS),
    "plain FP8 in blocks": by(functools.partial(pack_plain_fp8, in_blocks=True), EIGHT_BITS),
    "speculators DFlash2": Format(speculators_dflash2, DFLASH2_DRAFT, kept=1, alone=True),
    "Amazon's P-EAGLE": Format(amazon, PEAGLE_DRAFT, algorithm="EAGLE3", least=1),
    "NeMo's P-EAGLE": Format(nemo, PEAGLE_DRAFT, algorithm="PEAGLE", least=1),
    "Amazon's, with norms": Format(
        functools.partial(amazon, **LIKE_THE_BUNDLED, eagle_aux_hidden_state_layer_ids=INPUTS),
        PEAGLE_DRAFT,
        kept=1,
    ),
    "NeMo's, with norms": Format(functools.partial(nemo, **LIKE_THE_BUNDLED), PEAGLE_DRAFT, kept=1),
    "Muse's native names": Format(native_names, kept=1),
    "NeMo's DFlash": Format(
        lambda folder: make_draft(folder, architectures=["Qwen3DFlashDraftModel"]), kept=1
    ),
    "use_swa": Format(with_options(use_swa=True, swa_window_size=12), least=1.2),
    "causal full layers": Format(with_options(causal=True), least=1.2),
    "embeddings scaled": Format(with_options(input_embedding_scale=1.25), least=1.2),
    # Fewer positions than a prompt has tokens.
    "a short DFlash": Format(shortened, kept=1),
    "a short speculators DFlash": Format(
        lambda folder: shortened(folder, SPECULATORS_DRAFT), SPECULATORS_DRAFT, kept=1
    ),
    "a short P-EAGLE": Format(lambda folder: shortened(folder, PEAGLE_DRAFT), PEAGLE_DRAFT, kept=1),
}
# The rest takes minutes.
IN_EVERY_RUN = ("NVFP4", "speculators DFlash2", "Amazon's, with norms", "use_swa", "a short P-EAGLE")


@dataclass(frozen=True)
class Expected:
    """The target's own greedy texts, and plain drafts on them."""

    target: torch.nn.Module
    prompts: Sequence[Sequence[int]]
    texts: Sequence

    def cycles(self, draft: Path) -> list[int]:
        pair = Pair(Checkpoint.open(str(TARGET), False), Checkpoint.open(str(draft), True))
        assert not pair.config_faults
        plain = measure.load_draft(pair, self.target)
        return [len(blocks(text, draft_everywhere(plain, text, AS_CONFIGURED))) for text in self.texts]


@pytest.fixture(scope="module")
def expected() -> Expected:
    prompts = [run["prompt"] for run in json.loads((GOLDEN / "accepted.json").read_text())][:8]
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        texts.append(measure.capture(target, ids[0].tolist(), len(prompt)))
    return Expected(target, prompts, texts)


@pytest.mark.parametrize(
    "name",
    [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long) for name in FORMATS],
)
def test_text_and_cycles(name, expected, tmp_path, monkeypatch):
    form = FORMATS[name]
    draft = form.write(tmp_path / "draft")
    monkeypatch.setenv("SGLANG_DFLASH_TARGET_LAYERS", str(expected.target.config.num_hidden_layers))
    plain = expected.cycles(draft)
    flags = ["--model-path", TARGET, *dflash_arguments(draft)]
    flags[3] = form.algorithm
    if form.alone:
        flags = ["--model-path", draft]
    jobs = [Job(tuple(prompt), max_new_tokens=NEW_TOKENS) for prompt in expected.prompts]
    limits = [WHOLE_BLOCKS, "--random-seed", "7", "--max-total-tokens", "4096"]
    [answers] = run([*flags, *PLAIN_FLOAT32, *limits], [jobs])
    for text, answer in zip(expected.texts, answers, strict=True):
        assert list(answer.output_ids) == text.tokens[text.prompt_length :].tolist()
    assert [len(answer.accepted) for answer in answers] == plain
    num_tokens = len(jobs) * (NEW_TOKENS - 1)  # a prompt's forward gives the first
    assert num_tokens / sum(plain) >= form.least
    if form.kept is not None:
        assert sum(expected.cycles(form.source)) >= form.kept * sum(plain)
