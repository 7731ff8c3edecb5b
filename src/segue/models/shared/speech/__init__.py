"""Speech of stages that yield rows of codes: `code_predictor` draws the codes of a row after the first, `transfers`
sends rows on, `rows` checks those that arrive; `talker` has what talkers share, `text` reads the text to say. Streaming
vocoders: `vocoder` is the stage that cuts utterances into pieces, `pieces` carries the state of a causal network from
one piece of an utterance to the next, `windows` decodes pieces with the frames around them; `code2wav` runs the layers
of Qwen's vocoders (`library`) over pieces, `seanet` those of Mimi and its like. `recordings` is the stage that encodes
recordings, and what a decoder gets of them.

Doors: `code2wav`, `code_predictor`, `library`, `pieces`, `recordings`, `rows`, `seanet`, `talker`, `text`, `transfers`,
`vocoder`, `windows`.
"""
