"""Images, audio and video: fetched from a URL or file (`sources`), parsed out of messages (`parts`), bounded
(`limits`), decoded (`image`, `audio`, `video`), encoded (`encode`, `write_video`), and made faster
or slower (`speed`).

Doors: `arrays`, `audio`, `decode`, `encode`, `image`, `limits`, `parts`, `sources`, `speed`, `video`, `write_video`.
"""
