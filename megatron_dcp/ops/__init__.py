"""Variable-length attention, lse merge, relayout: schema, fake, autograd, reference."""
