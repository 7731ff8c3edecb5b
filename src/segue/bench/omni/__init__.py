"""`segue bench omni`: text, image, audio and video in, text and speech out: Qwen2.5-Omni and
Qwen3-Omni, compared with `transformers`.

Doors: `arguments`, `checkpoint`, `families`, `outcome`, `report`, `results`, `segue_driver`, `workload`.
"""
