"""input → film (module, video): noise, which no codec makes small."""
