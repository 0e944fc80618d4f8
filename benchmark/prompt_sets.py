"""Prompt sets of the benchmarks, and the requests made from them.

A prompt is a dictionary with an `id` and either `text`, which is continued, or `messages`, which are put into
the target's chat template. The sets:

- `humaneval`: the 164 tasks of HumanEval, as chat requests.
- `chat`: 40 chats written for this benchmark.
- `edits`: HumanEval's longer solutions, each with an instruction to change it and print it again. A good
  answer repeats most of the code. SmolLM2-135M-Instruct repeats about half of the lines.
- `heldout`: the bundled tiny targets' held-out files, as plain text. They are continued past the end of text.

Files of your own are JSON lines with `text` or `messages`: NAME=FILE.

    python benchmark/prompt_sets.py --overlap TRAIN.jsonl     # what the sets share with training prompts
"""

import ast
import gzip
import json
import random
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import documented, text_prompts, verdict_or_2

from sglang_dflash.srt.doctor.pair import BadInput, read_prompts

FOLDER = Path(__file__).parent / "prompts"
HUMANEVAL = FOLDER / "HumanEval.jsonl.gz"
CHATS = FOLDER / "chat.toml"
CHAT_SETS = ("humaneval", "chat", "edits")
TEXT_SETS = ("heldout",)
LEAST_EDIT_LINES = 8
OVERLAP_WORDS = 13  # a run of words that two texts rarely share by chance

COMPLETE = "Here is the beginning of a Python function. Write the whole function in a code block.\n\n{code}"
EDIT = (
    "Copy the function below into your answer, line by line, and {change}. Keep everything else as it is."
    "\n\n{code}"
)
CHANGES = (
    "rename the argument `{argument}` to `{argument}_in`",
    "add a docstring to it",
    "add type annotations to its arguments and its return value",
    "rename the function from `{name}` to `solve`",
    "call `logging.debug` on its first line",
)


@dataclass(frozen=True)
class PromptSet:
    """Prompts and how they are answered.

    Attributes:
        name: As on the command line.
        prompts: In a fixed random order, so that each slice is like the whole.
        max_new_tokens: The largest length at which an answer is cut.
        ignore_eos: Answer in full length, past the target's stop tokens.
    """

    name: str
    prompts: tuple[dict, ...]
    max_new_tokens: int = 256
    ignore_eos: bool = False

    def slice(self, number: int, count: int) -> list[dict]:
        """Return the prompts of a round: slices follow each other, and begin again at the end."""
        first = number * count
        return [self.prompts[i % len(self.prompts)] for i in range(first, first + count)]

    def sampling(self, prompt: dict, temperature: float) -> dict:
        """Return the sampling parameters of a prompt's request.

        An answer is cut at a length between a quarter of `max_new_tokens` and all of them. The prompt alone
        decides the length, so it is the same for every server and in every round. With one limit for all
        answers, requests that begin together would end together, as they do under no load that people have.
        """
        draw = random.Random(json.dumps(prompt, sort_keys=True))
        limit = draw.randint(-(-self.max_new_tokens // 4), self.max_new_tokens)
        params = {"temperature": temperature, "max_new_tokens": limit}
        return {**params, "ignore_eos": True} if self.ignore_eos else params


class RequestMaker:
    """Makes bodies of /generate requests; messages go through the target's chat template.

    template: what the template is told besides, as `enable_thinking=False`.
    """

    def __init__(self, target: str | Path, **template: Any):
        self._target, self._template = str(target), template
        self._tokenizer = None

    @property
    def tokenizer(self):
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._target)
        return self._tokenizer

    def body(self, prompt: dict, sampling: dict) -> dict:
        if prompt.get("messages") is None:
            return {"text": prompt["text"], "sampling_params": sampling}
        ids = self.tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, return_dict=True, **self._template
        )["input_ids"]
        return {"input_ids": ids, "sampling_params": sampling}


