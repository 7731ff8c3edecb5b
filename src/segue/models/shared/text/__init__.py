"""Prompts: chat templates, tokenizers, truncation, embeddings as prompts, the places of media; and the shared parts of
families that return numbers for texts.

Doors: `batches`, `chat_template`, `family`, `going_on`, `placeholders`, `prompt`, `prompt_embeds`,
`sequence_classifier`, `text_input`, `tokenizer`.
"""
