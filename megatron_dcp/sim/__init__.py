"""Discrete-event replay of plans on a described cluster, and comparison of strategies. No torch."""
