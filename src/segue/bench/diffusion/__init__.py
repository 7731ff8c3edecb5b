"""`segue bench diffusion`: compare image generation with the pipelines of `diffusers`, and measure the gain and the
error of each lossy optimisation.

Doors: `arguments`, `losses`, `report`, `results`.
"""
