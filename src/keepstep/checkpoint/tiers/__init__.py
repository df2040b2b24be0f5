"""Durable tiers of one shape: memory for tests, a directory, an object store; and what wraps them."""
