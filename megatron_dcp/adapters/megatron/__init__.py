"""Megatron-Core and Megatron-LM under a plan: one flag in a job, or ten lines in a loop.

Nothing here imports Megatron until it is used, so that `mdcp doctor` and `mdcp patch` work without.
"""
