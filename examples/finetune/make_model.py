"""Make a folder as the hub has them, without a network: a small Llama with random weights, and its tokenizer.

`python make_model.py runs/model` writes `config.json`, `model.safetensors` and `tokenizer.json`. To fine-tune weights
of your own, give the job their folder instead.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/model"
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))]
    bpe = Tokenizer(models.BPE())  # over bytes, so that no text is unknown
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} random weights in {folder}")


if __name__ == "__main__":
    main()
