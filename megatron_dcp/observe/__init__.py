"""Events, JSONL, traces, figures, reports and metric sinks. No torch."""
