"""Load what was fine-tuned without smpkit, test it on the same held-out text, and let it write.

`python use.py MODEL` takes transformers alone, `python use.py ADAPTERS --base MODEL` peft as well.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from data import Blocks, split
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, help="the model that the folder's adapters belong to")
    parser.add_argument("--text", type=Path, default=sysconfig.get_path("stdlib"), help="folder of Python files")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--context", type=int, default=128)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.base or arguments.folder).eval()
    if arguments.base:
        import peft

        model = peft.PeftModel.from_pretrained(model, arguments.folder).merge_and_unload()
    _, held_out = split(arguments.text, arguments.files)
    with torch.no_grad():
        losses = [
            model(input_ids=tokens, labels=tokens).loss.float()
            for tokens in DataLoader(Blocks(held_out, tokenizer, arguments.context), batch_size=16, drop_last=True)
        ]
    print(f"held-out loss {torch.stack(losses).mean():.3f}, weights in {model.dtype}")

    prompt = tokenizer("def __init__(self,", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False, repetition_penalty=1.1)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
