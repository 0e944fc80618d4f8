"""Common target families as tiny random checkpoints on SGLang's scheduler.

All run in float32. Each target gets the same prompts twice in one batch. A random draft, of which next to
nothing is accepted, drafts the first copy. An oracle that knows the answer and errs in one token of six
drafts the second, which gives long accepts. Both answers must be Hugging Face's greedy ids. The hidden states
that the draft gets must be outputs of the layers it names, for prompts and for verified blocks.
"""

import pytest
import torch
from serving import dflash_arguments
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from support.captures import Captures
from support.families import (
    FAMILIES,
    IMAGE_TOKEN,
    LAYER_IDS,
    TOLERANCE,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    VOCAB,
    Target,
    vision_kinds,
    write_draft,
    write_peagle_draft,
    write_target,
)
from support.parity import first_difference
from support.scheduled import Job, Oracle, run
from support.servers import PLAIN_FLOAT32, WIDTHS_CHANGE, patched

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="compares in float32, on the CPU"),
]

ANSWER = 16
# Shorter and longer than the sliding windows (16) and blocks (8).
LENGTHS = (3, 16, 17, 40, 70)
# Two implementations of one model in float32: logits of order 10 differ by about 1e-5.
TIE = 1e-3
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# Refused on a CPU, but for this patch. They prove what is served on CUDA.
NOT_ON_CPU = dict.fromkeys(("qwen3-next", "lfm2", "lfm2-moe"), patched("more_recurrent_targets"))
FLAGS = (*PLAIN_FLOAT32, "--random-seed", "7", "--max-total-tokens", "4096", "--skip-tokenizer-init")


def prompts(lengths=LENGTHS, seed=1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return write_draft(tmp_path_factory.mktemp("draft") / "draft")


def assert_answers(answers, expected: list[tuple[list[int], list[float]]]) -> None:
    compared = 0
    for number, (answer, (ids, leads)) in enumerate(zip(answers, expected, strict=True)):
        undecided = next((i for i, lead in enumerate(leads) if lead < TIE), len(ids))
        compared += undecided
        position = first_difference(answer.output_ids[:undecided], ids[:undecided])
        assert position is None, f"prompt {number} differs at {position}: {answer.output_ids}, wanted {ids}"
        assert len(answer.output_ids) == ANSWER
    assert compared > 0.5 * ANSWER * len(expected), "the checkpoint hardly decides between tokens"


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_captures(target: Target, ids: list[int], captured: dict[int, torch.Tensor]) -> None:
    assert set(range(len(ids) - 1)) <= set(captured)
    found = torch.stack([captured[position] for position in range(len(ids) - 1)])
    expected = target.hidden_states(ids)[:, :-1]
    for column, layer in enumerate(LAYER_IDS):
        assert distance(found[:, column], expected[layer + 1]) < TOLERANCE, f"layer {layer}"
        for other in (layer, layer + 2):  # the layer's input, and the next one's output
            assert distance(found[:, column], expected[other]) > 0.3


# One of each kind of layer, position and cache; the others run with `-m long`.
IN_EVERY_RUN = (
    "qwen2",
    "glm4-moe",
    "gpt-oss",
    "gemma4",
    "qwen3-vl",
    "qwen3.5",
    "qwen3-next",
    "lfm2",
    "llama",
)
IN_EVERY_RUN += ("deepseek-v3",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_EVERY_RUN)) for name in FAMILIES],
)
def test_a_family(name, draft, tmp_path):
    target = write_target(name, tmp_path / name)
    expected = [target.answer(prompt, ANSWER) for prompt in prompts()]
    extra = prompts((38,), seed=2)[0]  # sent once, because cached tokens are not captured again
    wanted = [*expected, *expected, target.answer(extra, ANSWER)]
    jobs = [Job(tuple(prompt), max_new_tokens=ANSWER) for prompt in (*prompts(), *prompts(), extra)]
    oracle = Oracle([None] * len(LENGTHS) + [ids + [0] * 8 for ids, _ in wanted[len(LENGTHS) :]])
    captures = Captures(len(jobs) - 1, tmp_path / "captures.pt")
    arguments = ["--model-path", target.path, *dflash_arguments(draft), *FLAGS]
    environment = ENVIRONMENT | NOT_ON_CPU.get(name, {})
    [answers] = run(arguments, [jobs], oracle, environment, captures)
    assert_answers(answers, wanted)
    kept = [count for answer in answers[len(LENGTHS) :] for count in answer.accepted]
    assert sum(kept) > 2 * len(kept), "the oracle's drafts were not accepted"
    assert_captures(target, extra + wanted[-1][0], captures.read(len(LAYER_IDS)))


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_a_family_with_a_peagle_draft(name, tmp_path):
    """The draft has its own request table, over slots that a windowed target maps."""
    target = write_target(name, tmp_path / name)
    wanted = [target.answer(prompt, ANSWER) for prompt in prompts()] * 2
    jobs = [Job(tuple(prompt), max_new_tokens=ANSWER) for prompt in prompts() * 2]
    oracle = Oracle([None] * len(LENGTHS) + [ids + [0] * 8 for ids, _ in wanted[len(LENGTHS) :]])
    peagle = write_peagle_draft(tmp_path / "draft")
    [answers] = run(
        ["--model-path", target.path, *dflash_arguments(peagle), *FLAGS], [jobs], oracle, ENVIRONMENT
    )
    assert_answers(answers, wanted)


