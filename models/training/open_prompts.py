"""Chat requests for training drafts, made from text under open licences.

Sources: functions and docstrings of the standard library and of the installed packages in `PACKAGES`, the
language reference that Python ships (`pydoc_data`), descriptions and licences of packages, and our phrases in
`prompts/`. No evaluation set is read. Whole source files and topics are held out, by a hash of their name.

    python open_prompts.py OUTPUT_DIR      # writes train.jsonl and heldout.jsonl

Each line has `id`, `kind`, and either `messages` (user turns) or `text` (a plain completion).
"""

import argparse
import ast
import hashlib
import importlib.metadata
import itertools
import json
import random
import re
import sysconfig
import textwrap
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics as language_reference

from corpus import SKIPPED_PARTS, is_heldout

PHRASES, CHATS = (
    tomllib.loads((Path(__file__).parent / "prompts" / name).read_text())
    for name in ("phrases.toml", "chats.toml")
)
# Packages under MIT, BSD, Apache or PSF licences. Absent ones are skipped.
PACKAGES = (
    "aiohttp attrs click cloudpickle einops fastapi fsspec httpx huggingface_hub Jinja2 jsonschema lark "
    "matplotlib networkx numpy packaging Pygments pyparsing python-dateutil requests rich six "
    "sortedcontainers starlette sympy tabulate tomlkit traitlets typer urllib3 virtualenv wcwidth yarl"
).split()
HELDOUT_PER_KIND = 40
TURNS_PER_TOPIC, NUMBER_PROMPTS, CHATS_PER_KIND = 12, 900, 3000
NUMBERS = {"small": (2, 12), "number": (10, 99), "large": (100, 9999), "year": (1750, 2020)}

Prompt = str | list[dict]
Found = tuple[str, str, Prompt]  # kind, source, prompt


def package_files(package: str) -> list[tuple[str, Path]]:
    """Return (name, path) of an installed package's files, or nothing if it is absent."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [(file.as_posix(), Path(str(file.locate()))) for file in files]


def source_files() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every source file of the standard library and of `PACKAGES`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [(path.relative_to(library).as_posix(), path) for path in sorted(library.rglob("*.py"))]
    for package in PACKAGES:
        paths += [(name, path) for name, path in package_files(package) if path.suffix == ".py"]
    for name, path in paths:
        if (SKIPPED_PARTS | {"_vendor"}).isdisjoint(name.split("/")) and path.exists():
            yield name, path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def functions(source: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield each function of a file with its dedented source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) >= 2 and node.end_lineno - node.lineno < 80:
            yield node, textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()


def user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def fenced(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def signature(node: ast.FunctionDef, text: str) -> str | None:
    """Return a function's text up to its docstring, or None if that is not a short signature."""
    lines = text.split("\n")[: node.body[0].lineno - node.lineno]
    head = "\n".join(lines).rstrip()
    return head if head.endswith(":") and len(head) < 300 else None


def edit_request(rng: random.Random, node: ast.FunctionDef, text: str) -> str | None:
    """Return a request to change a function and print it again."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {a.arg for a in node.args.args}
    names = sorted(n for n in names if len(n) > 1 and n not in ("self", "cls"))
    if not names:
        return None
    new = f"{rng.choice(PHRASES['code']['new_names'])}_{rng.choice('abcxyz')}"
    request = rng.choice(PHRASES["code"]["edit"]).format(a=rng.choice(names), b=new)
    if "docstring to" in request:
        text = re.sub(r'\n\s*[rR]?("""|\'\'\').*?\1', "", text, count=1, flags=re.DOTALL)
    parts = [request, fenced(text)]
    return "\n\n".join(parts[::-1] if rng.random() < 0.3 else parts)


def code_prompts(rng: random.Random) -> Iterator[Found]:
    """Yield requests to complete, write, explain and edit the functions of `source_files`."""
    phrases = PHRASES["code"]
    for name, source in source_files():
        for node, text in functions(source):
            doc = ast.get_docstring(node) or ""
            heading = " ".join(doc.split("\n\n")[0].split())[:300]
            if not node.name.startswith("_"):
                head = signature(node, text)
                if head and 40 < len(doc) < 700:
                    quoted = textwrap.indent(f'"""{doc}\n"""', "    ")
                    stub = f"{head}\n{quoted}\n"
                    yield "complete", name, stub
                    yield "complete", name, user(f"{rng.choice(phrases['complete'])}\n\n{fenced(stub)}")
                if len(heading) > 20:
                    request = rng.choice(phrases["write"]).format(n=node.name)
                    yield "write", name, user(request + heading)
                    module = name.removesuffix(".py").replace("/", ".")
                    yield "question", name, user(f"What does `{node.name}` in `{module}` do? {heading}")
            if 120 < len(text) < 900:
                yield "explain", name, user(f"{rng.choice(phrases['explain'])}\n\n{fenced(text)}")
                request = edit_request(rng, node, text)
                if request:
                    yield "edit", name, user(request)


def task_prompts(rng: random.Random) -> Iterator[Found]:
    """Yield small programming tasks."""
    phrases = PHRASES["tasks"]
    for elements, action in itertools.product(phrases["elements"], phrases["actions"]):
        act, argument = action.format(k=elements), rng.choice(phrases["arguments"])
        name = "_".join(re.findall("[a-z]+", act)[:1] + re.findall("[a-z]+", elements)[:3])
        sentence = act[0].upper() + act[1:]
        stub = f'def {name}({argument}):\n    """\n    {sentence} in `{argument}`.\n    """\n'
        typed = f"from typing import List\n\n\ndef {name}({argument}: List[int]) -> List[int]:\n"
        yield "task", elements, stub
        yield "task", elements, f'{typed}    """ {sentence} in the list {argument}.\n'
        yield "task", elements, user(f"Write a Python function to {act} in a list.")
        yield "task", elements, user(f"Write a function `{name}({argument})` to {act}. Explain how it works.")
        yield "task", elements, user(f"Complete this function.\n\n{fenced(stub)}")
        yield "task", elements, user(rng.choice(phrases["other_asks"]).format(act))
    for thing, ask in itertools.product(phrases["classes"], phrases["class_asks"]):
        yield "task", thing, user(ask.format(thing))


