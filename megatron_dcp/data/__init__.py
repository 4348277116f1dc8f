"""Where lengths come from: files, Megatron .idx, HF datasets, MDS, generators. No torch."""
