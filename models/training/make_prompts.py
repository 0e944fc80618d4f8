"""Cut benchmark/prompts/heldout.jsonl from the held-out files.

Lengths run from one token to about 1,500, most between 20 and 300, several
prompts per length so that an evaluation can batch them without padding.

    python make_prompts.py WORK_DIR OUTPUT_FILE
"""

import json
import sys
from pathlib import Path

import numpy as np
from corpus import render_chat
from tokenizers import Tokenizer

# prompts per length in tokens
LENGTHS = {
    1: 6,
    2: 4,
    3: 4,
    5: 4,
    8: 4,
    13: 4,
    17: 4,
    20: 6,
    24: 6,
    28: 6,
    32: 8,
    37: 8,
    43: 8,
    50: 10,
    57: 10,
    64: 12,
    73: 10,
    83: 10,
    95: 10,
    109: 10,
    125: 10,
    128: 8,
    144: 8,
    165: 8,
    189: 8,
    217: 8,
    249: 8,
    256: 8,
    285: 8,
    340: 4,
    420: 4,
    511: 4,
    640: 4,
    800: 4,
    1024: 4,
    1250: 4,
    1500: 4,
}
CHAT_PROMPTS = 20


def main(work_dir: Path, output: Path) -> None:
    heldout = json.loads((work_dir / "heldout.json").read_text())
    tokenizer = Tokenizer.from_file(str(work_dir / "tokenizer.json"))
    rng = np.random.default_rng(5)
    files = [np.array(tokenizer.encode(text).ids) for _, text in heldout["files"]]
    lines = []
    for length, count in LENGTHS.items():
        made = 0
        while made < count:
            ids = files[rng.integers(len(files))]
            if len(ids) <= length:
                continue
            start = int(rng.integers(len(ids) - length))
            if length >= 20 and rng.random() < 0.8:
                # Most prompts start at a line start, as a user's would.
                text = tokenizer.decode(ids[start : start + length + 60].tolist(), skip_special_tokens=False)
                text = text[text.find("\n") + 1 :]
                piece = tokenizer.encode(text).ids[:length]
            else:
                piece = ids[start : start + length].tolist()
            text = tokenizer.decode(piece, skip_special_tokens=False)
            # Only cuts that survive the round trip: no split characters, same token count.
            if len(piece) == length and tokenizer.encode(text).ids == list(piece):
                lines.append({"id": f"code-{length}-{made}", "text": text, "num_tokens": length})
                made += 1
    for number, messages in enumerate(heldout["chats"][:: max(1, len(heldout["chats"]) // CHAT_PROMPTS)]):
        if number == CHAT_PROMPTS:
            break
        text = render_chat(messages[:1], add_generation_prompt=True)
        lines.append(
            {
                "id": f"chat-{number}",
                "chat": True,
                "messages": messages[:1],
                "text": text,
                "num_tokens": len(tokenizer.encode(text).ids),
            }
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} prompts, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
