"""Images, audio and video: fetched from a URL or file (`sources`), parsed out of messages (`parts`), bounded
(`limits`), decoded (`image`, `audio`, `video`), encoded (`encode`, `write_video`, `fragmented_video`), and made into
the files that clients ask for (`files`, `audio_file`), perhaps faster or slower (`speed`).

Doors: `arrays`, `audio`, `audio_file`, `decode`, `encode`, `files`, `image`, `limits`, `parts`, `sources`, `video`,
`write_video`.
"""