def topic_prompts(rng: random.Random) -> Iterator[Found]:
    """Yield questions and conversations about topics."""
    phrases = PHRASES["topics"]
    topics = phrases["names"]
    for topic, ask in itertools.product(topics, phrases["asks"]):
        yield "topic", topic, user(ask.format(t=topic, u=rng.choice(topics)))
    for topic in topics * TURNS_PER_TOPIC:
        asks = [rng.choice(phrases["asks"]), *rng.sample(phrases["follow_ups"], 2)]
        contents = [ask.format(t=topic, u=rng.choice(topics)) for ask in asks]
        yield "turns", topic, [{"role": "user", "content": content} for content in contents]


def filled(rng: random.Random, template: str, topics: list[str]) -> str:
    """Return a template of `prompts/chats.toml` with all slots filled; the topics in it join `topics`."""

    def choose(slot: re.Match) -> str:
        name = slot[1]
        if name in NUMBERS:
            return str(rng.randint(*NUMBERS[name]))
        if name == "t":
            topics.append(rng.choice(PHRASES["topics"]["names"]))
            return topics[-1]
        return rng.choice(CHATS["slots"][name].split("|"))

    while "{" in template:
        template = re.sub(r"\{(\w+)\}", choose, template)
    return template[0].upper() + template[1:]


def chat_prompts(rng: random.Random) -> Iterator[Found]:
    """Yield requests of all kinds in `prompts/chats.toml`; each fourth has one or two more turns."""
    requests = dict(CHATS["requests"])
    follow_ups = requests.pop("follow_up")
    for kind, templates in requests.items():
        for number in range(CHATS_PER_KIND):
            asks = [rng.choice(templates)] + rng.sample(follow_ups, 0 if number % 4 else rng.randint(1, 2))
            topics: list[str] = []
            contents = [filled(rng, ask, topics) for ask in asks]
            source = next(filter(is_heldout, topics), contents[0])
            yield f"chat_{kind}", source, [{"role": "user", "content": content} for content in contents]


def number_and_data_prompts(rng: random.Random) -> Iterator[Found]:
    """Yield arithmetic questions and requests for JSON, tables and the like."""
    arithmetic, data = PHRASES["arithmetic"], PHRASES["data"]
    for _ in range(NUMBER_PROMPTS):
        x, y, z = rng.randint(2, 99), rng.randint(2, 60), rng.randint(2, 12)
        item, person = rng.choice(arithmetic["items"]), rng.choice(arithmetic["people"])
        numbers = {"x": x, "y": y, "z": z, "z0": 10 * x, "yz": y + z}
        text = rng.choice(arithmetic["asks"]).format(**numbers, item=item, person=person)
        yield "arithmetic", text, user(text)
        f, g, h = rng.sample(data["fields"], 3)
        text = rng.choice(data["asks"]).format(t=rng.choice(PHRASES["topics"]["names"]), f=f, g=g, h=h)
        yield "json", text, user(text)


def text_prompts(rng: random.Random) -> Iterator[Found]:
    """Yield requests about the language reference, package descriptions and licences."""
    phrases = PHRASES["texts"]
    texts = [(f"reference/{word}", text) for word, text in language_reference.items()]
    for package in PACKAGES:
        for name, path in package_files(package):
            is_prose = re.search(r"licen[cs]e|readme|metadata", path.name, re.IGNORECASE)
            if is_prose and path.suffix in ("", ".txt", ".md", ".rst") and path.exists():
                texts.append((name, path.read_text(encoding="utf-8", errors="ignore")))
    for name, text in texts:
        paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        prose = [p for p in paragraphs if 150 < len(p) < 900 and p.count(" ") > 20]
        for paragraph in prose[:8]:
            yield "text", name, user(f"{rng.choice(phrases['asks'])}\n\n{paragraph}")
    for word in language_reference:
        for ask in phrases["word_asks"]:
            yield "question", f"reference/{word}", user(ask.format(word))


def line(kind: str, prompt: Prompt) -> str:
    """Return a prompt as a line of a file, named by its kind and a hash."""
    body = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:10]
    return json.dumps({"id": f"{kind}-{digest}", "kind": kind, **body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng, seen, shares = random.Random(args.seed), set(), PHRASES["shares"]
    found: dict[str, dict[str, list]] = {"train": defaultdict(list), "heldout": defaultdict(list)}
    makers = (code_prompts, task_prompts, topic_prompts, number_and_data_prompts, text_prompts, chat_prompts)
    for kind, source, prompt in itertools.chain.from_iterable(make(rng) for make in makers):
        key = json.dumps(prompt)
        if key not in seen:
            seen.add(key)
            found["heldout" if is_heldout(source) else "train"][kind].append(prompt)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for part, kinds in found.items():
        lines = []
        for kind, prompts in sorted(kinds.items()):
            rng.shuffle(prompts)
            count = shares.get(kind, shares["chat"]) if part == "train" else HELDOUT_PER_KIND
            for prompt in prompts[:count]:
                lines.append(line(kind, prompt))
            print(f"{part}: {min(len(prompts), count)} of {len(prompts)} {kind}")
        rng.shuffle(lines)
        (args.output_dir / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
