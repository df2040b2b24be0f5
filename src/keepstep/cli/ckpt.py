"""``keepstep ckpt``: plan, list, verify, restore and hand over checkpoints. Arguments only; the work is elsewhere."""

from __future__ import annotations

from cyclopts import App

app = App(name="ckpt", help="Plan, list, verify, restore, export and import checkpoints.")
