"""Our DFlash2 draft on SGLang's layers against a plain-PyTorch reading of the format.

Block logits, and walks step by step, against reference_dflash2.py. float32 against float64; tolerances as
in test_draft_model.py.
"""

import pytest
import torch
from serving import DFLASH2_DRAFT, ROOT
from support.dflash2_cases import VARIANTS, DFlash2Case
from support.servers import run_to_end

from sglang_dflash.kernels.ops.speculative.selector_walk import Candidates, DrawInputs

LOGITS_TOLERANCE = 1e-4
BUNDLED = "bundled"
needs_bundled = pytest.mark.skipif(not DFLASH2_DRAFT.is_dir(), reason="the bundled draft is not there")


def make(name: str, tmp_path) -> DFlash2Case:
    return DFlash2Case.bundled(tmp_path) if name == BUNDLED else DFlash2Case.variant(name, tmp_path)


def draw_of(temperatures: list[float], slots: int, seed: int) -> DrawInputs:
    """Return draws at these temperatures of three requests, from the whole vocabulary."""
    return DrawInputs(
        temperature=torch.tensor(temperatures),
        top_k=torch.full((3,), 1 << 30, dtype=torch.int32),
        top_p=torch.ones(3),
        min_p=torch.zeros(3),
        uniforms=torch.rand(3, slots, generator=torch.Generator().manual_seed(seed)),
    )


CASES = [*VARIANTS, pytest.param(BUNDLED, marks=needs_bundled)]


@pytest.mark.parametrize("name", CASES)
def test_block_logits(name, tmp_path):
    assert make(name, tmp_path).compare_blocks([23, 1, 9, 14]) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_the_best_path(name, tmp_path):
    case = make(name, tmp_path)
    tokens, contexts, output = case.run_blocks([17, 3, 11])
    drafted = output.draft_tokens.view(3, -1)
    base = case.logits(output.hidden_states).view(*tokens.shape, -1)
    base = base[:, case.model.draft.num_idle_rows :].argmax(dim=2)
    for request, aux_hidden in enumerate(contexts):
        hidden = case.reference_hidden(tokens[request], aux_hidden)
        assert drafted[request].tolist() == case.reference.greedy_path(
            hidden, case.head, int(tokens[request, 0])
        )
    if name in ("as published", "all candidates"):
        assert (drafted != base).any()  # the transitions made a difference


@pytest.mark.parametrize(
    "name", ["as published", "capped logits", "all candidates", pytest.param(BUNDLED, marks=needs_bundled)]
)
def test_drawn_paths(name, tmp_path):
    case = make(name, tmp_path)
    tokens, contexts, output = case.run_blocks([17, 3, 11])
    slots = tokens.shape[1] - 1
    draw = draw_of([0.7, 1.0, 1.6], slots, seed=2)
    drafted, probs = case.model.candidate_selector.walk(output.candidates(3), tokens[:, 0], draw)
    assert (drafted != output.draft_tokens.view(3, -1)).any()  # not all are the best
    for request, aux_hidden in enumerate(contexts):
        hidden = case.reference_hidden(tokens[request], aux_hidden)
        ids, unary = case.reference.candidates(hidden, case.head)
        previous = int(tokens[request, 0])
        for slot in range(slots):
            scores = case.reference.scores(hidden[slot], previous, ids[slot], unary[slot])
            expected = torch.zeros(case.config["vocab_size"], dtype=torch.float64)
            expected[ids[slot]] = (scores / draw.temperature[request]).softmax(dim=0)
            found = torch.zeros_like(expected)
            found[probs.ids[request, slot]] = probs.probs[request, slot].double()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            previous = int(drafted[request, slot])
            assert found[previous] > 0


def test_a_narrower_block_is_the_first_part_of_a_causal_one(tmp_path):
    """Convolutions only look back: --speculative-num-draft-tokens cuts the block off."""
    case = DFlash2Case.variant("causal in a window", tmp_path)
    wide = case.run_blocks([12, 5])[2].draft_tokens.view(2, -1)
    case.config = case.config | {"block_size": 3}
    narrow = case.run_blocks([12, 5])[2].draft_tokens.view(2, -1)
    assert torch.equal(narrow, wide[:, :2])


def test_sglangs_own_model_says_the_same(tmp_path):
    """Hidden states, candidates and both kinds of walk, float32 on both sides."""
    names = ["capped logits", *([BUNDLED] if DFLASH2_DRAFT.is_dir() else [])]
    cases, outputs, given = [], [], []
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        case = make(name, folder)
        tokens, contexts, ours = case.run_blocks([17, 3, 11])
        draw = draw_of([0.7, 1.0, 1.3], tokens.shape[1] - 1, seed=4)
        cases.append((case, draw))
        outputs.append(ours)
        given.append(
            {
                "folder": str(folder),
                "weights": {name: tensor.float() for name, tensor in case.weights.items()},
                "head": case.head,
                "embedding": case.embedding.weight.data,
                "tokens": tokens,
                "contexts": contexts,
                "uniforms": draw.uniforms,
                "temperatures": draw.temperature,
            }
        )
    torch.save(given, tmp_path / "given.pt")
    script = ROOT / "test" / "srt" / "support" / "stock_dflash2.py"
    paths = [str(script.parents[1]), str(ROOT / "benchmark")]
    program = (
        f"import runpy, sys; sys.path[:0] = {paths}; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    files = tmp_path / "given.pt", tmp_path / "said.pt"
    done = run_to_end("-c", program, *files, environment={"TORCHDYNAMO_DISABLE": "1"})
    assert done.code == 0, done.output
    said = torch.load(tmp_path / "said.pt")
    for (case, draw), ours, asked, theirs in zip(cases, outputs, given, said, strict=True):
        tokens, found = asked["tokens"], ours.candidates(3)
        hidden = ours.hidden_states.view(*tokens.shape, -1)[:, 1:]
        torch.testing.assert_close(hidden, theirs["hidden"], rtol=0, atol=LOGITS_TOLERANCE)
        torch.testing.assert_close(found.unary, theirs["unary"], rtol=0, atol=LOGITS_TOLERANCE)
        # In order of ids: two logits may be as close as a rounding error.
        assert torch.equal(found.ids.sort().values, theirs["ids"].sort().values)
        assert torch.equal(ours.draft_tokens.view(3, -1), theirs["best"])
        theirs_in_order = Candidates(theirs["ids"], theirs["unary"], found.gate)
        drafted, probs = case.model.candidate_selector.walk(theirs_in_order, tokens[:, 0], draw)
        assert torch.equal(drafted, theirs["drawn"])
        torch.testing.assert_close(probs.probs, theirs["probs"], rtol=0, atol=1e-4)
