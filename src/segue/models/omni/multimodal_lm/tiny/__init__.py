"""Tiny multimodal models in the formats of published families."""
