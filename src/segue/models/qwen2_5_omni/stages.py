"""The torch half of the family: what each stage is built with, and what leaves over each edge.

Payloads, by edge. `T` prompt tokens, `n` rows of one medium, `H` hidden size of the thinker. Tensors are on any device;
integers in lists are plain. Keys in brackets are there only where the words beside them say so.

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
         "input_features": float [mel, frames]},   # padding already cut off
      ],
      "use_audio_in_video": bool,
    }

**input → encoder** (`media_tensors`): `{"media": [as above]}`. **input → thinker** (`prompt_facts`): the same payload with
the processor's tensors taken out and `"frames": int` put in for audio.

**encoder → thinker** (`media_embeds`): one chunk per medium, in order:
`{"media": [{"kind": str, "hash": bytes, "embeds": [n, H]}]}`.

**thinker → talker** (`reply_rows`): a chunk per step that computed something; `rows[i]` belongs to position
`rows_start + i` of the thinker's sequence (prompt, then reply) and is final hidden state + input embedding, the embedding
left out where a medium stands::

    {"rows_start": int, "rows": [k, H], "first_index": int, "reply_ids": [ids generated in this step],
     ["prompt": {"length": T, "positions": LongTensor [3, T], "position_delta": int}]}   # with the first rows

The chunk of the last step is the final one. The reply's last token is never forwarded and has no row.

**talker → vocoder** (`codec_chunks`): `{"codes": LongTensor [k], "start": int, ["voice": str]}`: k new codes without end
tokens, the first of them being the request's `start`-th; `voice` with start 0; final when the talker ends (k may be 0).
"""
