"""Checks that need two ranks. `tests.trainer.ranks.pair` says how to write one."""
