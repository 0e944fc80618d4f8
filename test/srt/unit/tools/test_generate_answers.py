"""Prompts and answers that drafts for SmolLM2 are trained on, without the target."""

import asyncio
import random
import re
from collections import deque

import open_prompts
import pytest
from chat_rollouts import Row
from corpus import is_heldout
from generate_answers import answer, without_loop
from pack_rollouts import Pieces, pack, packed_rows
from serving import TARGET
from tokenizers import Tokenizer

STOP = 0  # "<|endoftext|>" of the tiny target's tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture
def few_chats(monkeypatch):
    monkeypatch.setattr(open_prompts, "CHATS_PER_KIND", 40)


def test_every_slot_of_a_chat_is_known():
    requests, slots = open_prompts.CHATS["requests"], open_prompts.CHATS["slots"]
    texts = [ask for asks in requests.values() for ask in asks] + list(slots.values())
    named = {name for text in texts for name in re.findall(r"\{(\w*)\}", text)}
    assert named == {"t"} | set(open_prompts.NUMBERS) | set(slots)


def test_a_seed_decides_the_chats(few_chats):
    first, again, other = (list(open_prompts.chat_prompts(random.Random(seed))) for seed in (0, 0, 1))
    assert first == again != other
    assert not any("{" in turn["content"] for _, _, turns in first for turn in turns)


def test_a_chat_about_a_held_out_topic_is_held_out(few_chats, monkeypatch):
    topics = open_prompts.PHRASES["topics"]["names"]
    held = next(topic for topic in topics if is_heldout(topic))
    free = next(topic for topic in topics if not is_heldout(topic))
    for topic, expected in ((held, True), (free, False)):
        monkeypatch.setitem(open_prompts.PHRASES["topics"], "names", [topic])
        sources = [
            source
            for _, source, turns in open_prompts.chat_prompts(random.Random(0))
            if source == topic or any(topic.lower() in turn["content"].lower() for turn in turns)
        ]
        assert sources
        assert all(is_heldout(source) for source in sources) == expected


def row(name: str, written: int) -> Row:
    row = Row(name, "task", 0.7, [], deque())
    row.add([5, 6], False)
    row.add(list(range(10, 10 + written)), True)
    return row


def test_pieces_go_on_where_a_stopped_run_ended(tmp_path):
    pieces = Pieces(tmp_path, "part0of2", size=10)
    for name in ("task-a", "task-b", "task-c"):
        pieces.add(row(name, 6))
    Pieces(tmp_path, "part1of2", size=1).add(row("task-d", 3))
    (tmp_path / "part0of2-0001.partial").write_bytes(b"half a piece")
    again = Pieces(tmp_path, "part0of2", size=10)
    assert again.done == {"task-a", "task-b", "task-d"}  # the row that was in no piece is lost
    assert again.total == 12
    again.add(row("task-c", 11))
    pack(tmp_path, tmp_path / "all.packed")
    assert sorted(path.name for path in tmp_path.glob("part0*.npz")) == [
        "part0of2-0000.npz",
        "part0of2-0001.npz",
    ]
    assert packed_rows(tmp_path / "part0of2-0001.npz") == [
        Row("task-c", "task", pytest.approx(0.7), row("", 11).tokens, None, row("", 11).written)
    ]


class Answers:
    """An engine that gives prepared answers."""

    def __init__(self, *answers: list[int]):
        self.answers, self.asked = deque(answers), []

    async def async_generate(self, input_ids, sampling_params):
        self.asked.append((list(input_ids), sampling_params))
        return {"output_ids": self.answers.popleft()}


@pytest.mark.parametrize("last, turns", [(STOP, 2), (9, 1)])
def test_only_a_finished_answer_gets_the_next_question(tokenizer, last, turns):
    chat = Row("turns-x", "turns", 0.0, [], deque(["Why?"]))
    chat.add([5, 6], False)
    engine = Answers([7, 8, last], [11, STOP])
    asyncio.run(answer(engine, tokenizer, chat))
    assert len(engine.asked) == turns
    assert engine.asked[0][0] == [5, 6]
    written = [token for token, is_written in zip(chat.tokens, chat.written, strict=True) if is_written]
    assert written == [7, 8, last] + [11, STOP] * (turns - 1)
    if turns == 2:
        assert "Why?" in tokenizer.decode(engine.asked[1][0][5:])


def test_an_answer_ends_where_it_repeats_itself():
    varied = list(range(100, 300))
    looping = varied[:50] + [1, 2, 3] * 60
    cut = without_loop(looping)
    assert cut == looping[: len(cut)]
    assert 50 + 48 <= len(cut) < 50 + 48 + 16
    assert without_loop(varied) == varied
