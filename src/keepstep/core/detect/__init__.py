"""Detect: deadlines and leases, what turns silence into evidence."""
