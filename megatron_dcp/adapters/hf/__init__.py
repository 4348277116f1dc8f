"""Hugging Face: Transformers, TRL and Accelerate under a per-step plan."""
