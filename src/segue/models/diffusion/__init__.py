"""What the families that make pictures and video by diffusion share; each of them is a room above this one.

A family writes: its graph, an input stage (`input.DiffusionInput`), a text encoder (`text_encoder.TextEncoder`), a
denoiser (`denoiser.Denoiser`), a decoder (`decoder.Decoder`) and a tiny preset. The networks, schedulers and tokenizers
are those of diffusers and transformers, loaded part by part (`loading`); what leaves over the edges is in `transfers`.
"""
