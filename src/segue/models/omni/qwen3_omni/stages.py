"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

Payloads, by edge. `T` prompt tokens, `n` rows of one medium, `L` layers that get deep features, `H` hidden size of the
thinker. Tensors are on any device; integers in lists are plain.

**input → (both below)**: what `InputProcessor` makes of one request, one payload, final::

    {
      "token_ids": LongTensor [T],          # media placeholders already repeated once per row
      "media": [                            # in prompt order within each kind; the audio of a video comes after it
        {"kind": "image", "hash": bytes,    # of the decoded medium and the settings that shaped the tensors below:
                                            # equal hash means equal embeddings (16 bytes or more)
         "pixel_values": float [patches, channels*temporal_patch*patch*patch],
         "grid_thw": [t, h, w]},            # in patches, before merging
        {"kind": "video", "hash": bytes, "pixel_values": …, "grid_thw": [t, h, w],
         "second_per_grid": float},         # seconds from one temporal patch to the next
        {"kind": "audio", "hash": bytes,
         "input_features": float [mel, frames],   # padding already cut off
         "silence": int, "width": int},     # `segue.models.omni.qwen3_omni.input.Reader.facts`
      ],
      "use_audio_in_video": bool,
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`media_tensors`): `{"media": [as above]}`. **input → thinker** (`prompt_facts`): the same payload
with the processor's tensors taken out and `"frames": int` put in for audio.

**encoder → thinker** (`whole`): one chunk per medium, in order:
`{"media": [{"kind": str, "hash": bytes, "embeds": [n, 1 + L, H], of audio [n, 1, H]}]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.omni.qwen3_omni.encoder import Encoder
from segue.models.omni.qwen3_omni.input import InputProcessor
from segue.models.omni.qwen3_omni.thinker import Thinker
from segue.models.shared.omni.transfers import media_tensors, prompt_facts
from segue.models.shared.transfers import whole

STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "encoder": Encoder, "thinker": Thinker}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): media_tensors,
    ("input", "thinker"): prompt_facts,
    ("encoder", "thinker"): whole,
}
