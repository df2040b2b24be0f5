"""Tests of the data position: every sample exactly once in each pass, whatever happens in between."""
