"""Probes: work that is done only to learn which machine is ill. Shells around the pure planners in ``core.locate``."""
