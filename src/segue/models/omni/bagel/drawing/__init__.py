"""How an image is drawn: `settings` are what a request says about it, `reading` makes the contexts that it is drawn
from, `denoiser` the steps (`flow`) from noise (`noise`) to latents, which are rows of the decoder (`latents`); `vae`
makes them pixels.

Doors: `denoiser`, `flow`, `latents`, `reading`, `settings`, `vae`.
"""
