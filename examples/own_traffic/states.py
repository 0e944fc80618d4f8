"""Write hidden states of a target for `speculators train`, where no vLLM server can write them.

    python examples/own_traffic/states.py DATA TARGET STATES 2 5 8 11

DATA is the output of `speculators prepare-data`, the ids are the draft's `aux_hidden_state_layer_ids`. Id `i`
is the input of layer `i`. A row becomes STATES/hs_ROW.safetensors: `token_ids` [S], and `hidden_states`
[S, A + 1, hidden] in bfloat16, whose last entry is the input of the final norm. Runs in the environment of
`speculators`.
"""

import argparse
import os
from pathlib import Path

import torch
from datasets import load_from_disk
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("target")
    parser.add_argument("states", type=Path)
    parser.add_argument("ids", type=int, nargs="+")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    os.umask(0o077)  # a state's file has the tokens of a recorded row
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    model = model.to(args.device).eval().model
    caught: dict[int, torch.Tensor] = {}
    inputs = [*model.layers, model.norm]
    for i, module in enumerate(inputs):
        module.register_forward_pre_hook(lambda _, given, i=i: caught.__setitem__(i, given[0][0]))
    args.states.mkdir(exist_ok=True)
    for row, tokens in enumerate(load_from_disk(args.data).with_format("torch")["input_ids"]):
        with torch.no_grad():
            model(input_ids=tokens[None].to(args.device), use_cache=False)
        states = torch.stack([caught[i] for i in (*args.ids, len(inputs) - 1)], dim=1)
        tensors = {"token_ids": tokens, "hidden_states": states.cpu().contiguous()}
        save_file(tensors, args.states / f"hs_{row}.safetensors")


if __name__ == "__main__":
    main()
