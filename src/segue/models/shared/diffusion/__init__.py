"""Code shared by the families that generate images and video by diffusion.

Each family defines its graph, an input stage (`input.DiffusionInput`), a text encoder (`text_encoder.TextEncoder`), a
denoiser (`denoiser.Denoiser`), a decoder (`vae.Decoder`) and a tiny preset. Networks, schedulers and tokenizers come
from diffusers and transformers, loaded part by part (`loading`); `transfers` defines the edges' payloads.

Doors: every module.
"""
