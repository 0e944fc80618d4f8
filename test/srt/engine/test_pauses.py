"""After cycles without a draft, blocks accept as many tokens as if there had been no pause."""

import json

import pytest
from serving import DRAFT, PEAGLE_DRAFT, TARGET, WHOLE_BLOCKS, dflash_arguments, text_prompts
from support.scheduled import Job, run
from support.servers import FLOAT32
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

# Cycles without drafts, then with; longer than what P-EAGLE may leave pending, twice.
PAUSE, BLOCKS = 60, 40


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["DFlash", "P-EAGLE"])
def test_acceptance_after_a_pause_equals_that_without_a_pause(draft, tmp_path):
    """Compared cycle by cycle. Another request's prefill falls into the pause."""
    path = tmp_path / "pauses.json"
    path.write_text(json.dumps({"schedule": [0] * PAUSE + [7] * BLOCKS}))
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompt, other = (tuple(tokenizer.encode(one["text"]).ids) for one in text_prompts()[:2])
    serve = ["--model-path", TARGET, *FLOAT32, *dflash_arguments(draft), "--disable-radix-cache"]
    paused = ["--speculative-adaptive", "--speculative-adaptive-config", path]
    [[answer, _]] = run([*serve, *paused], [[Job(prompt, 240), Job(other, 4, step=PAUSE // 3)]])
    # The first kept token well behind the other request, with which the schedule gives other lengths.
    first = next(i for i in range(PAUSE // 2, PAUSE + BLOCKS) if answer.accepted[i])
    after = answer.accepted[first : first + 12]
    assert not any(answer.accepted[first - 12 : first]) and max(after) > 2, answer.accepted
    # The last token before it resumed is the anchor; here a prefill emits it.
    begun = first + sum(answer.accepted[:first])
    length = 1 + sum(after) + len(after)
    [[found]] = run([*serve, WHOLE_BLOCKS], [[Job((*prompt, *answer.output_ids[:begun]), length)]])
    assert found.output_ids == answer.output_ids[begun : begun + length]
    assert found.accepted == after
