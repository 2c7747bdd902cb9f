"""What old scripts and libraries expect: `torch.cuda` on the CPU, Hugging Face's Trainer, SMP v1's helpers."""
