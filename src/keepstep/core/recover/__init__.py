"""Recover: from a plan to epochs and orders, and on to a closed incident."""
