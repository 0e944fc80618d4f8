"""Text for the tiny pair: standard library source, its tokenizer, its split.

The only input is the source of the interpreter that runs this file, so there
is nothing to download. Whole files are held out, chosen by a hash of their
path: neither the target nor the draft ever sees a held-out file.

    python corpus.py WORK_DIR      # writes tokenizer.json, corpus.npz
"""

import ast
import hashlib
import json
import random
import sys
import sysconfig
import textwrap
import warnings
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END, MASK]  # ids 0, 1, 2, 3
END_OF_TEXT_ID, IM_START_ID, IM_END_ID, MASK_ID = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HELDOUT_PERCENT = 5
# Tables of code points and generated topics are not code: they cost tokens
# and teach nothing but digits.
SKIPPED_PARTS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "turtledemo",
}


def is_heldout(relative_path: str) -> bool:
    """Choose held-out files by a hash of their path, the same in every Python version."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT


def library_files() -> list[tuple[str, str]]:
    """Return all (relative path, text) of the standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
            if len(text) > 200:
                files.append((relative.as_posix(), text))
    return files


def chat_messages(source: str) -> list[list[dict]]:
    """Return a conversation of two messages for every documented function of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    conversations = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        doc = ast.get_docstring(node)
        body = ast.get_source_segment(source, node, padded=True)
        if not doc or not body or len(body) > 1600 or len(node.body) < 2:
            continue
        request = " ".join(doc.split("\n\n")[0].split())[:300]
        conversations.append(
            [
                {"role": "user", "content": f"Write a function: {request}"},
                {"role": "assistant", "content": textwrap.dedent(body).strip()},
            ]
        )
    return conversations


def render_chat(messages: list[dict]) -> str:
    """Render messages like CHAT_TEMPLATE."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode every string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer files by hand, because transformers' class names vary by version."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [IM_START, IM_END],
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode all documents in one row, each ended by <|endoftext|>.

    Returns:
        ids [num_tokens] uint16 and starts [num_documents] int64.
    """
    rows = [e.ids + [END_OF_TEXT_ID] for e in tokenizer.encode_batch(texts)]
    starts = np.cumsum([0] + [len(r) for r in rows[:-1]])
    return np.concatenate([np.array(r, dtype=np.uint16) for r in rows]), starts


def build(work_dir: Path) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    files = library_files()
    train = [(p, t) for p, t in files if not is_heldout(p)]
    heldout = [(p, t) for p, t in files if is_heldout(p)]
    random.Random(0).shuffle(train)

    tokenizer = train_tokenizer([t for _, t in train])
    save_tokenizer(tokenizer, work_dir)

    chats = [c for _, text in train for c in chat_messages(text)]
    random.Random(1).shuffle(chats)
    arrays = {}
    arrays["code"], arrays["code_starts"] = encode_documents(tokenizer, [t for _, t in train])
    arrays["chat"], arrays["chat_starts"] = encode_documents(tokenizer, [render_chat(c) for c in chats])
    arrays["heldout"], arrays["heldout_starts"] = encode_documents(tokenizer, [t for _, t in heldout])
    np.savez(work_dir / "corpus.npz", **arrays)

    digest = hashlib.sha256("".join(p + t for p, t in files).encode()).hexdigest()
    summary = {
        "python": sys.version.split()[0],
        "corpus_sha256": digest,
        "train_files": len(train),
        "heldout_files": len(heldout),
        "train_code_tokens": len(arrays["code"]),
        "train_chat_documents": len(chats),
        "train_chat_tokens": len(arrays["chat"]),
        "heldout_tokens": len(arrays["heldout"]),
        "characters_per_token": round(sum(len(t) for _, t in heldout) / len(arrays["heldout"]), 2),
    }
    (work_dir / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
