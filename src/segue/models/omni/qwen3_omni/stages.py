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
         "silence": int, "width": int},     # `segue.models.shared.omni.medium.MediaReader.audio_entry`
      ],
      "use_audio_in_video": bool,
      ["reply": [ids]],                   # the text to say, without an end token, if the request gives it
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`media_tensors`): `{"media": [as above]}`. **input → thinker** (`prompt_facts`): the same payload
with the processor's tensors taken out and `"frames": int` put in for audio.

**encoder → thinker** (`whole`): one chunk per medium, in order:
`{"media": [{"kind": str, "hash": bytes, "embeds": [n, 1 + L, H], of audio [n, 1, H]}]}`.

**thinker → talker** (`reply_rows`): one chunk per step that computed tokens; `rows[i]` belongs to position
`rows_start + i` of the thinker's sequence (prompt, then reply): the token's embedding, at media the hidden state of the
layer that the talker takes::

    {["rows_start": int, "rows": [k, H],] "reply": int,      # tokens generated so far
     ["prompt": {"token_ids": LongTensor [T], "media": [{"kind", "hash", "grid_thw", "second_per_grid", "frames"}]}]}
                                            # with the first rows

The chunk of the last step is final. The reply's last token is never forwarded and has no row.

**talker → vocoder** (`code_rows`): `{"codes": LongTensor [k, G], "start": int}`: k new rows of G codes; the first has
index `start` in the request. The row of the talker's last token is not sent: in the library it has no codes. Final when
the talker ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageRequest, Transfer
from segue.models.omni.qwen3_omni.encoder import Encoder
from segue.models.omni.qwen3_omni.input import InputProcessor
from segue.models.omni.qwen3_omni.prompt import FACTS
from segue.models.omni.qwen3_omni.talker import Talker
from segue.models.omni.qwen3_omni.thinker import Thinker
from segue.models.omni.qwen3_omni.vocoder import Code2Wav
from segue.models.shared.omni.transfers import media_tensors, prompt_facts
from segue.models.shared.speech.transfers import code_rows
from segue.models.shared.transfers import whole


def reply_rows(request: StageRequest, output: TokenOutput) -> Payload | None:
    """thinker → talker: the rows captured in a step."""
    if output.captured is None and not output.finished:
        return None
    payload: Payload = {"reply": output.first_index + len(output.token_ids)}
    if output.captured is not None:
        payload["rows_start"] = output.captured.start
        payload["rows"] = output.captured.data
    if (prompt := output.prompt) is not None:
        media = [
            {
                "kind": medium.kind,
                "hash": medium.hash,
                "grid_thw": None if medium.grid is None else list(medium.grid),
                "second_per_grid": medium.second_per_grid,
                "frames": medium.frames,
            }
            for medium in prompt.extras.get(FACTS, ())
        ]
        payload["prompt"] = {"token_ids": torch.tensor(prompt.token_ids), "media": media}
    return payload


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": InputProcessor,
    "encoder": Encoder,
    "thinker": Thinker,
    "talker": Talker,
    "vocoder": Code2Wav,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): media_tensors,
    ("input", "thinker"): prompt_facts,
    ("encoder", "thinker"): whole,
    ("thinker", "talker"): reply_rows,
    ("talker", "vocoder"): code_rows,
}
