"""A second toy family, whose talker yields rows of codes: input → counter → talker (rows) → tones (audio)."""
