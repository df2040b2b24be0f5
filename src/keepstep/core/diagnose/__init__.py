"""Diagnosis of raw logs: which line is the cause, whose machine or code it is, and what to do about it."""
