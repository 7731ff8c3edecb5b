"""OpenAI's endpoints: chat and legacy completions, responses, images, videos, audio, embeddings, models.

Doors: the `endpoint` and `request` of each, `audio.speech`, `audio.speech_request`, `audio.speech_session`,
`audio.transcriptions`, `chat.reply`, `chat.session`, `chat.template`, `chat.tools`, `embeddings`, `models`.
"""
