"""Prompts of 32,768 and 131,072 tokens on targets with recurrent states, in float32.

Position tables, windows of 2,048, the grid on which states are kept and the prefix cache, far beyond the
lengths of the other tests. One prompt of 32,768 tokens is on the dense pair.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serving import (
    DRAFT,
    HYBRID_DFLASH2_DRAFT,
    HYBRID_DRAFT,
    HYBRID_PEAGLE_DRAFT,
    HYBRID_TARGET,
    TARGET,
    WHOLE_BLOCKS,
    dflash_arguments,
    heldout_prompts,
)
from support.families import (
    VOCAB,
    lengthen_memory,
    write_dflash2_draft,
    write_draft,
    write_peagle_draft,
    write_target,
)
from support.parity import FLOAT32_TIE
from support.plain_loop import plain_loop
from support.reference_dflash import ReferenceDFlash
from support.reference_dflash2 import ReferenceDFlash2
from support.reference_peagle import ReferencePEagle
from support.scheduled import Answer, Job, Oracle, run
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="compares in float32, on the CPU"),
]

ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
CONTEXT = 2**17 + 2**12
FLAGS = (
    *("--dtype", "float32", "--random-seed", "7", "--skip-tokenizer-init", "--mamba-track-interval", "64"),
    *("--max-total-tokens", str(CONTEXT), "--max-running-requests", "4"),
)
CHUNK = 1024
ANSWER = 72
TIMEOUT_S = 3600
DRAFTS = {"dflash": write_draft, "dflash2": write_dflash2_draft, "peagle": write_peagle_draft}
REFERENCES = {
    HYBRID_DRAFT: ReferenceDFlash,
    HYBRID_DFLASH2_DRAFT: ReferenceDFlash2,
    HYBRID_PEAGLE_DRAFT: ReferencePEagle,
}
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True}


def rewrite(checkpoint: Path, **changes) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return checkpoint


def reaching_far(draft: Path) -> dict:
    """Return what a draft's config needs: SGLang refuses one that reaches less far than its target."""
    config = json.loads((draft / "config.json").read_text())
    layer = config.get("transformer_layer_config")
    longer = {"max_position_embeddings": CONTEXT}
    return longer if layer is None else {"transformer_layer_config": layer | longer}


def decided(answer: Answer) -> int:
    return next((i for i, gap in enumerate(answer.gaps) if gap < FLOAT32_TIE), len(answer.output_ids))


@pytest.mark.parametrize(
    ("draft", "length"), [("dflash", 2**15), ("dflash2", 2**15), ("peagle", 2**15), ("dflash", 2**17)]
)
def test_output_is_the_targets(draft, length, tmp_path):
    """One long prompt, then the same with a part of its answer and with other ends, from the prefix cache.

    The target is random, with one head and decays near one. An oracle drafts for two requests of three.
    """
    target = write_target(
        "qwen3.5-text", tmp_path / "target", num_attention_heads=1, num_key_value_heads=1
    ).path
    lengthen_memory(rewrite(target, max_position_embeddings=CONTEXT))
    folder = DRAFTS[draft](tmp_path / "draft")
    rewrite(folder, **reaching_far(folder), **(WINDOW if draft != "peagle" else {}))
    generator = torch.Generator().manual_seed(length)
    prompt = tuple(torch.randint(8, VOCAB, (length,), generator=generator).tolist())
    ends = [(*prompt[:-50], *prompt[at : at + 90]) for at in (100, 3000)]
    plain = ["--model-path", target, *FLAGS]

    def jobs(first: Answer | None, logprobs: bool) -> list[list[Job]]:
        begun = () if first is None else first.output_ids[:21]
        second = [Job(ids, ANSWER, logprobs=logprobs) for ids in (*ends, (*prompt, *begun))]
        return [[Job(prompt, ANSWER, logprobs=logprobs)], second]

    # SGLang's own CPU attention computes each chunk's rows for the whole context: few chunks are faster.
    few_chunks = [*plain, "--chunked-prefill-size", str(16 * CHUNK), "--mem-fraction-static", "0.7"]
    wanted = sum(run(few_chunks, jobs(None, True), environment=ENVIRONMENT, timeout=TIMEOUT_S), [])
    first = wanted[0]
    assert decided(first) > 30, "the target hardly decides between tokens"
    known = [list(answer.output_ids) + [0] * 8 for answer in wanted]
    oracle = Oracle([known[0], known[1], None, known[0][21:]])
    found = sum(
        run(
            [*plain, "--chunked-prefill-size", str(CHUNK), *dflash_arguments(folder)],
            jobs(first, False),
            oracle,
            ENVIRONMENT,
            timeout=TIMEOUT_S,
        ),
        [],
    )
    wanted[-1] = Answer(**{**vars(first), "output_ids": first.output_ids[21:], "gaps": first.gaps[21:]})
    for answer, want in zip(found, wanted, strict=True):
        end = decided(want)
        assert answer.output_ids[:end] == want.output_ids[:end]
    assert all(answer.cached_tokens > length - 2 * CHUNK for answer in found[1:])
    # Beyond a near tie an answer may differ, and the oracle is then wrong.
    accepted = [count for answer in (found[0], found[1], found[3]) for count in answer.accepted]
    assert sum(accepted) > len(accepted), "the oracle's drafts were not accepted"


