"""Drafts in the formats that people publish, each on SGLang's scheduler.

Greedy tokens are the target's. Every request takes as many cycles as the same draft in plain PyTorch, with
the same (dequantized) weights. A quantized draft's accept length is near the unquantized one's.

The bundled drafts of the speculators library agree with the library's own classes in float32, whose results
models/training/speculators_golden.py (commit 22b0e3f1) recorded in golden/: in logits and in every accept
length. All bundled drafts reach the accept length of benchmark/expected_acceptance.json.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from acceptance import EXPECTED, Acceptance, shortfall
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
    text_prompts,
)
from support.drafts import REMOVE, make_deepseek_draft, make_draft, read_config, write_checkpoint
from support.engine import Pools, build
from support.flat_peagle import INPUTS, SOURCE, amazon, nemo
from support.quantized_drafts import (
    SCHEMES,
    quantize_for_modelopt,
    quantize_plain_fp8,
    write,
    write_quantized,
)
from support.scheduled import Job, run
from support.servers import PLAIN_FLOAT32
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.doctor import measure
from sglang_dflash.srt.doctor.interpretations import AS_CONFIGURED, blocks, draft_everywhere
from sglang_dflash.srt.doctor.pair import Checkpoint, Pair
from sglang_dflash.srt.models.dflash import DFlashDraftModel

pytestmark = pytest.mark.server
GOLDEN = ROOT / "test" / "srt" / "golden" / "tiny-speculators"
NEW_TOKENS = 48
# Least of the unquantized draft's accept length that is kept.
EIGHT_BITS, FOUR_BITS = 0.97, 0.90
SCHEDULER = (WHOLE_BLOCKS, "--random-seed", "7", "--max-total-tokens")


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
    return Format(lambda folder: write_quantized(folder, DRAFT, scheme), kept=kept)


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


def speculators_dspark(folder: Path) -> Path:
    """Write the library's `dspark` without heads, which samples from the anchor."""
    config = read_config(SPECULATORS_DRAFT)
    config |= {"markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False}
    config |= {"speculators_model_type": "dspark", "block_size": 7, "sample_from_anchor": True}
    config["speculators_config"]["algorithm"] = "dspark"
    config["speculators_config"]["verifier"]["name_or_path"] = str(TARGET)
    return write_checkpoint(folder, config, load_file(SPECULATORS_DRAFT / "model.safetensors"))


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


def mask_by_name(folder: Path) -> Path:
    """Name the mask token, with an embedding in a file that is not its row of the table."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    mask = read_config(DRAFT)["dflash_config"]["mask_token_id"]
    name = tokenizer.convert_ids_to_tokens(mask)
    make_draft(folder, dflash_config={"mask_token_id": REMOVE, "mask_token": name})
    rows = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    vector = rows[mask] + 2 * rows[mask + 1]
    stored = {"embedding": vector, "mask_token_id": mask, "per_position": False}
    torch.save(stored, folder / "mask_embedding.pt")
    return folder


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
    "ModelOpt NVFP4": by(quantize_for_modelopt, FOUR_BITS),
    "DFlash2, ModelOpt NVFP4": by(quantize_for_modelopt, FOUR_BITS, DFLASH2_DRAFT),
    "plain FP8": by(functools.partial(quantize_plain_fp8, in_blocks=False), EIGHT_BITS),
    "plain FP8 in blocks": by(functools.partial(quantize_plain_fp8, in_blocks=True), EIGHT_BITS),
    "speculators DFlash2": Format(speculators_dflash2, DFLASH2_DRAFT, kept=1, alone=True),
    "DeepSeek's block of 7": Format(make_deepseek_draft, least=1),
    "speculators DSpark without heads": Format(speculators_dspark, SPECULATORS_DRAFT, alone=True, least=1),
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
    "a mask token by name": Format(mask_by_name, least=1.2),
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
IN_EVERY_RUN = (
    *("NVFP4", "speculators DFlash2", "Amazon's, with norms", "a mask token by name", "use_swa"),
    "a short P-EAGLE",
    "DeepSeek's block of 7",
)


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
def target() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(target) -> Expected:
    prompts = [run["prompt"] for run in json.loads((GOLDEN / "accepted.json").read_text())][:8]
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
    [answers] = run([*flags, *PLAIN_FLOAT32, *SCHEDULER, 4096], [jobs])
    for text, answer in zip(expected.texts, answers, strict=True):
        assert list(answer.output_ids) == text.tokens[text.prompt_length :].tolist()
    assert [len(answer.accepted) for answer in answers] == plain
    num_tokens = len(jobs) * (NEW_TOKENS - 1)  # a prompt's forward gives the first
    assert num_tokens / sum(plain) >= form.least
    if form.kept is not None:
        assert sum(expected.cycles(form.source)) >= form.kept * sum(plain)


TOLERANCE = 1e-4  # of the largest logit


def block_logits(draft, target, tokens: list[int], shift: int) -> torch.Tensor:
    """Return logits [B, draft vocab] of the block at the last token. shift: added to every layer id."""
    settings = draft.draft
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    ids = [layer_id + 1 + shift for layer_id in settings.target_layer_ids]
    aux = torch.cat([states[i][0] for i in ids], dim=-1)[:-1]
    anchor = len(tokens) - 1
    pools = Pools.of_draft(draft, 1, anchor + settings.block_size)
    draft.borrow_from_target(target.get_input_embeddings(), None)  # the draft has its own head
    draft.write_context_kv(aux, torch.arange(anchor), pools.slots(0, 0, anchor), pools.token_to_kv_pool)
    block = torch.full((1, settings.block_size), settings.mask_token_id)
    block[0, 0] = tokens[-1]
    hidden = pools.forward(draft, pools.blocks(block, [anchor])).hidden_states
    return torch.nn.functional.linear(hidden, draft.head.weight)


def test_block_logits_are_the_librarys(target):
    """A shift of layer ids moves logits a hundred times farther, although acceptance hardly changes."""
    config = DraftConfigParser().parse(str(SPECULATORS_DRAFT), trust_remote_code=False)
    weights = load_file(SPECULATORS_DRAFT / "model.safetensors")
    wide = ((name, t.float() if t.is_floating_point() else t) for name, t in weights.items())
    draft = build(DFlashDraftModel, config, wide)
    mapped = draft.to_target_ids(torch.arange(draft.draft.draft_vocab_size))
    assert torch.equal(mapped, weights["t2d"].nonzero().flatten())
    golden = np.load(GOLDEN / "block_logits.npz")
    prompts = [name for name in golden if name.startswith("prompt_")]
    assert prompts
    for name in prompts:
        tokens, wanted = golden[name].tolist(), torch.from_numpy(golden[name.replace("prompt", "logits")])
        off = {
            shift: (block_logits(draft, target, tokens, shift) - wanted).abs().max() / wanted.abs().max()
            for shift in (-1, 0, 1)
        }
        assert off[0] <= TOLERANCE and min(off[-1], off[1]) > 100 * TOLERANCE, off


@pytest.mark.parametrize("draft, folder", [(SPECULATORS_DRAFT, "speculators"), (PEAGLE_DRAFT, "peagle")])
def test_accept_lengths_are_the_librarys_step_by_step(draft, folder):
    """A checkpoint names its target, so it is the model path."""
    known = json.loads((GOLDEN.with_name(f"tiny-{folder}") / "accepted.json").read_text())
    assert len(known) >= 10
    jobs = [Job(tuple(one["prompt"]), len(one["output"])) for one in known]
    [answers] = run(["--model-path", draft, *PLAIN_FLOAT32, *SCHEDULER, 16384], [jobs])
    for one, answer in zip(known, answers, strict=True):
        *kept, last = answer.accepted
        assert kept == one["accepted"][:-1], f"margin {one['smallest_margin']}: {answer} {one}"
        assert last >= one["accepted"][-1], "the library's last block ends with the request"


PROFILES = {
    name: profile
    for name, profile in json.loads(EXPECTED.read_text()).items()
    if profile["server_args"][-1].startswith("models/")
}
# `-m long` measures all of them. test_lossless_hybrid.py compares every cycle of the hybrid pair.
TINY = "tiny-dflash2"


def test_every_bundled_draft_has_a_profile():
    configs = {path.parent: json.loads(path.read_text()) for path in (ROOT / "models").glob("*/config.json")}
    drafts = {path for path, config in configs.items() if "DraftModel" in config["architectures"][0]}
    assert drafts == {ROOT / profile["server_args"][-1] for profile in PROFILES.values()}


def test_a_draft_reaches_its_accept_length():
    """On every eighth prompt, in bfloat16."""
    profile, tokenizer = PROFILES[TINY], Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    arguments = [ROOT / word if word.startswith("models/") else word for word in profile["server_args"]]
    texts = [prompt["text"] for prompt in text_prompts()[::8]]
    jobs = [Job(tuple(tokenizer.encode(text).ids), profile["max_new_tokens"]) for text in texts]
    [answers] = run([*arguments, *SCHEDULER, 16384], [jobs])
    kept = [sum(answer.accepted.count(n) for answer in answers) for n in range(8)]
    length = Acceptance(drafted_per_step=7, kept=kept).accept_length
    assert shortfall("heldout", length, profile["sets"]["heldout"]) is None


@pytest.mark.long
@pytest.mark.parametrize("name", PROFILES)
def test_the_program_measures_a_draft(name):
    """benchmark/acceptance.py starts a server, and measures all prompts."""
    if not (ROOT / PROFILES[name]["server_args"][1]).exists():
        pytest.skip("`make model` fetches it")
    command = [sys.executable, "benchmark/acceptance.py", "--profile", name]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
