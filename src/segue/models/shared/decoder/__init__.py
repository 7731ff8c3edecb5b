"""Run the text decoder of a `transformers` model in the autoregressive engine: `decoder` with paged attention,
`gathered` for layers that accept no attention function, `states` for recurrent layers. `speculators` draft for it;
`tolerance` says how much two computations of the same may differ.

Doors: `decoder`, `deep_features`, `gathered`, `generation`, `interface`, `kept_media`, `layer_inputs`, `no_cache`,
`speculators`, `tolerance`.
"""
