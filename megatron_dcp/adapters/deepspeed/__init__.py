"""DeepSpeed: ZeRO engines under a per-step plan."""
