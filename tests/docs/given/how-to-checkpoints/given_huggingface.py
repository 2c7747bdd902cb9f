from given_weights import *

model = smp.DistributedModel(AutoModelForCausalLM.from_pretrained("llama"))
