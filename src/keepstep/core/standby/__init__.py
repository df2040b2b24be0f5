"""Standby: warm processes that wait for a rank."""
