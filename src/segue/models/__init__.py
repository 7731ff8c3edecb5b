"""Model families, which `registry` selects by a checkpoint's config; `model_graph` joins several checkpoints. A family
is a folder with its stage graph, stages and tiny preset, in the package of its kind: `text`, `omni` (several
modalities), `speech`, and `images` (images and video). `shared` holds code that several families use. One family never
imports another.

Doors: `registry`, `family`, `model_graph`, `shared.checkpoint`, `shared.decoder.speculators`, `shared.dialects`,
`shared.diffusion`, `shared.library`, `shared.reference`, `shared.text.chat_template`, `shared.tiny.made`,
`text.causal_lm`, `omni.bagel`, `speech.mimo_audio`.
"""
