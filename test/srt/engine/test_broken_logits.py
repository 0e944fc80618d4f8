"""A request with NaN or infinite target logits ends with that reason; all others go on."""

import pytest
from serving import PEAGLE_DRAFT, TARGET, dflash_arguments, heldout_prompts
from support.sampling_checks import assert_greedy
from support.scheduled import Job, run
from support.servers import FLOAT32, patched
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

DRAFTING = {
    "one-hot": dflash_arguments(),
    "probabilistic": [*dflash_arguments(), "--speculative-draft-sample-method", "probabilistic"],
    "P-EAGLE": dflash_arguments(PEAGLE_DRAFT),
}


@pytest.mark.parametrize("drafting", DRAFTING)
def test_broken_logits_end_their_request_alone(drafting):
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts() if 10 <= prompt["num_tokens"] <= 100][:12]
    prompts = [tuple(tokenizer.encode(text).ids) for text in texts]
    fine = [Job(prompt, step=3 * number) for number, prompt in enumerate(prompts)]
    broken = [
        Job(
            prompt,
            step=3 * number,
            sampling={"temperature": number % 2, "custom_params": {"logit": logit}},
            logprobs=number % 3 == 0,
        )
        for number, (prompt, logit) in enumerate(zip(prompts, ["nan", "inf"] * 6))
    ]
    arguments = ["--model-path", TARGET, *FLOAT32, *DRAFTING[drafting]]
    together, after = run(arguments, [[*fine, *broken], fine], environment=patched("broken_logits"))
    for answer in together[len(fine) :]:
        # SGLang's stop for NaN. The prefill's token, and the one at whose position the request ended.
        assert answer.finish_reason == "FINISH_MATCHED_STR" and len(answer.output_ids) == 2
    assert_greedy([*fine, *fine], [*together[: len(fine)], *after])
