"""A third toy family, whose talker yields rows of numbers: input → counter → talker (rows) → tones (audio)."""
