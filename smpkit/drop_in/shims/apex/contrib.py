"""Apex's collection of CUDA extensions, of which none is here."""

raise ImportError(
    "apex.contrib holds CUDA extensions only: use torch's own (scaled_dot_product_attention, torch.nn,"
    " torch.optim with fused=True), or install Apex"
)
