"""The module paths of flash-attn 1.x, on torch's scaled_dot_product_attention."""

__version__ = "1.0.9"
