"""BAGEL (ByteDance Seed): one decoder that reads text and images, and writes text and images.

Each layer has two sets of weights, *experts*: one for text and seen images, one for the latents of drawn images. Both
attend to the same keys and values. Read `graph` and `decoder`, then `vision` and `prompt` (in), and `drawing` (out).

In neither transformers nor diffusers. The layers are built of Qwen2's, the vision tower is SigLIP's encoder, the VAE is
diffusers' `AutoencoderKL` under other names. Written from the paper (arXiv 2505.14683) and the published parameter
names, and compared with tensors of the public reference. Served: replies to texts and images, images from texts, edited
images, images that the model first thinks about, and texts and images by turns, a walk that returns.

Doors: `family`, `config`, `decoder`, `drawing`, `loading`, `prompt`, `vision`.
"""
