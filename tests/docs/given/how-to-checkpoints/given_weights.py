import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import smpkit.torch as smp

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
transformers.LlamaForCausalLM(config).save_pretrained("llama")
smp.init()
