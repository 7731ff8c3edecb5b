"""Compare one network in this process with the device's ceilings: decode steps and prefill of a language model
(`steps`), calls of a denoiser (`denoise`), and attention alone (`attention`).

Doors: `arguments`, `denoise`, `results`.
"""
