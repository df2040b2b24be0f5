"""Decide: from suspects to a plan, one rung of the restart ladder."""