def load(name: str, max_new_tokens: int | None = None) -> PromptSet:
    """Return a set by its name, or the prompts of a file by NAME=FILE.

    Raises:
        BadInput: There is no such set, or the file is not as the doctor's prompts are.
    """
    options = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
    name, _, file = name.partition("=")
    if file:
        return PromptSet(name, tuple(read_prompts(Path(file))), **options)
    makers = {"humaneval": humaneval, "chat": chats, "edits": edits}
    if name in makers:
        prompts = makers[name]()
        random.Random(0).shuffle(prompts)
        return PromptSet(name, tuple(prompts), **options)
    if name == "heldout":
        return PromptSet(name, tuple(text_prompts()), **{"max_new_tokens": 128, **options}, ignore_eos=True)
    raise BadInput(f"{name}: no such prompt set ({', '.join((*CHAT_SETS, *TEXT_SETS))}, or NAME=FILE)")


def humaneval() -> list[dict]:
    """Return HumanEval's tasks as chat requests."""
    return [
        _chat(task["task_id"], COMPLETE.format(code=_fenced(task["prompt"]))) for task in humaneval_tasks()
    ]


def chats() -> list[dict]:
    """Return the chats of `chat.toml`."""
    conversations = tomllib.loads(CHATS.read_text())["conversations"]
    return [_chat(f"chat/{number}", *texts) for number, texts in enumerate(conversations)]


def edits() -> list[dict]:
    """Return requests to change one of HumanEval's solutions and print it again."""
    solutions = [found for task in humaneval_tasks() if (found := _solution(task))]
    requests = []
    for number, (task_id, code, names) in enumerate(solutions):
        change = CHANGES[number % len(CHANGES)].format(**names)
        requests.append(_chat(f"edit/{task_id}", EDIT.format(change=change, code=_fenced(code))))
    return requests


def overlaps(prompts: Sequence[dict], others: Sequence[dict], words: int = OVERLAP_WORDS) -> list[tuple]:
    """Return (id, id of the other, shared words) for each prompt that shares a run of words with another."""
    runs = {}
    for other in others:
        for run in _runs(other, words):
            runs.setdefault(run, other["id"])
    found = []
    for prompt in prompts:
        shared = next((run for run in _runs(prompt, words) if run in runs), None)
        if shared:
            found.append((prompt["id"], runs[shared], " ".join(shared)))
    return found


def humaneval_tasks() -> list[dict]:
    """Return HumanEval's tasks as they were published."""
    with gzip.open(HUMANEVAL, "rt") as lines:
        return [json.loads(line) for line in lines]


def _solution(task: dict) -> tuple[str, str, dict] | None:
    """Return (task id, the solution without docstring, its names), or None if it is too short to edit."""
    source = task["prompt"] + task["canonical_solution"]
    [node] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == task["entry_point"]
    ]
    lines = source.split("\n")
    docstring = range(node.body[0].lineno, node.body[0].end_lineno + 1) if ast.get_docstring(node) else ()
    kept = [lines[n - 1] for n in range(node.lineno, node.end_lineno + 1) if n not in docstring]
    if len(kept) < LEAST_EDIT_LINES:
        return None
    names = {"name": node.name, "argument": node.args.args[0].arg}
    return task["task_id"], "\n".join(kept), names


def _chat(prompt_id: str, *texts: str) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"id": prompt_id, "messages": messages}


def _fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def _runs(prompt: dict, words: int) -> Iterator[tuple[str, ...]]:
    """Yield each run of `words` words within one message."""
    for text in _texts(prompt):
        found = re.findall(r"\w+", text.lower())
        yield from (tuple(found[i : i + words]) for i in range(len(found) - words + 1))


def _texts(prompt: dict) -> list[str]:
    if "text" in prompt:
        return [prompt["text"]]
    return [message["content"] for message in prompt["messages"]]


@verdict_or_2
def main() -> None:
    parser = documented(__doc__)
    parser.add_argument("--overlap", type=Path, required=True, metavar="TRAIN.jsonl")
    parser.add_argument("--words", type=int, default=OVERLAP_WORDS, help="length of a shared run")
    args = parser.parse_args()
    training = load(f"training={args.overlap}").prompts
    for name in CHAT_SETS:
        prompts = load(name).prompts
        found = overlaps(prompts, training, args.words)
        print(f"{name}: {len(found)} of {len(prompts)} prompts share {args.words} words in a row")
        for prompt_id, other, shared in found:
            print(f"  {prompt_id}, {other}: {shared}")


if __name__ == "__main__":
    sys.exit(main())
