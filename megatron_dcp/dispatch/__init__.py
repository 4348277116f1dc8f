"""Who holds what: routing, exchange, packing, prefetch."""
