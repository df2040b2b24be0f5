"""Health: what is known about nodes beyond the present incident."""