def seen(prompt: list[int], model, seed: int, at: int, grid: tuple[int, int, int]):
    """Insert a random picture, or a video of several frames, after the prompt's first `at` tokens.

    grid: frames, rows and columns of patches. Four patches are one token; each frame stands alone.

    Returns:
        The token ids, the other inputs of Hugging Face's model, and those of SGLang's scheduler.
    """
    frames, rows, columns = grid
    modality = Modality.IMAGE if frames == 1 else Modality.VIDEO
    token = IMAGE_TOKEN if frames == 1 else VIDEO_TOKEN
    config, count = model.config.vision_config, rows * columns // 4
    width = 3 * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(frames * rows * columns, width, generator=torch.Generator().manual_seed(seed))
    frame = [VISION_START, *[token] * count, VISION_END]
    ids = [*prompt[:at], *frame * frames, *prompt[at:]]
    first = [at + 1 + number * len(frame) for number in range(frames)]
    name, grids = f"{modality.name.lower()}_grid_thw", torch.tensor([grid])
    positions, delta = model.model.get_rope_index(
        torch.tensor([ids]), mm_token_type_ids=vision_kinds(ids), **{name: grids}
    )
    item = MultimodalDataItem(
        modality=modality,
        offsets=[(start, start + count - 1) for start in first],
        feature=pixels,
        model_specific_data={name: grids},
    )
    given = MultimodalProcessorOutput(
        mm_items=[item],
        input_ids=ids,
        im_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        mrope_positions=positions[:, 0],
        mrope_position_delta=delta.view(1, 1),
    )
    pixels_name = "pixel_values" if frames == 1 else "pixel_values_videos"
    return ids, {pixels_name: pixels, name: grids}, given


