"""The stages before the language model of an omni model (a *thinker* that reads text, images, audio and video): `chat`
and `medium` run the checkpoint's processor, `input` is the input stage, `encoder` the base class of the encoder stage,
`positions` computes M-RoPE positions, `say` makes a given text the reply, and `transfers` has the edges from the input
stage. `prompt` collects what arrives at the thinker, and `reply` what its talker takes of its rows.

Doors: every module.
"""
