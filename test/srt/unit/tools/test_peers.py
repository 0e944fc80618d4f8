"""Other engines of the benchmark: which are found, what they are asked, and what they answer."""

import json
import stat
import sys

import peers
import pytest
from prompt_sets import RequestMaker
from serving import TARGET

PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--version" in sys.argv:
    print("version: 1234 (abc)")
    sys.exit()
class Handler(BaseHTTPRequestHandler):
    def reply(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.reply({{"data": [{{"id": "its name"}}]}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        open({asked!r}, "a").write(json.dumps(asked | {{"path": self.path}}) + "\\n")
        ends = {{"usage": {{"completion_tokens": 3}}, "choices": [{{"finish_reason": "stop"}}]}}
        self.reply(ends)
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def install(folder, name: str) -> None:
    """Put an engine of this name into a folder, which writes what it is asked to a file beside it."""
    program = folder / name
    program.write_text(PROGRAM.format(python=sys.executable, asked=str(folder / "asked")))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder that is the whole PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def found(gguf=None) -> list[str]:
    return [peer.name for peer in peers.find(str(TARGET), "float32", 1, gguf)]


def test_absent_engines_are_skipped_by_name(path, capsys):
    assert found() == ["transformers"]
    said = capsys.readouterr().out
    assert "llama.cpp is not measured" in said and "vLLM is not measured" in said
    install(path, "llama-server")
    assert found() == ["transformers"]  # there is no GGUF file
    assert found(path / "target.gguf") == ["transformers", "llama.cpp"]
    install(path, "vllm")
    assert found(path / "target.gguf") == ["transformers", "llama.cpp", "vLLM"]


@pytest.mark.parametrize("name", ["llama.cpp", "vLLM"])
def test_an_engine_gets_the_token_ids(name, path):
    for program in ("llama-server", "vllm"):
        install(path, program)
    [peer] = [p for p in peers.find(str(TARGET), "float32", 1, path / "x.gguf") if p.name == name]
    assert peer.version == "version: 1234 (abc)"
    assert peer.is_greedy
    maker = RequestMaker(TARGET)
    bodies = [
        {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 9}},
        {"text": "def f", "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}},
    ]
    with peer.serve() as server:
        answers = server.generate_many(bodies, 1)
    assert answers == 2 * [peers.as_answer(3, "stop")]
    asked = [json.loads(line) for line in (path / "asked").read_text().splitlines()]
    assert [one["prompt"] for one in asked] == [[5, 6, 7], maker.tokenizer("def f")["input_ids"]]
    assert [(one["max_tokens"], one["ignore_eos"]) for one in asked] == [(9, False), (4, True)]
    assert all(one["path"] == "/v1/completions" and one["model"] == "its name" for one in asked)
    assert all(one["temperature"] == 0 and not one["cache_prompt"] for one in asked)


def test_transformers_answers():
    [peer] = peers.find(str(TARGET), "float32", 1, None)[:1]
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with peer.serve() as server:
        answers = server.generate_many([{"text": "def add(a, b):\n", "sampling_params": sampling}], 4)
    assert answers == [peers.as_answer(12, "length")]
