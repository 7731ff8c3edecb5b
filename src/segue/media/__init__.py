"""Images, audio and video: fetched from a URL or file (`sources`), parsed out of messages (`parts`), bounded
(`limits`), decoded (`image`, `audio`, `video`), and encoded (`encode`, `write_video`).

Doors: `arrays`, `audio`, `decode`, `encode`, `image`, `limits`, `parts`, `sources`, `video`, `write_video`.
"""
