"""Checkpoint: a rank's state in memory, two versions of it, its copy on another node, and the step all can meet on."""
