"""The requests that run: `request_state` is what is known of one, and which of its stages start again after a loss;
`open_request` is one whose input is appended while it runs; `kept` retains those that others go on from.
`client_queue` bounds what a client has not read, `stage_messages` writes to the workers of a request's stages,
`prompt_embeds` checks embeddings at admission.

Doors: every module.
"""
