"""Reference attention, multi-process helpers, hypothesis strategies, tiny models."""