# After how many of a prompt's tokens, and how many frames, rows and columns of patches. The second picture
# lies across two chunks of 64 tokens, and across the first point at which states are kept.
PICTURES = ((9, 2, (1, 4, 6)), (100, 40, (1, 8, 16)), (70, 50, (1, 6, 8)), (30, 4, (3, 4, 6)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3-vl", "peagle"),
        ("qwen3.5", "dflash"),
        pytest.param("qwen3-vl", "dflash", marks=pytest.mark.long),
        pytest.param("qwen3.5", "peagle", marks=pytest.mark.long),
        pytest.param("qwen3.5-moe", "dflash", marks=pytest.mark.long),
    ],
)
def test_images(name, kind, draft, tmp_path):
    """Serve pictures, a video and a text in one batch, then again from the prefix cache.

    After a picture, text positions lag behind slots, so a block verified at slot numbers would be wrong. In
    place of its tokens SGLang has a hash, which a P-EAGLE draft cannot embed.
    """
    if kind == "peagle":
        draft = write_peagle_draft(tmp_path / "draft")
    target = write_target(name, tmp_path / "target")
    jobs, wanted = [], []
    for seed, (length, at, grid) in enumerate(PICTURES):
        ids, pictures, given = seen(prompts((length,), seed)[0], target.model, seed, at, grid)
        wanted.append(target.answer(ids, ANSWER, **pictures))
        jobs.append(Job(tuple(ids), max_new_tokens=ANSWER, mm_inputs=given))
    text = prompts((12,))[0]
    jobs.append(Job(tuple(text), max_new_tokens=ANSWER))
    wanted.append(target.answer(text, ANSWER))
    for number in (0, 3):
        assert target.answer(jobs[number].input_ids, ANSWER)[0] != wanted[number][0], "the picture is unseen"
    arguments = ["--model-path", target.path, *dflash_arguments(draft), *FLAGS]
    arguments += ["--chunked-prefill-size", "64", *["--mamba-track-interval", "64"] * (name != "qwen3-vl")]
    changes_width = name == "qwen3.5"
    arguments += WIDTHS_CHANGE if changes_width else ()
    oracle = Oracle([ids + [0] * 8 for ids, _ in wanted] * 2)
    first, again = run(arguments, [jobs, jobs], oracle, ENVIRONMENT)
    assert_answers(first, wanted)
    assert_answers(again, wanted)
    kept = [count for answer in (*first, *again) for count in answer.accepted]
    assert sum(kept) > (1 if changes_width else 2) * len(kept), "the oracle's drafts were not accepted"
    assert first[1].cached_tokens == 0 < 64 <= again[1].cached_tokens, "the cache knows no picture"


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",
        "gemma4",
        "deepseek-v3",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3-next", "lfm2")),
    ],
)
def test_a_family_without_a_draft(name, tmp_path):
    """Run chunked prefill, prefix cache and decode, which need our CPU attention."""
    target = write_target(name, tmp_path / name)
    wanted = [target.answer(prompt, ANSWER) for prompt in prompts()]
    jobs = [Job(tuple(prompt), max_new_tokens=ANSWER) for prompt in prompts()]
    arguments = ["--model-path", target.path, *FLAGS, "--chunked-prefill-size", "32"]
    environment = ENVIRONMENT | NOT_ON_CPU.get(name, {})
    first, again = run(arguments, [jobs, jobs], environment=environment)
    assert_answers(first, wanted)
    assert_answers(again, wanted)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-next", "lfm2"])
def test_states_that_verified_blocks_left(name, draft, tmp_path):
    """Answers continue from the prefix cache, which has states from chunks and from verified blocks.

    Each request and cycle verifies another number of tokens. SGLang keeps LFM2's states at ends of prompts
    alone.
    """
    target = write_target(name, tmp_path / name)
    first = prompts((50, 100, 150), seed=3)
    wanted = [target.answer(prompt, 72 + ANSWER) for prompt in first]
    begun = [[*prompt, *ids[:72]] for prompt, (ids, _) in zip(first, wanted, strict=True)]
    rest = [(ids[72:], leads[72:]) for ids, leads in wanted]
    arguments = ["--model-path", target.path, *dflash_arguments(draft), *FLAGS, *WIDTHS_CHANGE]
    arguments += ["--chunked-prefill-size", "64", "--mamba-track-interval", "64"]
    groups = [
        [Job(tuple(prompt), max_new_tokens=72 + ANSWER) for prompt in first],
        [Job(tuple(prompt), max_new_tokens=ANSWER) for prompt in begun],
    ]
    oracle = Oracle([ids + [0] * 8 for ids, _ in (*wanted, *rest)])
    answers, continued = run(arguments, groups, oracle, ENVIRONMENT | NOT_ON_CPU[name])
    for answer, (ids, leads) in zip(answers, wanted, strict=True):
        decided = next((i for i, lead in enumerate(leads) if lead < TIE), len(ids))
        assert list(answer.output_ids[:decided]) == ids[:decided] and decided > 72
    assert_answers(continued, rest)
    cached = [answer.cached_tokens for answer in continued]
    lengths = [len(prompt) for prompt in first]
    assert cached == lengths if name == "lfm2" else max(cached) > lengths[-1], cached
