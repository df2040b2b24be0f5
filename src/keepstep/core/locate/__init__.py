"""Locate: from evidence to suspects."""