def test_a_dense_pair_behind_32768_tokens(tmp_path):
    """An answer that crosses the position. An oracle drafts blocks of 16."""
    target, draft = (Path(shutil.copytree(pair, tmp_path / pair.name)) for pair in (TARGET, DRAFT))
    for folder in (target, draft):
        rewrite(folder, max_position_embeddings=2**16)
    ids = (
        Tokenizer.from_file(str(TARGET / "tokenizer.json"))
        .encode("\n".join(prompt["text"] for prompt in heldout_prompts() if not prompt.get("chat")))
        .ids
    )
    length = 2**15 - 24
    job = Job(tuple((ids * (length // len(ids) + 1))[:length]), 64, logprobs=True)
    flags = ["--model-path", target, "--dtype", "float32", "--max-total-tokens", str(2**15 + 1024)]
    few_chunks = ["--chunked-prefill-size", str(8 * CHUNK)]
    [[want]] = run([*flags, *few_chunks], [[job]], timeout=TIMEOUT_S)
    oracle = Oracle([[*want.output_ids, *[5] * 32]], error_rate=0.05)
    blocks = ["--speculative-num-draft-tokens", "16", "--no-speculative-adaptive"]
    few_rows = ["--chunked-prefill-size", str(CHUNK)]
    [[answer]] = run(
        [*flags, *few_rows, *dflash_arguments(draft), *blocks], [[job]], oracle, timeout=TIMEOUT_S
    )
    end = decided(want)
    assert end > 40 and answer.output_ids[:end] == want.output_ids[:end]
    assert sum(answer.accepted) > 4 * len(answer.accepted), "the oracle's drafts were not accepted"


@pytest.mark.parametrize(
    "draft", [HYBRID_DRAFT, HYBRID_DFLASH2_DRAFT, HYBRID_PEAGLE_DRAFT], ids=lambda d: d.name
)
def test_output_of_the_trained_pair_is_the_targets(draft, tmp_path, record_property):
    """The trained pair behind 1,000 and 8,000 tokens of other code, with its DFlash draft behind 31,000 too.

    Its drafts saw short texts in training. Their accept length falls with the context, here from 2.0 to 1.0.
    The loss is the draft's own: behind 1,000 and 8,000 tokens a loop without any cache accepts as many tokens
    in every block of two answers.
    """
    target = rewrite(shutil.copytree(HYBRID_TARGET, tmp_path / "target"), max_position_embeddings=CONTEXT)
    tokenizer = Tokenizer.from_file(str(HYBRID_TARGET / "tokenizer.json"))
    texts = [tokenizer.encode(prompt["text"]).ids for prompt in heldout_prompts() if not prompt.get("chat")]
    ends = texts[:40:5]
    before = [token for text in texts[40:] for token in text]
    before = (before * (32000 // len(before) + 1))[-31000:]
    lengths = (1000, 8000, 31000) if draft == HYBRID_DRAFT else (1000, 8000)
    groups = [[Job((*before[-length:], *end), 48, logprobs=True) for end in ends] for length in lengths]
    copied = Path(shutil.copytree(draft, tmp_path / "draft"))
    rewrite(copied, **reaching_far(copied))
    arguments = ["--model-path", target, *FLAGS, "--chunked-prefill-size", str(CHUNK)]
    wanted = run(arguments, groups, environment=ENVIRONMENT, timeout=TIMEOUT_S)
    found = run(
        [*arguments, WHOLE_BLOCKS, *dflash_arguments(copied)],
        groups,
        environment=ENVIRONMENT,
        timeout=TIMEOUT_S,
    )
    for length, answers, expected in zip(lengths, found, wanted, strict=True):
        for answer, want in zip(answers, expected, strict=True):
            end = decided(want)
            assert answer.output_ids[:end] == want.output_ids[:end]
        blocks = [count for answer in answers for count in answer.accepted]
        record_property(f"accept length behind {length}", f"{1 + sum(blocks) / len(blocks):.2f}")
    model = AutoModelForCausalLM.from_pretrained(HYBRID_TARGET, dtype=torch.float32).eval()
    reference = REFERENCES[draft](
        json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    )
    for number in (0, 1):
        # Beyond a near tie an answer may be another text than the loop's.
        whole = [
            pair
            for *pair, want in zip(groups[number], found[number], wanted[number])
            if decided(want) == len(want.output_ids)
        ]
        assert len(whole) > 1
        for job, answer in whole[:2]:
            text = [*job.input_ids, *answer.output_ids]
            with torch.no_grad():
                out = model.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
            accepted = plain_loop(model, reference, out.hidden_states, text, len(job.input_ids))
            # The last block may reach past the answer's end, where the loop has no token to compare.
            assert list(answer.accepted[:-1]) == accepted[:-1] and answer.accepted[-1] >= accepted[-1]
